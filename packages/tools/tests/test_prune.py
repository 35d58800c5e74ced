"""Test `lightspan prune` on files."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import pytest

from lightspan.cli import main
from lightspan.stores import open_store
from lightspan_testing.store_suite import make_rollout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a store's file with three ended rollouts and a queued one."""

    async def fill() -> None:
        async with open_store(tmp_path / "store.db") as store:
            names = ["ro-1", "ro-2", "ro-3"]
            await store.enqueue([make_rollout(name) for name in [*names, "ro-4"]])
            await store.cancel(names)

    asyncio.run(fill())
    return tmp_path / "store.db"


def kept(file: Path) -> list[str]:
    async def read() -> list[str]:
        async with open_store(file) as store:
            return [state.rollout.rollout_id for state in await store.rollouts()]

    return asyncio.run(read())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_what_it_forgot(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(file), "--older-than", "0s", "--yes"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        f"{file}: deleted 2 rollouts that ended more than 0s ago, with their records; 2 remain"
    )
    assert kept(file) == ["ro-3", "ro-4"]
    assert main(["prune", str(file), "--older-than", "1d", "--yes"]) == 0
    assert kept(file) == ["ro-3", "ro-4"]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 2), ("\n", 4), ("no\n", 4)])
def test_it_asks_first(file: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["prune", str(file), "--older-than", "0s"]) == 0
    assert len(kept(file)) == left


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--older-than", "0s"], "add --yes to confirm"),
        (["--older-than", "a month", "--yes"], "'a month': give an age such as 30d or 12h"),
    ],
)
def test_what_is_refused(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["prune", str(file), *arguments]) == 1
    assert said in capsys.readouterr().err
    assert len(kept(file)) == 4


def test_a_store_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(tmp_path / "no.db"), "--older-than", "1d", "--yes"]) == 1
    assert "there is no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
