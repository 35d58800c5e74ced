"""The command line of `train.py`, and the servers that one run needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

from desk_example.candidates import GOOD
from desk_example.reflection import scripted
from desk_example.serving import app_asks, served
from desk_example.training import PROMPT, held_out_tasks, route, train_tasks
from lightspan import LLM, FitResult, PromptTemplate, Trainer
from lightspan.errors import LightspanError
from lightspan.progress import Reporter, default_reporter
from router_example.pretrained import pretrained

MAX_ROLLOUTS: Final = 200
CACHE: Final = Path(__file__).parents[2] / "router" / ".cache"
"""Cache of the router example, so that both examples share one pretrained model."""


class Run(NamedTuple):
    """One run of `train.py`, with the options of its command line."""

    options: argparse.Namespace
    reporter: Reporter
    reflection: LLM
    prompt: PromptTemplate
    folder: Path


def parser(description: str) -> argparse.ArgumentParser:
    """Return the argument parser of `train.py`."""
    made = argparse.ArgumentParser(
        description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--order", type=int, default=0, help="the seed of the search, and of the script (0)")
    add("--good-seed", action="store_true", help="begin with a prompt that is good already")
    add("--max-rollouts", type=int, default=MAX_ROLLOUTS, help=f"of the search ({MAX_ROLLOUTS})")
    add("--runners", type=int, default=8, help="messages that are routed at once (8)")
    add("--folder", type=Path, help="of the run (runs/desk-order0)")
    add("--resume", action="store_true", help="go on after Ctrl-C, a crash or kill -9")
    add(
        "--dev", action="store_true", help="look first: a few messages, and how many a search takes"
    )
    add("--model", type=Path, help="the folder of another chat model that answers the app")
    add("--cache", type=Path, default=CACHE, help="where the pretrained model is kept")
    add("--base-url", metavar="URL", help="an endpoint that answers the app, in place of a model")
    add("--endpoint-model", metavar="NAME", help="the model to ask it for")
    add("--reflection-url", metavar="URL", help="an endpoint that reflects, in place of the script")
    add("--reflection-model", metavar="NAME", help="the model to ask it for")
    add("--reflection-key-env", metavar="NAME", help="the variable with its key")
    return made


def main(
    prepare: Callable[[Run], Trainer],
    train: Callable[[Run], FitResult],
    description: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Search for a prompt, or with `--dev` make a dry run; return the exit status.

    Args:
        prepare: function that returns the trainer of a run.
        train: function that searches and prints the result.
        description: text above the options in `--help`; None for no text.
        arguments: command-line arguments; None for `sys.argv[1:]`.
    """
    made = parser(description or "")
    options = made.parse_args(arguments)
    for url, name in (("base_url", "endpoint_model"), ("reflection_url", "reflection_model")):
        if (getattr(options, url) is None) != (getattr(options, name) is None):
            flags = [f"--{each.replace('_', '-')}" for each in (url, name)]
            made.error(f"{' and '.join(flags)} go together")
    try:
        with opened(options) as run:
            if options.dev:
                report = prepare(run).dev(route, train_tasks(), held_out_tasks())
                run.reporter.line(report.text())
            else:
                train(run)
    except LightspanError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("go on with --resume", file=sys.stderr)
        return 130
    return 0


@contextmanager
def opened(options: argparse.Namespace, reporter: Reporter | None = None) -> Iterator[Run]:
    """Start the model that answers the app and the endpoint that reflects; stop both after the
    block.
    """
    reporter = reporter or default_reporter()
    start = "-good" if options.good_seed else ""
    folder = options.folder or Path(f"runs/desk{start}-order{options.order}")
    with _reflection(options, folder) as llm, _answering(options, reporter):
        prompt = PromptTemplate(GOOD) if options.good_seed else PROMPT
        yield Run(options, reporter, llm, prompt, folder)


def _reflection(options: argparse.Namespace, folder: Path) -> Any:
    if options.reflection_url is None:
        return scripted(options.order, folder)
    return nullcontext(
        LLM(
            base_url=options.reflection_url,
            model=options.reflection_model,
            api_key_env=options.reflection_key_env,
        )
    )


@contextmanager
def _answering(options: argparse.Namespace, reporter: Reporter) -> Iterator[None]:
    if options.base_url is not None:  # with the key that the app has
        key = os.environ.get("OPENAI_API_KEY") or "unused"
        with app_asks(options.base_url, options.endpoint_model, key):
            yield
        return
    model = options.model or pretrained(options.cache, reporter)
    with served(model) as (url, name), app_asks(url, name):
        yield
