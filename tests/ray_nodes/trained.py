"""A training with a scripted engine, whose learner stores its rows.

As a script, `trained.py FOLDER MODEL ADDRESS STORE`, its calls never end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripted_learning import Recording, scripted  # type: ignore[import-not-found]

from lightspan import LightningRL, RayRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan.protocols.engine import GenerationRequest
from lightspan_testing.scripted_engine import Gate, Say, ScriptedEngine, tiny_chat_tokenizer

APP = "ray_apps:twice"
TASKS = [{"q": "question " + "x" * number} for number in range(16)]
HERE = str(Path(__file__).parent)


class Script:
    """Answer by the prompt alone."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer()
        self.asked = 0

    def __call__(self, request: GenerationRequest) -> Say:
        self.asked += 1
        return Say(text=scripted(self.tokenizer.decode(request.prompt_ids)))


class Endless(Script):
    """Never answer, and print the number of calls."""

    def __call__(self, request: GenerationRequest) -> Say:
        said = super().__call__(request)
        print(asked(self.asked), flush=True)
        return Say(text=said.text, gates={1: Gate()})


def asked(calls: int) -> str:
    return f"{calls} have asked."


def trainer(
    folder: Path,
    model: Path,
    script: Script,
    runners: RayRunners,
    store: str,
    *,
    steps: int = 2,
    pace_s: float = 0.0,
) -> Trainer:
    """Return a trainer with eight tasks per step.

    Args:
        folder: folder of the run.
        model: the model.
        script: script of the engine.
        runners: the runners.
        store: URL of the store.
        steps: number of steps.
        pace_s: seconds per token.
    """
    algorithm = LightningRL(
        model, optimize="writer", estimator="reinforce++", group_size=1, tasks_per_step=8
    )
    engine = ScriptedEngine(script.tokenizer, script, policies={"policy": 0}, pace_s=pace_s)
    return Trainer(
        algorithm,
        folder=folder,
        steps=steps,
        engine=engine,
        learner=Recording(model),
        runners=runners,
        store=store,
        lease_s=600,
        reporter=SilentReporter(),
    )


def learned(trained: Trainer) -> object:
    """Return the rows of each step."""
    learner = trained.settings.learner
    assert isinstance(learner, Recording)
    return learner.learned()


def main(folder: str, model: str, address: str, store: str) -> None:
    """Train with calls that never end."""
    runners = RayRunners(8, actors=2, address=address, app_dirs=HERE)
    trainer(Path(folder), Path(model), Endless(), runners, store).fit(APP, TASKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
