"""Train a coding agent, mini-swe-agent, on this machine, or on a GPU with a real model.

python examples/terminal/train.py                    a small model, built here, on the CPU
python examples/terminal/train.py --resume           go on after Ctrl-C, a crash or `kill -9`
python examples/terminal/train.py --dev              look before training: a few packages, a report
python examples/terminal/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
"""

from __future__ import annotations

import sys

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from terminal_example.options import TerminalExample
from terminal_example.training import AGENTS, CACHE, answer  # the app with its reward

METRIC = "packages repaired"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    broken = run.tasks("train")
    held_out = run.tasks("test")  # other kinds of bugs
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates recorded sessions
        optimize=["repair"],
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora
    )
    trainer = Trainer(
        algorithm,
        steps=run.recipe.steps,
        metric=METRIC,
        cluster="name",  # attempts at one package are alike
        **run.trainer_options,
    )
    return Prepared(trainer, broken, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward in packages whose kinds of bugs were not trained on."""
    trainer, broken, held_out = prepare(run)
    result = trainer.fit(
        answer, broken, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = TerminalExample(prepare, train, cache=CACHE)

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
