"""Test the shipped sinks with the real packages of the services, all of them offline."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan.training.sinks import SinkRun, Sinks
from lightspan_tools.sinks import MLflow, TensorBoard, Trackio, WandB

LINES: list[dict[str, Any]] = [
    {"kind": "eval", "step": 0, "mean": 0.25, "n": 4},
    {"kind": "train", "step": 1, "reward": 0.5, "note": "text"},
    {"kind": "train", "step": 2, "reward": 0.75, "odd": float("nan")},
    {"kind": "eval", "step": 2, "mean": 0.5, "n": 4},
]
REWARDS = [(1, 0.5), (2, 0.75)]
MEANS = [(0, 0.25), (2, 0.5)]


@pytest.fixture
def run(tmp_path: Path) -> SinkRun:
    folder = tmp_path / "first"
    folder.mkdir()
    return SinkRun(run_id="run-0123456789", folder=folder, config={"model": "m"}, first_step=0)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Yield the list in which a test collects errors; check afterwards that it is empty."""
    texts: list[str] = []
    yield texts
    assert texts == []


def send(sinks: Sinks, run: SinkRun, lines: list[dict[str, Any]]) -> None:
    sinks.open(run)
    for line in lines:
        sinks.add(line)
    sinks.close()


def test_tensorboard(run: SinkRun, said: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(Sinks([TensorBoard()], said.append), run, LINES)
    found = EventAccumulator(str(run.folder / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["eval/mean", "eval/n", "train/reward"]
    assert [(e.step, e.value) for e in found.Scalars("train/reward")] == REWARDS
    assert [(e.step, e.value) for e in found.Scalars("eval/mean")] == MEANS


@pytest.mark.filterwarnings("ignore")  # mlflow's own, about sqlalchemy and pydantic
def test_mlflow_goes_on_with_a_resumed_run(run: SinkRun, said: list[str], tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    send(Sinks([MLflow(tracking_uri=uri)], said.append), run, LINES[:2])
    send(Sinks([MLflow(tracking_uri=uri)], said.append), run, LINES[2:])
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("lightspan")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "first"
    assert found.info.status == "FINISHED"
    assert found.data.params == {"model": "m"}
    history = client.get_metric_history(found.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == REWARDS
    history = client.get_metric_history(found.info.run_id, "eval/mean")
    assert [(m.step, m.value) for m in history] == MEANS


def wandb_records(path: Path) -> list[Any]:
    """Return the records in an offline file of W&B, which W&B's Python code cannot read.

    The file has a header of 7 bytes, then a log in LevelDB's format.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[Any] = []
    data, at, message = path.read_bytes(), 7, b""
    while True:
        left = 32_768 - at % 32_768  # of the block
        at += left if left < 7 else 0  # there a block is only filled up
        if at + 7 > len(data):
            return found
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return found
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(message))
            message = b""


def test_wandb_offline(run: SinkRun, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    send(Sinks([WandB(mode="offline")], said.append), run, LINES)
    [kept] = (run.folder / "wandb").glob("offline-run-*")
    [events] = kept.glob("run-*.wandb")
    assert events.name == "run-run-0123456789.wandb"
    records, deadline = wandb_records(events), time.monotonic() + 30
    while not (records and records[-1].HasField("exit")) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process of W&B's own writes it, on its own time
        records = wandb_records(events)
    found = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(e["_step"], e["train/reward"]) for e in found if "train/reward" in e] == REWARDS
    assert [(e["_step"], e["eval/mean"]) for e in found if "eval/mean" in e] == MEANS


def test_trackio(run: SinkRun, said: list[str]) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    send(Sinks([Trackio("project")], said.append), run, LINES)
    logs = SQLiteStorage.get_logs("project", "first-23456789")
    assert [(e["step"], e["train/reward"]) for e in logs if "train/reward" in e] == REWARDS
    assert [(e["step"], e["eval/mean"]) for e in logs if "eval/mean" in e] == MEANS
