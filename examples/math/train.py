"""Train the word problem agent on this machine, or on a GPU with a real model.

python examples/math/train.py                    a small model, built here, on the CPU
python examples/math/train.py --resume           go on after Ctrl-C, a crash or `kill -9`
python examples/math/train.py --dev              look before training: a few problems, a report
python examples/math/train.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda
python examples/math/train.py --model ... --data DIR       on Calc-X or GSM8K
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from math_example.options import MathExample
from math_example.training import AGENTS, answer  # the app with its reward; the data, the recipe

METRIC = "exact answers"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    problems = run.tasks("train")  # generated, or read from --data
    held_out = run.tasks("test")
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=["solver"],
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora
    )
    trainer = Trainer(algorithm, steps=run.recipe.steps, metric=METRIC, **run.trainer_options)
    return Prepared(trainer, problems, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward on problems that were not trained on."""
    trainer, problems, held_out = prepare(run)
    result = trainer.fit(
        answer, problems, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = MathExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
