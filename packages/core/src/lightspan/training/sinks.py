"""Metric sinks: a run's metrics, sent to where a team looks at them too.

`metrics.jsonl` in the run's folder is the record; a sink is a copy for reading. One that fails is
reported once and left out from then on: it never stops a training. Metrics are named
`train/<metric>` and `eval/<metric>`, at the iteration that they belong to.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError
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
    """Where metrics go. Any error in it is caught by `Sinks`."""

    def open(self, run: SinkRun) -> None:
        """Begin, or go on with, the run's record there."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite metrics of one iteration; several calls may have one step."""
        ...

    def close(self) -> None:
        """Wait until everything arrived."""
        ...


class TensorBoard(MetricSink):
    """Event files for TensorBoard (`pip install tensorboard`).

    Args:
        folder: where the event files go; None for `tensorboard` in the run's folder.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: SinkRun) -> None:
        _needs("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder or run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ProjectSink(MetricSink):
    """What Weights & Biases and Trackio, which copies its interface, share.

    Args:
        project: the project there.
        options: further arguments of the service's `init`.
    """

    def __init__(self, project: str = "lightspan", **options: Any) -> None:
        self._project = project
        self._options = options
        self._run: Any = None
        """What takes the metrics, once it is open."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandB(_ProjectSink):
    """Weights & Biases (`pip install wandb`). The key comes from `wandb login` or WANDB_API_KEY.

    Args:
        project: the project there.
        options: further arguments of `wandb.init`, such as `mode="offline"`.
    """

    def open(self, run: SinkRun) -> None:
        wandb = _needs("wandb")
        defaults = {
            "project": self._project,
            "id": run.run_id,
            "name": run.name,
            "resume": "allow",
            "config": dict(run.config),
            "dir": str(run.folder),
        }
        self._run = wandb.init(**{**defaults, **self._options})


class MLflow(MetricSink):
    """MLflow tracking (`pip install mlflow`; `mlflow-skinny` suffices for a server elsewhere).

    Args:
        experiment: the experiment there; it is made if it does not exist.
        tracking_uri: None for MLFLOW_TRACKING_URI, else MLflow's own default.
    """

    RUN_TAG: Final = "lightspan.run_id"

    def __init__(self, experiment: str = "lightspan", tracking_uri: str | None = None) -> None:
        self._experiment = experiment
        self._uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def open(self, run: SinkRun) -> None:
        _needs("mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        existing = self._client.get_experiment_by_name(self._experiment)
        if existing is None:
            experiment = self._client.create_experiment(self._experiment)
        else:
            experiment = existing.experiment_id
        wanted = f"tags.`{self.RUN_TAG}` = '{run.run_id}'"
        earlier = self._client.search_runs([experiment], wanted, max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {self.RUN_TAG: run.run_id}
        self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        for name, value in run.config.items():
            self._client.log_param(self._run_id, name, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio(_ProjectSink):
    """Trackio (`pip install trackio`): kept on this machine unless told otherwise.

    Args:
        project: the project there.
        options: further arguments of `trackio.init`, such as `space_id`.
    """

    def open(self, run: SinkRun) -> None:
        self._run = _needs("trackio")  # the module itself logs to the run that it opened last
        # it goes on with a run by its name, which folders of different runs may share
        defaults = {"name": f"{run.name}-{run.run_id[-8:]}", "config": dict(run.config)}
        self._run.init(self._project, resume="allow", **{**defaults, **self._options})


SINKS: Final[Mapping[str, type[MetricSink]]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}
"""Name of a sink, and of the package that it needs → its class."""


class Sinks:
    """Several sinks that cannot do harm.

    Args:
        sinks: names of `SINKS`, or sinks.
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
            f"sinks={sinks!r} is no list of sinks: give names ({', '.join(SINKS)}) or sinks in a "
            "list, () for none"
        )
    checked = tuple(sinks)
    for sink in checked:
        _sink(sink)
    return checked


def _sink(sink: str | MetricSink) -> MetricSink:
    if isinstance(sink, str):
        if sink not in SINKS:
            raise ConfigError(f"sinks: {sink!r} is unknown; use one of {', '.join(SINKS)}")
        _check_installed(sink)
        return SINKS[sink]()
    if isinstance(sink, type):
        raise ConfigError(f"sinks: {sink.__name__} is a class; give a sink, {sink.__name__}(…)")
    lacking = [name for name in _METHODS if not callable(getattr(sink, name, None))]
    if lacking:
        raise ConfigError(
            f"sinks: {sink!r} is no sink; it needs open, log and close, and lacks "
            f"{', '.join(lacking)}"
        )
    for package, kind in SINKS.items():
        if isinstance(sink, kind):
            _check_installed(package)
    return sink


_METHODS: Final = ("open", "log", "close")


def _check_installed(package: str) -> None:
    """Raise `ConfigError` if it is not, without importing it."""
    # find_spec raises for a module without a spec, and None in sys.modules rules a package out
    loaded = package in sys.modules
    if (sys.modules[package] if loaded else find_spec(package)) is None:
        raise _not_installed(package)


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise _not_installed(package) from error


def _not_installed(package: str) -> ConfigError:
    return ConfigError(f"this sink needs {package}, which is not installed: pip install {package}")
