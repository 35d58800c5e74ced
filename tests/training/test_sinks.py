"""Test that metric sinks get the lines of `metrics.jsonl`, and that their errors are harmless."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, Trainer
from lightspan.errors import ConfigError
from lightspan.progress import SilentReporter
from lightspan.training.folder import RunFolder
from lightspan.training.sinks import (
    MetricSink,
    SinkRun,
    Sinks,
    metric_values,
)

pytestmark = pytest.mark.slow

RUN = SinkRun(run_id="run-1", folder=Path("runs/a"), config={}, first_step=0)


class Kept(MetricSink):
    """A sink in memory that fails in given calls."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.events: list[tuple[Any, ...]] = []

    def _do(self, name: str, *values: Any) -> None:
        if name in self.fails:
            raise ConnectionError(f"{name}: the service is down")
        self.events.append((name, *values))

    def open(self, run: SinkRun) -> None:
        self._do("open", run.run_id, run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do("log", step, dict(values))

    def close(self) -> None:
        self._do("close")


def test_the_numbers_of_a_line() -> None:
    line = {"kind": "train", "step": 3, "reward": 0.5, "n": 2, "odd": float("nan"), "text": "x"}
    assert metric_values(line) == {"train/reward": 0.5, "train/n": 2.0}


@pytest.mark.parametrize("call", ["open", "log", "close"])
def test_a_sink_that_fails_is_left_out_and_said(call: str) -> None:
    said: list[str] = []
    good, bad = Kept(), Kept(call)
    sinks = Sinks([bad, good], said.append)
    sinks.open(RUN)
    for step in (1, 2):
        sinks.add({"kind": "train", "step": step, "reward": 0.5})
    sinks.close()
    assert [event[0] for event in good.events] == ["open", "log", "log", "close"]
    (text,) = said
    assert text.startswith("Kept ")
    assert text.endswith(f"(metrics.jsonl has everything): {call}: the service is down")


def test_unknown_sinks() -> None:
    with pytest.raises(ConfigError, match="'tensorbord' is unknown; use one of mlflow, tensorb"):
        Sinks(["tensorbord"], print)


class Half:
    def open(self, run: SinkRun) -> None: ...


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (None, r"sinks=None is no list of sinks: give names \(mlflow, "),
        ([Kept], "Kept'> is no sink: give an object with open, log and close$"),
        ([Half()], "sinks: <.*Half object .*> is no sink: give an object with open, log and clo"),
        ("tensorboard", r"needs tensorboard, .*: pip install tensorboard$"),
    ],
)
def test_what_is_no_sink_is_said_by_the_trainer(
    sinks: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=message):
        Trainer(LightningRL("no-model"), sinks=sinks, reporter=SilentReporter())


def test_a_run_and_its_resumption(tiny: Path, apps: Any, tmp_path: Path) -> None:
    def train(steps: int, *, resume: bool) -> Kept:
        sink = Kept()
        algorithm = LightningRL(
            tiny, optimize="writer", frozen="base", group_size=2, tasks_per_step=1, seed=3
        )
        trainer = Trainer(
            algorithm,
            steps=steps,
            folder=tmp_path / "run",
            sinks=[sink],
            reporter=SilentReporter(),
        )
        trainer.fit(apps.two, [{"q": "one"}, {"q": "two"}], [{"q": "held"}], resume=resume)
        return sink

    first = train(1, resume=False)
    run = RunFolder(tmp_path / "run")
    lines = run.metrics()
    run_id = run.read_config()["run_id"]
    assert [line["kind"] for line in lines] == ["eval", "train", "eval"]
    assert first.events == [
        ("open", run_id, 0),
        *(("log", line["step"], metric_values(line)) for line in lines),
        ("close",),
    ]
    second = train(2, resume=True)
    added = run.metrics()[len(lines) :]
    assert [line["kind"] for line in added] == ["train", "eval"]
    assert second.events == [
        ("open", run_id, 2),
        *(("log", line["step"], metric_values(line)) for line in added),
        ("close",),
    ]
