"""Metric sinks: copies of a run's metrics for the services of a team.

`metrics.jsonl` in the run's folder is the record; a sink is a copy for reading. One that fails is
reported once and left out from then on: it never stops a training. Metrics are named
`train/<metric>` and `eval/<metric>`, at the iteration that they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.records import Json


class SinkRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a sink opens."""

    run_id: str
    """The same when the run is resumed."""
    folder: Path
    config: Mapping[str, Json]
    first_step: int
    """The first iteration whose metrics follow; above 0 when the run is resumed. What a sink holds
    of it and of later ones is out of date."""

    @property
    def name(self) -> str:
        return self.folder.name


@runtime_checkable
class MetricSink(Protocol):
    """Where metrics go. Any error in it is caught by `Sinks`.

    It may have a method `check`, which raises `ConfigError` before the training begins, where a
    package that it needs is not installed.
    """

    def open(self, run: SinkRun) -> None:
        """Begin, or go on with, the run's record there."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite metrics of one iteration; several calls may have one step."""
        ...

    def close(self) -> None:
        """Wait until everything arrived."""
        ...


class Sinks:
    """Several sinks that cannot do harm.

    Args:
        sinks: names of entry points of `lightspan.sinks`, or sinks.
        note: is told of one that fails.

    Raises:
        ConfigError: an unknown name, something that is no sink, or a sink's package is not
            installed.
    """

    def __init__(self, sinks: Iterable[str | MetricSink], note: Callable[[str], None]) -> None:
        self._configured = [_sink(sink) for sink in sinks]
        self._sinks: list[MetricSink] = []
        """Those that are open."""
        self._note = note

    def open(self, run: SinkRun) -> None:
        """Open all.

        Raises:
            ConfigError: a sink's package is not installed.
        """
        for sink in self._configured:
            self._sinks.append(sink)
            self._try(sink, lambda sink: sink.open(run), "could not be opened")

    def add(self, line: Mapping[str, Json]) -> None:
        """One line of `metrics.jsonl`: its numbers, under the line's kind and step."""
        values = metric_values(line)
        self._each(lambda sink: sink.log(int(line["step"]), values), "takes no metrics")

    def close(self) -> None:
        """Close all."""
        self._each(lambda sink: sink.close(), "could not be closed")
        self._sinks = []

    def _each(self, act: Callable[[MetricSink], None], what: str) -> None:
        for sink in list(self._sinks):
            self._try(sink, act, what)

    def _try(self, sink: MetricSink, act: Callable[[MetricSink], None], what: str) -> None:
        try:
            act(sink)
        except Exception as error:  # a service that is down must not end a training
            self._sinks.remove(sink)
            if isinstance(error, ConfigError):  # but a person can do something about this
                raise
            self._note(
                f"{type(sink).__name__} {what} and is left out from now on "
                f"(metrics.jsonl has everything): {error}"
            )


def metric_values(line: Mapping[str, Json]) -> dict[str, float]:
    """`<kind>/<metric>` → value, for the finite numbers of a line of metrics."""
    return {
        f"{line['kind']}/{name}": float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def checked_sinks(sinks: Any) -> tuple[str | MetricSink, ...]:
    """What was given as `sinks=`, once it is known to be usable; a single name makes a list of one.

    Raises:
        ConfigError: see `Sinks`; or what was given is no list of sinks.
    """
    if isinstance(sinks, str):
        sinks = (sinks,)
    if isinstance(sinks, type) or not isinstance(sinks, Iterable):
        raise ConfigError(
            f"sinks={sinks!r} is no list of sinks: give names ({_names()}) or sinks in a "
            "list, () for none"
        )
    checked = tuple(sinks)
    for sink in checked:
        _sink(sink)
    return checked


def _sink(sink: str | MetricSink) -> MetricSink:
    if isinstance(sink, str):
        if sink not in installed_plugins("sinks"):
            raise ConfigError(f"sinks: {sink!r} is unknown; use one of {_names()}")
        made: MetricSink = load_plugin("sinks", sink)()
        return _checked(made)
    if isinstance(sink, type):
        raise ConfigError(f"sinks: {sink.__name__} is a class; give a sink, {sink.__name__}(…)")
    lacking = [name for name in _METHODS if not callable(getattr(sink, name, None))]
    if lacking:
        raise ConfigError(
            f"sinks: {sink!r} is no sink; it needs open, log and close, and lacks "
            f"{', '.join(lacking)}"
        )
    return _checked(sink)


def _checked(sink: MetricSink) -> MetricSink:
    """Raise `ConfigError` if the sink says that it lacks a package."""
    check = getattr(sink, "check", None)
    if callable(check):
        check()
    return sink


def _names() -> str:
    return ", ".join(installed_plugins("sinks"))


_METHODS: Final = ("open", "log", "close")
