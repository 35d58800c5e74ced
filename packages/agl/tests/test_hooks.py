"""Tests of hooks and tracers: which spans they see, and what is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

import lightspan_agl as agl
from lightspan.errors import UnsupportedError
from lightspan.schema.spans import SpanKind
from lightspan_agl._dev import DevSummary
from lightspan_testing.scripted import ScriptedServer


@agl.rollout
async def asks(task: Any, llm: agl.LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
        for _ in range(task["calls"]):
            await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": str(task)}]
            )
    if task["calls"] == 3:
        raise ValueError("three are too many")
    return float(task["calls"])


@agl.rollout
def asks_blocking(task: Any, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": str(task)}]
        )
    return 1.0


class Watch(agl.Hook):
    """A hook that notes its calls, with the number of model calls in the trace."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        self.seen.append(("rollout_start", rollout.input))

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        self.seen.append(("trace_start", _calls(tracer.get_last_trace())))

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
        assert agent.tracer is tracer
        self.seen.append(("trace_end", _calls(tracer.get_last_trace())))

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        self.seen.append(("rollout_end", _calls(spans)))
        raise RuntimeError("a hook may fail")


def _calls(spans: list[agl.Span]) -> int:
    return sum(span.kind is SpanKind.LLM for span in spans)


@pytest.mark.parametrize("agent", [asks, asks_blocking])
async def test_a_hook_sees_the_rollout_that_it_ends(agent: Any) -> None:
    hook, tracer = Watch(), agl.AgentOpsTracer()
    runner, store = agl.LitAgentRunner[Any](tracer), agl.InMemoryLightningStore()
    with ScriptedServer(lambda request: "fine") as server:
        resources: agl.NamedResources = {"main_llm": agl.LLM(endpoint=server.url, model="gpt")}
        with runner.run_context(agent=agent, store=store, hooks=[hook]):
            for calls in (2, 1) if agent is asks else (1, 1):
                hook.seen.clear()
                rollout = await runner.step({"calls": calls}, resources=resources)
                assert hook.seen == [
                    ("rollout_start", {"calls": calls}),
                    ("trace_start", 0),
                    ("trace_end", calls),
                    ("rollout_end", calls),
                ]
                assert rollout.status == "succeeded"
                assert _calls(tracer.get_last_trace()) == calls  # also after the rollout
                spans = await store.query_spans(rollout.rollout_id)
                assert agl.find_final_reward(spans) == float(calls)


class Emits(agl.Hook):
    """A hook that emits a reward in one of its methods."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.rewards: list[float | None] = []

    def _emit(self, where: str) -> None:
        if where == self._where:
            agl.emit_reward(0.25)

    async def on_rollout_start(self, **arguments: Any) -> None:
        self._emit("on_rollout_start")

    async def on_trace_start(self, **arguments: Any) -> None:
        self._emit("on_trace_start")

    async def on_trace_end(self, **arguments: Any) -> None:
        self._emit("on_trace_end")

    async def on_rollout_end(self, *, agent: Any, spans: Any, **arguments: Any) -> None:
        self._emit("on_rollout_end")
        assert agent.tracer.get_last_trace() == spans
        self.rewards.append(agl.find_final_reward(spans))


@agl.rollout
def without_reward(task: Any) -> None: ...


@agl.rollout
async def without_reward_async(task: Any) -> None: ...


@pytest.mark.parametrize("agent", [without_reward, without_reward_async])
@pytest.mark.parametrize(
    ("where", "reward"),
    [
        ("on_rollout_start", None),
        ("on_trace_start", 0.25),
        ("on_trace_end", 0.25),
        ("on_rollout_end", None),
    ],
)
async def test_rewards_of_hooks_count_inside_the_trace(
    agent: Any, where: str, reward: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    hook, store, runner = Emits(where), agl.InMemoryLightningStore(), agl.LitAgentRunner[Any]()
    with runner.run_context(agent=agent, store=store, hooks=[hook]):
        rollout = await runner.step("x")
    assert hook.rewards == [reward]
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == reward
    line = f"lightspan.reward in {where} of a hook is outside the trace, so it is not recorded"
    assert (line in caplog.text) == (reward is None)


@agl.rollout
def keeps_a_loop(task: Any) -> float:
    if task["n"] == 0:
        asyncio.set_event_loop(asyncio.new_event_loop())
    loop = asyncio.get_event_loop()
    reward = loop.run_until_complete(asyncio.sleep(0, task["n"]))
    if task["n"] == 1:
        loop.close()
    return float(reward)


def test_an_agent_may_keep_a_loop_in_its_thread() -> None:
    resources: agl.NamedResources = {"p": agl.PromptTemplate(template="x")}
    summary = agl.Trainer(initial_resources=resources).dev(keeps_a_loop, [{"n": 0}, {"n": 1}])
    assert isinstance(summary, DevSummary)
    assert summary.rewards == [0.0, 1.0]


async def test_a_failed_rollout_has_an_end_too(caplog: pytest.LogCaptureFixture) -> None:
    hook, store = Watch(), agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any]()
    with ScriptedServer(lambda request: "fine") as server:
        resources: agl.NamedResources = {"main_llm": agl.LLM(endpoint=server.url, model="gpt")}
        with runner.run_context(agent=asks, store=store, hooks=[hook]):
            rollout = await runner.step({"calls": 3}, resources=resources)
    assert rollout.status == "failed"
    assert [name for name, _ in hook.seen] == ["rollout_start", "trace_start", "rollout_end"]
    assert "ValueError: three are too many" in caplog.text


def test_trainers_call_hooks_and_hand_agents_their_tracer() -> None:
    hook, tracer = Watch(), _Handing()
    with ScriptedServer(lambda request: "fine") as server:
        llm = agl.LLM(endpoint=server.url, model="gpt")
        trainer = agl.Trainer(initial_resources={"main_llm": llm}, hooks=hook, tracer=tracer)
        trainer.dev(asks, [{"calls": 1}, {"calls": 2}])
    assert [count for name, count in hook.seen if name == "trace_end"] == [1, 2]
    assert asks.tracer is tracer  # type: ignore[union-attr]


class _Handing(agl.OtelTracer):
    """A tracer with a method of its own that agents may call."""

    def get_langchain_handler(self, tags: list[str] | None = None) -> Any:
        return "handler"


class _Recording(agl.OtelTracer):
    """A tracer that would record by itself."""

    def trace_context(self, name: str) -> Any:
        raise AssertionError(name)

    def create_span(self, name: str) -> Any:
        raise AssertionError(name)


def test_what_would_never_be_called_is_refused_by_name() -> None:
    for make in (agl.Trainer, agl.LitAgentRunner):
        with pytest.raises(UnsupportedError, match=r"_Recording.*: create_span, trace_context wo"):
            make(tracer=_Recording())
    with pytest.raises(UnsupportedError, match=r"reward_match='first'.*: leave it out"):
        agl.TracerTraceToTriplet(reward_match="first")
    with pytest.raises(UnsupportedError, match=r"use instances of subclasses of .*Hook"):
        agl.Trainer(hooks=[Watch])  # type: ignore[list-item]


def test_options_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:9", model="m")
    trainer = agl.Trainer(
        initial_resources={"main_llm": llm}, adapter={"repair_hierarchy": False}, port=1
    )
    trainer.dev(asks, [{"calls": 0}])
    text = "Trainer: without effect: port=1, adapter={'repair_hierarchy': False} ("
    assert text in capsys.readouterr().out
    agl.LitAgentRunner(poll_interval=1.0, max_rollouts=None)
    assert "LitAgentRunner: without effect: poll_interval=1.0" in capsys.readouterr().out
