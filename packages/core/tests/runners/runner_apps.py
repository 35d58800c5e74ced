"""Apps for the tests of runners, which import them by name, in this process or another.

Functions that call a model import the client themselves, because that import takes two thirds of
the start of a runner process.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import lightspan.capture.emit as emit
from lightspan.runners.protocol import GATEWAY_VARIABLE, TOKEN_VARIABLE


class Unreadable:
    """An object whose float() and repr() raise."""

    def __float__(self) -> float:
        raise TypeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


SPECIAL = {
    "nan": float("nan"),
    "unreadable": Unreadable(),
    "two": {"reward": 0.5, "a\udc80": 3},
}


def returns(task: dict[str, Any]) -> Any:
    value = task.get("value")
    return SPECIAL.get(value, value) if isinstance(value, str) else value


async def returns_async(task: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return returns(task)


def raises(task: dict[str, Any]) -> float:
    raise ValueError(task["text"])


class Skipped(BaseException):
    """A BaseException that is no Exception, like those with which pytest skips and fails tests."""


BUILTIN: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        StopIteration,
        StopAsyncIteration,
        GeneratorExit,
        KeyboardInterrupt,
        SystemExit,
        Skipped,
    )
}
"""Kind → exception that futures, coroutines and event loops treat specially."""


def raises_builtin(task: dict[str, Any]) -> float:
    raise BUILTIN[task["kind"]]("by the app")


async def raises_builtin_async(task: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return raises_builtin(task)


def raises_builtin_later(task: dict[str, Any]) -> Any:
    """Return the coroutine of `raises_builtin_async`, from a plain function."""
    return raises_builtin_async(task)


def raises_builtin_in_a_thread(task: dict[str, Any]) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(raises_builtin, task).result()


async def ends_in_a_task_of_its_own(task: dict[str, Any]) -> float:
    """Raise an exception in a task of the app's own.

    asyncio passes SystemExit and KeyboardInterrupt of a task on to the event loop's caller.
    """
    kind = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}.get(task["kind"])

    async def inner() -> float:
        if kind is not None:
            raise kind("by the app")
        return float(os.getpid())

    return await asyncio.create_task(inner())


async def cancels_itself(task: Any) -> float:
    raise asyncio.CancelledError


def hands_on(task: Any) -> Any:
    """Return the coroutine of `returns_async`, from a plain function."""
    return returns_async(task)


async def sleeps_async(task: dict[str, Any]) -> float:
    await asyncio.sleep(task["seconds"])
    return 1.0


def sleeps(task: dict[str, Any]) -> float:
    time.sleep(task["seconds"])
    return float(os.getpid())


def emits_a_text(task: Any) -> float:
    emit.emit_reward("good")  # type: ignore[arg-type]
    return 1.0


def emits(task: Any) -> None:
    with emit.agent("planner"), emit.tool("search", "{}"):
        emit.emit_reward(0.5)
        emit.emit_message("hello \ud800")


def ask(llm: Any, text: str) -> str:
    import openai

    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": text}]
        )
    return str(answer.choices[0].message.content)


def asks(task: dict[str, Any], llm: Any) -> float:
    with emit.agent("writer"):
        return float(ask(llm, task["text"]))


async def asks_async(task: dict[str, Any], llm: Any) -> float:
    import openai

    with emit.agent("writer"):
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1") as client:  # no key
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": task["text"]}]
            )
    return float(answer.choices[0].message.content or "nan")


def catches_and_hides(task: dict[str, Any], llm: Any) -> float:
    import openai

    try:
        ask(llm, task["text"])
    except openai.OpenAIError as error:
        raise RuntimeError("the model does not answer") from error
    return 1.0


def shows_environment(task: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # an app may have children
        assert pool.map(abs, [-1]) == [1]
    assert os.environ[TOKEN_VARIABLE]
    assert os.environ[GATEWAY_VARIABLE] == "http://127.0.0.1:9"
    assert not any(".db" in text for text in os.environ.values())  # where the store is
    return {"reward": 1.0, "pid": float(os.getpid())}


def kills_itself(task: dict[str, Any]) -> float:
    if not os.path.exists(task["marker"]):
        with open(task["marker"], "w"):
            pass
        os.kill(os.getpid(), 9)
    return 1.0


POOLS: list[ProcessPoolExecutor] = []


def keeps_a_pool(task: dict[str, Any]) -> float:
    """Use a process pool that stays open; write the start method and the pool's process ids."""
    if not POOLS:
        POOLS.append(ProcessPoolExecutor(2))
    assert sum(POOLS[0].map(abs, [-1, 1])) == 2
    method = multiprocessing.get_start_method()
    with open(task["marker"], "w") as file:
        json.dump([method, [child.pid for child in multiprocessing.active_children()]], file)
    return 1.0


def dies(task: dict[str, Any]) -> float:
    if task["dies"]:
        os.kill(os.getpid(), 9)
    return 1.0


def catches_and_goes_on(task: dict[str, Any], llm: Any) -> float:
    """Ask `task["times"]` times at most until there is an answer, and end without one too."""
    import openai

    for _ in range(task["times"]):
        try:
            ask(llm, task["text"])
            break
        except openai.OpenAIError:
            continue
    return 0.0
