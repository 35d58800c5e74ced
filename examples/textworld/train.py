"""Train the player of TextWorld's games on this machine, or on a GPU with a real model.

python examples/textworld/train.py                   a small model, built here, on the CPU
python examples/textworld/train.py --resume          go on after Ctrl-C, a crash or `kill -9`
python examples/textworld/train.py --dev             look before training: a few games, a report
python examples/textworld/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
"""

from __future__ import annotations

import sys

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from textworld_example.options import TextWorldExample
from textworld_example.training import AGENTS, CACHE, answer  # the app with its reward

METRIC = "games won"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    games = run.tasks("train")
    held_out = run.tasks("test")
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=["play"],
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora
    )
    trainer = Trainer(
        algorithm,
        steps=run.recipe.steps,
        metric=METRIC,
        cluster="route",  # games of one route are alike
        **run.trainer_options,
    )
    return Prepared(trainer, games, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward in games that were not trained on."""
    trainer, games, held_out = prepare(run)
    result = trainer.fit(
        answer, games, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = TextWorldExample(prepare, train, cache=CACHE)

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
