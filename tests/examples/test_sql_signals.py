"""Test `--air`: the signal that the SQL app's records give, and the effect of the option."""

from __future__ import annotations

from lightspan.lightning.episode import Call
from lightspan.lightning.history import History
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from sql_example.prompts import check_prompt
from sql_example.signals import draft_error


def call_of(agent: str, prompt: str) -> Call:
    span = Span(
        span_id="1" * 16,
        trace_id="0" * 32,
        parent_id=None,
        name="chat",
        kind=SpanKind.LLM,
        rollout_id="ro",
        attempt_id="at",
        start_ns=1,
        end_ns=2,
        status=SpanStatus.OK,
        attributes={c.INPUT_MESSAGES: dump([{"role": "user", "content": prompt}])},
    )
    return Call(
        call_id="c", choice=0, agent_path=agent, outcome=CallOutcome.OK, sequence_start=1, span=span
    )


def seen(*calls: Call) -> float:
    return draft_error(History(task_id="t", turn=len(calls), calls=calls, tools=()))


def test_whether_the_newest_draft_failed() -> None:
    wrote = call_of("write_query", "Write one SQLite query.\nError: no words of mine")
    good = call_of("check_query", check_prompt("How many?", "SELECT\n1", "1"))
    bad = call_of("check_query", check_prompt("How many?", "SELEC 1", 'Error: near "SELEC"'))
    assert seen() == 0.0
    assert seen(wrote) == 0.0
    assert seen(wrote, good) == 0.0
    assert seen(wrote, bad) == -1.0
    assert seen(wrote, bad, wrote, good) == 0.0
    assert seen(wrote, good, wrote, bad) == -1.0
    bare = Call(call_id="c", choice=0, agent_path="check_query", outcome=CallOutcome.OK)
    assert seen(bare) == 0.0
