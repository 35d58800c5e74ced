"""A script that trains on vLLM servers: `train_vllm.py FOLDER MODEL PYTHON STEPS [--resume]`.

With `--lora` it trains two policies as LoRA on the weights of one server. With `--images` both of
them look at images, and the servers find torchvision in the folder `stand_in` of
tests/vllm_servers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import look, spell, two  # type: ignore[import-not-found]

from lightspan import VLLM, LightningRL, LocalRunners, LoRA, Policy, Trainer

STAND_IN = Path(__file__).parents[1] / "vllm_servers" / "stand_in"
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main(
    folder: str,
    model: str,
    python: str,
    steps: int,
    *,
    resume: bool,
    with_lora: bool,
    with_images: bool,
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
            arguments=("--enforce-eager", *(("--skip-mm-profiling",) if with_images else ())),
            environment={**SMALL, "PYTHONPATH": str(STAND_IN)} if with_images else SMALL,
            exchange=str(Path(folder).parent),  # where the test looks, and nobody else writes
        ),
    )
    train = [{"q": f"question {number}"} for number in range(32)]
    val = [{"q": f"held out {number}"} for number in range(40)]
    app = look if with_images else two if with_lora else spell
    print(trainer.fit(app, train, val, resume=resume).summary())


if __name__ == "__main__":
    more = sys.argv[5:]
    main(
        *sys.argv[1:4],
        int(sys.argv[4]),
        resume="--resume" in more,
        with_lora="--lora" in more,
        with_images="--images" in more,
    )
