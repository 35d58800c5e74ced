"""Test generators of a recorded app: calls belong to the attempt, whichever thread reads items."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import anyio.to_thread
import openai
import pytest

import lightspan
from lightspan.capture import context, emit
from lightspan.capture._globals import state
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan_testing.attempts import read_recorded
from packages.core.tests.production.chat import say

Way = Callable[[openai.OpenAI, str], Iterator[Any]]
LETTERS = "123"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert state.steps == {}
    assert context.current_context() is None


# --- ways to write one ----------------------------------------------------------------------
def block(client: openai.OpenAI, name: str) -> Iterator[Any]:
    with lightspan.agent(name):
        for letter in LETTERS:
            yield say(client, f"{name}{letter}")


def decorated(client: openai.OpenAI, name: str) -> Iterator[Any]:
    @lightspan.agent(name)
    def work() -> Iterator[Any]:
        for letter in LETTERS:
            yield say(client, f"{name}{letter}")

    return work()


def of_the_apps_own(client: openai.OpenAI, name: str) -> Iterator[Any]:
    @contextmanager
    def acting() -> Iterator[None]:
        with lightspan.agent(name):
            yield

    class AgentContext:
        def __enter__(self) -> None:
            self.inner = acting()
            self.inner.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.inner.__exit__(*error)

    with AgentContext():
        for letter in LETTERS:
            yield say(client, f"{name}{letter}")


WAYS: dict[str, Way] = {
    "block": block,
    "decorated": decorated,
    "of the app's own": of_the_apps_own,
}


def check(url: str, *expected: tuple[str, str]) -> None:
    """Fail unless the store has exactly the expected attempts, each (agent, calls)."""
    found = read_recorded(url)
    seen = [
        [
            (str(span.attributes[c.AGENT_PATH]), call.asked)
            for span, call in zip(one.calls, one.answered, strict=True)
        ]
        for one in found
    ]
    wanted = [[(name, f"{name}{letter}") for letter in letters] for name, letters in expected]
    assert sorted(seen) == sorted(wanted)
    assert all(one.attempt.status.final and not one.attempt.capture_errors for one in found)
    assert not any(call.late for one in found for call in one.calls)


# --- whoever takes their items --------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_two_in_turns(client: openai.OpenAI, url: str, way: str) -> None:
    """Check that calls between two items belong to neither generator's attempt."""
    with record(url):
        first, second = WAYS[way](client, "a"), WAYS[way](client, "b")
        for _ in LETTERS:
            next(first)
            say(client, "app-")
            next(second)
        for one in (first, second):
            assert next(one, None) is None
        assert context.current_agent() is not None
        say(client, "app-")
    check(url, ("a", LETTERS), ("b", LETTERS), *[("app", "-")] * 4)


@pytest.mark.parametrize("way", WAYS)
async def test_each_item_in_a_thread(client: openai.OpenAI, url: str, way: str) -> None:
    """Check a generator whose items are computed in any thread, each with a copy of the context.

    Starlette's StreamingResponse does this.
    """

    async def respond(items: Iterator[Any]) -> None:
        item = "first"
        while item is not None:
            item = await anyio.to_thread.run_sync(next, items, None)

    with record(url) as made:
        await asyncio.gather(*(respond(WAYS[way](client, name)) for name in "abcd"))
        assert await asyncio.to_thread(made.flush)
    await asyncio.to_thread(check, url, *((name, LETTERS) for name in "abcd"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["closed", "dropped", "dropped elsewhere", "thrown at"])
def test_one_that_is_left(client: openai.OpenAI, url: str, way: str, end: str) -> None:
    def dropped(items: list[Iterator[Any]]) -> None:
        items.clear()
        gc.collect()

    with record(url):
        items = [WAYS[way](client, "a")]
        next(items[0])
        if end == "closed":
            items[0].close()  # type: ignore[attr-defined]
        elif end == "thrown at":
            with suppress(KeyError):
                items[0].throw(KeyError())  # type: ignore[attr-defined]
        elif end == "dropped":
            dropped(items)
        else:
            thread = threading.Thread(target=dropped, args=[items])
            thread.start()
            thread.join()
        say(client, "app-")
    check(url, ("a", "1"), ("app", "-"))


def test_a_block_around_generators(client: openai.OpenAI, url: str) -> None:
    """Check that generators inside a `record` block belong to the attempt of the block."""
    with record(url), lightspan.operation("handle"):
        first, second = block(client, "a"), block(client, "b")
        for one in (first, second, first, second):
            next(one)
        say(client, "app-")
        del first, second
    [found] = read_recorded(url)
    paths = [str(call.attributes[c.AGENT_PATH]) for call in found.calls]
    assert paths == ["a", "b", "a", "b", "app"]


# --- threads of a later item ------------------------------------------------------------------
POOLS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "submit": lambda client: in_pool(say, client, "in a thread"),
    "a copied context": lambda client: in_pool(copy_context().run, say, client, "in a thread"),
    "a partial of it": lambda client: in_pool(
        partial(copy_context().run, say, client), "in a thread"
    ),
}


def in_pool(func: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(func, *args).result()


@pytest.mark.parametrize("pool", POOLS)
def test_threads_of_a_later_item_belong_to_a_block(
    client: openai.OpenAI, url: str, pool: str
) -> None:
    """Check that the app's own context variables stay, and that no attempt gets another's call."""

    def items(name: str) -> Iterator[Any]:
        with lightspan.agent(name):
            yield name
            yield POOLS[pool](client)

    with record(url):
        one, two = items("a"), items("b")
        for each in (one, two, one, two):
            copy_context().run(next, each)
        say(client, "outside")
        for each in (one, two):
            copy_context().run(next, each, None)
    found = read_recorded(url)
    paths = [[str(call.attributes[c.AGENT_PATH]) for call in each.calls] for each in found]
    assert sorted(paths) == [["a"], ["app"], ["b"]]


# --- blocks that end in another context ------------------------------------------------------
def in_a_thread(client: openai.OpenAI) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, say, client, "in a thread").result()


def take_each_in_a_copy(items: Iterator[Any]) -> None:
    while copy_context().run(next, items, None) is not None:
        pass


def test_threads_of_a_later_item_belong_to_a_decorated_generator(
    client: openai.OpenAI, url: str
) -> None:
    @lightspan.operation("ticket", input="hello")
    def items() -> Iterator[Any]:
        yield lightspan.current_attempt_id()
        yield in_a_thread(client)

    with record(url):
        take_each_in_a_copy(items())
    [found] = read_recorded(url)
    assert [call.asked for call in found.answered] == ["in a thread"]
    assert found.rollout.task == "hello"


def in_a_dependency(client: openai.OpenAI) -> None:
    """Do what FastAPI does with a sync `yield` dependency."""
    ticket = contextmanager(lightspan.operation("ticket")(dependency))()
    copy_context().run(ticket.__enter__)
    say(client, "in the handler")
    copy_context().run(ticket.__exit__, None, None, None)


def dependency() -> Iterator[None]:
    yield


def test_a_block_that_misses_its_calls_is_logged(
    client: openai.OpenAI, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    emit._warn_of_context.cache_clear()
    with record(url):
        for _ in range(2):
            in_a_dependency(client)
    assert [len(one.calls) for one in read_recorded(url)] == [0, 1, 0, 1]
    [line] = [line for line in caplog.messages if "another context" in line]
    assert "'ticket'" in line
    assert "use the ASGI middleware of docs/guides/fastapi.md" in line


def test_a_block_inside_the_requests_operation_is_not_torn(
    client: openai.OpenAI, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the remedy that the log names: an operation around the request."""
    emit._warn_of_context.cache_clear()
    with record(url), lightspan.operation("request", input="/"):
        in_a_dependency(client)
    [found] = read_recorded(url)
    assert [len(found.calls), found.rollout.task] == [1, "/"]
    assert "ticket" in found.tree()
    assert caplog.messages == []


def test_a_block_in_one_context_is_not_logged(
    client: openai.OpenAI, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    emit._warn_of_context.cache_clear()
    with record(url):
        with lightspan.operation("empty"):
            pass
        items = block(client, "a")
        take_each_in_a_copy(items)
    assert caplog.messages == []


def stream(client: openai.OpenAI) -> Iterator[Any]:
    with lightspan.operation("ticket"):
        yield "first"
        yield from say(client, stream=True)
        yield "last"


@pytest.mark.parametrize(
    ("taken", "status"), [(1, "succeeded"), (2, "failed"), (None, "succeeded")]
)
def test_a_stream_that_is_closed_in_an_answer_has_failed(
    client: openai.OpenAI, url: str, taken: int | None, status: str
) -> None:
    """Check that a cut answer fails the attempt, as the cancellation of an async one does."""
    with record(url):
        items: Any = stream(client)
        for place, item in enumerate(items, 1):
            if place == taken or item == "last":
                break
        items.close()
    [found] = read_recorded(url)
    assert found.attempt.status == status


# --- async ----------------------------------------------------------------------------------
async def ask(client: openai.AsyncOpenAI, text: str) -> Any:
    asked: Any = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="m", messages=asked)


async def async_block(client: openai.AsyncOpenAI, name: str) -> AsyncIterator[Any]:
    with lightspan.agent(name):
        for letter in LETTERS:
            yield await ask(client, f"{name}{letter}")


async def test_two_async_ones_in_turns(client: openai.OpenAI, url: str) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="k") as own:
        with record(url) as made:
            first, second = async_block(own, "a"), async_block(own, "b")
            for _ in LETTERS:
                await asyncio.create_task(anext(first))
                await ask(own, "app-")
                await anext(second)
            for one in (first, second):
                assert await anext(one, None) is None
            await ask(own, "app-")
            assert await asyncio.to_thread(made.flush)
    await asyncio.to_thread(check, url, ("a", LETTERS), ("b", LETTERS), *[("app", "-")] * 4)


@pytest.mark.parametrize("end", ["closed", "dropped"])
async def test_an_async_one_that_is_left(client: openai.OpenAI, url: str, end: str) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="k") as own:
        with record(url) as made:
            items: Any = async_block(own, "a")
            await anext(items)
            if end == "closed":
                await items.aclose()
            del items
            gc.collect()
            while state.steps:  # noqa: ASYNC110 (its end is a task of the loop's own)
                await asyncio.sleep(0)
            await ask(own, "app-")
            assert await asyncio.to_thread(made.flush)
    await asyncio.to_thread(check, url, ("a", "1"), ("app", "-"))
