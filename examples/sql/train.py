"""Train the text-to-SQL app on this machine, or on a GPU with a real model.

python examples/sql/train.py                     a small model, built here, on the CPU
python examples/sql/train.py --resume            go on after Ctrl-C, a crash or `kill -9`
python examples/sql/train.py --dev               look before training: a few questions, a report
python examples/sql/train.py --air               with intermediate rewards
python examples/sql/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
python examples/sql/train.py --model ... --data spider     on Spider's questions and databases
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from sql_example.options import SqlExample
from sql_example.training import AGENTS, answer  # the app with its reward; the data, the recipe

METRIC = "execution accuracy"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    questions = run.tasks("train")  # generated, or read from --data
    held_out = run.tasks("test")
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=["write_query", "rewrite_query"],
        frozen="base",  # the checker keeps the weights that training begins with
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora, --air
    )
    trainer = Trainer(
        algorithm,
        steps=run.recipe.steps,
        metric=METRIC,
        cluster="schema",  # questions about one schema are alike
        **run.trainer_options,
    )
    return Prepared(trainer, questions, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward on questions that were not trained on."""
    trainer, questions, held_out = prepare(run)
    result = trainer.fit(
        answer, questions, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = SqlExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
