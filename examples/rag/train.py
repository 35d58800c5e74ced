"""Train the question answering app on this machine, or on a GPU with a real model.

python examples/rag/train.py                     a small model, built here, on the CPU
python examples/rag/train.py --resume            go on after Ctrl-C, a crash or `kill -9`
python examples/rag/train.py --dev               look before training: a few questions, a report
python examples/rag/train.py --framework crewai  the app as a crew; in an environment with CrewAI
python examples/rag/train.py --framework crewai --optimize searcher
python examples/rag/train.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda
python examples/rag/train.py --model ... --data DIR        on MuSiQue, or documents of your own
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import FitResult, LightningRL, Trainer
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from rag_example.options import RagExample, trained_agents

METRIC = "0.9 F1 + 0.1 form"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    questions = run.tasks("train")  # generated, or read from --data
    held_out = run.tasks("test")
    algorithm = LightningRL(
        run.model or run.warm_start(),  # a small model imitates demonstrations
        optimize=trained_agents(run),  # the researcher; of a crew both agents, or --optimize
        frozen=run.training.FROZEN,
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, temperature, …
        **run.algorithm_options,  # --seed, --lora
    )
    trainer = Trainer(
        algorithm,
        steps=run.recipe.steps,
        metric=METRIC,
        # questions about one world are alike; those of --data are about one collection
        cluster="documents" if run.options.data is None else None,
        **run.trainer_options,
    )
    return Prepared(trainer, questions, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward on questions that were not trained on."""
    app = run.training  # rag_example.training, or rag_example.crew_training with CrewAI
    trainer, questions, held_out = prepare(run)
    result = trainer.fit(
        app.answer,
        questions,
        held_out,
        selection=run.selection,
        agents=app.AGENTS,
        resume=run.resume,
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = RagExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
