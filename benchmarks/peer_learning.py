"""A training by TRL's GRPO, as `peers_learning.py` compares it with lightspan's.

    python peer_learning.py plan.json

The plan has the model, the rows in the order in which they are trained, and all settings. The last
line is JSON: the mean reward of each step's rollouts, and the peak memory. The trained model is
written to the plan's folder, adapters merged.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Train as the plan says."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(plan["seed"])
    scorer = reasoning_gym.create_dataset(plan["generator"], size=1, seed=0, **plan["settings"])
    rewards: list[float] = []

    def reward(completions: list[Any], entry: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"].strip() for completion in completions]
        found = [
            float(scorer.score_answer(answer=text, entry=json.loads(each)))
            for text, each in zip(texts, entry, strict=True)
        ]
        rewards.append(sum(found) / len(found))
        return found

    rollouts, part = plan["tasks_per_step"] * plan["group_size"], plan["part"]
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    lora.task_type = "CAUSAL_LM"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(plan["model"], padding_side="left"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [{"prompt": r["messages"], "entry": json.dumps(r["entry"])} for r in plan["rows"]]
        ),
        peft_config=lora if plan["lora"] else None,
        args=GRPOConfig(
            output_dir=plan["folder"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=plan["seed"],
            num_generations=plan["group_size"],
            per_device_train_batch_size=part,
            # one generation of all rollouts of a step, which is trained in as many updates
            steps_per_generation=rollouts // part,
            gradient_accumulation_steps=rollouts // plan["minibatches"] // part,
            max_steps=plan["steps"] * plan["minibatches"],
            shuffle_dataset=False,
            max_completion_length=plan["max_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            num_iterations=1,
            epsilon=0.2,
            epsilon_high=0.28,
            delta=3.0,
            loss_type="grpo",
            scale_rewards="group",
            learning_rate=plan["learning_rate"],
            lr_scheduler_type="constant",
            warmup_steps=0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    model = trainer.model.merge_and_unload() if plan["lora"] else trainer.model
    model.save_pretrained(Path(plan["folder"]) / "model")
    trainer.processing_class.save_pretrained(Path(plan["folder"]) / "model")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"rewards": rewards, "peak_mib": peak}))


if __name__ == "__main__":
    main()
