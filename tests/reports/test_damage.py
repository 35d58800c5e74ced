"""Test commands on a run with damaged files: each names the file, the damage and the remedy."""

from __future__ import annotations

import random
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightspan import Trainer
from lightspan.cli import main
from lightspan.errors import CheckpointError, ConfigError, StoreError, StoreFormatError
from lightspan.progress import SilentReporter
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan.training import checkpoints
from lightspan.training.folder import RunFolder
from lightspan_gateway.serving.endpoint import load_served
from lightspan_torch.learner.torch import TorchLearner

Change = Callable[[Path], None]


def cut(path: Path) -> None:
    """Cut the file to half of its size."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(at: float) -> Change:
    """Return a change that overwrites up to 400 bytes, from the fraction `at` of the file's size
    on.
    """

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        start = int(len(data) * at)
        garbage = random.Random(at).randbytes(min(400, len(data) - start))
        data[start : start + len(garbage)] = garbage
        path.write_bytes(data)

    change.__name__ = f"overwritten at {at}"
    return change


def replaced(text: str) -> Change:
    """Return a change that replaces the file's content by `text`."""

    def change(path: Path) -> None:
        path.write_text(f"{text}\n")

    change.__name__ = f"now {text}"
    return change


def a_folder(path: Path) -> None:
    """Replace the file by a folder."""
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


CHANGES = [
    cut,
    emptied,
    *(overwritten(at) for at in (0.0, 0.2, 0.8)),
    *(replaced(text) for text in ("[]", "{}", '{"steps": 1, "kept": {}}')),
    a_folder,
    gone,
]
FILES = [
    *("store.db", "metrics.jsonl", "config.json", "result.json"),
    *("evaluations/*.json", "explanations/*.json"),
]


@pytest.fixture
def run(one_step: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """Return a copy of a complete run."""
    folder: Path = shutil.copytree(one_step[0], tmp_path / "run")
    return folder


@pytest.mark.parametrize("file", FILES)
def test_commands_say_what_is_damaged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """Check that each command works, or names the file that it cannot use in a line or two."""
    name = next(run.glob(file)).relative_to(run)
    out = ["-o", str(tmp_path / "out.jsonl")]
    for change in CHANGES:
        damaged = shutil.copytree(run, tmp_path / change.__name__)
        change(damaged / name)
        for command in (["inspect", str(damaged)], ["export", str(damaged), "messages", *out]):
            status = main(command)
            said = capsys.readouterr().err
            if status != 0:
                assert (status, said[:11], said.count("\n") <= 2) == (1, "lightspan: ", True), said
                assert str(damaged) in said
        shutil.rmtree(damaged)


def test_a_store_that_another_program_has_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = sqlite3.connect(run / "store.db")
    db.execute("DROP TABLE attempts")
    db.close()
    assert main(["inspect", str(run)]) == 1
    assert "tables or columns are missing" in capsys.readouterr().err


async def test_a_row_that_is_not_what_was_written(run: Path) -> None:
    """Check a changed row, which SQLite does not detect because it has no checksums."""
    db = sqlite3.connect(run / "store.db")
    with db:
        db.execute("UPDATE rollout_bodies SET body = x'93c1ff'")
    db.close()
    async with open_store(RunFolder(run).store_url) as store:
        with pytest.raises(StoreFormatError, match=r"store\.db: the file is damaged.*recover"):
            await store.rollouts()
        assert (await store.count())[RolloutStatus.SUCCEEDED] > 0


@pytest.mark.parametrize("change", CHANGES[:-2], ids=lambda change: change.__name__)
def test_what_is_damaged_is_not_served(run: Path, change: Change) -> None:
    for name in ("config.json", "result.json"):
        before = (run / name).read_bytes()
        change(run / name)
        assert str(run) in error_of(lambda: load_served(run), ConfigError, run)
        (run / name).write_bytes(before)


def test_training_does_not_go_on_in_a_damaged_store(
    apps: Any, rl: Any, ask: Any, run: Path, tmp_path: Path
) -> None:
    """Check that the store is not changed, so that most of it can be recovered."""
    folder = tmp_path / "new"
    folder.mkdir()
    shutil.copy(run / "store.db", folder)
    cut(folder / "store.db")
    before = (folder / "store.db").read_bytes()
    trainer = Trainer(rl(), steps=1, folder=folder, reporter=SilentReporter())
    with pytest.raises(StoreError) as refused:
        trainer.fit(apps.spell, ask(1), resume=True)
    assert str(folder / "store.db") in str(refused.value)
    assert (folder / "store.db").read_bytes() == before


def error_of(act: Callable[[], object], kind: type[Exception], path: Path) -> str:
    """Return the message of the error that `act` raises, which must be of `kind`.

    Returns `path` if `act` raises nothing.
    """
    try:
        act()
    except kind as error:
        return str(error)
    return str(path)


# --- checkpoints ----------------------------------------------------------------------------
def learner(tiny: Path) -> TorchLearner:
    return TorchLearner({"policy": tiny})


@pytest.mark.parametrize(
    "file", ["state.json", "learner/learner.json", "learner/random.safetensors"]
)
def test_a_damaged_checkpoint_is_named(run: Path, tiny: Path, file: str) -> None:
    made = learner(tiny)
    found = checkpoints.latest(run / "checkpoints")
    assert found is not None
    before = (found / file).read_bytes()
    for change in CHANGES:
        change(found / file)

        def load() -> None:
            checkpoints.load_state(found)
            made.load(found / "learner")

        assert str(found) in error_of(load, CheckpointError, found)
        shutil.rmtree(found / file, ignore_errors=True)
        (found / file).write_bytes(before)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limit the size of files, which fails like a full disk with another error number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_finds_no_room(tiny: Path, tmp_path: Path) -> None:
    """Check that the previous checkpoint is kept, from which the run is resumed."""
    made, state = learner(tiny), checkpoints.TrainerState(run_id="run", step=1)
    kept = checkpoints.save(tmp_path / "checkpoints", state, made.save)
    state.step = 2
    with room_for(10_000):
        with pytest.raises(CheckpointError, match=r"step-000002.*too large"):
            checkpoints.save(tmp_path / "checkpoints", state, made.save)
        with pytest.raises(CheckpointError, match=r"cannot export policy .*too large"):
            made.export("policy", tmp_path / "model")
    assert checkpoints.latest(tmp_path / "checkpoints") == kept
    made.load(kept / "learner")
