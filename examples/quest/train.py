"""Train the text adventure's agent on this machine, or on a GPU with a real model.

python examples/quest/train.py                   a small model, built here, on the CPU
python examples/quest/train.py --resume          go on after Ctrl-C, a crash or `kill -9`
python examples/quest/train.py --dev             look before training: a few quests, a report
python examples/quest/train.py --credit discounted   another rule for the calls' credit
python examples/quest/train.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from quest_example.options import QuestExample
from quest_example.training import AGENTS, answer  # the app with its reward; the data, the recipe

METRIC = "quests solved"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    quests = run.tasks("train")
    held_out = run.tasks("test")
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=["explore"],
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, learning rate, …
        **run.algorithm_options,  # --seed, --lora, --credit
    )
    trainer = Trainer(algorithm, steps=run.recipe.steps, metric=METRIC, **run.trainer_options)
    return Prepared(trainer, quests, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward in worlds that were not trained on."""
    trainer, quests, held_out = prepare(run)
    result = trainer.fit(
        answer, quests, held_out, selection=run.selection, agents=AGENTS, resume=run.resume
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = QuestExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
