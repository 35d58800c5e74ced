"""Test that a checkpoint is complete or does not exist."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from lightspan.errors import CheckpointError
from lightspan.training.checkpoints import (
    TrainerState,
    latest,
    list_checkpoints,
    load_state,
    save,
)


def _learner(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")


def _state(step: int) -> TrainerState:
    return TrainerState(run_id="run-1", step=step)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    rng = random.Random(5)
    state = TrainerState(
        run_id="run-1",
        step=12,
        cursor=40,
        in_flight={"g": {"q": 1}},
        versions={"policy": 14},
        rng=rng.getstate(),
        algorithm={"seen": [1]},
        seconds={"engine": 1.5},
    )
    path = save(tmp_path, state, _learner)
    assert path == latest(tmp_path) == tmp_path / "step-000012"
    assert (path / "learner" / "weights").read_bytes() == b"w"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    loaded = load_state(path)
    version, internal, gauss = loaded.rng
    again = random.Random()
    again.setstate((version, tuple(internal), gauss))
    assert again.random() == rng.random()
    loaded.rng = state.rng
    assert loaded == state


def test_the_newest_two_are_kept_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (8, 9, 10, 1_000_000):
        save(tmp_path, _state(step), _learner)
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-000010", "step-1000000"]


def test_failure_leaves_earlier_ones_and_no_rest(tmp_path: Path) -> None:
    save(tmp_path, _state(1), _learner)

    def full(folder: Path) -> None:
        _learner(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000002 cannot be written: .*No space left"):
        save(tmp_path, _state(2), full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, _state(2), lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', '{"run_id": 1}'])
def test_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, _state(1), _learner)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step-000001 cannot be read"):
        load_state(path)
