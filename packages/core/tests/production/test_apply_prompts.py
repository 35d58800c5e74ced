"""Test learned prompts in production, in real requests that are recorded or not."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import lightspan
from lightspan import PromptTemplate, agent, apply_prompts, prompt, record
from lightspan.capture import (
    context,
    context_propagation,
    misattributed_calls,
    sdk_instrumentation,
    sdks,
)
from lightspan.capture._globals import state
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.capture.prompt_overrides import OUTSIDE, PromptNotAppliedError
from lightspan.errors import ConfigError
from lightspan.production import apply_prompts as module
from lightspan.production.record import hold, release
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.prompts import LearnedPrompt, PromptPlace
from lightspan.schema.spans import SpanKind
from lightspan.schema.system_prompts import NO_INSTRUCTIONS, OTHER_TEXT
from lightspan.training.folder import RunFolder
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer

OLD, NEW = "You route. Today is 2026-11-24.", "Route well! Today is 2026-11-24."
RULES = PromptTemplate("Speak.")
TOLD = {"role": "system", "content": OLD}
USER = {"role": "user", "content": "hi"}
AGENT, CODE, ARGUMENT = PromptPlace.AGENT, PromptPlace.CODE, PromptPlace.ARGUMENT


def change(before: str, after: str, **more: Any) -> LearnedPrompt:
    return LearnedPrompt(before=PromptTemplate(before), after=PromptTemplate(after), **more)


LEARNED = {
    "router": change(
        "You route. Today is {date_1}.",
        "Route well! Today is {date_1}.",
        place=AGENT,
        agent="router",
    ),
    "mails": change("Which {mail}?", "Which one: {mail}?", place=CODE),
    "rules": change("Speak.", "Shout."),
}


@pytest.fixture
def run(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the folder of a training run; after the test no prompts are applied."""
    monkeypatch.delenv("LIGHTSPAN_PROMPTS", raising=False)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_prompts(LEARNED)
    folder.release()
    yield folder.path
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


def ask(client: openai.OpenAI, *told: Any) -> None:
    client.chat.completions.create(model="m", messages=[*(told or [TOLD]), USER])


def told_last(server: ScriptedServer) -> str:
    return str(server.requests[-1].messages[0]["content"])


def test_for_the_whole_process_and_undone(
    server: ScriptedServer, client: openai.OpenAI, run: Path
) -> None:
    """Check requests outside of every scope, and that another agent's requests are unchanged."""
    for name in ("router", "clerk"):
        with agent(name):
            ask(client)
        assert told_last(server) == OLD
    plain = server.requests[-1]
    with apply_prompts(run) as applied:
        with agent("router"):
            ask(client)
            assert told_last(server) == NEW
            assert server.requests[-1].headers["authorization"] == "Bearer secret-key"
        with agent("clerk"):
            ask(client)
        assert json.dumps(server.requests[-1].body) == json.dumps(plain.body)
        assert prompt("mails", "Which {mail}?").format(mail="x") == "Which one: x?"
        assert prompt("rules", "Speak.") == "Shout."  # was an argument
        assert applied.prompts["rules"].template == "Shout."
    applied.close()
    with agent("router"):
        ask(client)
    assert told_last(server) == OLD
    assert prompt("mails", "Which {mail}?") == "Which {mail}?"
    assert context.current_context() is None


@pytest.mark.parametrize("order", ["apply first", "record first"])
def test_recorded_with_both_texts(
    server: ScriptedServer, client: openai.OpenAI, run: Path, url: str, order: str
) -> None:
    first, second = (
        (apply_prompts(run), record(url))
        if order == "apply first"
        else (record(url), apply_prompts(run))
    )
    with first, second, agent("router"):
        ask(client)
    [found] = read_recorded(url)
    assert found.attempt.capture_errors == []
    [span] = [span for span in found.spans if span.kind is SpanKind.LLM]
    assert (span.attributes[c.PROMPT_ORIGINAL], span.attributes[c.PROMPT_APPLIED]) == (OLD, True)
    assert genai_messages.input_messages_of(span.attributes)[0]["content"] == NEW
    assert told_last(server) == NEW


def test_a_redaction_sees_the_apps_own_text_too(client: openai.OpenAI, run: Path, url: str) -> None:
    def redact(span: Any) -> Any:
        return lightspan.map_text(span, lambda text: text.replace("2026-11-24", "<day>"))

    with apply_prompts(run), record(url, redact=redact), agent("router"):
        ask(client)
    [found] = read_recorded(url)
    assert "2026-11-24" not in " ".join(str(span.attributes) for span in found.spans)


def test_in_a_runners_process_it_changes_nothing(
    server: ScriptedServer, client: openai.OpenAI, run: Path
) -> None:
    """Check that prompts are not applied inside a runner, where the algorithm chooses them.

    A worker that has lost the attempt's context acts outside of the attempt.
    """
    told, before = [], misattributed_calls.count()

    def work() -> None:
        with agent("router"):
            ask(client)
        told.append((told_last(server), prompt("rules", "Speak.")))

    context_propagation.carry()
    try:
        with apply_prompts(run), open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
            work()
            worker = threading.Thread(target=contextvars.Context().run, args=(work,))
            worker.start()
            worker.join()
        with apply_prompts(run):  # where an attempt was open before
            work()
    finally:
        context_propagation.stop_carrying()
    assert told == [(OLD, "Speak.")] * 3
    assert misattributed_calls.count() - before == 2


def test_another_text_is_left_alone_and_said_once(
    server: ScriptedServer, client: openai.OpenAI, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"role": "system", "content": "You write."}
    with apply_prompts(run), agent("router"):
        for _ in range(3):
            ask(client, other)
        assert prompt("mails", "Who {mail}?") == "Who {mail}?"
        ask(client)
    assert [r.messages[0]["content"] for r in server.requests[-4:]] == ["You write."] * 3 + [NEW]
    said = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert said == [
        "lightspan.apply_prompts: the learned text for 'router' is not applied, and the app's own "
        "is sent: the text is not one that was found before (logged once)",
        "lightspan.apply_prompts: the learned text for 'mails' is not applied, and the app's own "
        "is sent: the app gives another text than in the first evaluation (logged once)",
        "lightspan.apply_prompts: 3 of 4 requests for 'router' got the app's own text",
        "lightspan.apply_prompts: 1 of 1 requests for 'mails' got the app's own text",
    ]


def test_what_was_sent_is_counted(client: openai.OpenAI, run: Path) -> None:
    with apply_prompts(run) as applied:
        assert applied.sent == {"router": 0, "mails": 0, "rules": 0}
        with agent("router"):
            ask(client)
            ask(client)
            ask(client, {"role": "system", "content": "You write."})
            ask(client, USER)
        prompt("mails", "Which {mail}?")
    assert applied.sent == {"router": 2, "mails": 1, "rules": 0}
    assert applied.not_sent == {
        "router": {OTHER_TEXT: 1, NO_INSTRUCTIONS: 1},
        "mails": {},
        "rules": {},
    }


@pytest.mark.parametrize("recorded", [True, False])
async def test_strictly_another_text_is_an_error(
    server: ScriptedServer,
    client: openai.OpenAI,
    run: Path,
    url: str,
    recorded: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = len(server.requests)
    scope = record(url) if recorded else contextlib.nullcontext()
    other = openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0)
    with apply_prompts(run, strict=True) as applied, scope, agent("router"):
        ask(client)
        for _ in range(2):
            with pytest.raises(PromptNotAppliedError, match=r"'router' is not applied, and strict"):
                ask(client, {"role": "system", "content": "You write."})
        with pytest.raises(PromptNotAppliedError):
            await other.responses.create(model="m", input="hi", instructions="You write.")
        with pytest.raises(PromptNotAppliedError, match="the app gives another text than in"):
            prompt("mails", "Who {mail}?")
        with agent("clerk"):
            ask(client, {"role": "system", "content": "You write."})
    await other.close()
    assert len(server.requests) == count + 2
    assert applied.sent["router"] == 1
    assert applied.not_sent["router"] == {}  # nothing was sent
    assert "got the app's own text" not in caplog.text
    assert "could not be" not in caplog.text


WAYS: dict[str, Callable[[Callable[[], object]], object]] = {
    "ThreadPoolExecutor": lambda work: in_pool(work),
    "run_in_executor": lambda work: asyncio.run(in_executor(work)),
    "ThreadPool": lambda work: in_thread_pool(work),
    "a copied context": lambda work: in_thread(partial(contextvars.copy_context().run, work)),
}


def in_pool(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


async def in_executor(work: Callable[[], object]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, work)


def in_thread_pool(work: Callable[[], object]) -> None:
    with ThreadPool(1) as pool:
        pool.apply(work)


def in_thread(work: Callable[[], object]) -> None:
    """Run `work` in a plain thread, and raise its error here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recorded", [True, False])
def test_calls_in_threads_get_the_learned_text(
    server: ScriptedServer, client: openai.OpenAI, run: Path, url: str, recorded: bool, way: str
) -> None:
    work = WAYS[way]
    scope = record(url) if recorded else contextlib.nullcontext()
    with apply_prompts(run, strict=True) as applied, scope, agent("router"):
        apply_prompts(run).close()  # leaves the other in force
        work(partial(ask, client))
        assert told_last(server) == NEW
        with pytest.raises(PromptNotAppliedError):
            work(partial(ask, client, {"role": "system", "content": "You write."}))
    assert (applied.sent["router"], applied.not_sent["router"]) == (1, {})
    assert state.thread_patches == []


@pytest.mark.parametrize("recorded", [True, False])
def test_a_call_in_a_plain_thread_is_counted_for_the_agent_with_its_text(
    server: ScriptedServer,
    client: openai.OpenAI,
    run: Path,
    url: str,
    caplog: pytest.LogCaptureFixture,
    recorded: bool,
) -> None:
    scope = record(url) if recorded else contextlib.nullcontext()
    with apply_prompts(run) as applied, scope, agent("router"):
        in_thread(partial(ask, client))
        assert told_last(server) == OLD
        in_thread(partial(ask, client, {"role": "system", "content": "You write."}))
        with agent("clerk"):
            ask(client)
    assert (applied.sent["router"], applied.not_sent["router"]) == (0, {OUTSIDE: 1})
    assert caplog.messages == [
        "lightspan.apply_prompts: the learned text for 'router' is not applied, and the app's own "
        f"is sent: {OUTSIDE} (logged once)",
        "lightspan.apply_prompts: 1 of 1 requests for 'router' got the app's own text",
    ]
    count = len(server.requests)
    error = pytest.raises(PromptNotAppliedError, match="strict=True: the call is outside every")
    with apply_prompts(run, strict=True), agent("router"), error:
        in_thread(partial(ask, client))
    assert len(server.requests) == count


@lightspan.rollout
def speak(task: str, rules: PromptTemplate = RULES) -> str:
    return f"{task}: {rules.format()}"


@lightspan.rollout
async def speak_alone(task: str, *, prompt: PromptTemplate = RULES) -> str:
    return f"{task}: {prompt.format()}"


async def test_prompts_that_are_arguments(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller who leaves the prompt out gets the learned one; no SDK of a model is needed."""
    assert speak("a") == "a: Speak."
    with apply_prompts(run) as applied:
        assert speak("a") == speak(task="a") == "a: Shout."
        assert speak("a", RULES) == speak("a", rules=RULES) == "a: Speak."
        assert await speak_alone("a") == "a: Speak."  # which of the three is not known
    assert applied.sent["rules"] == 2
    alone = tmp_path / "prompts.json"
    alone.write_bytes(msgspec.json.encode({"rules": LEARNED["rules"]}))
    with apply_prompts(alone):
        assert await speak_alone("a") == "a: Shout."
    assert speak("a") == "a: Speak."
    assert caplog.records == []


def test_prompts_of_several_runs(
    server: ScriptedServer,
    client: openai.OpenAI,
    run: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each applies; an agent and another prompt may have the same name; the last of equals wins."""
    more = {
        "clerk": change(OLD, "Write.", place=PromptPlace.AGENT, agent="clerk"),
        "router": change("Go.", "Run."),
        "rules": LEARNED["rules"],
    }
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(more))
    with apply_prompts(run) as one, apply_prompts(other) as two:
        for name, text in (("router", NEW), ("clerk", "Write.")):
            with agent(name):
                ask(client)
            assert told_last(server) == text
        assert prompt("router", "Go.") == "Run."
        assert prompt("mails", "Which {mail}?") == "Which one: {mail}?"
        assert prompt("rules", "Speak.") == "Shout."
        assert (one.sent["router"], two.sent["clerk"], two.sent["router"]) == (1, 1, 1)
    assert caplog.messages == []
    other.write_bytes(msgspec.json.encode({"rules": change("Speak.", "Whisper.")}))
    with apply_prompts(run):
        with apply_prompts(other):
            assert prompt("rules", "Speak.") == "Whisper."
        assert prompt("rules", "Speak.") == "Shout."
    assert caplog.messages[0] == (
        f"lightspan.apply_prompts: 'rules' of {other} is applied in place of that of {run}, until "
        "closed"
    )


def test_a_template_is_no_text() -> None:
    with pytest.raises(TypeError, match=r"prompt\('rules', …\) takes a text, .*\.template"):
        prompt("rules", RULES)  # type: ignore[arg-type]


def test_an_agent_that_is_not_there(
    client: openai.OpenAI, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with apply_prompts(run):
        pass
    assert caplog.records == []  # nothing was asked at all
    with apply_prompts(run), agent("ruter"):
        ask(client)
    [entry] = caplog.records
    assert entry.getMessage().startswith(
        "lightspan.apply_prompts: no model call of 'router' was seen, so "
    )


def test_an_unchanged_text_has_nothing_to_warn_of(
    client: openai.OpenAI, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (run / "prompts.json").read_text()
    (run / "prompts.json").write_text(text.replace("Route well!", "You route."))
    with apply_prompts(run) as applied:
        for name in ("router", "clerk"):
            with agent(name):
                ask(client)
    assert not applied.prompts["router"].is_changed
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("away", None, r"away does not exist: name the folder of a run"),
        ("empty", "", r"empty has learned no prompts, or is incomplete: name the folder of a run"),
        ("a.json", '{"router": {"before": 1}}', r"a\.json cannot be read: Expected"),
        ("a.json", "{}", r"a\.json contains no prompt"),
        ("a.json", "edited", r"differ in their placeholders: \{date_1\}, \{x\} is"),
    ],
)
def test_what_cannot_be_read(
    run: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content == "":
        path.mkdir()
    elif content == "edited":
        learned = (run / "prompts.json").read_text()
        path.write_text(learned.replace("well! Today is {date_1}", "{x}"))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        apply_prompts(path)
    assert context.current_context() is None


def test_without_a_client_there_is_nothing_to_apply_it_to(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdks, "SDKS", ())
    with pytest.raises(ConfigError, match="'router' cannot be applied: no client"):
        apply_prompts(run)


def test_the_environment_names_it(
    server: ScriptedServer, client: openai.OpenAI, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that LIGHTSPAN_PROMPTS applies to `apply_prompts()` and to an adapter's
    `instrument()`.
    """
    with apply_prompts() as applied:
        assert applied.prompts == {}
        assert context.current_context() is None
    monkeypatch.setenv("LIGHTSPAN_PROMPTS", str(run / "prompts.json"))
    with apply_prompts(), agent("router"):
        ask(client)
    assert told_last(server) == NEW
    hold("one")
    hold("other")
    release("one")
    with agent("router"):
        ask(client)
    assert told_last(server) == NEW
    release("other")
    release("other")
    assert context.current_context() is None


def test_a_wrong_variable_is_logged_and_the_app_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTSPAN_PROMPTS", str(run / "away"))
    hold("one")
    hold("other")  # tells it no second time
    with apply_prompts() as applied:
        assert (applied.prompts, applied.sent) == ({}, {})
    why = "lightspan: no learned prompt of LIGHTSPAN_PROMPTS is applied: "
    assert [message.startswith(why) for message in caplog.messages] == [True, True]
    assert "away does not exist" in caplog.text
    release("one")
    release("other")
    assert context.current_context() is None
    assert not module._applied
    with pytest.raises(ConfigError, match="away does not exist"):
        apply_prompts(strict=True)
