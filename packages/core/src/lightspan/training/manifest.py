"""The manifest of a run: what its folder says of the data it learns from (`config.json`), what it
gave and how its policies are to be served (`result.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing
from lightspan.training.data import fingerprint
from lightspan.training.folder import PROMPTS, RunFolder
from lightspan.training.results import Evaluation, FitResult, Outcomes

KEY: Final = "serving"
"""In `result.json`."""


def data_config(
    train: Sequence[Json], val: Sequence[Json] | None, selection: Sequence[Json] | None
) -> dict[str, Json]:
    """What `config.json` says of the data."""
    splits = {"val": val, "selection": selection}
    others = {name: None if tasks is None else _described(tasks) for name, tasks in splits.items()}
    return {"train": _described(train), **others}


def _described(tasks: Sequence[Json]) -> dict[str, Json]:
    return {"tasks": len(tasks), "fingerprint": fingerprint(list(tasks))}


def fit_result(
    folder: RunFolder, steps: int, seconds: Mapping[str, float], kept: Evaluation | None = None
) -> FitResult:
    """The result of the run in this folder, whose model, or prompts, are there."""
    return FitResult(
        folder=folder.path,
        model=folder.model if folder.model.is_dir() else None,
        prompts=folder.prompts(),
        evaluations=tuple(folder.evaluations()),
        seconds=dict(seconds),
        steps=steps,
        kept=kept,
        outcomes=Outcomes.of(folder.metrics()),
    )


def finished_result(folder: RunFolder, step: int, kept: Evaluation | None) -> FitResult | None:
    """The result of a run whose training has ended with this step, if the run is complete.

    Args:
        kept: by which the weights are chosen; None for the last ones.
    """
    saved = folder.read_result()
    if saved is None or saved["steps"] != step or saved.get("kept") != _kept(kept):
        return None
    has_model = saved.get(KEY) is not None
    if has_model and not folder.model.is_dir():
        return None
    return fit_result(folder, step, saved.get("seconds", {}), kept)


def _kept(kept: Evaluation | None) -> dict[str, Json] | None:
    """What `result.json` says of the choice of a step."""
    return None if kept is None else {"step": kept.step, "selection": kept.metrics()}


def write_result(
    folder: RunFolder,
    result: FitResult,
    served: ServedRun | None,
    metric: str,
) -> None:
    """Say that the run is complete, what it gave and how it is to be served (None: no model)."""
    summary = {
        "steps": result.steps,
        "summary": result.summary(metric),
        "evaluations": [_figures(each) for each in result.evaluations],
        "training": result.outcomes._asdict(),
        "seconds": result.seconds,
    }
    document = None if served is None else served.as_json()
    folder.write_result({**summary, "kept": _kept(result.kept), KEY: document})


def _figures(evaluation: Evaluation) -> dict[str, Json]:
    """An evaluation's line; a mean of nothing is null, as JSON knows no NaN."""
    line = {"step": evaluation.step, **evaluation.metrics()}
    lacking = {name for name, value in line.items() if value != value}
    return {name: None if name in lacking else value for name, value in line.items()}


class ServedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A trained policy."""

    folder: str
    """Of the model or PEFT adapter, relative to the run's."""
    model: str
    """Its starting weights, which an adapter needs."""
    version: int = 0


class Upstream(NamedTuple):
    """An endpoint that a run has agents' calls sent to."""

    agents: str
    """A pattern."""
    url: str
    variable: str | None
    """With the key that is sent; None: none is."""

    def __str__(self) -> str:
        key = f"the key in ${self.variable}" if self.variable else "no key"
        host = f" (the host is {self._host})" if "@" in self.url else ""
        return quoted(f"{self.agents} -> {self.url}{host}, with {key}")

    @property
    def _host(self) -> str | None:
        """Where it leads, which a user's name before it may hide."""
        try:
            return urlsplit(self.url).hostname
        except ValueError:
            return None


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of a run, and which agents they answer."""

    policies: dict[str, ServedPolicy]
    base_model: str
    """For agents frozen as `"base"`."""
    routing: Routing

    @classmethod
    def of(cls, algorithm: Algorithm, folder: RunFolder, versions: Mapping[str, int]) -> ServedRun:
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

    def upstreams(self) -> list[Upstream]:
        """The endpoints that calls of frozen agents go to."""
        table = [*((rule.pattern, rule.target) for rule in self.routing.rules)]
        return [
            Upstream(pattern, target.endpoint.base_url, target.endpoint.api_key_env)
            for pattern, target in [*table, ("other agents", self.routing.default)]
            if target.endpoint is not None
        ]

    def as_json(self) -> dict[str, Json]:
        """For `result.json`."""
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return plain


def read_served(result: Mapping[str, Any] | None, folder: Path) -> ServedRun:
    """What `result.json` says.

    Raises:
        ConfigError: the run is not complete, trained no policy, or its file is damaged.
    """
    if result is None:
        raise ConfigError(
            f"the run in {folder} is not complete, so it has no trained model yet: go on with it "
            "(resume=True, --resume), then serve it"
        )
    if result.get(KEY) is None:
        path = folder / PROMPTS
        learned = f": what it learned is in {path}" if path.exists() else ""
        raise ConfigError(f"the run in {folder} trained no policy, so it has no model{learned}")
    try:
        return msgspec.convert(result[KEY], ServedRun)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder} does not say how it is to be served: {error}") from error


def quoted(text: str) -> str:
    """The text of a file from elsewhere, with nothing that a terminal obeys or that looks like
    other letters."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
