"""A training by lightspan, as `peers_learning.py` compares it with TRL's.

    python lightspan_learning.py plan.json

The plan has the model, the tasks and all settings. The last line is JSON: the mean reward of each
step's rollouts, the peak memory and the parts of the CPU time. The trained model is written to the
plan's folder, adapters merged. Runners import this script too, so it imports no torch.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from _reasoning_tasks import answer, answer_by_sdk

from lightspan import LightningRL, LoRA, Trainer


def main() -> None:
    """Train as the plan says."""
    import torch

    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    algorithm = LightningRL(
        plan["model"],
        lora=LoRA() if plan["lora"] else None,
        group_size=plan["group_size"],
        tasks_per_step=plan["tasks_per_step"],
        minibatches=plan["minibatches"],
        learning_rate=plan["learning_rate"],
        failure_reward=0.0,
        seed=plan["seed"],
    )
    folder = Path(plan["folder"])
    trainer = Trainer(algorithm, runners=16, steps=plan["steps"], folder=folder / "run")
    result = trainer.fit(answer if plan["is_http"] else answer_by_sdk, plan["train"])
    merged(Path(result.model)).rename(folder / "model")

    from lightspan.training.folder import RunFolder

    lines = [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]
    own, apps = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    parts = {
        "engine": result.seconds["engine"],
        "learner": result.seconds["learner"],
        "runners": apps.ru_utime + apps.ru_stime,
        "process": own.ru_utime + own.ru_stime,
    }
    parts = {name: round(value, 1) for name, value in parts.items()}
    rewards = [line["reward"] for line in lines]
    print(json.dumps({"rewards": rewards, "peak_mib": own.ru_maxrss // 1024, "parts": parts}))


def merged(folder: Path) -> Path:
    """Return a folder with the whole model; an adapter is merged with its base model first."""
    from lightspan_torch.engine.hub import is_adapter
    from lightspan_torch.learner.policy_model import merge_adapter

    whole = folder.with_name(f"{folder.name}-merged")
    return merge_adapter(folder, whole) if is_adapter(folder) else folder


if __name__ == "__main__":
    main()
