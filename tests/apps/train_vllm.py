"""A script that trains on vLLM servers: `train_vllm.py FOLDER MODEL PYTHON STEPS [--resume]`.

With `--lora` it trains two policies as LoRA on the weights of one server.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import spell, two  # type: ignore[import-not-found]

from lightspan import VLLM, LightningRL, LocalRunners, LoRA, Policy, Trainer

SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main(
    folder: str, model: str, python: str, steps: int, *, resume: bool, with_lora: bool
) -> None:
    """Train; evaluate before and after."""
    import torch

    torch.set_num_threads(1)
    lora = {name: Policy(lora=LoRA(rank=8)) for name in ("writer", "checker")}
    algorithm = LightningRL(
        Path(model),
        optimize=lora if with_lora else "writer",
        group_size=8,
        tasks_per_step=4,
        learning_rate=1e-2 if with_lora else 1e-3,
    )
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(8, processes=2),
        steps=steps,
        folder=folder,
        engine=VLLM(
            python=python,
            arguments=("--enforce-eager",),
            environment=SMALL,
            exchange=str(Path(folder).parent),  # where the test looks, and nobody else writes
        ),
    )
    train = [{"q": f"question {number}"} for number in range(32)]
    val = [{"q": f"held out {number}"} for number in range(40)]
    app = two if with_lora else spell
    print(trainer.fit(app, train, val, resume=resume).summary())


if __name__ == "__main__":
    more = sys.argv[5:]
    main(*sys.argv[1:4], int(sys.argv[4]), resume="--resume" in more, with_lora="--lora" in more)
