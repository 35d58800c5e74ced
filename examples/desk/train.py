"""Learn a better prompt for the help desk, on a laptop's CPU.

python examples/desk/train.py                  SmolLM2-135M-Instruct answers, a script reflects
python examples/desk/train.py --resume         go on after Ctrl-C, a crash or `kill -9`
python examples/desk/train.py --dev            look first: a few messages, how many it would take
python examples/desk/train.py --good-seed      begin with a prompt that is good already
python examples/desk/train.py --reflection-url https://api.openai.com/v1 \\
    --reflection-model gpt-5-mini --reflection-key-env OPENAI_API_KEY      a real model reflects
"""

from __future__ import annotations

import sys

from desk_example.options import Run, main
from desk_example.training import METRIC, NAME, held_out_tasks, route, train_tasks
from lightspan import GEPA, FitResult, Trainer


def prepare(run: Run) -> Trainer:
    """Return the trainer of the search that the command line describes."""
    algorithm = GEPA(
        {NAME: run.prompt},  # the argument of `route`, as it is
        run.reflection,
        max_rollouts=run.options.max_rollouts,
        seed=run.options.order,
    )
    return Trainer(
        algorithm,
        runners=run.options.runners,
        folder=None if run.options.dev else run.folder,
        cluster="phrasing",
        metric=METRIC,
        reporter=run.reporter,
    )


def train(run: Run) -> FitResult:
    """Search for a better prompt, and print its reward on the held-out messages."""
    trainer = prepare(run)
    result = trainer.fit(route, train_tasks(), held_out_tasks(), resume=run.options.resume)
    run.reporter.line(result.prompts[NAME].diff() or "the prompt stays as it was")
    run.reporter.line(result.summary(METRIC))
    return result


if __name__ == "__main__":
    sys.exit(main(prepare, train, __doc__))
