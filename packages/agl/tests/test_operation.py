"""Tests of `operation`, in the forms that Agent Lightning documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lightspan
import lightspan_agl as agl


async def spans_of(function: Callable[[], Any]) -> list[agl.Span]:
    """Return the spans of the operations in a rollout that calls a function."""

    @agl.rollout
    async def agent(task: Any) -> float:
        result = function()
        if hasattr(result, "__await__"):
            await result
        return 1.0

    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        rollout = await runner.step({})
    assert rollout.status == "succeeded"
    spans = await store.query_spans(rollout.rollout_id)
    return [span for span in spans if span.kind == "operation"]


@agl.operation
def add(a: int, b: int = 1) -> int:
    return a + b


@agl.operation(category="compute", limits={"top": 3})
async def subtract(a: int, *others: int, **more: int) -> int:
    return a - sum(others) - sum(more.values())


@agl.operation(name="parts")
def divide(count: int) -> Iterator[int]:
    yield from range(count)


@agl.operation
def fails(a: object) -> None:
    raise ValueError("no")


def shown(span: agl.Span) -> tuple[str, dict[str, Any]]:
    attributes = {k: v for k, v in span.attributes.items() if k != "lightspan.agent.path"}
    return span.name, attributes


async def test_decorated_functions_run_and_are_recorded() -> None:
    results: list[Any] = []

    async def calls() -> None:
        results.extend([add(1), add(2, b=3), await subtract(9, 1, 2, x=3), [*divide(2)]])

    spans = await spans_of(calls)
    await calls()  # outside a rollout
    assert results == [2, 5, 3, [0, 1]] * 2
    of_input, of_output = "lightspan.operation.input", "lightspan.operation.output"
    assert [shown(span) for span in spans] == [
        ("add", {of_input: '{"a":1,"b":1}', of_output: "2"}),
        ("add", {of_input: '{"a":2,"b":3}', of_output: "5"}),
        (
            "subtract",
            {
                "category": "compute",
                "limits.top": 3,
                of_input: '{"a":9,"others":[1,2],"more":{"x":3}}',
                of_output: "3",
            },
        ),
        ("parts", {of_input: '{"count":2}'}),
    ]
    assert add.__name__ == "add"


async def test_errors_are_the_functions_own() -> None:
    def calls() -> None:
        with pytest.raises(ValueError, match="no"):
            fails(add)
        with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
            add(1, c=2)  # type: ignore[call-arg]

    failed, wrong = await spans_of(calls)
    assert (failed.status, failed.status_message) == ("error", "no")
    assert wrong.attributes["lightspan.operation.input"] == '{"args":[1],"c":2}'
    calls()


async def test_a_block_has_input_output_and_a_span() -> None:
    operations: list[Any] = []

    def block() -> None:
        with agl.operation(user_id=1) as op:
            op.set_input(1, data={"k": 2})
            op.set_output([3])
            with pytest.raises(RuntimeError, match=r"call span\(\) after the `with` block"):
                op.span()
        with agl.operation(name="quiet", propagate=False) as quiet:
            quiet.set_output(1)
            assert add(1) == 2
        operations.extend([op, quiet])

    spans = await spans_of(block)
    assert [span.name for span in spans] == ["operation", "add"]
    assert shown(spans[0])[1] == {
        "user_id": 1,
        "lightspan.operation.input": '{"args":[1],"data":{"k":2}}',
        "lightspan.operation.output": "[3]",
    }
    assert operations[0].span() == spans[0]
    assert operations[1].span() is None
    block()
    assert operations[2].span() is None  # outside a rollout
    with pytest.raises(ValueError, match=r"operation\('x'\): give the name as operation\(name="):
        agl.operation("x")  # type: ignore[call-overload]


@pytest.mark.parametrize("decorator", ["agent", "operation", "tool"])
def test_lightspans_own_decorators_need_a_name(decorator: str) -> None:
    with pytest.raises(TypeError, match=rf"needs a name: @lightspan\.{decorator}\('NAME'\)"):
        getattr(lightspan, decorator)(lambda: 1)
