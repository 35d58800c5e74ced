"""One step of TRL's GRPO, measured as `step.py` measures ours.

Runs in the peer's own environment (`_peers.py`); the last line is JSON: for each step the
CPU-seconds of the process between its beginning and its end, generation included, how many
tokens were sampled and how many sequences.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PASS = 16
"""Number of sequences in a forward pass."""
CACHE = {"num_blocks": 256, "page_size": 64}
"""Settings of a key-value cache for 16,384 tokens. The default takes most of the machine's
memory."""


class Meter(TrainerCallback):
    """Records the CPU seconds between the start and the end of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.tokens = self.sequences = 0
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.tokens = self.sequences = 0
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        spent = time.process_time() - self._start
        self.steps.append({"cpu_s": spent, "tokens": self.tokens, "sequences": self.sequences})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--answer", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--batching", action="store_true", help="transformers' continuous batching")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = json.loads(options.prompts.read_text())
    batch = len(prompts) * options.group
    meter, rng = Meter(), random.Random(1)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        meter.tokens += sum(map(len, completion_ids))
        meter.sequences += len(completions)
        return [rng.random() for _ in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[meter],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=PASS,
                gradient_accumulation_steps=batch // PASS,
                num_generations=options.group,
                max_completion_length=options.answer,
                temperature=1.0,
                top_k=0,
                beta=0.0,
                learning_rate=options.learning_rate,
                max_steps=options.steps,
                use_transformers_continuous_batching=options.batching,
                transformers_continuous_batching_config=CACHE if options.batching else None,
                shuffle_dataset=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
        )
        trainer.train()
    print(json.dumps(meter.steps))


if __name__ == "__main__":
    main()
