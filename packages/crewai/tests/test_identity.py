"""Test agent paths and spans of CrewAI's events, without CrewAI."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, strategies as st

# Before CrewAI is imported: it reports to its makers otherwise.
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_DISABLE_TRACKING"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"

pytest.importorskip("crewai")

from lightspan.capture.adapter import FrameworkCall
from lightspan.capture.context import AgentContext, AttemptContext
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan_crewai import _hook
from lightspan_crewai._identity import (
    End,
    Entry,
    Kind,
    Name,
    Place,
    Start,
    Trail,
    begin,
    choose_name,
    clean,
    end,
)
from packages.crewai.tests.crewai_apps import WARNINGS

# These tests ask no model, but what another file's crews left unclosed may be collected in them:
# a thread of CrewAI's can still hold it when that file ends.
pytestmark = WARNINGS

ROOT = Place((), "0" * 16)
ATTEMPT = AttemptContext(rollout_id="rollout", attempt_id="attempt", trace_id="f" * 32)


def role(name: str, agent_id: str | None = None) -> Name:
    return Name(name, name, agent_id or name)


class Context:
    """Hold the open entries of a context, and feed them with events in short form."""

    def __init__(self) -> None:
        self.trail: Trail = ()
        self.lost: list[Entry] = []

    def begin(self, kind: Kind, key: Any, name: Name | None = None, **attributes: Any) -> str:
        given = self.trail[-1].inside if self.trail else ROOT
        start = Start(kind, key, name, attributes)
        self.trail, lost = begin(self.trail, start, given, start_call=start_call)
        self.lost += lost
        return self.path

    def end(self, kind: Kind, key: Any, **more: Any) -> Entry | None:
        self.trail, entry, lost = end(self.trail, End(kind, key, **more))
        self.lost += lost
        return entry

    @property
    def path(self) -> str:
        return join_path(f.name for f in self.trail[-1].inside.frames) if self.trail else "app"


# --- paths ----------------------------------------------------------------------------------


def test_a_tool_that_asks_its_agents_model() -> None:
    now = Context()
    now.begin(Kind.TASK, 1, role("boss"))
    now.begin(Kind.TOOL, "parse")
    assert now.begin(Kind.CALL, "c", role("boss")) == "boss"


def test_a_manager_acts_where_the_event_names_the_agent_of_the_task() -> None:
    now = Context()
    now.begin(Kind.TASK, 1, role("manager"))
    now.begin(Kind.AGENT, (2, 1), role("manager"))
    assert now.begin(Kind.CALL, "c", role("writer")) == "manager"


def test_two_agents_of_one_role() -> None:
    now = Context()
    now.begin(Kind.TASK, 1, role("writer", "a"))
    now.begin(Kind.TOOL, "ask")
    assert now.begin(Kind.AGENT, (2, 9), role("writer", "b")) == "writer/writer"


def test_a_call_outside_any_agents_turn() -> None:
    now = Context()
    now.begin(Kind.FLOW, 1, Name("F", "F"))
    now.begin(Kind.METHOD, 2, Name("m", "m"))
    assert now.begin(Kind.CALL, "outer", role("writer")) == "F/m/writer"
    assert now.begin(Kind.CALL, "inner", role("writer")) == "F/m/writer"


# --- ends -----------------------------------------------------------------------------------
def test_an_end_that_comes_twice_takes_nothing_else_away() -> None:
    now = Context()
    now.begin(Kind.TASK, 1, role("writer"))
    now.begin(Kind.CALL, "c")
    assert now.end(Kind.CALL, "c") is not None
    assert now.end(Kind.CALL, "c") is None
    assert now.path == "writer"


def test_an_end_closes_what_was_left_open_inside() -> None:
    now = Context()
    now.begin(Kind.CREW, 1)
    now.begin(Kind.TASK, 2, role("writer"))
    now.begin(Kind.TOOL, "t")
    now.begin(Kind.AGENT, 3, role("expert"))
    assert now.end(Kind.CREW, 1) is not None
    assert [entry.start.kind for entry in now.lost] == [Kind.AGENT, Kind.TOOL, Kind.TASK]
    assert now.trail == ()


def test_an_execution_that_begins_again_is_a_retry() -> None:
    """Check older versions of CrewAI, where the second execution begins inside the first."""
    now = Context()
    now.begin(Kind.TOOL, "ask")
    first = now.begin(Kind.AGENT, (1, 2), role("expert"))
    second = now.begin(Kind.AGENT, (1, 2), role("expert"))
    assert first == second == "expert"
    assert len(now.lost) == 1
    assert [entry.start.kind for entry in now.trail] == [Kind.TOOL, Kind.AGENT]


_KINDS = st.sampled_from([Kind.CREW, Kind.FLOW, Kind.METHOD, Kind.TOOL, Kind.CALL])


@given(st.lists(st.tuples(_KINDS, st.integers(0, 3), st.booleans()), max_size=40))
def test_whatever_happens_the_trail_stays_a_stack(steps: list[tuple[Kind, int, bool]]) -> None:
    now = Context()
    seen: list[Entry] = []
    ended: list[Entry] = []
    for kind, key, begins in steps:
        if begins:
            now.begin(kind, key, Name(f"n{key}", f"n{key}"))
            seen.append(now.trail[-1])
        else:
            entry = now.end(kind, key)
            ended += [] if entry is None else [entry]
        for outer, inner in zip(now.trail, now.trail[1:], strict=False):
            assert inner.around == outer.inside
    assert {id(e) for e in seen} == {id(e) for e in (*ended, *now.lost, *now.trail)}
    assert len(seen) == len(ended) + len(now.lost) + len(now.trail)


# --- names ----------------------------------------------------------------------------------
ANALYST = Name("{topic} analyst", "rain analyst", "7")


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ([], "{topic} analyst"),
        (["*"], "{topic} analyst"),
        (["{topic} analyst"], "{topic} analyst"),
        (["rain analyst"], "rain analyst"),
        (["* analyst"], "{topic} analyst"),
        (["press/rain analyst"], "rain analyst"),
        (["**/rain analyst/*"], "rain analyst"),
        (["writer", "rain analyst"], "rain analyst"),
    ],
)
def test_a_template_matches_in_both_forms(patterns: list[str], chosen: str) -> None:
    assert choose_name(patterns, ANALYST[:2]) == chosen


def test_the_first_rule_that_tells_them_apart_decides() -> None:
    patterns = ["rain analyst", "{topic} analyst"]
    assert choose_name(patterns, ANALYST[:2]) == "rain analyst"
    assert choose_name(patterns[::-1], ANALYST[:2]) == "{topic} analyst"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [("writer\n", "writer"), ("  a \n b ", "a b"), (None, ""), ("", ""), ("Prüferin日本",) * 2],
)
def test_white_space(text: Any, cleaned: str) -> None:
    assert clean(text) == cleaned


# --- spans ----------------------------------------------------------------------------------
def entry_of(kind: Kind, name: Name | None = None, around: Place = ROOT, **more: Any) -> Entry:
    (*_, entry), _ = begin((), Start(kind, 1, name, more), around, start_call=start_call)
    return entry


def start_call(around: Iterable[FrameworkCall]) -> FrameworkCall:
    return FrameworkCall(AgentContext(ATTEMPT), around)


def recorded(entry: Entry, event: End) -> list[Span]:
    """Return the spans that are recorded when an entry ends."""
    attempt = AttemptContext(rollout_id="rollout", attempt_id="attempt")
    _hook._register_pending(attempt, entry)
    _hook._record(attempt, entry, event)
    return attempt.recorder.drain()


def test_a_call_that_no_client_made_is_recorded_as_structure() -> None:
    entry = entry_of(Kind.CALL, model="m", messages="hi", temperature=0.5, tools=None)
    answer = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
    (span,) = recorded(entry, End(Kind.CALL, 1, attributes=answer))
    assert (span.kind, span.name, span.status) == (SpanKind.LLM, "chat m", SpanStatus.OK)
    known = dict(span.attributes)
    assert str(known.pop("lightspan.call.id")).startswith("call")
    assert '"hi"' in str(known.pop("gen_ai.input.messages"))
    assert '"yes"' in str(known.pop("gen_ai.output.messages"))
    assert known == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "lightspan.agent.path": "app",
        "lightspan.call.outcome": "ok",
        "lightspan.route": "app",
        "openinference.span.kind": "LLM",
    }
