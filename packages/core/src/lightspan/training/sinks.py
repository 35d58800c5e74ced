"""Metric sinks: copy a run's metrics to experiment trackers.

All metrics are in `metrics.jsonl` in the run's folder; a sink gets a copy. A sink that fails is
reported once and disabled. It does not stop a training, except by a `ConfigError`, such as for a
missing package. A metric is named `<kind>/<metric>`, with one of the kinds `train`, `eval` and
`selection`. The tracker's step is the number of the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.records import Json


class SinkRun(msgspec.Struct, frozen=True, kw_only=True):
    """Data about the run whose metrics a sink gets."""

    run_id: str
    """Id of the run; it stays the same when the run is resumed."""
    folder: Path
    config: Mapping[str, Json]
    first_step: int
    """First iteration whose metrics follow; above 0 if the run is resumed. Metrics that the sink
    got for this and later iterations before the resume are out of date.
    """

    @property
    def name(self) -> str:
        return self.folder.name


@runtime_checkable
class MetricSink(Protocol):
    """A destination of metrics. Exceptions of its methods do not stop the training.

    A sink may have a method `check`, which is called before the training begins and raises
    `ConfigError` if a package is not installed.
    """

    def open(self, run: SinkRun) -> None:
        """Open the run's record in the tracker; it exists already if the run is resumed."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics for iteration `step`; all values are finite.

        It may be called several times for the same step.
        """

    def close(self) -> None:
        """Send all metrics and close the run's record."""


class Sinks:
    """The sinks of a run; their errors do not stop the training.

    Args:
        sinks: sinks, or names of entry points of `lightspan.sinks`.
        note: function that prints a note about a sink that fails.

    Raises:
        ConfigError: a name is unknown, a value is not a sink, or a package is not installed.
    """

    def __init__(self, sinks: Iterable[str | MetricSink], note: Callable[[str], None]) -> None:
        self._configured = [_sink(sink) for sink in sinks]
        self._sinks: list[MetricSink] = []
        """The open sinks."""
        self._note = note

    def open(self, run: SinkRun) -> None:
        """Open all sinks for the run.

        Raises:
            ConfigError: a sink's package is not installed.
        """
        for sink in self._configured:
            self._sinks.append(sink)
            self._call([sink], lambda sink: sink.open(run), "could not be opened")

    def add(self, line: Mapping[str, Json]) -> None:
        """Log the numbers of a line of `metrics.jsonl`."""
        step, values = int(line["step"]), metric_values(line)
        self._call(self._sinks, lambda sink: sink.log(step, values), "takes no metrics")

    def close(self) -> None:
        """Close all sinks."""
        self._call(self._sinks, lambda sink: sink.close(), "could not be closed")
        self._sinks = []

    def _call(
        self, sinks: Sequence[MetricSink], act: Callable[[MetricSink], None], problem: str
    ) -> None:
        for sink in list(sinks):
            try:
                act(sink)
            except ConfigError:  # the user can fix it
                self._sinks.remove(sink)
                raise
            except Exception as error:  # a service that is down must not end a training
                self._sinks.remove(sink)
                self._note(
                    f"{type(sink).__name__} {problem} and is left out from now on "
                    f"(metrics.jsonl has everything): {error}"
                )


def metric_values(line: Mapping[str, Json]) -> dict[str, float]:
    """Return the finite numbers of a line of `metrics.jsonl`, named `<kind>/<metric>`."""
    return {
        f"{line['kind']}/{name}": float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def checked_sinks(sinks: Any) -> tuple[str | MetricSink, ...]:
    """Return a validated `sinks=` argument as a tuple; a single name makes a tuple of one.

    Raises:
        ConfigError: `sinks` is not a list, a name is unknown, a value is not a sink, or a package
            is not installed.
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
        sink = load_plugin("sinks", sink)()
    if isinstance(sink, type) or not isinstance(sink, MetricSink):
        raise ConfigError(f"sinks: {sink!r} is no sink: give an object with open, log and close")
    check = getattr(sink, "check", None)
    if callable(check):
        check()  # raises for a missing package
    return sink


def _names() -> str:
    return ", ".join(installed_plugins("sinks"))
