"""The command line of each example's `train.py`: train, go on, look before training."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from lightspan import FitResult, LightningRL, LoRA, Trainer
from lightspan.dryrun import DevReport
from lightspan.dryrun.measuring import child_peak_bytes, peak_bytes
from lightspan.dryrun.running import NO_MODEL, named_endpoint
from lightspan.dryrun.writing import STDOUT, check_writable, shown
from lightspan.errors import LightspanError
from lightspan.progress import PlainReporter, Reporter, default_reporter
from lightspan.sinks import SINKS, MetricSink
from lightspan_examples.recipe import Recipe

Split: TypeAlias = Literal["train", "test"]


class Prepared(NamedTuple):
    """A trainer and its data."""

    trainer: Trainer
    train_tasks: Sequence[Any]
    test_tasks: Sequence[Any]


class Example:
    """What one example is; `main` makes a command of it.

    Its training module has `answer` (the app), `AGENTS` (the paths of all of its agents), `RECIPE`
    and `REAL_MODEL` (a `Recipe` for the small model and for one that was not built here),
    `load_tasks(cache, split, recipe, reporter)`, `warm_start(cache, seed, reporter, recipe)` and
    `rl_options(seed, recipe)`; with `data_help` also
    `load_data(data, split, reporter, recipe, limit=)`.

    Args:
        cache: where generated data and warm starts are kept, unless `--cache` says otherwise.
    """

    name: str
    """Of runs' folders: `runs/<name>-seed0`."""
    metric: str
    """What the reward is called on the curve."""
    training: str
    """The name of the training module; it is imported when it is needed."""
    data_help: str | None = None
    """What `--data DIR` takes; None if the example has no such option."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    # --- what an example may say otherwise ---------------------------------------------------
    def module(self, options: argparse.Namespace) -> Any:
        """The training module."""
        del options
        return importlib.import_module(self.training)

    def rl_options(self, options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
        """The arguments of LightningRL."""
        rules: dict[str, Any] = self.module(options).rl_options(options.seed, recipe)
        return rules

    def data_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """Further arguments of `load_data`."""
        del options
        return {}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of this example's own; none by default."""
        del parser

    def run_name(self, options: argparse.Namespace) -> str:
        """The name of the run's folder, without its seed."""
        return self.name if options.model is None else f"{self.name}-{Path(options.model).name}"

    # --- what follows from it ---------------------------------------------------------------
    def parser(self, description: str) -> argparse.ArgumentParser:
        """The options of `train.py`."""
        parser = argparse.ArgumentParser(
            description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_arguments(parser, self)
        self.add_arguments(parser)
        return parser

    def prepare(
        self,
        options: argparse.Namespace,
        reporter: Reporter,
        sinks: Sequence[str | MetricSink] = (),
    ) -> Prepared:
        """Data, warm start and trainer, as the options say."""
        _one_torch_thread(options.device)
        training = self.module(options)
        is_small = options.model is None and options.endpoint is None
        recipe: Recipe = training.RECIPE if is_small else training.REAL_MODEL
        if options.steps is not None:
            recipe = replace(recipe, steps=options.steps)
        train_tasks = self._tasks("train", options, recipe, reporter)
        test_tasks = self._tasks("test", options, recipe, reporter)[: options.held_out]
        model: str | Path = options.model or NO_MODEL
        if is_small:
            model, seconds = training.warm_start(options.cache, options.seed, reporter, recipe)
            reporter.line(f"the warm start took {seconds:.0f} CPU-seconds")
        lora = LoRA(rank=16) if options.lora else None
        trainer = Trainer(
            LightningRL(str(model), lora=lora, **self.rl_options(options, recipe)),
            runners=options.runners,
            steps=recipe.steps,
            folder=None if options.dev else self.folder(options),
            validate_every=max(1, recipe.steps // 2),
            checkpoint_every=1 if is_small else 20,
            device=options.device,
            learner_options=None
            if options.token_budget is None
            else {"token_budget": options.token_budget},
            metric=self.metric,
            sinks=[*options.sink, *sinks],
            reporter=reporter,
        )
        return Prepared(trainer, train_tasks, test_tasks)

    def folder(self, options: argparse.Namespace) -> Path:
        """Where the run is kept."""
        return Path(options.folder or f"runs/{self.run_name(options)}-seed{options.seed}")

    def train(self, options: argparse.Namespace, reporter: Reporter) -> FitResult:
        """Everything: data, warm start, reinforcement learning."""
        trainer, train_tasks, test_tasks = self.prepare(options, reporter)
        training = self.module(options)
        return trainer.fit(
            training.answer,
            train_tasks,
            test_tasks,
            agents=list(training.AGENTS),
            resume=options.resume,
        )

    def dry_run(self, options: argparse.Namespace, reporter: Reporter) -> DevReport:
        """A few tasks, and what training would do with them."""
        trainer, train_tasks, test_tasks = self.prepare(options, reporter)
        training = self.module(options)
        return trainer.dev(
            training.answer,
            train_tasks,
            test_tasks,
            agents=list(training.AGENTS),
            endpoint=options.endpoint,
            folder=options.folder,
        )

    def _tasks(
        self, split: Split, options: argparse.Namespace, recipe: Recipe, reporter: Reporter
    ) -> Sequence[Any]:
        training = self.module(options)
        tasks: Sequence[Any]
        if self.data_help is None or options.data is None:
            tasks = training.load_tasks(options.cache, split, recipe, reporter)
        else:
            limit = options.held_out if split == "test" else None
            more = self.data_options(options)
            tasks = training.load_data(options.data, split, reporter, recipe, limit=limit, **more)
        return tasks


def main(example: Example, description: str, arguments: Sequence[str] | None = None) -> int:
    """The command: trains, prints the gain; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = example.parser(description)
    options = parser.parse_args(given)
    _check(parser, options, example)
    reporter = default_reporter()
    try:
        if options.dev:
            return _look(example, options, reporter)
        result = example.train(options, reporter)
    except LightspanError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if not options.dev:
            print(f"go on with: {_resume_command(given)}", file=sys.stderr)
        return 130
    _report(result, example.metric, reporter)
    return 0


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, example: Example) -> None:
    """End with status 2 where options contradict one another."""
    asks = options.base_url is not None or options.endpoint_model is not None
    if not options.dev:
        for name in ("json", "base_url", "endpoint_model"):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is of a dry run: give --dev too")
    elif options.resume:
        parser.error("--dev trains nothing that --resume could go on with")
    if example.data_help and options.data is not None and options.model is None and not asks:
        parser.error("--data needs --model: the small model knows no words but its own")
    if options.held_out < 1:
        parser.error(f"--held-out {options.held_out} must be at least 1")


def _look(example: Example, options: argparse.Namespace, reporter: Reporter) -> int:
    """A dry run; returns the exit status."""
    check_writable(options.json)
    if options.json == STDOUT:  # which the JSON has alone
        reporter = PlainReporter(sys.stderr)
    options.endpoint = named_endpoint(options.base_url, options.endpoint_model)
    report = example.dry_run(options, reporter)
    print(shown(report, options.json))
    if report.failure:
        print(f"train.py: {report.failure}", file=sys.stderr)
    return int(bool(report.failure))


def _one_torch_thread(device: str) -> None:
    """At this size a second thread gives nothing, and the app needs the other core."""
    if device == "cpu":
        import torch

        torch.set_num_threads(1)


def _report(result: FitResult, metric: str, reporter: Reporter) -> None:
    spent = ", ".join(f"{part} {seconds:.1f}" for part, seconds in result.seconds.items())
    reporter.line(f"CPU-seconds: {spent}")
    peak = (peak_bytes() + child_peak_bytes()) / 2**30
    reporter.line(f"peak memory: {peak:.2f} GiB (trainer and largest runner)")
    reporter.line(f"run: {result.folder}  curve: {result.folder / 'learning_curve.png'}")
    reporter.line(f"model: {result.model}  look inside: lightspan inspect {result.folder}")
    reporter.line(result.summary(metric))


def _resume_command(arguments: Sequence[str]) -> str:
    kept = [part for part in arguments if part != "--resume"]
    return " ".join(["python", sys.argv[0], *kept, "--resume"])


def _add_arguments(parser: argparse.ArgumentParser, example: Example) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and training (0)")
    parser.add_argument(
        "--model", help="folder or hub name of a chat model; without it a small one is built"
    )
    parser.add_argument("--device", default="cpu", help='"cpu", "cuda" or "cuda:1" (cpu)')
    parser.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help="tokens that the learner computes at once; lower it when memory runs out",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters, not the full weights")
    if example.data_help:
        parser.add_argument("--data", type=Path, metavar="DIR", help=example.data_help)
    parser.add_argument(
        "--dev", action="store_true", help="a dry run: report what training would do, and stop"
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="with --dev: an OpenAI-compatible endpoint that answers in place of the model",
    )
    parser.add_argument(
        "--endpoint-model",
        metavar="NAME",
        help="with --dev: the model to ask that endpoint for, or the one of OPENAI_BASE_URL",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=Path,
        metavar="PATH",
        help="with --dev: the report as JSON, to a file or in place of the text",
    )
    parser.set_defaults(endpoint=None)
    parser.add_argument(
        "--sink",
        action="append",
        default=[],
        choices=list(SINKS),
        help="send metrics there too; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--steps", type=int, help="training iterations")
    parser.add_argument("--held-out", type=int, default=500, help="held-out questions (500)")
    parser.add_argument("--runners", type=int, default=16, help="attempts at once (16)")
    parser.add_argument("--folder", type=Path, help=f"of the run (runs/{example.name}-seed<seed>)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=example.cache,
        help=f"where data and warm starts are kept (examples/{example.name}/.cache)",
    )
