"""What an agent says, and what spans say of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agl_programs.program import SHOWN, decorator_of, raised, shows, span


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
