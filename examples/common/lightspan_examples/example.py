"""Hold the settings of an example (`Example`) and of one run of its `train.py` (`Run`)."""

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
from lightspan_tools.dry_run.memory import peak_bytes

Split: TypeAlias = Literal["train", "dev", "test"]

ON_THE_WAY: Final = 200
"""Maximum number of tasks in an evaluation between steps."""
ON_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment of a vLLM server on the CPU: 1 GiB of KV cache, one thread, bound to no core."""
SHARE: Final = 0.02
"""Share of the training tasks of `--data` that are evaluated between steps instead of trained on.
"""


class Prepared(NamedTuple):
    """A trainer with its training tasks and held-out tasks."""

    trainer: Trainer
    train_tasks: Sequence[Any]
    held_out: Sequence[Any]


class Example:
    """Names and functions of one example; `script.main` runs its `train.py`.

    `training` names a module with these attributes:

    - `answer`: the app with its reward.
    - `AGENTS`: paths of all of the app's agents.
    - `RECIPE` and `REAL_MODEL`: the `Recipe` for the small model, and for a model from `--model`.
    - `load_tasks(cache, split, recipe, reporter)` and `warm_start(cache, seed, reporter, recipe)`.
    - `load_data(data, split, reporter, recipe, limit=)`, if `data_help` is set.

    Args:
        prepare: function that returns the trainer and its data for a run.
        train: function that trains, prints the result and returns it.
        cache: default of `--cache`, the folder of generated data and warm starts.
    """

    name: str
    """Name of the example, with which the folders of its runs begin: `runs/<name>-seed0`."""
    training: str
    """Name of the training module, which is imported at its first use."""
    data_help: str | None = None
    """Help text of `--data DIR`; None if the example has no such option."""

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
        """Return the parser of `train.py`, with the shared options and the example's own."""
        parser = argparse.ArgumentParser(
            description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_options(parser, self.name, self.cache, self.data_help)
        self.add_arguments(parser)
        return parser

    # --- what an example may say otherwise ---------------------------------------------------
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this example has. The default adds none."""
        del parser

    def module(self, options: argparse.Namespace) -> Any:
        """Import and return the training module."""
        del options
        return importlib.import_module(self.training)

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments of `LightningRL` that the command line sets."""
        return {"seed": options.seed, "lora": LoRA(rank=16) if options.lora else None}

    def data_options(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return further arguments of `load_data`. The default returns none."""
        del options
        return {}

    def run_name(self, options: argparse.Namespace) -> str:
        """Return the name of the run's folder, without its seed."""
        return self.name if options.model is None else f"{self.name}-{Path(options.model).name}"


class Run:
    """One run of an example's `train.py`, with the options of its command line.

    Args:
        sinks: destinations of metrics in addition to those of `--sink`.
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
        """Whether the small model is trained, which is built on this machine (no `--model`)."""
        self._example = example
        self._sinks = sinks

    @cached_property
    def recipe(self) -> Recipe:
        """Return the training settings, with the values of `--steps` and `--demonstrations`."""
        recipe: Recipe = self.training.RECIPE if self.is_small else self.training.REAL_MODEL
        options = self.options
        if options.steps is not None:
            recipe = replace(recipe, steps=options.steps)
        if options.demonstrations is not None:
            imitation = replace(recipe.imitation, demonstrations=options.demonstrations)
            recipe = replace(recipe, imitation=imitation)
        return recipe

    def tasks(self, split: Split) -> Sequence[Any]:
        """Return the tasks of a split, from `load_data` with `--data`, else from `load_tasks`.

        At most `--held-out` tasks of `test` are returned, and of `dev` also at most `ON_THE_WAY`.
        Data of `--data` has no split `dev`.
        """
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
        """Return the tasks of the evaluations between steps, which use no held-out task.

        They are tasks of `dev`, or with `--data` a share of the training tasks (`SHARE`). None if
        `--validate-every 0` turns these evaluations off.
        """
        if not self._validate_every:
            return None
        return self.tasks("dev") if self.options.data is None else SHARE

    @property
    def _validate_every(self) -> int | None:
        every: int | None = self.options.validate_every
        return max(1, self.recipe.steps // 2) if every is None else every or None

    @property
    def model(self) -> str | None:
        """The value of `--model`; None if the small model is trained."""
        model: str | None = self.options.model
        return model

    def warm_start(self) -> str:
        """Build the small model and train it on demonstrations; return its folder."""
        options = self.options
        model, seconds = self.training.warm_start(
            options.cache, options.seed, self.reporter, self.recipe
        )
        self.reporter.line(f"the warm start took {seconds:.0f} CPU-seconds")
        return str(model)

    @property
    def algorithm_options(self) -> dict[str, Any]:
        """The arguments of `LightningRL` that the command line sets."""
        return self._example.algorithm_options(self.options)

    @property
    def trainer_options(self) -> dict[str, Any]:
        """The arguments of `Trainer` that the command line sets."""
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
        """The folder of the run."""
        options = self.options
        return Path(options.folder or f"runs/{self._example.run_name(options)}-seed{options.seed}")

    @property
    def resume(self) -> bool:
        """Whether to resume from the latest checkpoint."""
        return bool(self.options.resume)

    def report(self, result: FitResult) -> None:
        """Print the CPU time and peak memory of the training, and the paths of its results."""
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
    """Let torch use one thread on the CPU: a small model gains nothing from more, and the app needs
    the other cores.
    """
    if device == "cpu":
        import torch

        torch.set_num_threads(1)
