"""Test that recording never disturbs the app, whatever fails or ends."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import pydantic
import pytest

import lightspan
from lightspan.errors import StoreError
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanKind
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import Request, ScriptedServer
from packages.core.tests.production.chat import say


def test_a_store_out_of_reach(
    client: openai.OpenAI, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    with record(f"sqlite:{folder / 'production.db'}") as made:
        for _ in range(3):
            assert say(client).choices[0].message.content == "echo hello"
        assert not made.flush(0.3)
        folder.mkdir()
        assert made.flush(20)
        assert made.lost == 0
    assert len(read_recorded(f"sqlite:{folder / 'production.db'}")) == 3
    warnings = [one for one in caplog.records if "the app is not affected" in one.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("way", ["moved", "deleted"])
def test_a_store_whose_file_disappears(
    client: openai.OpenAI, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Check that what goes to a file that is no longer there does not count as written."""
    with record(url) as made:
        say(client)
        assert made.flush()
        for path in list(tmp_path.glob("production.db*")):
            path.rename(f"{path}.old") if way == "moved" else path.unlink()
        say(client)
        assert not made.flush(0.5)
        assert "was moved or deleted while in use" in caplog.text
        if way == "moved":
            for path in list(tmp_path.glob("*.old")):
                path.rename(path.with_suffix(""))
            assert made.flush(20)
    assert made.lost == 0
    if way == "moved":
        assert len(read_recorded(url)) == 2


def test_what_cannot_be_kept_is_counted(
    client: openai.OpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lightspan.production.store_writer.MAX_ATTEMPTS", 2)
    folder = tmp_path / "later"
    with record(f"sqlite:{folder / 'production.db'}", service="support") as made:
        say(client, "first")
        assert not made.flush(0.2)  # it waits for the store, and leaves the queue empty
        for number in range(5):
            say(client, f"{number}")
        assert made.lost == 3
        folder.mkdir()
        assert made.flush(20)
    found = read_recorded(f"sqlite:{folder / 'production.db'}")
    asked = [one.answered[0].asked for one in found if one.calls]
    assert asked == ["first", "0", "1"]
    [last] = [line for line in caplog.messages if "could not be recorded" in line]
    assert last.startswith("lightspan: 3 attempts of 'support' could not be recorded in sqlite:")


def test_a_store_that_fails_in_between(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that writes to a full disk are retried, and that nothing is stored twice."""
    from lightspan.stores.sqlite import SQLiteStore

    report, failures = SQLiteStore.report, iter([StoreError("the disk is full")] * 2)

    async def failing(self: Any, reports: Any) -> Any:
        for failure in failures:
            raise failure
        return await report(self, reports)

    monkeypatch.setattr(SQLiteStore, "report", failing)
    with record(url) as made:
        say(client, "one")
        say(client, "two")
        assert made.flush(20)
    found = read_recorded(url)
    assert [one.answered[0].asked for one in found] == ["one", "two"]
    assert [one.attempt.status for one in found] == ["succeeded"] * 2


class Ticket(pydantic.BaseModel):
    question: str
    share: float = 0.5
    note: str | None = None


class Question(str):
    __slots__ = ()


def test_inputs_of_other_types_than_json(client: openai.OpenAI, url: str) -> None:
    inputs = {
        "model": (Ticket(question="q"), {"question": "q", "share": 0.5}),
        "nested": (
            {"tickets": [Ticket(question="q")]},
            {"tickets": [{"question": "q", "share": 0.5}]},
        ),
        "date": ({"day": datetime.date(2026, 1, 2)}, {"day": "2026-01-02"}),
        "number": ({1: {2}}, {"1": [2]}),
        "text": (Question("q"), "q"),
        "mapping": (MappingProxyType({"q": 1}), {"q": 1}),
    }
    with record(url):
        for name, (given, _) in inputs.items():
            with lightspan.operation(name, input=given):
                say(client)
    found = read_recorded(url)
    assert [one.rollout.task for one in found] == [task for _, task in inputs.values()]
    assert [one.attempt.message for one in found] == [""] * len(inputs)


def test_inputs_that_are_no_tasks(
    client: openai.OpenAI, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that no task is made of another text than the input: its `repr`, base64, null."""
    circle: list[Any] = []
    circle.append(circle)
    inputs = {
        "it holds an object of type object": {"c": object()},
        "can't serialize ints": 2**70,
        "maximum recursion depth": circle,
        "'utf-8' codec can't encode": "\ud800",
        "it holds an object of type type": object,
        "Out of range float values": {"x": float("inf")},
        "Object of type bytes": {"x": b"\xff"},
        "float values are not JSON": Ticket(question="q", share=float("nan")),
    }
    with record(url):
        for given in inputs.values():
            with lightspan.operation("handle", input=given):
                say(client)
    found = read_recorded(url)
    assert [one.rollout.task for one in found] == [None] * len(inputs)
    assert [one.attempt.capture_errors for one in found] == [[]] * len(inputs)
    for reason, one in zip(inputs, found, strict=True):
        assert one.attempt.message.startswith("no task: the input is not JSON: ")
        assert reason in one.attempt.message
    [warning] = caplog.messages
    assert "are no tasks: the input is not JSON: it holds an object of type object" in warning


def test_large_attempts_are_written_in_pieces(client: openai.OpenAI, url: str) -> None:
    with record(url), lightspan.operation("handle", input="x" * 300_000):
        for _ in range(3):
            say(client, "y" * 700_000)
        for number in range(200):
            lightspan.emit_message(str(number))
    [found] = read_recorded(url)
    assert len(found.calls) == 3
    assert len(found.spans) == 205
    assert (found.attempt.capture_errors, found.rollout.task) == ([], None)
    assert found.attempt.message == ("no task: the input has 300,002 characters, more than 262,144")


def test_the_app_never_waits_for_the_store(client: openai.OpenAI, url: str) -> None:
    """Check that passing attempts to the writer stays fast while another process locks the
    store.
    """
    import sqlite3

    with record(url) as made:
        say(client)
        assert made.flush()
        blocker = sqlite3.connect(url.removeprefix("sqlite:"), isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        begun = time.perf_counter()
        for _ in range(200):
            with lightspan.operation("handle"):
                pass
        taken = time.perf_counter() - begun
        blocker.execute("ROLLBACK")
        blocker.close()
        assert made.flush()
    assert taken < 1.0
    assert len(read_recorded(url)) == 201


# --- processes ------------------------------------------------------------------------------
PROGRAM = """
import sys, lightspan, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
def say(text):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
made = lightspan.record()
"""


def run_program(server: ScriptedServer, url: str, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LIGHTSPAN_STORE": url}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + program, server.url],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_dropped_streams_are_collected_at_any_moment(server: ScriptedServer, url: str) -> None:
    program = """
import faulthandler, gc
faulthandler.dump_traceback_later(90, exit=True)  # where a lock is waited for by its own holder
messages = [{"role": "user", "content": "dropped"}]
for later in range(0, 40, 2):  # objects that are made before the collector runs
    with lightspan.operation("handle"):
        gc.disable()
        client.chat.completions.create(model="m", messages=messages, stream=True)
        gc.set_threshold(gc.get_count()[0] + later)
        gc.enable()
        lightspan.emit_reward(1.0)
    gc.collect()
"""
    ended = run_program(server, url, program)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = read_recorded(url)
    outcomes = [call.attributes[c.CALL_OUTCOME] for one in found for call in one.calls]
    assert outcomes == ["cancelled"] * 20


@pytest.mark.parametrize("is_lone", [True, False])
def test_calls_under_way_when_recording_ends(url: str, is_lone: bool) -> None:
    arrived, released = threading.Event(), threading.Event()

    def wait(request: Request) -> str:
        arrived.set()
        assert released.wait(20)
        return "late"

    def handle(client: openai.OpenAI) -> None:
        with nullcontext() if is_lone else lightspan.agent("writer"):
            say(client, "slow")

    with (
        ScriptedServer(wait) as slow,
        openai.OpenAI(base_url=slow.url, api_key="k", max_retries=0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with record(url):
            handled = pool.submit(handle, client)
            assert arrived.wait(20)
        released.set()
        handled.result()
    [found] = read_recorded(url)
    [call] = found.calls
    assert call.attributes[c.CALL_OUTCOME] == "cancelled"
    assert [each.asked for each in found.answered] == ["slow"]
    assert (found.attempt.status, found.attempt.capture_errors) == (
        "cancelled",
        ["the process ended first"],
    )


def test_a_program_that_ends_in_the_midst(server: ScriptedServer, url: str) -> None:
    program = "lightspan.operation('handle', input={'q': 1}).__enter__()\nsay('only')\nsys.exit(3)"
    ended = run_program(server, url, program)
    assert (ended.returncode, ended.stderr) == (3, "")
    [found] = read_recorded(url)
    assert [call.asked for call in found.answered] == ["only"]
    assert found.tree() == "invoke_workflow handle\n  handle\n    chat m @app"
    assert {span.status for span in found.spans if span.kind is not SpanKind.LLM} == {"unset"}
    assert found.rollout.task == {"q": 1}
    assert (found.attempt.status, found.attempt.capture_errors) == (
        "cancelled",
        ["the process ended first"],
    )


NO_THREADS = """
import atexit, threading
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(lambda: setattr(threading.Thread, "start", refuse))
say('only')
"""


@pytest.mark.parametrize("program", ["say('only')", NO_THREADS], ids=["", "no threads"])
def test_a_program_that_ends_at_once(server: ScriptedServer, url: str, program: str) -> None:
    """Check that the attempt is written and nothing is printed, if the program ends at once.

    Python 3.12 starts no threads at the end of a program.
    """
    ended = run_program(server, url, program)
    assert (ended.returncode, ended.stderr) == (0, "")
    [found] = read_recorded(url)
    assert found.answered == [("only", "echo only")]


PREFORK = """
import os
say('parent')
with lightspan.operation('around'):
    say('around')
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            client.close()
            client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
            for call in range(4):
                with lightspan.operation('request'):
                    say(f'child {number} {call}')
            sys.exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
say('parent again')
"""


def test_servers_that_fork(server: ScriptedServer, url: str) -> None:
    """Check servers such as gunicorn, whose parent process records before it forks."""
    ended = run_program(server, url, PREFORK)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = read_recorded(url)
    asked = sorted(call.asked for one in found for call in one.answered)
    children = [f"child {number} {call}" for number in range(3) for call in range(4)]
    assert asked == sorted(["parent", "around", "parent again", *children])
    assert {one.attempt.status for one in found} == {"succeeded"}
    assert len(found) == 3 + 12


def test_a_store_that_cannot_be_opened_does_not_keep_the_process(
    server: ScriptedServer, url: str, tmp_path: Path
) -> None:
    nowhere = f"sqlite:{tmp_path / 'no' / 'such' / 'folder.db'}"
    ended = run_program(server, nowhere, "say('only')")
    assert ended.returncode == 0
    [last] = [line for line in ended.stderr.splitlines() if "could not be recorded" in line]
    assert last.startswith("lightspan: 1 attempts of 'unknown_service' could not be recorded in ")
    assert f": the folder {tmp_path / 'no' / 'such'} does not exist" in last
