"""Train the customer service app: a real language model learns, on a laptop's CPU.

python examples/router/train.py                  SmolLM2-135M-Instruct, on the CPU
python examples/router/train.py --resume         go on after Ctrl-C, a crash or `kill -9`
python examples/router/train.py --dev            look before training: a few messages, a report
python examples/router/train.py --policies separate    a policy for each of the two agents
python examples/router/train.py --framework pydantic-ai    the same app on Pydantic AI
python examples/router/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import FitResult, LightningRL, Trainer, Transformers
from lightspan_examples.example import Prepared, Run
from lightspan_examples.script import main
from router_example.options import RouterExample
from router_example.pretrained import pretrained

METRIC = "department and product right"


def prepare(run: Run) -> Prepared:
    """Return the trainer and its data for the options of the command line."""
    messages = run.tasks("train")
    held_out = run.tasks("test")  # other products in other words
    algorithm = LightningRL(
        run.model or pretrained(run.options.cache, run.reporter),
        **run.recipe.settings,  # RECIPE: rollouts of a task, tasks of a step, learning rate, …
        **run.algorithm_options,  # optimize=["route", "answer"], lora=LoRA(rank=16), --seed
    )
    trainer = Trainer(
        algorithm,
        steps=run.recipe.steps,
        metric=METRIC,
        cluster="phrasing",  # messages of one phrasing are alike
        engine=Transformers(num_blocks=64),  # 4,096 tokens of keys and values: 16 calls of 130
        **run.trainer_options,
    )
    return Prepared(trainer, messages, held_out)


def train(run: Run) -> FitResult:
    """Train, and print the reward on messages that were not trained on."""
    app = run.training  # router_example.training, or router_example.pydantic_ai_training
    trainer, messages, held_out = prepare(run)
    result = trainer.fit(
        app.answer,
        messages,
        held_out,
        selection=run.selection,
        agents=app.AGENTS,
        resume=run.resume,
    )
    run.report(result)
    run.reporter.line(result.summary(METRIC))
    return result


EXAMPLE = RouterExample(prepare, train, cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__))
