"""Metric sinks of TensorBoard, Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

from lightspan.errors import ConfigError
from lightspan.training.sinks import MetricSink, SinkRun


class _PackageSink(MetricSink):
    """A metric sink that needs an optional Python package."""

    package: ClassVar[str]

    def check(self) -> None:
        """Raise `ConfigError` if the package is not installed. The package is not imported."""
        # find_spec raises for a loaded module without a spec; None in sys.modules disables one.
        is_loaded = self.package in sys.modules
        if (sys.modules[self.package] if is_loaded else find_spec(self.package)) is None:
            raise ConfigError(
                f"this sink needs {self.package}, which is not installed: pip install "
                f"{self.package}"
            )


class TensorBoard(_PackageSink):
    """Sink that writes event files for TensorBoard (`pip install tensorboard`).

    Args:
        folder: folder of the event files; None for `tensorboard` in the run's folder.
    """

    package = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder or run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _ProjectSink(_PackageSink):
    """Base class of the sinks for Weights & Biases and for Trackio, which copies its interface.

    Args:
        project: name of the project.
        options: further arguments of the service's `init`.
    """

    def __init__(self, project: str = "lightspan", **options: Any) -> None:
        self._project = project
        self._options = options
        self._run: Any = None
        """The open run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandB(_ProjectSink):
    """Sink for Weights & Biases (`pip install wandb`).

    The key comes from `wandb login` or WANDB_API_KEY.

    Args:
        project: name of the project.
        options: further arguments of `wandb.init`, such as `mode="offline"`.
    """

    package = "wandb"

    def open(self, run: SinkRun) -> None:
        import wandb

        defaults = {
            "project": self._project,
            "id": run.run_id,
            "name": run.name,
            "resume": "allow",
            "config": dict(run.config),
            "dir": str(run.folder),
        }
        self._run = wandb.init(**{**defaults, **self._options})


class MLflow(_PackageSink):
    """Sink for MLflow (`pip install mlflow`; `mlflow-skinny` suffices for a remote server).

    Args:
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: URI of the server; None for MLFLOW_TRACKING_URI, else MLflow's default.
    """

    package = "mlflow"

    RUN_TAG: Final = "lightspan.run_id"

    def __init__(self, experiment: str = "lightspan", tracking_uri: str | None = None) -> None:
        self._experiment = experiment
        self._uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def open(self, run: SinkRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        existing = self._client.get_experiment_by_name(self._experiment)
        if existing is None:
            experiment = self._client.create_experiment(self._experiment)
        else:
            experiment = existing.experiment_id
        run_filter = f"tags.`{self.RUN_TAG}` = '{run.run_id}'"
        earlier = self._client.search_runs([experiment], run_filter, max_results=1)
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
    """Sink for Trackio (`pip install trackio`), which stores on this machine by default.

    Args:
        project: name of the project.
        options: further arguments of `trackio.init`, such as `space_id`.
    """

    package = "trackio"

    def open(self, run: SinkRun) -> None:
        import trackio

        self._run = trackio  # the module logs to the run that it opened last
        # Trackio resumes a run by its name, which folders of different runs may share.
        defaults = {"name": f"{run.name}-{run.run_id[-8:]}", "config": dict(run.config)}
        self._run.init(self._project, resume="allow", **{**defaults, **self._options})
