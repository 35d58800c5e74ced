"""Test `lightspan status` and `lightspan cancel` through the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan.runners.discovery import make_peer
from lightspan.schema.records import AttemptStatus, Outcome, PeerRole, RolloutStatus
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.stores.protocol import StoredCall
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_testing.store_suite import make_production, make_rollout, make_span
from packages.gateway.tests.remote_store.served import KEYS, READER, RUNNER, TRAINER, serving

pytestmark = pytest.mark.slow

DAY_S = 86_400.0
REASON = "the gateway http://10.0.0.5:1 of the training does not answer"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run `lightspan` as a user does; return its exit status and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "lightspan.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=["file", "served"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the URL of a store with trainings, and the URL with which commands open it."""
    path = tmp_path / "a store.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    if request.param == "file":
        yield f"sqlite:///{path}", str(path)
    else:
        with serving(lambda: SQLiteStore(path), Keys(KEYS)) as served:
            yield f"sqlite:///{path}", served.url


async def fill(url: str) -> None:
    """Store a live training, one that is complete, two that are gone, and production."""
    now = [0.0]
    async with SQLiteStore(url.removeprefix("sqlite://"), clock=lambda: now[0]) as store:
        await store.announce(trainer("run-stopped"))
    async with open_store(url) as store:
        await store.announce(trainer("run-live", gateway="http://10.0.0.5:1", remote=True))
        await store.announce(trainer("run-complete", complete=True))
        await store.announce(make_peer("runner-1", PeerRole.RUNNER, "my_app:answer", slots=4))
        for run_id, count in (("run-live", 3), ("run-forgotten", 2), ("run-complete", 1)):
            names = [f"{run_id}-{number}" for number in range(count)]
            app = "my_app:answer"
            await store.enqueue([make_rollout(name, run_id=run_id, app=app) for name in names])
        await store.start([make_production("one", run_id="service")])
        [claim] = await store.claim("runner-1-2", 1, 60.0, "run-live")
        report = claim.attempt.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, REASON)
        await store.report([report])
        [claim] = await store.claim("runner-1-2", 1, 60.0, "run-live")
        ref = claim.attempt
        usage = {"gen_ai.usage.input_tokens": 1200, "gen_ai.usage.output_tokens": 30}
        for number, more in enumerate((usage, {})):
            attributes = {"gen_ai.request.model": "paid", **more}
            span = make_span(ref, number, kind=SpanKind.LLM, attributes=attributes)
            await store.add_calls([StoredCall(span=span, records=[], epoch=ref.epoch)])
        await store.claim("runner-of-a-trainer", 1, 60.0, "run-forgotten")


def trainer(run_id: str, **fields: Any) -> Any:
    return make_peer(run_id, PeerRole.TRAINER, "my_app:answer", run_id=run_id, **fields)


def test_attempts_that_were_lost_count_after_their_rollouts_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def train() -> None:
        async with SQLiteStore(path) as store:
            await store.announce(trainer("run-1", complete=True))
            await store.enqueue([make_rollout("ro-1", run_id="run-1")])
            lost = (AttemptStatus.LOST, Outcome.INFRASTRUCTURE, REASON)
            for ending in (lost, lost, (AttemptStatus.SUCCEEDED, Outcome.OK)):
                [claim] = await store.claim("runner-1", 1, 60.0, "run-1")
                await store.report([claim.attempt.report(*ending)])

    asyncio.run(train())
    [training] = json.loads(run("status", str(path), "--json")[1])["trainings"]
    assert (training["rollouts"], training["lost"]) == ({"succeeded": 1}, 2)
    assert f"    attempts lost: 2, the last one: {REASON}\n" in run("status", str(path))[1]


def test_runners_with_another_version_of_the_app_are_named(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    async def announce() -> None:
        async with SQLiteStore(path) as store:
            own = {"my_app": "1", "rewards": "1"}
            await store.announce(trainer("run-1", sources=own))
            versions = {"r1": own, "r2": {**own, "rewards": "2"}, "r3": {}}
            for name, sources in versions.items():
                peer = make_peer(name, PeerRole.RUNNER, "my_app:answer", sources=sources)
                await store.announce(peer)

    asyncio.run(announce())
    runners = json.loads(run("status", str(path), "--json")[1])["runners"]
    assert [each["differs"] for each in runners] == ["", "training run-1 (rewards)", ""]
    line = "    has another version of the app than training run-1 (rewards)\n"
    assert run("status", str(path))[1].count(line) == 1


def open_counts(url: str) -> dict[str, int]:
    """Return the number of open rollouts of each run."""

    async def read() -> dict[str, int]:
        counts: dict[str, int] = {}
        async with open_store(url) as store:
            for state in await store.rollouts(status=[RolloutStatus.QUEUED, RolloutStatus.RUNNING]):
                run_id = state.rollout.run_id
                counts[run_id] = counts.get(run_id, 0) + 1
        return counts

    return asyncio.run(read())


def test_who_uses_a_store(place: tuple[str, str]) -> None:
    _, opened = place
    code, text = run("status", opened, "--tokens", LIGHTSPAN_STORE_KEY=READER)
    assert code == 0, text
    for line in (
        "  run-live of my_app:answer: live, seen ",
        "    rollouts: queued 2, running 1\n",
        "    gateway: http://10.0.0.5:1\n",
        f"    attempts lost: 1, the last one: {REASON}\n",
        "    paid: 2 calls, 1 of them without usage; 1,200 tokens read, 30 written\n",
        "  run-complete of my_app:answer: complete, seen ",
        "  run-forgotten of my_app:answer: gone\n",
        "  service: production\n",
        "  runner-1 of my_app:answer: 1 of 4 attempts under way, seen ",
        "attempts under way in runners that trainers started: 1\n",
    ):
        assert line in text
    assert "to remove what is open: lightspan cancel " in text
    assert "run-stopped" not in text  # announced more than a day ago, and nothing is open


def test_the_status_for_programs(place: tuple[str, str]) -> None:
    url, opened = place
    code, text = run("status", opened, "--json", LIGHTSPAN_STORE_KEY=TRAINER)
    assert code == 0, text
    status = json.loads(text)
    states = {training["run_id"]: training["state"] for training in status["trainings"]}
    assert states == {
        "run-live": "live",
        "run-complete": "complete",
        "run-forgotten": "gone",
        "service": "production",
    }
    queued = {t["run_id"]: t["rollouts"].get("queued", 0) for t in status["trainings"]}
    assert queued == {"run-live": 2, "run-complete": 1, "run-forgotten": 1, "service": 0}
    [runner] = status["runners"]
    assert (runner["name"], runner["running"], runner["slots"]) == ("runner-1", 1, 4)
    assert open_counts(url)["run-live"] == 3  # nothing has changed


def test_open_rollouts_of_a_training_that_is_gone_are_removed(place: tuple[str, str]) -> None:
    url, opened = place
    code, text = run("cancel", opened, "forgotten", LIGHTSPAN_STORE_KEY=TRAINER)
    assert (code, text) == (0, "training run-forgotten: cancelled 2 rollouts\n")
    assert open_counts(url) == {"run-live": 3, "run-complete": 1, "service": 1}
    code, text = run("status", opened, LIGHTSPAN_STORE_KEY=TRAINER)
    assert "run-forgotten" not in text
    code, text = run("cancel", opened, "--gone", LIGHTSPAN_STORE_KEY=TRAINER)
    assert (code, text) == (0, "no training is gone\n")
    code, text = run("cancel", opened, "run-complete", LIGHTSPAN_STORE_KEY=TRAINER)
    assert (code, text) == (0, "training run-complete: cancelled 1 rollout\n")


def test_a_training_that_is_live_is_cancelled_by_force_only(place: tuple[str, str]) -> None:
    url, opened = place
    code, text = run("cancel", opened, "run-live", LIGHTSPAN_STORE_KEY=TRAINER)
    assert code == 1
    assert "training run-live is live" in text
    assert "add --force" in text
    assert open_counts(url)["run-live"] == 3
    code, text = run("cancel", opened, "run-live", "--force", LIGHTSPAN_STORE_KEY=TRAINER)
    assert (code, text) == (0, "training run-live: cancelled 3 rollouts\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cancel", "STORE"], ["RUN or --gone"]),
        (["cancel", "STORE", "run-live", "--gone"], ["RUN or --gone"]),
        (["cancel", "STORE", "nobody"], ["no training 'nobody'", "run-complete, run-forgotten"]),
        (["cancel", "STORE", "run-"], ["3 trainings match 'run-'"]),
        (["cancel", "STORE", "service"], ["recorded in production"]),
        (["status", "memory:"], ["lives in one process"]),
        (["status", "sqlite:no-such.db"], ["there is no store", "no-such.db"]),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path, arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(fill(f"sqlite:///{tmp_path}/store.db"))
    code, text = run(*[word.replace("STORE", "store.db") for word in arguments])
    assert code == 1
    assert text.startswith("lightspan: ")
    for word in words:
        assert word in text
    assert not (tmp_path / "no-such.db").exists()


@pytest.mark.parametrize("command", ["status", "inspect", "cancel"])
def test_looking_changes_no_file(tmp_path: Path, command: str) -> None:
    """Check that a file that is no store stays as it is, and a store of another format too."""
    arguments = ("--gone",) if command == "cancel" else ()
    empty, older = tmp_path / "empty.db", tmp_path / "older.db"
    empty.touch()
    asyncio.run(fill(f"sqlite:///{older}"))
    with contextlib.closing(sqlite3.connect(older, isolation_level=None)) as db:
        [version] = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version = {version - 2}")  # the one before can be read
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for path, words in ((empty, "nothing was recorded there"), (older, "an older lightspan")):
        before = path.read_bytes()
        code, text = run(command, f"sqlite:///{path}", *arguments)
        assert (code, words in text) == (1, True), text
        assert path.read_bytes() == before


def test_a_key_that_may_not_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    with serving(lambda: SQLiteStore(path), Keys(KEYS)) as served:
        code, text = run("status", served.url, LIGHTSPAN_STORE_KEY=RUNNER)
        assert code == 1
        assert "`lightspan status` reads what this key may not read" in text
        assert "a runner's key may not call count, only that of: admin" in text
        assert "the key in $LIGHTSPAN_STORE_KEY; set it to the key of a role" in text
        code, text = run("cancel", served.url, "--gone", LIGHTSPAN_STORE_KEY=RUNNER)
        assert code == 1


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_the_help_names_what_it_takes(command: str) -> None:
    code, text = run(command, "--help")
    assert code == 0
    assert "STORE" in text
    assert "resume" in text
