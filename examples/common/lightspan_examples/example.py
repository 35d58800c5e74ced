"""An example, and one run of its `train.py`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import lightspan
from lightspan import FitResult, LoRA, Torch, Trainer
from lightspan.progress import Reporter
from lightspan.training.sinks import MetricSink
from lightspan_examples.options import add_options
from lightspan_examples.recipe import Recipe
from lightspan_tools.dry_run.token_estimates import peak_bytes

Split: TypeAlias = Literal["train", "dev", "test"]

ON_THE_WAY: Final = 200
"""Tasks that are evaluated while training, at most."""
ON_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What a server of vLLM's is told: GiB of keys and values, and to take no core that others need."""
SHARE: Final = 0.02
"""Of the training tasks of `--data`, taken for that."""


class Prepared(NamedTuple):
    """A trainer and its data."""

    trainer: Trainer
    train_tasks: Sequence[Any]
    held_out: Sequence[Any]


class Example:
    """What the command of one example is made of; `script.main` runs it.

    Its training module has `answer` (the app with its reward), `AGENTS` (the paths of all of its
    agents), `RECIPE` and `REAL_MODEL` (a `Recipe` for the small model and for one that was not
    built here), `load_tasks(cache, split, recipe, reporter)` and
    `warm_start(cache, seed, reporter, recipe)`; with `data_help` also
    `load_data(data, split, reporter, recipe, limit=)`.

    Args:
        prepare: the algorithm and its trainer, with their data, for a run.
        train: what follows: it trains and says what came of it.
        cache: where generated data and warm starts are kept, unless `--cache` says otherwise.
    """

    name: str
    """What its runs' folders begin with: `runs/<name>-seed0`."""
    training: str
    """The name of the training module; it is imported when it is needed."""
    data_help: str | None = None
    """What `--data DIR` takes; None if the example has no such option."""

    def __init__(
        self,
        prepare: Callable[[Run], Prepared],
        train: Callable[[Run], FitResult],
        *,
        cache: Path,
    ) -> None:
        self.prepare = prepare
        self.train = train
        self.cache = cache

    def parser(self, description: str) -> argparse.ArgumentParser:
        """The options of `train.py`."""
        parser = argparse.ArgumentParser(
            description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_options(parser, self.name, self.cache, self.data_help)
        self.add_arguments(parser)
        return parser

    # --- what an example may say otherwise ---------------------------------------------------
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of this example's own; none by default."""
        del parser

    def module(self, options: argparse.Namespace) -> Any:
        """The training module."""
        del options
        return importlib.import_module(self.training)

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """The arguments of LightningRL that the command line gives."""
        return {"seed": options.seed, "lora": LoRA(rank=16) if options.lora else None}

    def data_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """Further arguments of `load_data`."""
        del options
        return {}

    def run_name(self, options: argparse.Namespace) -> str:
        """The name of the run's folder, without its seed."""
        return self.name if options.model is None else f"{self.name}-{Path(options.model).name}"


class Run:
    """One run of an example's `train.py`, as its command line asks for it.

    Args:
        sinks: where metrics go, beside those of `--sink`.
    """

    def __init__(
        self,
        example: Example,
        options: argparse.Namespace,
        reporter: Reporter,
        sinks: Sequence[str | MetricSink] = (),
    ) -> None:
        _one_torch_thread(options.device)
        self.options = options
        self.reporter = reporter
        self.training = example.module(options)
        self.is_small = options.model is None
        """Whether the small model, which is built here, is what learns."""
        self._example = example
        self._sinks = sinks

    @cached_property
    def recipe(self) -> Recipe:
        """The settings for the model that learns, with `--steps` and `--demonstrations`."""
        recipe: Recipe = self.training.RECIPE if self.is_small else self.training.REAL_MODEL
        options = self.options
        if options.steps is not None:
            recipe = replace(recipe, steps=options.steps)
        if options.demonstrations is not None:
            imitation = replace(recipe.imitation, demonstrations=options.demonstrations)
            recipe = replace(recipe, imitation=imitation)
        return recipe

    def tasks(self, split: Split) -> Sequence[Any]:
        """The tasks of a split: generated by `load_tasks`, or read from `--data` by `load_data`;
        `--held-out` of the test's; of `dev`, which `--data` has not, no more either."""
        options = self.options
        limits = {"test": options.held_out, "dev": min(ON_THE_WAY, options.held_out)}
        limit = limits.get(split)
        tasks: Sequence[Any]
        if options.data is None:
            tasks = self.training.load_tasks(options.cache, split, self.recipe, self.reporter)
        else:
            tasks = self.training.load_data(
                options.data,
                split,
                self.reporter,
                self.recipe,
                limit=limit,
                **self._example.data_options(options),
            )
        return tasks[:limit]

    @property
    def selection(self) -> Sequence[Any] | float | None:
        """What is evaluated on the way, so that the test is looked at before and after only: tasks
        of `dev`; of `--data` a share of the training tasks. None: nothing is."""
        if not self._validate_every:
            return None
        return self.tasks("dev") if self.options.data is None else SHARE

    @property
    def _validate_every(self) -> int | None:
        every: int | None = self.options.validate_every
        return max(1, self.recipe.steps // 2) if every is None else every or None

    @property
    def model(self) -> str | None:
        """`--model`; None where the small model learns."""
        model: str | None = self.options.model
        return model

    def warm_start(self) -> str:
        """The small model, after it has imitated demonstrations."""
        options = self.options
        model, seconds = self.training.warm_start(
            options.cache, options.seed, self.reporter, self.recipe
        )
        self.reporter.line(f"the warm start took {seconds:.0f} CPU-seconds")
        return str(model)

    @property
    def algorithm_options(self) -> dict[str, Any]:
        """The arguments of LightningRL that the command line gives."""
        return self._example.algorithm_options(self.options)

    @property
    def trainer_options(self) -> dict[str, Any]:
        """The arguments of Trainer that follow from the command line."""
        options = self.options
        return {
            "runners": options.runners,
            "folder": None if options.dev else self.folder,
            "validate_every": self._validate_every,
            "checkpoint_every": 1 if self.is_small else 20,
            "device": options.device,
            **_engine_options(options),
            **_learner_options(options),
            "sinks": [*options.sink, *self._sinks],
            "reporter": self.reporter,
        }

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        options = self.options
        return Path(options.folder or f"runs/{self._example.run_name(options)}-seed{options.seed}")

    @property
    def resume(self) -> bool:
        """Whether to go on from the last checkpoint."""
        return bool(self.options.resume)

    def report(self, result: FitResult) -> None:
        """Say what training cost and where to find what it left."""
        line = self.reporter.line
        spent = ", ".join(f"{part} {seconds:.1f}" for part, seconds in result.seconds.items())
        line(f"CPU-seconds: {spent}")
        # what Linux says of a child counts what its parent held when it was started
        line(f"peak memory: {peak_bytes() / 2**30:.2f} GiB (trainer; runner processes on top)")
        line(f"run: {result.folder}  curve: {result.folder / 'learning_curve.png'}")
        line(f"model: {result.model}  look inside: lightspan inspect {result.folder}")


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.vllm is None:
        return {}
    if options.device != "cpu":
        return {"engine": lightspan.VLLM(python=options.vllm)}
    # nothing is compiled before the first answer
    return {
        "engine": lightspan.VLLM(
            python=options.vllm, environment=ON_CPU, arguments=("--enforce-eager",)
        )
    }


def _learner_options(options: argparse.Namespace) -> dict[str, Any]:
    budget = options.token_budget
    if options.verl is not None:
        return {"learner": lightspan.Verl(python=options.verl, token_budget=budget)}
    return {} if budget is None else {"learner": Torch(token_budget=budget)}


def _one_torch_thread(device: str) -> None:
    """Limit torch to one: at this size a second gives nothing, and the app needs the other core."""
    if device == "cpu":
        import torch

        torch.set_num_threads(1)
