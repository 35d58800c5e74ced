"""Test AIR's signals, and the order of tool calls among model calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightspan import AIR
from lightspan.errors import ConfigError
from lightspan.lightning import build_episode, classify_calls
from lightspan.lightning.air import ToolSuccess, shape
from lightspan.lightning.credit import discounted
from lightspan.lightning.episode import Episode
from lightspan.lightning.history import History, Trace
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan_testing.strategies import (
    attempts,
    make_reward_span,
    make_span,
)
from packages.core.tests.lightning.steps import (
    EVERYONE,
    WRITER,
    answers,
    at,
    attempt,
    batch,
    built,
    call,
    phi,
    raises,
    see,
    tool,
)


def test_tools_are_chosen_by_name() -> None:
    tools = [
        tool("t1", at(3), at(3) + 1, name="sql_query"),
        tool("t2", at(3), at(3) + 1, name="search", fails=True),
    ]
    episode = built([call("a", 1, 2)], tools)
    assert see(episode, ToolSuccess()) == [1.0, 0.0]
    assert see(episode, ToolSuccess(tools="sql*")) == [1.0]


@pytest.mark.parametrize(
    ("status", "attributes", "seen"),
    [
        (SpanStatus.OK, {}, [1.0]),
        (SpanStatus.ERROR, {}, [0.0]),
        (SpanStatus.UNSET, {}, []),  # interrupted: nothing is known
        (SpanStatus.UNSET, {c.TOOL_CALL_RESULT: ""}, [1.0]),
        (SpanStatus.UNSET, {"traceloop.entity.output": "rows"}, [1.0]),
        (SpanStatus.OK, {c.ERROR_TYPE: "ToolException"}, [0.0]),
    ],
)
def test_what_success_is(status: SpanStatus, attributes: dict[str, Any], seen: list[float]) -> None:
    span = make_span("t", SpanKind.TOOL, status=status, attributes=attributes)
    episode = built([call("a", 1, 2)], [span])
    assert see(episode, ToolSuccess()) == seen


def test_a_function_sees_calls_and_tools_and_no_reward() -> None:
    seen: list[History] = []

    def spy(history: History) -> float:
        seen.append(history)
        return True

    calls = [call("a", 1, 2), call("b", 3, 4, agent="checker"), call("d", 5, 6)]
    used = tool("t", at(2) + 1, at(2) + 2, attributes={c.TOOL_CALL_ARGUMENTS: "{}"}, fails=True)
    paid = make_reward_span("r", 1.0, {c.REWARD_CALL_ID: "a"})
    assert phi(built(calls, [used, paid]), spy) == [1.0, 1.0]
    empty, last = seen
    assert (empty.turn, empty.calls, empty.tools, empty.task_id) == (0, (), (), "task-g")
    assert [(one.call_id, one.agent, one.reward) for one in last.calls] == [
        ("a", "writer", None),
        ("b", "checker", None),
    ]
    [found] = last.tools
    assert (found.name, found.arguments, found.result, found.succeeded, found.call) == (
        "sql",
        "{}",
        None,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"the signal raises failed on task task-g, turn 0: KeyError: 'query'; return"),
        (lambda history: "much", r"<lambda> returned 'much' on task task-g, turn 0: return a fin"),
        (lambda history: math.nan, "returned nan"),
        (lambda history: None, "returned None"),
    ],
)
def test_a_function_that_fails_is_an_error_that_names_it(
    function: Callable[[History], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        batch([attempt("m+")], air=AIR(signals=(function,)))
    with pytest.raises(ConfigError, match=message.replace("turn 0", "turn 1")):
        batch([attempt("m+")], air=AIR(signals=(function,), mode="bonus"))


# --- where a tool call stands ---------------------------------------------------------------
def places(episode: Episode) -> dict[str, tuple[int | None, int | None]]:
    return {t.tool.span.span_id: (t.after, t.since) for t in Trace(episode).tools}


def test_by_the_clock_where_nothing_else_says() -> None:
    calls = [call("a", 1, 2), call("b", 3, 4)]
    tools = [
        tool("early", at(1) - 9, at(1) - 8),
        tool("between", at(2) + 1, at(2) + 2),
        tool("across", at(2) + 1, at(3) + 1),
        tool("tie", at(2), at(3)),
        tool("late", at(4) + 1, at(4) + 2),
    ]
    assert places(built(calls, tools)) == {
        "early": (-1, -1),
        "between": (2, 2),
        "across": (3, 2),
        "tie": (3, 2),
        "late": (4, 4),
    }
    seen: list[History] = []
    good = phi(built(calls, tools), ToolSuccess(), lambda history: seen.append(history) or 0.0)
    assert good == [0.5, 0.5]
    names = [[found.span.span_id for found in history.tools] for history in seen]
    assert names == [["early"], ["early", "between"]]


def test_a_tool_call_never_ends_before_the_call_that_asked_for_it() -> None:
    """Check that a tool call is placed after the model call that requested it, whatever its
    times.
    """
    calls = [call("a", 1, 2), call("b", 3, 4, attributes=answers(None, ("x", "{}")))]
    used = tool("t", 5, 6, attributes={c.TOOL_CALL_ID: "x"})
    assert places(built(calls, [used])) == {"t": (4, 4)}
    assert Trace(built(calls, [used])).tools[0].tool.call == ("b", 0)


def test_a_tool_that_is_an_agent_ends_after_its_own_model_calls() -> None:
    calls = [
        call("a", 1, 2, attributes=answers(None, ("x", "{}"))),
        call("inner", 3, 6, agent="checker", parent_id="node"),
        call("b", 7, 8),
    ]
    outer = tool("t", 0, 0, attributes={c.TOOL_CALL_ID: "x"})
    node = make_span("node", SpanKind.AGENT, parent_id="t")
    assert places(built(calls, [outer, node])) == {"t": (6, 2)}


def test_clocks_that_disagree_are_not_used() -> None:
    """Check that times are ignored if the gateway's clock is 5 s ahead of the app's.

    By their times, tool calls would end before the model calls that requested them.
    """
    ahead = 5_000_000_000
    record, span = call("a", 1, 2, parent_id="node")
    shifted = span.replace(start_ns=at(1) + ahead, end_ns=at(2) + ahead)
    node = make_span("node", SpanKind.AGENT, start_ns=at(1) - 9, end_ns=at(2) + 9)
    spans = [tool("t", at(2) + 10, at(2) + 20), node]
    assert places(built([(record, span)], spans)) == {"t": (2, 2)}
    skewed = built([(record, shifted)], spans)
    assert places(skewed) == {"t": (None, None)}
    coverage = classify_calls(skewed, WRITER, step_rewards=True)
    found = shape(AIR(), discounted(1), skewed, coverage)
    assert (found.unplaced, dict(found.observed)) == (1, {"tool_success": [1.0]})


def test_a_tool_that_begins_before_it_was_asked_for_shows_other_clocks() -> None:
    """Check the case that a tool begins before the model call that requested it.

    Tools with an id are placed by the id, and tools without an id are not placed.
    """
    asker = call("a", 1, 2, attributes=answers(None, ("x", "{}")))
    tools = [
        tool("t", at(1), at(1) + 1, attributes={c.TOOL_CALL_ID: "x"}),
        tool("other", at(2) + 1, at(2) + 2),
    ]
    assert places(built([asker], tools)) == {"t": (2, 2), "other": (None, None)}


def test_a_tool_call_counts_once() -> None:
    calls = [call("a", 1, 2, attributes=answers(None, ("x", "{}"))), call("b", 9, 10)]
    asked = {c.TOOL_CALL_ID: "x"}
    tools = [
        tool("t1", at(3), at(4), attributes=asked, fails=True),
        tool("t2", at(5), at(6), attributes=asked),  # tried again
        tool("t3", at(7), at(8)),
        tool("t3", at(7), at(8)),  # arrived twice
        tool("t4", at(7), at(8), late=True),
        tool("t5", at(7), at(8), attempt="other"),
    ]
    assert places(built(calls, tools)) == {"t2": (2, 2), "t3": (2, 2)}
    assert phi(built(calls, tools)) == [0.0, 1.0]


@settings(deadline=None)
@given(attempts(), st.randoms(use_true_random=False), st.sampled_from(["potential", "bonus"]))
def test_anything_recorded_has_a_shaping(recorded: Any, random: Any, mode: Any) -> None:
    """Check that shaping never raises, for cycles, missing parents, wrong clocks and any order."""
    signals = (ToolSuccess(), lambda h: len(h.tools))
    air = AIR(signals=signals, scale=1, mode=mode)
    spans, records = list(recorded.spans), list(recorded.records)
    random.shuffle(spans)
    random.shuffle(records)
    found = []
    for some in (recorded, recorded._replace(spans=spans, records=records)):
        episode = build_episode(*some)
        coverage = classify_calls(episode, EVERYONE, step_rewards=True)
        shaped = shape(air, discounted(0.5), episode, coverage)
        assert set(shaped.credits) == {entry.call.key for entry in coverage.selected}
        assert all(math.isfinite(value) for value in shaped.credits.values())
        found.append(shaped)
    assert found[0].unplaced == found[1].unplaced
    assert found[0].credits == pytest.approx(found[1].credits)
