"""Run the commands of the pages on stores: docs/guides/store-over-http.md, prune-and-backup.md."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("aiohttp")

from pages import PORT, blocks  # type: ignore[import-not-found]
from serve_process import serving_store  # type: ignore[import-not-found]

from lightspan import Trainer
from lightspan.cli import main
from lightspan.schema.records import RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores import open_store
from lightspan_testing.store_suite import make_production, make_report, make_rollout


async def recorded(url: str) -> None:
    """Record a production attempt, as a service on another machine does."""
    production = make_production(run_id="desk")
    async with open_store(url) as store:
        await store.start([production])
        await store.report([make_report(production.attempt, reward=Reward(0.75))])


def test_what_is_old_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [command] = [
        text
        for _, _, text in blocks("guides/prune-and-backup.md")
        if text.startswith("lightspan prune ")
    ]
    monkeypatch.chdir(tmp_path)
    asyncio.run(recorded("sqlite:agents.db"))
    assert main([*shlex.split(command)[1:], "--yes"]) == 0
    assert "deleted 0 rollouts that ended more than 30d ago" in capsys.readouterr().out


def test_a_file_in_use_is_copied(tmp_path: Path) -> None:
    """Check that the copy also has the data that are still in the write-ahead log."""
    [command] = [
        text for _, _, text in blocks("guides/prune-and-backup.md") if text.startswith("python -c ")
    ]

    async def copied() -> None:
        async with open_store(f"sqlite:{tmp_path}/agents.db") as store:
            await store.enqueue([make_rollout()])
            _, *arguments = shlex.split(command)
            done = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=tmp_path)
            assert await done.wait() == 0
        async with open_store(f"sqlite:{tmp_path}/backup.db") as store:
            assert await store.count() == {RolloutStatus.QUEUED: 1}

    asyncio.run(copied())


def test_a_store_behind_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [text.splitlines() for _, _, text in blocks("guides/store-over-http.md")]
    [served] = [lines for lines in found if lines[0].startswith("export TRAINER_KEY=")]
    [elsewhere] = [lines for lines in found if lines[0].startswith("export LIGHTSPAN_STORE_KEY=")]
    keys = {"TRAINER_KEY": "t" * 64, "RUNNER_KEY": "r" * 64}
    assert all(f"{name}=$(openssl rand -hex 32)" in served[0] for name in keys)
    program, command, option, store, *options = shlex.split(served[1])
    assert [program, command, option] == ["lightspan", "serve", "--store"]
    assert elsewhere[0] == "export LIGHTSPAN_STORE_KEY=$TRAINER_KEY"
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", keys["TRAINER_KEY"])
    monkeypatch.chdir(tmp_path)
    with serving_store(store, *options, **keys) as (url, _):
        asyncio.run(recorded(url))
        there = elsewhere[1].replace(f"http://127.0.0.1:{PORT}", url)
        assert main(shlex.split(there)[1:]) == 0
    assert (tmp_path / "agents.db").exists()
    said = capsys.readouterr().out
    assert f"{url}: recorded in production\n1 attempts by service: desk 1" in said
    assert " 0.75 " in said


@pytest.mark.parametrize("page", ["postgresql", "store-over-http", "ray"])
def test_the_programs_of_the_pages(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the programs are valid up to the training itself."""
    called: list[Trainer] = []

    def fit(trainer: Trainer, *_: object) -> SimpleNamespace:
        called.append(trainer)
        return SimpleNamespace(summary=str)

    monkeypatch.setattr(Trainer, "fit", fit)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    programs = [
        text
        for kind, _, text in blocks(f"guides/{page}.md")
        if kind == "python" and "__main__" in text
    ]
    for program in programs:
        exec(program, {"__name__": "__main__"})
    assert len(called) == len(programs) > 0
