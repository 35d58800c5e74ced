"""Test that callbacks before the first task and after the last belong to the crew's attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("crewai")

from crewai import Crew

from lightspan.production import record
from lightspan.schema.spans import SpanStatus
from lightspan_testing.attempts import Recorded, captured, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.crewai.tests.crewai_apps import WARNINGS, an_agent, crew_of, llm_of

pytestmark = [
    *WARNINGS,
    pytest.mark.usefixtures("installed_crewai"),
    pytest.mark.filterwarnings("ignore:.*callbacks cannot be serialized:UserWarning"),
]

GIVEN = {"topic": "rain"}

PRESS = """
invoke_workflow press
  invoke_agent press
    chat m @press
    invoke_agent {topic} writer
      chat m @press/{topic} writer
    chat m @press
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Return the URL of the production store."""
    url = f"sqlite:{tmp_path / 'traces.db'}"
    with record.record(url):
        yield url


def read(url: str) -> list[Recorded]:
    assert record.flush()
    return read_recorded(url)


class Callbacks:
    """Callbacks that call a model, by the app's own OpenAI client and by CrewAI's client."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    def before(self, inputs: dict[str, Any]) -> dict[str, Any]:
        with openai.OpenAI(base_url=self.server.url, api_key="key", max_retries=0) as sdk:
            said: Any = [{"role": "user", "content": "before"}]
            sdk.chat.completions.create(model="m", messages=said)
        return {**inputs, "style": "short"}

    def after(self, output: Any) -> Any:
        llm_of(self.server).call("after")
        return output

    def crew(self, name: str | None = "press", **more: Any) -> Crew:
        return crew_of(
            an_agent(self.server, "{topic} writer"),
            before_kickoff_callbacks=[self.before],
            after_kickoff_callbacks=[self.after],
            **({"name": name} if name else {}),
            **more,
        )


@pytest.fixture
def callbacks(server: ScriptedServer) -> Callbacks:
    return Callbacks(server)


def streamed(app: Crew) -> None:
    app.stream = True
    list(app.kickoff(inputs=GIVEN))


async def _streamed_async(app: Crew, kickoff: str) -> None:
    app.stream = True
    output: Any = await getattr(app, kickoff)(inputs=GIVEN)
    assert [chunk async for chunk in output]


KICKOFFS: Mapping[str, Callable[[Crew], Any]] = {
    "kickoff": lambda app: app.kickoff(inputs=GIVEN),
    "kickoff_positional": lambda app: app.kickoff(GIVEN),
    "kickoff_async": lambda app: asyncio.run(app.kickoff_async(inputs=GIVEN)),
    "akickoff": lambda app: asyncio.run(app.akickoff(inputs=GIVEN)),
    "kickoff_for_each": lambda app: app.kickoff_for_each(inputs=[GIVEN]),
    "kickoff_for_each_async": lambda app: asyncio.run(app.kickoff_for_each_async(inputs=[GIVEN])),
    "akickoff_for_each": lambda app: asyncio.run(app.akickoff_for_each(inputs=[GIVEN])),
    "streamed": streamed,
    "streamed_async": lambda app: asyncio.run(_streamed_async(app, "kickoff_async")),
    "streamed_natively": lambda app: asyncio.run(_streamed_async(app, "akickoff")),
}


@pytest.mark.parametrize("kickoff", KICKOFFS)
def test_callbacks_belong_to_the_attempt(callbacks: Callbacks, store: str, kickoff: str) -> None:
    KICKOFFS[kickoff](callbacks.crew())
    [found] = read(store)
    assert found.tree() == PRESS.strip()
    assert found.rollout.task == GIVEN
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


def test_each_input_is_an_attempt(callbacks: Callbacks, store: str) -> None:
    topics = [{"topic": "rain"}, {"topic": "sun"}]
    callbacks.crew().kickoff_for_each(inputs=topics)
    found = read(store)
    assert [one.tree() for one in found] == [PRESS.strip()] * 2
    assert [one.rollout.task for one in found] == topics


def test_callbacks_in_a_scope(callbacks: Callbacks) -> None:
    """Check that the path in a training is the same as in production."""
    with captured() as run:
        callbacks.crew().kickoff(inputs=GIVEN)
    assert run.tree == [
        "invoke_agent press @press",
        "  chat m @press",
        "  invoke_agent {topic} writer @press/{topic} writer",
        "    chat m @press/{topic} writer",
        "  chat m @press",
    ]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_callback_that_raises_fails_the_attempt(
    server: ScriptedServer, store: str, when: str, is_async: bool
) -> None:
    def refuse(value: Any) -> Any:
        raise StopIteration("no")  # which a generator around it would turn into another error

    writer = an_agent(server, "writer")
    app = crew_of(writer, name="press", **{f"{when}_kickoff_callbacks": [refuse]})
    with pytest.raises(RuntimeError if is_async else StopIteration):
        KICKOFFS["akickoff" if is_async else "kickoff"](app)
    [found] = read(store)
    ran = ["    invoke_agent writer", "      chat m @press/writer"] if when == "after" else []
    assert found.tree().splitlines() == ["invoke_workflow press", "  invoke_agent press", *ran]
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    assert [span.status for span in found.spans[:2]] == [SpanStatus.ERROR] * 2
    said = (
        ("coroutine raised StopIteration", "RuntimeError") if is_async else ("no", "StopIteration")
    )
    assert found.spans[0].status_message == said[0]
    assert (found.spans[1].status_message, found.spans[1].attributes["exception.type"]) == said
