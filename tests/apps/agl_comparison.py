"""Small programs in the original's names, run with Agent Lightning 0.3.0 and with `lightspan.agl`:
what they print is the same.

    python agl_comparison.py agentlightning --check FILE     # does 0.3.0 say what is written there?
    python agl_comparison.py agentlightning --write FILE     # write what it says

A program gets the module and returns JSON; `shows` names the public names that it shows at work.
`tests/core/agl/test_comparison.py` compares them, `nox -s tests_agl` looks whether 0.3.0 still says
what is written there. Where the two differ by design, a program asks for what they share.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import socket
import sys
import tempfile
import types
import typing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}
SHOWN: dict[str, set[str]] = {}
"""Program → the names that it shows."""


def shows(*names: str) -> Callable[[Program], Program]:
    def keep(program: Program) -> Program:
        PROGRAMS[program.__name__] = program
        SHOWN[program.__name__] = set(names)
        return program

    return keep


def raised(call: Callable[[], Any]) -> str:
    """Which of Python's errors it raises."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = (TypeError, ValueError, RuntimeError)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return "nothing"


def fails(call: Callable[[], Any]) -> bool:
    """Whether it raises anything."""
    try:
        call()
    except Exception:
        return True
    return False


def decorator_of(agl: Any) -> Any:
    """0.3.0 hides the decorator `reward` behind a module of that name."""
    return agl.reward.reward if isinstance(agl.reward, types.ModuleType) else agl.reward


# --- records --------------------------------------------------------------------------------
IDS = {"trace_id": "a" * 32, "span_id": "b" * 16, "parent_id": "c" * 16}


def span(agl: Any, **fields: Any) -> Any:
    return agl.Span.from_attributes(**{"attributes": {}, **IDS, **fields})


@shows("Span", "SpanContext", "TraceStatus", "OtelResource", "SpanCoreFields", "Event", "Link")
def spans(agl: Any) -> Any:
    core = agl.SpanCoreFields(
        name="core",
        status=agl.TraceStatus(status_code="ERROR", description="bad"),
        attributes={"k": [1, 2]},
        start_time=1.5,
        end_time=2,
    )
    from_core = agl.Span.from_core_fields(core, rollout_id="r", attempt_id="a", sequence_id=3)
    whole = span(agl, attributes={"x": 1}, name="n", rollout_id="r", start_time=1, end_time=2.5)
    event = agl.Event(name="e", attributes={"z": True}, timestamp=3)
    link = agl.Link(context=whole.context, attributes={"why": "so"})
    full = whole.model_copy(update={"events": [event], "links": [link]})
    again = agl.Span.model_validate_json(full.model_dump_json())
    resource = agl.OtelResource(attributes={"service.name": "s"}, schema_url="u")
    return {
        "core": from_core.model_dump(exclude={"trace_id", "span_id", "context"}),
        "whole": whole.model_dump(),
        "full": full.model_dump(mode="json"),
        "again": again == full,
        "types": [type(again.events[0]).__name__, type(again.links[0].context).__name__],
        "random": len({agl.Span.from_attributes(attributes={}).span_id for _ in range(3)}),
        "default": [agl.Span.from_attributes(attributes={}).name, whole.resource.model_dump()],
        "resource": span(agl, resource=resource).resource.model_dump(),
        "wrong": [
            raised(lambda: agl.TraceStatus(status_code="FINE")),
            raised(lambda: agl.SpanContext(trace_id=1, span_id="", is_remote=0, trace_state={})),
            raised(lambda: agl.Span.model_validate({"name": "n"})),
        ],
    }


@shows("Span", "Event", "Link", "SpanContext", "TraceStatus", "OtelResource")
def spans_of_opentelemetry(agl: Any) -> Any:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "x"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("programs")
    outer = tracer.start_span("outer", attributes={"k": (1, 2), "t": "x"}, start_time=10**18)
    outer.add_event("happened", {"z": 1.5}, timestamp=10**18 + 10**9)
    outer.set_status(trace.StatusCode.ERROR, "bad")
    inner = tracer.start_span(
        "inner",
        context=trace.set_span_in_context(outer),
        links=[trace.Link(outer.get_span_context(), {"l": 1})],
        start_time=10**18,
    )
    inner.end(10**18 + 5)
    outer.end(10**18 + 2 * 10**9)
    first, second = (
        agl.Span.from_opentelemetry(s, "r", "a", n) for n, s in enumerate(kept.get_finished_spans())
    )
    ids = {"trace_id", "span_id", "parent_id", "context", "parent", "links"}
    return {
        "inner": first.model_dump(mode="json", exclude=ids),
        "outer": second.model_dump(mode="json", exclude=ids),
        "child": first.parent_id == second.span_id == first.parent.span_id,
        "link": [first.links[0].context.span_id == second.span_id, first.links[0].attributes],
        "lengths": [len(first.trace_id), len(first.span_id)],
    }


@shows("SpanNames", "SpanAttributeNames", "StatusCode", "RolloutMode", "RolloutStatus")
def words(agl: Any) -> Any:
    literals = ("StatusCode", "RolloutMode", "RolloutStatus", "AttemptStatus", "WorkerStatus")
    return {
        **{name: sorted(typing.get_args(getattr(agl, name))) for name in literals},
        "SpanNames": {name.name: name.value for name in agl.SpanNames},
        "SpanAttributeNames": {name.name: name.value for name in agl.SpanAttributeNames},
        "text": agl.SpanNames.REWARD == "agentlightning.reward",
    }


SHOWN["words"] |= {"AttemptStatus", "WorkerStatus"}


@shows("Attributes", "AttributeValue", "TraceState", "SpanLike", "TaskInput", "RolloutRawResult")
def annotations(agl: Any) -> Any:
    plain = {str, bool, int, float}
    return {
        "Attributes": typing.get_origin(agl.Attributes).__name__,
        "AttributeValue": sorted(
            kind.__name__ for kind in typing.get_args(agl.AttributeValue) if kind in plain
        ),
        "TraceState": [kind.__name__ for kind in typing.get_args(agl.TraceState)],
        "SpanLike": agl.Span in typing.get_args(agl.SpanLike),
        "TaskInput": agl.TaskInput is Any,
        "RolloutRawResult": [
            kind in typing.get_args(agl.RolloutRawResult) for kind in (float, type(None))
        ],
        "NamedResources": typing.get_origin(agl.NamedResources).__name__,
        "FilterField": sorted(agl.FilterField.__annotations__),
        "SortOptions": sorted(agl.SortOptions.__annotations__),
        "FilterOptions": issubclass(dict, typing.get_origin(agl.FilterOptions)),
        "store": [
            sorted(agl.LightningStoreCapabilities.__annotations__),
            {"name", "total_rollouts"} <= set(agl.LightningStoreStatistics.__annotations__),
        ],
        "protocols": [
            hasattr(agl.SpanRecordingContext, "record_exception"),
            hasattr(agl.SpanRecordingContext, "get_recorded_span"),
            hasattr(agl.Dataset[int], "__getitem__"),
            hasattr(agl.ExecutionEvent, "wait"),
        ],
    }


SHOWN["annotations"] |= {
    *("NamedResources", "FilterField", "SortOptions", "FilterOptions", "SpanRecordingContext"),
    *("Dataset", "ExecutionEvent", "LightningStoreCapabilities", "LightningStoreStatistics"),
}


@shows("Rollout", "Attempt", "AttemptedRollout", "RolloutConfig", "EnqueueRolloutRequest", "Worker")
def rollouts(agl: Any) -> Any:
    attempt = agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1)
    rollout = agl.Rollout(rollout_id="r", input={"q": [1]}, start_time=2.5, mode="val")
    nested = {"rollout_id": "r", "input": 1, "start_time": 1.0, "attempt": attempt.model_dump()}
    attempted = agl.AttemptedRollout.model_validate(nested)
    wrong = {**nested, "rollout_id": "other"}
    config = agl.RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"])
    return {
        "attempt": attempt.model_dump(),
        "rollout": rollout.model_dump(),
        "attempted": [type(attempted.attempt).__name__, attempted.model_dump()],
        "isinstance": isinstance(attempted, agl.Rollout),
        "config": config.model_dump(),
        "request": agl.EnqueueRolloutRequest(input="x", config=config).model_dump(),
        "worker": agl.Worker(worker_id="w", status="busy").model_dump(exclude_none=True),
        "own defaults": agl.Rollout(rollout_id="r", input=1, start_time=1).config
        is not rollout.config,
        "wrong": [
            raised(lambda: agl.AttemptedRollout(**wrong)),
            raised(lambda: agl.RolloutConfig(max_attempts=0)),
            raised(lambda: agl.RolloutConfig(retry_condition=["tired"])),
            raised(lambda: agl.Rollout(rollout_id="r", input=1, start_time=1, mode="dev")),
            raised(lambda: agl.Worker(worker_id=7)),
        ],
    }


@shows("Triplet", "PaginatedResult", "ParallelWorkerBase", "Hook")
def others(agl: Any) -> Any:
    page = agl.PaginatedResult(items=["a", "b", "c"], limit=3, offset=1, total=9)
    worker = agl.ParallelWorkerBase()
    before = worker.worker_id
    worker.init()
    worker.init_worker(4)
    hooks = ("on_rollout_start", "on_rollout_end", "on_trace_start", "on_trace_end")
    return {
        "triplet": agl.Triplet(prompt=[1], response="x", reward=1).model_dump(),
        "page": [len(page), page[0], list(page[1:]), list(page), "b" in page, page.total],
        "limits": [page.limit, page.offset],
        "worker": [before, worker.worker_id, worker.run()],
        "hooks": [inspect.iscoroutinefunction(getattr(agl.Hook, name)) for name in hooks],
        "hook": isinstance(agl.Hook(), agl.ParallelWorkerBase),
    }


@shows("LLM", "ProxyLLM", "PromptTemplate", "Resource", "ResourceUnion", "ResourcesUpdate")
def resources(agl: Any) -> Any:
    llm = agl.LLM(endpoint="http://e/v1", model="m", sampling_parameters={"temperature": 0.5})
    rollout = agl.AttemptedRollout(
        rollout_id="r",
        input=1,
        start_time=1,
        attempt=agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1),
    )
    proxies = [
        agl.ProxyLLM(endpoint=url, model="m", api_key="k")
        for url in ("http://e", "http://e/", "http://e/v1", "http://e/v1/")
    ]
    prompt = agl.PromptTemplate(template="Say {x} and {y!r}", engine="f-string")
    update = agl.ResourcesUpdate(
        resources_id="rs",
        create_time=1,
        update_time=2,
        version=1,
        resources={"llm": llm, "proxy": proxies[0], "prompt": prompt},
    )
    again = agl.ResourcesUpdate.model_validate_json(update.model_dump_json())
    return {
        "llm": [llm.get_base_url(), llm.get_base_url("r", "a"), llm.model_dump()],
        "proxies": [proxy.get_base_url("r", "a") for proxy in proxies],
        "none": proxies[0].get_base_url(None, None),
        "half": raised(lambda: proxies[0].get_base_url("r", None)),
        "baked": proxies[2].with_attempted_rollout(rollout).model_dump(),
        "prompt": [prompt.format(x=1, y="z"), prompt.model_dump()],
        "kinds": [isinstance(item, agl.Resource) for item in (llm, proxies[0], prompt)],
        "is an LLM": isinstance(proxies[0], agl.LLM),
        "update": update.model_dump(mode="json"),
        "again": {name: type(item).__name__ for name, item in again.resources.items()},
        "equal": again.resources["llm"] == llm,
        "one of": len(typing.get_args(agl.ResourceUnion)) >= 2,
        "wrong": [
            raised(lambda: agl.LLM(endpoint=1, model="m")),
            raised(lambda: agl.PromptTemplate(template="x", engine="mustache")),
            raised(lambda: agl.ResourcesUpdate.model_validate({"resources_id": "x"})),
        ],
    }


# --- what an agent says, and what spans say -------------------------------------------------
def told(core: Any) -> Any:
    """What a span says, without when."""
    attributes = {k: v for k, v in core.attributes.items() if k != "exception.stacktrace"}
    return [core.name, attributes, core.status.status_code]


@shows("emit_reward", "emit_annotation", "emit_object", "find_reward_spans", "find_final_reward")
def rewards(agl: Any) -> Any:
    one = agl.emit_reward(0.5, propagate=False)
    whole = agl.emit_reward(True, attributes={"why": {"so": "x"}}, propagate=False)
    many = agl.emit_reward({"style": 1, "right": 0.25}, primary_key="right", propagate=False)
    note = agl.emit_annotation({"a": {"b": [1, 2], "c": "x"}, "d": 1.5}, propagate=False)
    kept = [
        agl.Span.from_core_fields(core, sequence_id=n)
        for n, core in enumerate([one, note, many, whole, note])
    ]
    agentops = span(
        agl, attributes={"agentops.task.output": '{"type": "reward", "value": 2.5}'}, name="task"
    )
    legacy = span(agl, attributes={"reward": 0.75}, name="agentlightning.annotation")
    odd = [agentops, legacy, span(agl, attributes={"agentops.entity.output": "no JSON"})]
    return {
        "told": [told(core) for core in (one, whole, many, note)],
        "values": [agl.get_reward_value(s) for s in [*kept, *odd]],
        "are": [agl.is_reward_span(s) for s in [*kept, *odd]],
        "found": [s.sequence_id for s in agl.find_reward_spans(kept)],
        "final": [
            agl.find_final_reward(kept),
            agl.find_final_reward([]),
            agl.find_final_reward(odd),
        ],
        "dimensions": [
            [r.model_dump() for r in agl.get_rewards_from_span(s)] for s in [*kept, *odd]
        ],
        "wrong": [
            raised(lambda: agl.emit_annotation({"a": object()}, propagate=False)),
            raised(lambda: agl.emit_annotation({"a": [1, "x"], "b": None}, propagate=False)),
            raised(lambda: agl.emit_reward("much", propagate=False)),
        ],
        "refused": [
            raised(lambda: agl.emit_reward({"a": 1.0}, propagate=False)) != "nothing",
            raised(lambda: agl.emit_reward({"a": 1.0}, primary_key="b", propagate=False))
            != "nothing",
            raised(lambda: agl.emit_reward({"a": "x"}, primary_key="a", propagate=False))
            != "nothing",
        ],
    }


SHOWN["rewards"] |= {"get_reward_value", "get_rewards_from_span", "is_reward_span"}


class Point:
    """No JSON."""


@shows("emit_object", "get_object_value", "get_message_value")
def objects(agl: Any) -> Any:
    values: list[Any] = ["text", 3, 2.5, True, b"\x00\xff", [1, {"a": None}], {"k": "v"}, None]
    cores = [agl.emit_object(value, {"tag": 1}, propagate=False) for value in values]
    back = [agl.get_object_value(agl.Span.from_core_fields(core)) for core in cores]
    message = span(agl, attributes={"agentlightning.message.body": "hello"})
    return {
        "told": [told(core) for core in cores],
        "back": [value == again for value, again in zip(values, back, strict=True)],
        "nothing": [agl.get_object_value(message), agl.get_message_value(span(agl))],
        "message": agl.get_message_value(message),
        "refused": raised(lambda: agl.emit_object(Point(), propagate=False)) != "nothing",
        "broken": raised(
            lambda: agl.get_object_value(span(agl, attributes={"agentlightning.object.json": "{"}))
        )
        != "nothing",
    }


def listener(agl: Any) -> Any:
    """A tracer of one's own, that keeps what it hears."""

    class Listener(agl.Tracer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def create_span(
            self, name: str, attributes: Any = None, timestamp: Any = None, status: Any = None
        ) -> Any:
            core = agl.DummyTracer().create_span(name, attributes, timestamp, status)
            self.heard.append(told(core))
            return core

    return Listener()


@shows("Tracer", "DummyTracer", "get_active_tracer", "set_active_tracer", "clear_active_tracer")
def tracer_of_ones_own(agl: Any) -> Any:
    tracer = listener(agl)
    reward = decorator_of(agl)

    @reward
    def judge(x: float) -> float:
        return x / 2

    @reward
    async def judge_later(x: float) -> float:
        return x * 2

    first = agl.get_active_tracer()
    agl.set_active_tracer(tracer)
    try:
        again = raised(lambda: agl.set_active_tracer(tracer))
        is_set = agl.get_active_tracer() is tracer
        results = [judge(1.0), asyncio.run(judge_later(3.0))]
        returned = [agl.emit_message("hi", {"n": {"m": 1}}), agl.emit_exception(ValueError("v"))]
        agl.emit_reward(1)
        agl.emit_object([1])
        agl.emit_annotation({"a": 1})
        agl.emit_message("unheard", propagate=False)
    finally:
        agl.clear_active_tracer()
    return {
        "active": [first is None, again, is_set, agl.get_active_tracer() is None],
        "results": results,
        "returned": returned,
        "heard": tracer.heard,
        "wrong": [
            raised(lambda: agl.emit_message(7, propagate=False)) != "nothing",
            raised(lambda: agl.emit_exception("v", propagate=False)) != "nothing",
        ],
    }


SHOWN["tracer_of_ones_own"] |= {
    *("emit_message", "emit_exception", "emit_reward", "emit_object", "emit_annotation", "reward"),
}


@shows("operation", "DummyTracer", "SpanRecordingContext")
def operations(agl: Any) -> Any:
    with agl.operation(propagate=False, user=7, deep={"x": [1, 2]}) as op:
        early = raised(op.span)
        op.set_input(1, {"q": "x"}, mode="fast")
        op.set_output({"ok": [True, "x"]})
    kept = []

    class Keeps(agl.DummyTracer):  # type: ignore[misc, name-defined]
        def operation_context(self, *args: Any, **kwargs: Any) -> Any:
            context = super().operation_context(*args, **kwargs)
            kept.append(context)
            return context

    tracer = agl.DummyTracer()
    with tracer.operation_context("block", {"a": 1}) as recording:
        recording.record_attributes({"b": 2})
        recording.record_status("ERROR", "meh")
    failed = None
    try:
        with tracer.operation_context("fails") as failed:
            raise ValueError("no")
    except ValueError:
        pass

    @agl.operation(propagate=False, kind="sum")
    def add(a: int, b: int = 2, *more: int, **named: Any) -> int:
        return a + b + sum(more)

    @agl.operation(propagate=False)
    async def later(a: int) -> dict[str, int]:
        return {"a": a}

    assert failed is not None
    return {
        "early": early != "nothing",
        "block": told(op.span()),
        "outside": raised(lambda: op.set_output(1)) != "nothing",
        "recorded": told(recording.get_recorded_span()),
        "failed": told(failed.get_recorded_span()),
        "functions": [add(1), add(1, 2, 3, x=4), asyncio.run(later(5)), add.__name__],
    }


@shows("OtelTracer", "operation", "emit_message", "emit_reward", "emit_object", "emit_exception")
def traces(agl: Any) -> Any:
    tracer = agl.OtelTracer()

    async def work(x: int) -> int:
        agl.emit_reward(x / 4)
        return x

    async def inside() -> None:
        async with tracer.trace_context("first"):

            @agl.operation(kind="tool")  # 0.3.0 decorates only where a tracer is active
            def look_up(word: str, times: int = 1) -> list[str]:
                agl.emit_message(f"looked up {word}")
                return [word] * times

            with agl.operation(name="outer", user=1) as op:
                op.set_input("in")
                look_up("a", times=2)
                agl.emit_object({"k": 1})
                op.set_output(2.5)
            agl.emit_reward({"a": 1.0, "b": 0.5}, primary_key="b")

    with tracer.lifespan():
        asyncio.run(inside())
        first = tracer.get_last_trace()
        result = asyncio.run(tracer.trace_run_async(work, 2))
        second = tracer.get_last_trace()
    return {"first": tree(first), "second": [result, tree(second)]}


def tree(spans: Any) -> Any:
    """What spans say, each with the name of its parent, in an order of their content."""
    by_id = {s.span_id: s for s in spans}
    said = [
        [
            *told(s)[:2],
            by_id[s.parent_id].name if s.parent_id in by_id else None,
        ]
        for s in spans
    ]
    return sorted(said, key=json.dumps)


# --- adapters -------------------------------------------------------------------------------
def node(
    agl: Any, span_id: str, parent: str | None, start: float, end: float, name: str, **said: Any
) -> Any:
    attributes = {key.replace("__", "."): value for key, value in said.items()}
    return agl.Span.from_attributes(
        attributes=attributes,
        span_id=span_id,
        parent_id=parent,
        trace_id="t" * 32,
        start_time=start,
        end_time=end,
        name=name,
    )


def call(agl: Any, span_id: str, parent: str | None, start: float, **said: Any) -> Any:
    return node(
        agl,
        span_id,
        parent,
        start,
        start + 0.5,
        "openai.chat.completion",
        **{
            "gen_ai__response__id": f"id-{span_id}",
            "gen_ai__request__model": "m",
            "gen_ai__prompt__0__role": "user",
            "gen_ai__prompt__0__content": f"asked {span_id}",
            "gen_ai__completion__0__role": "assistant",
            "gen_ai__completion__0__content": f"answered {span_id}",
            "prompt_token_ids": [1, int(start)],
            "response_token_ids": [2, int(start)],
            **said,
        },
    )


def earned(agl: Any, span_id: str, parent: str | None, start: float, value: float) -> Any:
    said = {"agentlightning__reward__0__name": "primary", "agentlightning__reward__0__value": value}
    return node(agl, span_id, parent, start, start, "agentlightning.annotation", **said)


def episode(agl: Any) -> list[Any]:
    """A writer that is called twice, a checker in between, rewards and a judge."""
    return [
        node(agl, "root", None, 0, 30, "session"),
        node(agl, "w1", "root", 1, 6, "agent", agent__name="write_query"),
        call(agl, "c1", "w1", 2),
        node(agl, "inner", "w1", 3, 4, "tool"),
        call(agl, "c2", "inner", 3),
        earned(agl, "r1", "root", 7, 0.25),
        node(agl, "k", "root", 8, 12, "agent", recipient_agent_type="check_query"),
        call(agl, "c3", "k", 9),
        node(
            agl,
            "w2",
            "root",
            13,
            20,
            "agent",
            agentops__span__kind="agent",
            operation__name="rewrite_query",
        ),
        call(agl, "c4", "w2", 14, logprobs__content='[{"logprob": -0.5}]'),
        node(agl, "dup", "c4", 14.1, 14.4, "openai.chat.completion"),
        node(
            agl,
            "j",
            "w2",
            16,
            18,
            "agentlightning.operation",
            agentlightning__operation__name="agentlightning.reward",
        ),
        call(agl, "c5", "j", 17),
        earned(agl, "r2", "w2", 19, 1.0),
        node(agl, "lc", "root", 21, 25, "langchain.Chain.x", lc_name="Tail"),
        call(agl, "c6", "lc", 22, prompt_token_ids="none"),
        earned(agl, "r3", "root", 26, 0.5),
    ]


@shows("TracerTraceToTriplet", "TraceToTripletBase", "Triplet")
def triplets(agl: Any) -> Any:
    def adapted(spans: list[Any], **options: Any) -> Any:
        adapter = agl.TracerTraceToTriplet(repair_hierarchy=False, **options)
        return [triplet.model_dump() for triplet in adapter(spans)]

    def calls(spans: list[Any], **options: Any) -> Any:
        return [
            [t["metadata"]["response_id"], t["metadata"]["agent_name"], t["reward"]]
            for t in adapted(spans, **options)
        ]

    spans = episode(agl)
    images = [
        call(
            agl,
            "i",
            None,
            1,
            gen_ai__prompt__0__content=json.dumps(
                [
                    {"type": "image_url", "image_url": {"url": "http://pic"}},
                    {"type": "text", "text": "x"},
                ]
            ),
        )
    ]
    return {
        "whole": adapted(spans),
        "write": calls(spans, agent_match="write"),
        "anchored": calls(spans, agent_match="^write"),
        "nobody": calls(spans, agent_match="nobody"),
        "judges too": calls(spans, exclude_llm_call_in_reward=False),
        "siblings": calls(spans, reward_match="first_sibling"),
        "tools": calls(spans, llm_call_match="^tool$"),
        "with tokens": calls(spans, _skip_empty_token_spans=True),
        "an orphan": calls([call(agl, "o", "unknown", 1), earned(agl, "r", "unknown", 2, 1.5)]),
        "images": adapted(images),
        "is": issubclass(agl.TracerTraceToTriplet, agl.TraceToTripletBase),
        "adapter": isinstance(agl.TracerTraceToTriplet(), agl.TraceAdapter),
    }


@shows("TraceToMessages", "TraceAdapter", "OtelTraceAdapter", "Adapter")
def messages(agl: Any) -> Any:
    asks = call(
        agl,
        "a",
        None,
        1,
        gen_ai__prompt__0__role="system",
        gen_ai__prompt__1__role="user",
        gen_ai__prompt__1__content="?",
        gen_ai__request__functions__0__name="look",
        gen_ai__request__functions__0__description="Looks",
        gen_ai__request__functions__0__parameters='{"type": "object", "properties": {}}',
    )
    tool = node(
        agl,
        "t",
        "a",
        1.1,
        1.2,
        "tool",
        tool__name="look",
        tool__parameters='{"x": 1}',
        tool__call__id="call-1",
        tool__call__type="function",
    )
    last = call(agl, "b", None, 3)

    class Counts(agl.TraceAdapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: Any) -> int:
            return len(source)

    class Reads(agl.OtelTraceAdapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: Any) -> list[str]:
            return [s.name for s in source]

    class Doubles(agl.Adapter):  # type: ignore[misc, name-defined]
        def adapt(self, source: int) -> int:
            return 2 * source

    kept = agl.TraceToMessages().adapt([asks, tool, last])
    for conversation in kept:  # 0.3.0 says of some messages that they are of no tool call
        for message in conversation["messages"]:
            if message.get("tool_call_id", 0) is None:
                del message["tool_call_id"]
    return {
        "messages": kept,
        "none": agl.TraceToMessages()([tool]),
        "own": [Counts()([1, 2]), Reads()([asks]), Doubles()(3)],
        "is": [
            isinstance(Counts(), agl.Adapter),
            isinstance(agl.TraceToMessages(), agl.TraceAdapter),
        ],
        "must": fails(lambda: agl.Adapter().adapt(1)),
    }


# --- small helpers --------------------------------------------------------------------------
@shows("LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var")
def environment(agl: Any) -> Any:
    variable = agl.LightningEnvVar.AGL_SERVER_PORT
    found: dict[str, Any] = {"names": sorted(v.value for v in agl.LightningEnvVar)}
    resolvers = (agl.resolve_bool_env_var, agl.resolve_int_env_var, agl.resolve_str_env_var)
    try:
        for text in (None, "12", "yes", " OFF ", "x"):
            if text is None:
                os.environ.pop(variable.value, None)
            else:
                os.environ[variable.value] = text
            found[str(text)] = []
            for resolve in resolvers:
                try:
                    value = [resolve(variable), resolve(variable, 1), resolve(variable, fallback=0)]
                except ValueError:
                    value = ["ValueError", resolve(variable, 1)]
                found[str(text)].append(value)
    finally:
        os.environ.pop(variable.value, None)
    return found


@shows("ThreadingEvent", "MultiprocessingEvent", "ExecutionEvent")
def events(agl: Any) -> Any:
    found = {}
    for event in (agl.ThreadingEvent(), agl.MultiprocessingEvent()):
        said = [event.is_set(), event.wait(0.01)]
        event.set()
        said += [event.is_set(), event.wait(), event.wait(1.0)]
        event.clear()
        found[type(event).__name__] = [*said, event.is_set()]
    return found


@shows("setup_logging", "setup_module_logging", "configure_logger")
def logs(agl: Any) -> Any:
    import warnings

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "deep", "lines.log")
        agl.setup_logging(
            "INFO",
            console=False,
            apply_to=["mine"],
            submodule_levels={"mine.deep": "ERROR"},
            files=path,
        )
        mine, deep = logging.getLogger("mine"), logging.getLogger("mine.deep")
        mine.warning("seen")
        deep.warning("not seen")
        for handler in mine.handlers:
            handler.flush()
        with open(path) as file:
            lines = file.read().count("seen")
        levels = [mine.level, deep.level, mine.propagate]
        for logger in (
            mine,
            deep,
            logging.getLogger("agentlightning"),
            logging.getLogger("lightspan"),
        ):
            for handler in logger.handlers:
                handler.close()
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
    own = agl.setup_module_logging("WARNING", name="own", console=True, propagate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = agl.configure_logger(logging.DEBUG, name="old")
    said = [[x.name, x.level, x.propagate, len(x.handlers)] for x in (own, old)]
    for logger in (own, old):
        logger.handlers.clear()
    return {"lines": lines > 0, "levels": levels, "loggers": said}


class Part:
    """A component."""

    def __init__(self, size: int = 1, store: Any = None) -> None:
        self.size, self.store = size, store


class LargePart(Part):
    """A larger one."""


@shows("build_component")
def components(agl: Any) -> Any:
    here = f"{__name__}.LargePart"
    own = Part(7)

    def built(spec: Any, **options: Any) -> Any:
        try:
            part = agl.build_component(spec, expected_type=Part, spec_name="part", **options)
        except (ValueError, TypeError) as error:
            return "TypeError" if isinstance(error, TypeError) else "ValueError"
        return part if part is None else [type(part).__name__, part.size, part.store]

    return {
        "itself": agl.build_component(own, expected_type=Part, spec_name="part") is own,
        "class": built(LargePart),
        "function": built(lambda: Part(3)),
        "text": built(here),
        "mapping": built({"type": here, "size": 4}),
        "none": [built(None), built(None, allow_none=True), built(None, default_factory=Part)],
        "defaults": built(LargePart, optional_defaults={"size": 9, "store": lambda: "s", "x": 1}),
        "given": built({"type": here, "size": 2}, optional_defaults={"size": 9}),
        "short": [
            built("large", registry={"large": here}),
            built({"name": "large"}, registry={"large": here}),
        ],
        "plain": built({"size": 5}, dict_requires_type=False, dict_default_cls=Part),
        "wrong": [built({"size": 5}), built(3.5), built(lambda: "text"), built(dict)],
    }


# --- agents ---------------------------------------------------------------------------------
def agent_of(agl: Any) -> Any:
    class Doubles(agl.LitAgent):  # type: ignore[misc, name-defined]
        """Its reward is what it is asked, doubled."""

        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            agl.emit_message(f"working on {task}")
            if task == "fail":
                raise ValueError("cannot do that")
            if task == "emit":
                agl.emit_reward(0.125)
                return None
            if task == "spans":
                return [
                    agl.SpanCoreFields(
                        name="made",
                        status=agl.TraceStatus(status_code="OK"),
                        attributes={"by": "hand"},
                        start_time=1.0,
                        end_time=2.0,
                    ),
                    agl.emit_reward(0.75, propagate=False),
                ]
            if task == "template":
                return float(resources["prompt"].format(x=1))
            return 2.0 * task

    return Doubles


@shows("LitAgent", "rollout", "llm_rollout", "prompt_rollout")
def agents(agl: Any) -> Any:
    class Splits(agl.LitAgent):  # type: ignore[misc, name-defined]
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

        def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 2.0

    class Awaits(agl.LitAgent):  # type: ignore[misc, name-defined]
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return 3.0

    class Plain(agl.LitAgent):  # type: ignore[misc, name-defined]
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 4.0

    @agl.rollout
    def asks(task: Any, llm: Any) -> Any:
        return [task, type(llm).__name__, llm.endpoint, llm.sampling_parameters]

    @agl.llm_rollout(strip_proxy=False)
    def raw(task: Any, llm: Any, rollout: Any) -> Any:
        return [type(llm).__name__, rollout.rollout_id]

    @agl.prompt_rollout
    async def says(task: Any, prompt_template: Any, rollout: Any) -> str:
        return str(prompt_template.format(x=task))

    resources = {
        "prompt": agl.PromptTemplate(template="{x}!", engine="f-string"),
        "llm": agl.ProxyLLM(endpoint="http://e/v1", model="m", sampling_parameters={"n": 1}),
    }
    attempt = agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1)
    rollout = agl.AttemptedRollout(rollout_id="r", input=1, start_time=1, attempt=attempt)
    llm = agl.LLM(endpoint="http://x", model="m")
    return {
        "async": [kind().is_async() for kind in (Splits, Awaits, Plain)]
        + [function.is_async() for function in (asks, raw, says)],
        "splits": [
            Splits().training_rollout(1, {}, rollout),
            Splits().validation_rollout(1, {}, rollout),
        ],
        "plain": [
            Plain().training_rollout(1, {}, rollout),
            Plain().validation_rollout(1, {}, rollout),
        ],
        "awaits": asyncio.run(Awaits().training_rollout_async(1, {}, rollout)),
        "llm": asks.rollout("t", resources, rollout),
        "raw": raw.rollout("t", resources, rollout),
        "prompt": asyncio.run(says.rollout_async("hello", resources, rollout)),
        "called": asks("t", llm),
        "name": asks.__name__,
        "is": isinstance(asks, agl.LitAgent),
        "missing": raised(lambda: asks.rollout("t", {}, rollout)),
    }


# --- stores ---------------------------------------------------------------------------------
@asynccontextmanager
async def shared_store(agl: Any) -> AsyncIterator[Any]:
    """A store that another process could have a client of, too."""
    if agl.__name__ == "agentlightning":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", port)
        await server.start()
        client = agl.LightningStoreClient(f"http://127.0.0.1:{port}")
        try:
            yield client
        finally:
            await client.close()
            await server.stop()
    else:
        with tempfile.TemporaryDirectory() as folder:
            client = agl.LightningStoreClient(f"sqlite:///{folder}/store.db")
            yield client
            await client.close()


@shows("InMemoryLightningStore", "LightningStore")
def store_in_memory(agl: Any) -> Any:
    store = agl.InMemoryLightningStore()
    return {
        "is": isinstance(store, agl.LightningStore),
        "name": asyncio.run(store.statistics())["name"],
        **asyncio.run(life(agl, store)),
    }


@shows("LightningStoreClient", "LightningStore")
def store_of_several_processes(agl: Any) -> Any:
    async def inside() -> Any:
        async with shared_store(agl) as store:
            return {"is": isinstance(store, agl.LightningStore), **await life(agl, store)}

    return asyncio.run(inside())


async def life(agl: Any, store: Any) -> Any:
    """What happens in a store."""
    found: dict[str, Any] = {}
    empty = [await store.get_latest_resources(), await store.dequeue_rollout("w1")]
    found["empty"] = [*empty, await store.get_rollout_by_id("unknown")]
    found["no attempts"] = list(await store.query_attempts("unknown"))

    # resources
    prompt = {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")}
    first = await store.add_resources(prompt)
    second = await store.update_resources("named", {"llm": agl.LLM(endpoint="e", model="m")})
    third = await store.update_resources("named", {"llm": agl.LLM(endpoint="f", model="m")})
    latest = await store.get_latest_resources()
    found["resources"] = {
        "versions": [first.version, second.version, third.version],
        "latest": [latest.resources_id, latest.resources["llm"].endpoint],
        "first": (await store.get_resources_by_id(first.resources_id))
        .resources["prompt"]
        .format(x=2),
        "unknown": await store.get_resources_by_id("unknown"),
        "all": (await store.query_resources()).total,
        "named": [r.version for r in await store.query_resources(resources_id="named")],
    }

    # queued, in order
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    one = await store.enqueue_rollout(
        {"n": 1},
        mode="train",
        config=config,
        metadata={"k": ["v"]},
        resources_id=first.resources_id,
    )
    two, three = await store.enqueue_many_rollouts(
        [agl.EnqueueRolloutRequest(input="two", mode="val"), agl.EnqueueRolloutRequest(input=3)]
    )
    names = {one.rollout_id: "one", two.rollout_id: "two", three.rollout_id: "three"}
    shown = ("input", "mode", "status", "metadata")
    found["queued"] = [
        [*(getattr(r, name) for name in shown), r.config.max_attempts] for r in (one, two, three)
    ]
    found["bound"] = [one.resources_id == first.resources_id, two.resources_id]
    again = await store.get_rollout_by_id(one.rollout_id)
    found["again"] = [
        again.model_dump(exclude={"start_time"}) == one.model_dump(exclude={"start_time"})
    ]

    async def status(rollout: Any) -> str:
        return str((await store.get_rollout_by_id(rollout.rollout_id)).status)

    # taken, failed, taken again
    taken = await store.dequeue_rollout("w1")
    found["taken"] = [
        names[taken.rollout_id],
        taken.status,
        taken.attempt.status,
        taken.attempt.worker_id,
    ]
    worker = await store.get_worker_by_id("w1")
    found["worker"] = [worker.status, worker.current_rollout_id == one.rollout_id]
    note = agl.Span.from_attributes(
        attributes={"n": 1},
        name="note",
        rollout_id=one.rollout_id,
        attempt_id=taken.attempt.attempt_id,
        sequence_id=5,
        start_time=1.0,
        end_time=2.0,
    )
    kept = await store.add_span(note)
    found["kept"] = [kept == note, await store.add_span(note) is None, await status(one)]
    found["numbers"] = [
        await store.get_next_span_sequence_id(one.rollout_id, taken.attempt.attempt_id),
        list(
            await store.get_many_span_sequence_ids([(one.rollout_id, taken.attempt.attempt_id)] * 2)
        ),
    ]
    ended = await store.update_attempt(one.rollout_id, "latest", status="failed")
    found["failed"] = [ended.status, ended.sequence_id, await status(one)]
    others = await store.dequeue_many_rollouts(limit=2, worker_id="w2")
    found["next"] = len(others)  # lightspan's keep their place, 0.3.0 puts them last
    more = await store.dequeue_many_rollouts(limit=5, worker_id="w2")
    everybody = {r.rollout_id: r for r in [*others, *more]}
    found["all taken"] = [len(everybody), await store.dequeue_rollout("w1") is None]
    retried = everybody[one.rollout_id]
    found["retried"] = [retried.attempt.sequence_id, retried.status]
    await store.update_attempt(one.rollout_id, retried.attempt.attempt_id, status="failed")
    found["given up"] = [
        await status(one),
        [a.status for a in await store.query_attempts(one.rollout_id)],
    ]

    # succeeded, cancelled
    success = everybody[two.rollout_id].attempt
    await store.update_attempt(two.rollout_id, success.attempt_id, status="running")
    await store.update_attempt(two.rollout_id, success.attempt_id, status="succeeded")
    await store.update_rollout(three.rollout_id, status="cancelled")
    found["ended"] = [await status(two), await status(three)]
    last = await store.get_latest_attempt(two.rollout_id)
    found["last"] = [last.status, last.sequence_id, last.end_time is not None]
    waited = await store.wait_for_rollouts(rollout_ids=[*names, "unknown"], timeout=0.05)
    found["waited"] = sorted([names[r.rollout_id], r.status] for r in waited)

    # started outside the queue
    started = await store.start_rollout({"n": 4}, mode="test", worker_id="w3")
    names[started.rollout_id] = "started"
    found["started"] = [started.status, started.mode, started.attempt.sequence_id, started.input]
    found["still"] = list(
        await store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=0.05)
    )
    late = await store.start_rollout(5, config=agl.RolloutConfig(timeout_seconds=0.05))
    names[late.rollout_id] = "late"

    # queries
    everything = await store.query_rollouts()
    found["query"] = {
        "total": everything.total,
        "failed": [names[r.rollout_id] for r in await store.query_rollouts(status_in=["failed"])],
        "either": (
            await store.query_rollouts(
                status_in=["cancelled"], rollout_id_in=[one.rollout_id], filter_logic="or"
            )
        ).total,
        "both": (
            await store.query_rollouts(status_in=["cancelled"], rollout_id_in=[one.rollout_id])
        ).total,
        "part": [
            (p := await store.query_rollouts(limit=2, offset=1)).total,
            len(p),
            p.limit,
            p.offset,
        ],
        "sorted": [
            names[r.rollout_id] for r in await store.query_rollouts(sort_by="status", limit=1)
        ],
        "contains": (await store.query_rollouts(rollout_id_contains=one.rollout_id[3:])).total,
        "attempts": [type(r).__name__ for r in everything][:1],
    }
    attempt_id = started.attempt.attempt_id
    spans = [
        agl.Span.from_attributes(
            attributes={},
            name=name,
            rollout_id=started.rollout_id,
            attempt_id=attempt_id,
            sequence_id=number,
            parent_id=parent,
        )
        for name, number, parent in (("c", 3, None), ("a", 1, "p" * 16), ("b", 2, None))
    ]
    added = await store.add_many_spans(spans)
    query = store.query_spans
    rollout_id = started.rollout_id
    found["spans"] = {
        "added": len(added),
        "order": [s.name for s in await query(rollout_id)],
        "latest": [s.name for s in await query(rollout_id, "latest", sort_order="desc")],
        "attempt": len(await query(rollout_id, attempt_id)),
        "name": [s.name for s in await query(rollout_id, name="b")],
        "either": [
            s.name
            for s in await query(rollout_id, name="b", parent_id_contains="p", filter_logic="or")
        ],
        "by name": [s.name for s in await query(rollout_id, sort_by="name", limit=2)],
        "unknown": len(await query("unknown")),
    }
    found["refused"] = [
        await refusal(store.add_span(note.model_copy(update={"rollout_id": "unknown"}))),
        await refusal(store.update_attempt("unknown", "latest", status="failed")),
        await refusal(store.update_rollout("unknown", status="failed")),
    ]

    # time is over
    await asyncio.sleep(0.1)
    if isinstance(store, agl.InMemoryLightningStore):
        store._last_scan_entrance_time = 0.0  # 0.3.0 looks every ten seconds only
        found["late"] = [
            await status(late),
            (await store.get_latest_attempt(late.rollout_id)).status,
        ]
    workers = await store.query_workers(sort_by="worker_id")
    found["workers"] = [[w.worker_id, w.status] for w in workers]
    await store.update_worker("w9", {"cpu": 1})
    found["heartbeat"] = (await store.get_worker_by_id("w9")).heartbeat_stats
    found["busy"] = [w.worker_id for w in await store.query_workers(status_in=["busy"])]
    return found


async def refusal(work: Any) -> bool:
    try:
        await work
    except Exception:
        return True
    return False


# --- algorithms and runners -----------------------------------------------------------------
@shows("Algorithm", "FastAlgorithm", "algo", "Baseline")
def algorithms(agl: Any) -> Any:
    class Mine(agl.Algorithm):  # type: ignore[misc, name-defined]
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            heard.append(["ran", train_dataset, val_dataset])

    class Later(agl.FastAlgorithm):  # type: ignore[misc, name-defined]
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            heard.append(["awaited", train_dataset])

    @agl.algo
    def asks(*, store: Any, adapter: Any, initial_resources: Any, train_dataset: Any) -> None:
        heard.append([store, type(adapter).__name__, initial_resources, train_dataset])

    @agl.algo
    async def waits(*, store: Any, llm_proxy: Any) -> None:
        heard.append([store, llm_proxy])

    heard: list[Any] = []
    unset = [raised(getattr(Mine(), f"get_{name}")) for name in ("store", "adapter", "trainer")] + [
        Mine().get_llm_proxy(),
        Mine().get_initial_resources(),
    ]
    adapter = agl.TracerTraceToTriplet()
    for algorithm in (asks, waits):
        algorithm.set_store("the store")
        algorithm.set_adapter(adapter)
        algorithm.set_initial_resources({"a": 1})
    Mine()([1], val_dataset=[2])
    asyncio.run(Later().run([3]))
    asks.run([4])
    asyncio.run(waits.run())
    return {
        "unset": unset,
        "heard": heard,
        "async": [x.is_async() for x in (Mine(), Later(), asks, waits, agl.Baseline())],
        "set": [asks.get_store(), asks.get_adapter() is adapter, asks.get_initial_resources()],
        "refused": [
            raised(lambda: waits.run([1])),
            fails(lambda: agl.Algorithm().run()),
            raised(lambda: agl.Baseline(train_split=2.0)),
        ],
        "fast": [isinstance(x, agl.FastAlgorithm) for x in (agl.Baseline(), Later(), Mine(), asks)],
        "name": asks.__name__,
    }


@shows("LitAgentRunner", "Runner", "Hook", "OtelTracer", "LitAgent")
def runners(agl: Any) -> Any:
    heard: list[Any] = []

    class Listens(agl.Hook):  # type: ignore[misc, name-defined]
        async def on_rollout_start(self, *, rollout: Any, **_: Any) -> None:
            heard.append(["start", rollout.input])

        async def on_trace_start(self, *, tracer: Any, **_: Any) -> None:
            heard.append(["trace start", isinstance(tracer, agl.Tracer)])

        async def on_trace_end(self, *, runner: Any, **_: Any) -> None:
            heard.append(["trace end", isinstance(runner, agl.Runner)])

        async def on_rollout_end(self, *, rollout: Any, spans: Any, **_: Any) -> None:
            heard.append(["end", len(spans) > 0 or rollout.input])

    async def inside() -> Any:
        store = agl.InMemoryLightningStore()
        await store.add_resources(
            {"prompt": agl.PromptTemplate(template="{x}.5", engine="f-string")}
        )
        runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=3, poll_interval=0.01)
        steps: list[Any] = []
        with runner.run_context(agent=agent_of(agl)(), store=store, hooks=[Listens()]):
            steps += [
                await seen(agl, store, await runner.step(task, mode="train"))
                for task in (3, "emit", "spans", "template")
            ]
            try:
                await runner.step("fail")
            except Exception as error:
                steps.append(str(error))
            [failed] = await store.query_rollouts(status_in=["failed"])
            steps.append(await seen(agl, store, failed))
            ids = [
                (await store.enqueue_rollout(n, mode="train")).rollout_id for n in (1, 2, "fail")
            ]
            await runner.iter()
            done = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
            queued = [[r.status, r.input] for r in done]
            event = agl.ThreadingEvent()
            event.set()
            await runner.iter(event=event)
        return {"steps": steps, "queued": queued, "worker": (await store.query_workers()).total}

    return {**asyncio.run(inside()), "heard": heard}


async def seen(agl: Any, store: Any, rollout: Any) -> Any:
    spans = await store.query_spans(rollout.rollout_id)
    attempts = [a.status for a in await store.query_attempts(rollout.rollout_id)]
    return [rollout.status, attempts, agl.find_final_reward(spans), [told(s)[:2] for s in spans]]


async def everyone(store: Any, rollout_ids: list[str]) -> Any:
    """The rollouts, when all have ended: 0.3.0 looks every ten seconds if nobody asks again."""
    while True:
        ended = await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=0.05)
        if len(ended) == len(rollout_ids):
            return ended


@shows("Trainer", "algo", "Baseline", "Algorithm")
def training(agl: Any) -> Any:
    found: list[Any] = []

    @agl.algo
    async def learn(
        *, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any, adapter: Any
    ) -> None:
        update = await store.add_resources(initial_resources)
        for mode, data in (("train", train_dataset), ("val", val_dataset)):
            ids = [
                (
                    await store.enqueue_rollout(item, mode=mode, resources_id=update.resources_id)
                ).rollout_id
                for item in data
            ]
            ended = await everyone(store, ids)
            for rollout in ended:
                spans = await store.query_spans(rollout.rollout_id, "latest")
                reward = agl.find_final_reward(spans)
                found.append(
                    [mode, rollout.input, rollout.status, reward, len(adapter.adapt(spans))]
                )

    shared = {"type": "shm", "main_thread": "algorithm"}  # else its runner never ends
    options: dict[str, Any] = {"tracer": agl.OtelTracer(), "strategy": shared, "n_runners": 1}
    if agl.__name__ != "agentlightning":
        options = {"n_runners": 1}
    resources = {"prompt": agl.PromptTemplate(template="{x}.5", engine="f-string")}
    trainer = agl.Trainer(algorithm=learn, initial_resources=resources, **options)
    trainer.fit(agent_of(agl)(), [1, "template", "fail"], val_dataset=[2])
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=agl.Baseline(polling_interval=0.02),
        initial_resources=resources,
        store=store,
        **options,
    )
    trainer.dev(agent_of(agl)(), [1, 2], val_dataset=[3])

    async def ended() -> Any:
        every = await store.query_rollouts()
        return sorted([r.mode, r.input, r.status] for r in every)

    return {"found": sorted(found, key=json.dumps), "baseline": asyncio.run(ended())}


def said_by(module: str) -> dict[str, Any]:
    """The public names of a module, and what each program says with it."""
    agl = importlib.import_module(module)
    said = {name: program(agl) for name, program in PROGRAMS.items()}
    return as_json({"names": public_names(agl), "programs": said})  # type: ignore[no-any-return]


def as_json(value: Any) -> Any:
    """As it is after a journey as JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def public_names(agl: Any) -> list[str]:
    """The names that a module offers: no modules, but for `reward`, which 0.3.0 has as both."""
    return sorted(
        name
        for name in dir(agl)
        if not name.startswith("_")
        and (name == "reward" or not isinstance(getattr(agl, name), types.ModuleType))
    )


def main(module: str, what: str, path: str) -> int:
    """Write what a module says, or look whether it is what a file has."""
    said = said_by(module)
    if what == "--write":
        with open(path, "w") as file:
            file.write(json.dumps(said, indent=1, sort_keys=True) + "\n")
        return 0
    with open(path) as file:
        written = json.load(file)
    other = [name for name in PROGRAMS if said["programs"][name] != written["programs"].get(name)]
    if said["names"] != written["names"]:
        other.append("the public names")
    print(f"{module}: {len(said['names'])} names, {len(PROGRAMS)} programs; differ: {other}")
    return bool(other)


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is downloaded
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # 0.3.0 leaves threads behind that never end
