"""Train the reader of charts on this machine, or on a GPU with a real model.

python examples/charts/train.py                  a small vision model, built here, on the CPU
python examples/charts/train.py --resume         go on after Ctrl-C, a crash or `kill -9`
python examples/charts/train.py --dev            look before training: a few charts, a report
python examples/charts/train.py --model Qwen/Qwen2.5-VL-3B-Instruct --device cuda
"""

from __future__ import annotations

import sys
from pathlib import Path

from charts_example.options import ChartsExample
from charts_example.training import AGENTS, answer  # the app with its reward
from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main

METRIC = "answers right"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    charts = run.tasks("train")
    held_out = run.tasks("test")  # other values, titles and colours
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=["reader"],  # `computer` follows rules
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora
    )
    trainer = Trainer(algorithm, steps=run.recipe.steps, metric=METRIC, **run.trainer_options)
    return Prepared(trainer, charts, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward on charts that were not trained on."""
    trainer, charts, held_out = prepare(run)
    result = trainer.fit(
        answer, charts, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = ChartsExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
