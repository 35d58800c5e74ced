"""`lightspan.record`: plain apps outside every rollout, with real HTTP, stores and processes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import lightspan
from lightspan import conventions as c
from lightspan import recording, scope
from lightspan.errors import ConfigError, IllegalMoveError, StoreError
from lightspan.lightning import Rejection, build_episode, cover
from lightspan.recording import record, sampled
from lightspan.records import Mode, Reward, TokenRecord
from lightspan.routing import make_routing
from lightspan.spans import Span
from lightspan.stores import open_store
from lightspan.testing.recorded import read_recorded
from lightspan.testing.scripted import Reply, Request, ScriptedServer

USER: Any = [{"role": "user", "content": "hello"}]


def echo(request: Request) -> str:
    return f"echo {request.last_text}"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(echo) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="secret-key", max_retries=0) as made:
        yield made


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("LIGHTSPAN_STORE", "LIGHTSPAN_SAMPLE", "LIGHTSPAN_REDACT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield f"sqlite:{tmp_path / 'production.db'}"
    assert scope.pushed() is None
    assert scope.ambient() is None


def say(client: openai.OpenAI, text: str = "hello", **more: Any) -> Any:
    asked: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=asked, **more)


# --- what becomes an attempt ----------------------------------------------------------------
def test_a_bare_call_is_an_attempt(client: openai.OpenAI, url: str) -> None:
    with record(url, service="support"):
        answer = say(client)
    [found] = read_recorded(url)
    [span] = found.spans
    assert found.tree() == "chat m @app"
    assert (span.parent_id, span.status, span.resource) == (None, "ok", {"service.name": "support"})
    assert span.attributes[c.RESPONSE_ID] == answer.id
    assert span.attributes[c.ROUTE] == "app"
    assert span.attributes[c.CALL_OUTCOME] == "ok"
    assert span.attributes[c.CALL_ID] == found.attempt.attempt_id.replace("at-", "call-") + "-1"
    assert found.answered == [("hello", "echo hello")]
    assert found.rollout.task == {"messages": USER}
    assert (found.rollout.mode, found.rollout.run_id) == (Mode.PRODUCTION, "support")
    assert (found.attempt.status, found.attempt.outcome, found.attempt.damage) == (
        "succeeded",
        "ok",
        [],
    )
    assert found.attempt.call_token not in ("", found.attempt.attempt_id)
    assert "secret-key" not in repr(found)


def test_the_outermost_block_is_an_attempt(client: openai.OpenAI, url: str) -> None:
    with record(url):
        with lightspan.operation("handle", input={"ticket": 7}):
            attempt_id = lightspan.current_attempt_id()
            with lightspan.agent("writer"):
                say(client, "one")
                assert lightspan.current_attempt_id() == attempt_id
            lightspan.emit_reward(0.5)
        assert lightspan.current_attempt_id() is None
        with lightspan.agent("writer"):
            say(client, "two")
    first, second = read_recorded(url)
    assert first.attempt.attempt_id == attempt_id
    assert first.rollout.task == {"ticket": 7}
    assert first.rollout.run_id == "unknown_service"
    assert first.tree() == (
        "invoke_workflow handle\n"
        "  handle\n"
        "    invoke_agent writer\n"
        "      chat m @writer\n"
        "    lightspan.reward"
    )
    assert second.rollout.task == {"messages": [{"role": "user", "content": "two"}]}


def test_a_function_that_is_trained_is_an_attempt_too(client: openai.OpenAI, url: str) -> None:
    @lightspan.rollout
    def answer(task: dict[str, Any]) -> str:
        return str(say(client, task["q"]).choices[0].message.content)

    @lightspan.rollout
    async def later(task: dict[str, Any]) -> str:
        return await asyncio.to_thread(answer, task)

    with record(url):
        assert answer({"q": "one"}) == "echo one"
        assert asyncio.run(later({"q": "two"})) == "echo two"
    tasks = [found.rollout.task for found in read_recorded(url)]
    assert tasks == [{"q": "one"}, {"q": "two"}]


@pytest.mark.parametrize("kind", [ValueError("boom"), KeyboardInterrupt()])
def test_an_app_that_raises(client: openai.OpenAI, url: str, kind: BaseException) -> None:
    @lightspan.operation("handle")
    def handle() -> None:
        say(client)
        raise kind

    with record(url), pytest.raises(type(kind)):
        handle()
    [found] = read_recorded(url)
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    [root] = [span for span in found.spans if span.parent_id is None]
    assert (root.status, root.attributes[c.EXCEPTION_TYPE]) == ("error", type(kind).__name__)


def test_a_call_that_fails(url: str) -> None:
    with (
        ScriptedServer(lambda _: Reply(text="no", status=400)) as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client,
        record(url),
        pytest.raises(openai.BadRequestError),
    ):
        say(client)
    [found] = read_recorded(url)
    assert found.attempt.status == "failed"
    assert found.calls[0].attributes[c.CALL_OUTCOME] == "error"


def test_streams_are_put_together(client: openai.OpenAI, url: str) -> None:
    with record(url):
        read = list(say(client, "read", stream=True))
        say(client, "closed", stream=True).close()
        stream = say(client, "dropped", stream=True)
        del stream
        gc.collect()
    assert len(read) > 1
    found = {one.answered[0].asked: one for one in read_recorded(url)}
    assert found["read"].answered == [("read", "echo read")]
    outcomes = {name: one.calls[0].attributes[c.CALL_OUTCOME] for name, one in found.items()}
    assert outcomes == {"read": "ok", "closed": "cancelled", "dropped": "cancelled"}


async def test_attempts_of_one_loop_do_not_mix(server: ScriptedServer, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="k") as client:

        async def handle(number: int) -> str | None:
            with lightspan.operation("handle", input=number):
                for step in ("a", "b"):
                    asked: Any = [{"role": "user", "content": f"{number}{step}"}]
                    await client.chat.completions.create(model="m", messages=asked)
                return lightspan.current_attempt_id()

        with record(url) as made:
            ids = await asyncio.gather(*(handle(number) for number in range(32)))
            assert await asyncio.to_thread(made.flush)
        found = {one.attempt.attempt_id: one for one in await asyncio.to_thread(read_recorded, url)}
    assert set(found) == set(ids)
    for number, attempt_id in enumerate(ids):
        one = found[str(attempt_id)]
        assert one.rollout.task == number
        assert [call.asked for call in one.answered] == [f"{number}a", f"{number}b"]


def test_what_ends_later_is_kept_late(client: openai.OpenAI, url: str) -> None:
    from contextvars import copy_context

    with record(url) as made:
        with lightspan.operation("handle"):
            say(client, "now")
            context = copy_context()
        assert made.flush()
        context.run(say, client, "later")
    [found] = read_recorded(url)
    late = {call.asked: span.late for call, span in zip(found.answered, found.calls, strict=True)}
    assert late == {"now": False, "later": True}


def test_a_trace_of_the_apps_own_is_kept(client: openai.OpenAI, url: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with record(url), provider.get_tracer("app").start_as_current_span("request") as span:
        say(client, "private words")
    [found] = read_recorded(url)
    assert found.calls[0].trace_id == f"{span.get_span_context().trace_id:032x}"
    [theirs] = exporter.get_finished_spans()
    assert "private words" not in theirs.to_json()


def test_a_reward_on_a_response_of_another_endpoint(client: openai.OpenAI, url: str) -> None:
    with record(url), lightspan.operation("handle"):
        first, second = say(client, "one"), say(client, "two")
        lightspan.emit_reward(0.25, call=second.id)
    [found] = read_recorded(url)
    episode = build_episode(found.attempt, found.rollout, found.spans, [])
    assert first.id != second.id
    assert [call.reward for call in episode.calls] == [None, 0.25]
    assert episode.unattached == ()


# --- unset, sampled, wrong ------------------------------------------------------------------
def test_unset_nothing_happens(client: openai.OpenAI, url: str) -> None:
    made = record()
    assert not made.on
    assert (made.settings, made.lost, made.flush()) == (None, 0, True)
    recording.hold("adapter")
    assert scope.pushed() is None
    recording.release("adapter")
    with made:
        say(client)
    probe = "import sys, lightspan; lightspan.record(); print('openai' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.split() == ["False"]


def test_the_environment_says_it_all(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "billing")
    monkeypatch.setenv("LIGHTSPAN_REDACT", f"{__name__}:shout")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    for adapter in ("one", "other"):
        recording.hold(adapter)
    say(client)
    recording.release("one")
    say(client)
    recording.release("other")
    say(client)
    found = read_recorded(url)
    assert [one.rollout.run_id for one in found] == ["billing", "billing"]
    assert found[0].answered == [("HELLO", "ECHO HELLO")]


def shout(span: Span) -> Span:
    return lightspan.map_text(span, str.upper)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHTSPAN_STORE", "nonsense:"),
        ("LIGHTSPAN_STORE", "memory:"),
        ("LIGHTSPAN_SAMPLE", "1.5"),
        ("LIGHTSPAN_SAMPLE", "nan"),
        ("LIGHTSPAN_SAMPLE", "some"),
        ("LIGHTSPAN_REDACT", "no_function"),
    ],
)
def test_a_wrong_variable_is_logged_and_the_app_starts(
    name: str,
    value: str,
    client: openai.OpenAI,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    monkeypatch.setenv(name, value)
    recording.hold("adapter")
    assert say(client).choices[0].message.content == "echo hello"
    recording.release("adapter")
    assert value in caplog.text
    assert not Path(url.removeprefix("sqlite:")).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "nonsense:"}, "is not known"),
        ({"store": "memory:"}, "is of one process"),
        ({"sample": 2}, "sample=2"),
        ({"sample": float("nan")}, "sample=nan"),
        ({"redact": "module"}, "module:function"),
        ({"redact": "os:no_such"}, "cannot be imported"),
        ({"redact": "os:sep"}, "is no function"),
        ({"redact": 3}, "is no function"),
    ],
)
def test_wrong_arguments_raise(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(**{"store": url, **options})


def test_one_recording_at_a_time(url: str) -> None:
    with record(url), pytest.raises(ConfigError, match=r"records to .* already"):
        record(url)


def test_an_explicit_recording_goes_before_the_environments(
    client: openai.OpenAI, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"sqlite:{tmp_path / 'other.db'}"
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    recording.hold("adapter")
    with record(other):
        say(client, "explicit")
    say(client, "environment")
    recording.release("adapter")
    assert [one.answered[0].asked for one in read_recorded(other)] == ["explicit"]
    assert [one.answered[0].asked for one in read_recorded(url)] == ["environment"]


def test_sampling_keeps_whole_attempts_by_their_trace(client: openai.OpenAI, url: str) -> None:
    with record(url, sample=0.5):
        ids = []
        for _ in range(40):
            with lightspan.operation("handle"):
                say(client)
                say(client)
                ids.append(lightspan.current_attempt_id())
    found = read_recorded(url)
    assert 5 <= len(found) <= 35  # 1e-6 of all runs would not be
    assert {one.attempt.attempt_id for one in found} == {one for one in ids if one is not None}
    assert all(len(one.calls) == 2 for one in found)
    assert all(sampled(one.spans[0].trace_id, 0.5) for one in found)


def test_sampled_is_opentelemetrys_decision() -> None:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    for ratio in (0.0, 0.1, 0.5, 1.0):
        sampler = TraceIdRatioBased(ratio)
        for number in (0, 1, 2**63, 2**64 - 1, 2**64, 123 * 2**57, 2**128 - 1, 2**61 - 7):
            theirs = sampler.should_sample(None, number, "x").decision.is_sampled()  # type: ignore[no-untyped-call]
            assert sampled(f"{number:032x}", ratio) is theirs, (ratio, number)


def test_outside_costs_little() -> None:
    """Asking who acts, where nothing is recorded: what every event of an adapter begins with."""
    times = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(10_000):
            scope.pushed()
        times.append((time.process_time() - begun) / 10_000)
    assert min(times) < 10e-6


# --- redaction ------------------------------------------------------------------------------
SECRET = re.compile(r"hunter2|ann@example\.org")


def hide(span: Span) -> Span:
    return lightspan.map_text(span, lambda text: SECRET.sub("***", text))


def test_a_hook_sees_everything_before_it_is_kept(url: str, tmp_path: Path) -> None:
    def reply(request: Request) -> Reply:
        return Reply(text="your password is hunter2")

    @lightspan.operation("ann@example.org", input="hunter2")
    def handle(client: openai.OpenAI) -> None:
        say(client, "I am ann@example.org")
        with lightspan.tool("look", '{"who": "ann@\\u0065xample.org"}'):
            lightspan.emit_message("hunter2")
        raise RuntimeError("hunter2")

    with (
        ScriptedServer(reply) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        record(url, redact=hide),
        pytest.raises(RuntimeError),
    ):
        handle(client)
    [found] = read_recorded(url)
    assert found.answered == [("I am ***", "your password is ***")]
    assert found.rollout.task == "***"
    assert found.attempt.damage == []
    assert SECRET.search(repr(found)) is None
    assert not any(SECRET.search(path.read_bytes().decode("latin1")) for path in tmp_path.iterdir())


def broken(span: Span) -> Span:
    raise LookupError(f"cannot redact {span.attributes}")


def no_span(span: Span) -> Any:
    return "nothing"


@pytest.mark.parametrize("hook", [broken, no_span, f"{__name__}:absent"])
def test_a_hook_that_fails_costs_the_content_not_the_call(
    hook: Any,
    client: openai.OpenAI,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    if isinstance(hook, str):
        monkeypatch.setenv("LIGHTSPAN_REDACT", hook)
        hook = None
    with record(url, redact=hook):
        for _ in range(2):
            with lightspan.operation("private", input="private"):
                assert say(client, "private").choices[0].message.content == "echo private"
    for found in read_recorded(url):
        assert found.rollout.task is None
        [damage] = found.attempt.damage
        assert damage.startswith("redact failed on 3 spans (")
        assert [span.name for span in found.spans] == ["chain", "operation", "llm"]
        assert isinstance(found.calls[0].attributes[c.INPUT_TOKENS], int)
    assert len([one for one in caplog.records if "redact failed" in one.message]) == 1
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"private" not in stored
    assert "private" not in caplog.text


def test_a_hook_may_ask_a_model(client: openai.OpenAI, url: str) -> None:
    def judged(span: Span) -> Span:
        said = say(client, "is this private?").choices[0].message.content
        assert said == "echo is this private?"
        return span.replace(attributes={**span.attributes, "judged": True})

    with record(url, redact=judged), lightspan.operation("handle"):
        say(client)
    [found] = read_recorded(url)
    assert found.attempt.damage == []
    assert [span.kind for span in found.spans] == ["chain", "operation", "llm"]
    assert all(span.attributes["judged"] for span in found.spans)


async def asynchronous(span: Span) -> Span:
    return span


@pytest.mark.parametrize("hook", [asynchronous, f"{__name__}:asynchronous"])
def test_an_asynchronous_hook_is_refused(
    hook: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(ConfigError, match="is asynchronous"):
        record(url, redact=hook)


def test_the_environment_says_how_many_are_kept(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    monkeypatch.setenv("LIGHTSPAN_SAMPLE", "0.25")
    recording.hold("adapter")
    ids = []
    for _ in range(60):
        with lightspan.agent("writer"):
            say(client)
            ids.append(lightspan.current_attempt_id())
    recording.release("adapter")
    kept = {one.attempt.attempt_id: one.spans[0].trace_id for one in read_recorded(url)}
    assert kept.keys() == set(filter(None, ids))
    assert 1 <= len(kept) <= 45  # one run in 10^7 would have fewer or more
    assert all(sampled(trace_id, 0.25) for trace_id in kept.values())


def test_a_hook_may_leave_spans_out(client: openai.OpenAI, url: str) -> None:
    def only_structure(span: Span) -> Span | None:
        return None if span.kind == "llm" else span

    with record(url, redact=only_structure), lightspan.operation("handle"):
        say(client)
    [found] = read_recorded(url)
    assert (found.calls, found.attempt.damage) == ([], [])
    assert found.attempt.message == "1 spans were left out by redact"


def test_a_hook_cannot_change_whose_a_span_is(client: openai.OpenAI, url: str) -> None:
    def move(span: Span) -> Span:
        attributes = {**span.attributes, c.CALL_ID: "call-other", "odd": object()}
        return span.replace(attempt_id="at-other", span_id="f" * 16, attributes=attributes)

    with record(url, redact=move):
        say(client)
    [found] = read_recorded(url)
    assert found.attempt.damage == []
    assert str(found.calls[0].attributes[c.CALL_ID]).startswith("call-")
    assert found.calls[0].attributes[c.CALL_ID] != "call-other"
    assert str(found.calls[0].attributes["odd"]).startswith("<object object")


# --- never in the app's way -----------------------------------------------------------------
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
    warnings = [one for one in caplog.records if "the app goes on" in one.message]
    assert len(warnings) == 1


def test_what_cannot_be_kept_is_counted_in_the_store(
    client: openai.OpenAI, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan.journal.MOST_ATTEMPTS", 2)
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
    [gap] = [one for one in found if not one.calls]
    assert (gap.attempt.status, gap.rollout.run_id) == ("cancelled", "support")
    [damage] = gap.attempt.damage
    assert damage.startswith("3 attempts and 0 spans of others were not recorded: the queue was")


def test_a_store_that_fails_in_between(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a full disk: tried again, nothing twice."""
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


def test_an_attempt_holds_so_many_spans(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan.recording.MOST_SPANS", 3)
    with record(url), lightspan.operation("handle"):
        for _ in range(4):
            say(client)
    [found] = read_recorded(url)
    assert len(found.spans) == 3
    assert found.attempt.damage == ["3 spans dropped"]


def test_inputs_that_json_cannot_say(client: openai.OpenAI, url: str) -> None:
    circle: list[Any] = []
    circle.append(circle)
    inputs = [2**70, {1: {2}}, circle, "\ud800", object, float("nan"), b"\xff"]
    with record(url):
        for given in inputs:
            with lightspan.operation("handle", input=given):
                say(client)
    found = read_recorded(url)
    assert len(found) == len(inputs)
    assert [one.attempt.damage for one in found] == [[]] * len(inputs)
    assert found[0].rollout.task == str(2**70)


def test_an_attempt_that_cannot_be_put_together_is_counted(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = iter([ZeroDivisionError()])

    def task_of(*_: Any, **__: Any) -> Any:
        for error in tasks:
            raise error
        return None

    monkeypatch.setattr("lightspan.recording.task_of", task_of)
    with record(url) as made:
        for _ in range(2):
            say(client)
        assert made.flush()
        assert made.lost == 1
    damages = [one.attempt.damage for one in read_recorded(url)]
    assert sorted(map(len, damages)) == [0, 1]


def test_large_attempts_are_written_in_pieces(client: openai.OpenAI, url: str) -> None:
    with record(url), lightspan.operation("handle", input="x" * 300_000):
        for _ in range(3):
            say(client, "y" * 700_000)
        for number in range(200):
            lightspan.emit_message(str(number))
    [found] = read_recorded(url)
    assert len(found.calls) == 3
    assert len(found.spans) == 205
    assert found.attempt.damage == ["an input of 300002 characters was not kept"]


def test_the_app_never_waits_for_the_store(client: openai.OpenAI, url: str) -> None:
    """While another process holds the store's lock, handing attempts over stays cheap."""
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


def test_what_ends_after_recording(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with record(url), lightspan.operation("whole"):
        pass
    with caplog.at_level("WARNING", "lightspan"), record(url) as made:
        late = lightspan.operation("late")
        late.__enter__()
        made.close()
        late.__exit__(None, None, None)
    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "lightspan: attempts are not recorded: it ended after recording was closed"
    ]
    assert [one.attempt.status for one in read_recorded(url)] == ["succeeded", "cancelled"]


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
        timeout=60,
        check=False,
    )


def test_a_program_that_ends_at_once(server: ScriptedServer, url: str) -> None:
    ended = run_program(server, url, "say('only')")
    assert (ended.returncode, ended.stderr) == (0, "")
    [found] = read_recorded(url)
    assert found.answered == [("only", "echo only")]


def test_dropped_streams_are_collected_at_any_moment(server: ScriptedServer, url: str) -> None:
    program = """
import faulthandler, gc
faulthandler.dump_traceback_later(20, exit=True)  # where a lock is waited for by its own holder
messages = [{"role": "user", "content": "dropped"}]
for later in range(40):  # objects that are made before the collector runs
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
    assert outcomes == ["cancelled"] * 40


def test_a_program_that_ends_in_the_midst(server: ScriptedServer, url: str) -> None:
    program = "lightspan.operation('handle').__enter__()\nsay('only')\nsys.exit(3)"
    ended = run_program(server, url, program)
    assert (ended.returncode, ended.stderr) == (3, "")
    [found] = read_recorded(url)
    assert [call.asked for call in found.answered] == ["only"]
    assert (found.attempt.status, found.attempt.damage) == (
        "cancelled",
        ["the process ended first"],
    )


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
    """As gunicorn does, after the parent has recorded already."""
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
    assert "1 attempts of 'unknown_service' could not be recorded" in ended.stderr


# --- never trained --------------------------------------------------------------------------
async def test_production_is_never_claimed_nor_trained(client: openai.OpenAI, url: str) -> None:
    with record(url, service="support") as made:
        say(client)
        assert made.flush()
    [found] = await asyncio.to_thread(read_recorded, url)
    async with open_store(url) as store:
        assert await store.claim("runner", 10, 60) == []
        assert await store.claim("runner", 10, 60, run_id="support") == []
        assert await store.claim_of_token("") is None
        with pytest.raises(IllegalMoveError):
            await store.enqueue([found.rollout])
    call = found.calls[0]
    forged = TokenRecord.create(
        prompt_ids=[1],
        response_ids=[2],
        logprobs=[-0.1],
        versions=[(1, 1)],
        attempt_id=found.attempt.attempt_id,
        call_id=str(call.attributes[c.CALL_ID]),
        choice=0,
        policy="policy",
        span_id=call.span_id,
        agent_path="app",
    )
    rewarded = msgspec.structs.replace(found.attempt, reward=Reward(1.0))
    episode = build_episode(rewarded, found.rollout, found.spans, [forged])
    routing = make_routing({"*": "policy"}, None, "policy", None)
    for modes in ((Mode.TRAIN,), (Mode.TRAIN, Mode.DEV), tuple(Mode)):
        [entry] = cover(episode, routing, modes=modes).entries
        assert entry.rejection is Rejection.MODE_NOT_TRAIN


def test_rollouts_inside_a_recording_are_not_recorded(client: openai.OpenAI, url: str) -> None:
    with record(url), scope.open_scope(scope.Scope(rollout_id="r", attempt_id="a")) as inner:
        say(client)
        assert len(inner.recorder.drain()) == 1
    assert not Path(url.removeprefix("sqlite:")).exists()
