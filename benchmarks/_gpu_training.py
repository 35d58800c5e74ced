"""A training that `gpu.py` kills: `_gpu_training.py FOLDER MODEL STEPS DEVICE`, resumed if it can
be. Before each update of the weights it writes the step's number into `FOLDER.updating`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import openai

import lightspan
from lightspan import LightningRL, LocalRunners, Trainer

# nobody is there: calls are redirected to the gateway
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


@lightspan.rollout
def spell(task: dict[str, Any]) -> float:
    """Call the model once; the reward is the share of lower-case letters."""
    with lightspan.agent("writer"):
        messages: Any = [{"role": "user", "content": task["q"]}]
        reply = client.chat.completions.create(model="any", max_tokens=16, messages=messages)
    text = reply.choices[0].message.content or ""
    return sum(c.isascii() and c.islower() for c in text) / max(1, len(text))


def main(folder: str, model: str, steps: str, device: str) -> None:
    """Train."""
    from lightspan_torch.learner.torch import TorchLearner

    update = TorchLearner.update
    updates = 0

    def noted(self: TorchLearner, *arguments: Any, **options: Any) -> dict[str, float]:
        nonlocal updates
        updates += 1
        Path(f"{folder}.updating").write_text(str(updates))
        return update(self, *arguments, **options)

    TorchLearner.update = noted  # type: ignore[method-assign]
    algorithm = LightningRL(Path(model), optimize="writer", group_size=4, tasks_per_step=4)
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(8, processes=1),
        steps=int(steps),
        folder=folder,
        device=device,
        checkpoint_every=1,
    )
    tasks = [{"q": f"question {number}"} for number in range(8)]
    print(trainer.fit(spell, tasks, resume=True).summary())


if __name__ == "__main__":
    main(*sys.argv[1:])
