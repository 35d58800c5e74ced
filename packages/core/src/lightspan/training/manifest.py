"""The manifest of a run: what its folder says of the data it learns from (`config.json`), what it
gave and how its policies are to be served (`result.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing
from lightspan.training.checkpoints import TrainerState
from lightspan.training.data import fingerprint
from lightspan.training.folder import RunFolder
from lightspan.training.results import FitResult

KEY: Final = "serving"
"""In `result.json`."""


def data_config(train: Sequence[Json], val: Sequence[Json] | None) -> dict[str, Json]:
    """What `config.json` says of the data."""
    return {"train": _described(train), "val": None if val is None else _described(val)}


def _described(tasks: Sequence[Json]) -> dict[str, Json]:
    return {"tasks": len(tasks), "fingerprint": fingerprint(list(tasks))}


def fit_result(folder: RunFolder, steps: int, seconds: Mapping[str, float]) -> FitResult:
    """The result of the run in this folder, whose model is there."""
    return FitResult(
        folder=folder.path,
        model=folder.model,
        evaluations=tuple(folder.evaluations()),
        seconds=dict(seconds),
        steps=steps,
    )


def finished_result(folder: RunFolder, state: TrainerState, planned: int) -> FitResult | None:
    """The result of a run that has nothing left to do."""
    saved = folder.read_result()
    if saved is None or state.step < planned or saved["steps"] != state.step:
        return None
    return fit_result(folder, state.step, saved["seconds"]) if folder.model.is_dir() else None


def write_result(folder: RunFolder, result: FitResult, served: Served, metric: str) -> None:
    """Say that the run is complete, what it gave and how it is to be served."""
    summary = {"steps": result.steps, "summary": result.summary(metric), "seconds": result.seconds}
    folder.write_result({**summary, KEY: served.as_json()})


class ServedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A trained policy."""

    folder: str
    """Of the model or PEFT adapter, relative to the run's."""
    model: str
    """Its starting weights, which an adapter needs."""
    version: int = 0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of a run, and which agents they answer."""

    policies: dict[str, ServedPolicy]
    base_model: str
    """For agents frozen as `"base"`."""
    routing: Routing

    @classmethod
    def of(cls, algorithm: Algorithm, folder: RunFolder, versions: Mapping[str, int]) -> Served:
        """The algorithm's policies, where the run leaves them; one alone is the run's model."""
        specs = algorithm.policies()
        model = folder.model.relative_to(folder.path)
        policies = {
            name: ServedPolicy(
                folder=str(model if len(specs) == 1 else model / name),
                model=spec.model,
                version=versions.get(name, 0),
            )
            for name, spec in specs.items()
        }
        return cls(policies=policies, base_model=algorithm.base_model, routing=algorithm.routing())

    def as_json(self) -> dict[str, Json]:
        """For `result.json`."""
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return plain


def read_served(result: Mapping[str, Any] | None, folder: Path) -> Served:
    """What `result.json` says.

    Raises:
        ConfigError: the run is not complete, or an older lightspan ended it.
    """
    if result is None:
        raise ConfigError(
            f"the run in {folder} is not complete, so it has no trained model yet: go on with it "
            "(resume=True, --resume), then serve it"
        )
    if KEY not in result:
        raise ConfigError(
            f"the run in {folder} was ended by a lightspan that could not serve yet: train it again"
        )
    try:
        return msgspec.convert(result[KEY], Served)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder} does not say how it is to be served: {error}") from error
