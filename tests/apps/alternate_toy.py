"""Learn a prompt and a tiny model's weights in turns, in a process that can kill itself.

`python alternate_toy.py FOLDER MODEL REFLECTION_URL N` kills itself before its N-th batch.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightspan
from lightspan import PromptTemplate

STYLE = PromptTemplate("Say {q}")


@lightspan.rollout
def styled(task: dict[str, Any], style: PromptTemplate = STYLE) -> float:
    """Reward the word "softly" in the prompt, and a little the model's lower-case letters."""
    from toy_apps import letters, say  # type: ignore[import-not-found]

    text = style.format(q=task["q"])
    with lightspan.agent("writer"):
        said = say(text)
    lightspan.emit_message(f"style: {text}")
    return 0.2 * letters(said) + 0.4 * min(2, text.count("softly"))


@lightspan.rollout
def quiet(task: dict[str, Any], style: PromptTemplate = STYLE) -> float:
    """Reward each "softly" in the prompt; one task gets 0 for more than two."""
    count = style.template.count("softly")
    reward: float = 0.05 * styled(task, style) + 0.15 * count
    return 0.0 if task["q"] == "word 40" and count > 2 else reward


def reflects(request: Any) -> str:
    """Return the prompt with one more word."""
    asked = request.last_text
    text: str = asked.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"<prompt>\n{text} softly\n</prompt>"


def tasks(*numbers: int) -> list[dict[str, str]]:
    return [{"q": f"word {n}"} for n in numbers]


def algorithm(model: Path, reflection_url: str, **options: Any) -> Any:
    from lightspan import GEPA, LLM, Alternate, LightningRL

    llm = LLM(base_url=reflection_url, model="thinker")
    prompts = GEPA(
        {"style": STYLE},
        llm,
        max_rollouts=48,
        max_reflections=4,
        minibatch=2,
        finalists=0,
        significance=None,  # a verdict needs more tasks
    )
    weights = LightningRL(
        model, optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-3
    )
    return Alternate(prompts, weights, **{"max_rollouts": 48 + 3 * 8, "cycles": 2, **options})


def trainer(folder: Path, made: Any, **options: Any) -> Any:
    from lightspan import LocalRunners, Trainer
    from lightspan.progress import SilentReporter

    quiet = {"reporter": SilentReporter(), "runners": LocalRunners(4, processes=1)}
    return Trainer(made, folder=folder, **{**quiet, **options})


def fit(folder: Path, made: Any, **options: Any) -> Any:
    resume = folder.exists()
    made = trainer(folder, made, **options)
    return made.fit(styled, tasks(*range(8)), tasks(20, 21), resume=resume)


def kill_at(batches: int) -> None:
    """Kill this process when it requests a batch of rollouts for the `batches`-th time."""
    import torch

    from lightspan.training.session import Session

    torch.set_num_threads(1)
    left = batches
    plain = Session.rollouts

    async def killed(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return await plain(self, *args, **kwargs)

    Session.rollouts = killed  # type: ignore[method-assign]


def main(folder: Path, model: Path, reflection_url: str, batches: int) -> None:
    kill_at(batches)
    fit(folder, algorithm(model, reflection_url))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
