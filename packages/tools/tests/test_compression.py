"""Test what `lightspan compress` counts: tokens, costs, seconds and the report's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightspan.algorithms.recorded_attempts import is_of
from lightspan.lightning import Call
from lightspan.schema import semconv as c
from lightspan.schema.token_records import CallOutcome
from lightspan.training.results import Evaluation
from lightspan_testing.strategies import make_call_span, make_record
from lightspan_tools.compression.measurement import Measurement, busy_seconds
from lightspan_tools.compression.recorded import Recorded, Tokens, low_scores
from lightspan_tools.compression.report import CompressionReport, FineTuning
from lightspan_tools.compression.run import Compression


def call(
    call_id: str, start_s: float = 0, end_s: float = 1, usage: Any = (100, 10), **fields: Any
) -> Call:
    """Return a call with the usage (prompt, answer), between two times in seconds."""
    counts = {} if usage is None else {c.INPUT_TOKENS: usage[0], c.OUTPUT_TOKENS: usage[1]}
    span = make_call_span(call_id, attributes=counts)
    span = span.replace(start_ns=int(start_s * 1e9), end_ns=int(end_s * 1e9))
    defaults: dict[str, Any] = {"choice": 0, "agent_path": "desk/sort", "outcome": CallOutcome.OK}
    return Call(call_id=call_id, span=span, **{**defaults, **fields})


def test_tokens_are_means_over_the_answered_calls_with_usage() -> None:
    record = make_record("4", (1, 2, 3), (4, 5))
    tokens = Tokens.of(
        [
            call("1"),
            call("2", usage=(300, 30)),
            call("3", usage=None),
            call("4", usage=None, record=record),  # of lightspan's own engine
            call("5", usage=(9000, 9000), outcome=CallOutcome.ERROR),
            call("1", choice=1),  # another answer of the same call, whose usage has both
        ]
    )
    assert tokens == Tokens(calls=4, uncounted=1, input=403 / 3, output=42 / 3)
    assert Tokens.of([]) == Tokens(calls=0, uncounted=0, input=0, output=0)
    assert Tokens(calls=1, uncounted=0, input=500, output=100).cost_per_1000((2, 8)) == 1.8


def test_seconds_count_calls_at_once_a_single_time() -> None:
    calls = [call("1", 0, 2), call("2", 1, 3), call("3", 5, 6), call("4", 5.25, 5.5)]
    assert busy_seconds(reversed(calls)) == 4.0
    assert busy_seconds([]) == 0.0


def test_agents_are_matched_by_name_and_path() -> None:
    assert is_of(call("1"), ())
    assert is_of(call("1"), ("sort",))
    assert is_of(call("1"), ("other", "desk/*"))
    assert not is_of(call("1"), ("reply",))


def measurement(rewards: dict[str, float]) -> Measurement:
    tokens = Tokens(calls=4, uncounted=0, input=90, output=6)
    evaluation = Evaluation(step=0, rewards=rewards)
    return Measurement(evaluation=evaluation, tokens=tokens, seconds=2.0)


SETTINGS = ("prices", "price_per_hour", "agents")


def report(**fields: Any) -> CompressionReport:
    options = {name: fields.pop(name) for name in SETTINGS if name in fields}
    settings = Compression(store="sqlite:x.db", model="m", folder=Path("small"), **options)
    recorded = Recorded(
        attempts=5,
        agents={"sort": 5, "reply": 3},
        tokens=Tokens(calls=5, uncounted=1, input=100, output=10),
        scores=[0.0, 1.0, 1.0],
    )
    left_out = {"unscored": 2, "scored too low": 1}
    tuning = FineTuning(demonstrations=2, left_out=left_out, losses=[3.0, 0.5], seconds=7)
    values: dict[str, Any] = {"settings": settings, "recorded": recorded, "tuning": tuning}
    return CompressionReport(**(values | fields))


def test_the_report_of_a_comparison() -> None:
    comparison = report(
        prices=(2, 8),
        price_per_hour=0.36,
        agents=("sort",),
        before=measurement({"a": 0.0, "b": 1.0}),
        after=measurement({"a": 1.0, "b": 1.0}),
    )
    assert comparison.costs == {"recorded": pytest.approx(0.28), "small": pytest.approx(0.05)}
    assert comparison.gain is not None
    assert comparison.gain.mean == 0.5
    lines = comparison.text().splitlines()
    assert lines[0] == "5 attempts recorded; calls by agent: sort 5, reply 3"
    assert (
        lines[1]
        == "scores of the chosen agents' calls: 3 of 5 answered calls, mean 0.667, median 1"
    )
    assert lines[2].startswith("2 calls imitated; left out: 1 scored too low, 2 unscored; loss 3.0")
    assert lines[3].startswith("recorded endpoint: held-out reward 0.500 (95% CI ")
    assert lines[4].startswith("small: held-out reward 1.000 (95% CI ")
    assert lines[5].startswith("difference of the small model: 0.500 (95% CI ")
    assert lines[7:9] == [
        "  recorded endpoint, calls of production  0.28; 100,000 input and 10,000 output tokens"
        " (1 calls without usage)",
        "  small, calls of the held-out tasks  0.05; 90,000 input and 6,000 output tokens,"
        " 500.0 s of this machine (cpu, up to 8 attempts at once)",
    ]
    assert "Trainer(LightningRL('small', optimize=['sort'])).fit(app, tasks)" in lines[11]
    plain = json.loads(comparison.json())
    assert plain["cost_per_1000_calls"] == comparison.costs
    assert plain["after"]["seconds_per_call"] == 0.5
    assert plain["difference"]["mean"] == 0.5


def test_the_report_without_a_comparison_says_how_to_get_one() -> None:
    text = report().text()
    assert "--resume --app MODULE:APP --tasks FILE.jsonl" in text
    assert "--price INPUT OUTPUT" in text
    assert json.loads(report().json())["difference"] is None
    unpriced = report(prices=(1, 1), before=measurement({}), after=measurement({"a": 1.0}))
    assert "no task was scored with both" in unpriced.text()
    assert "--price-per-hour PRICE" in unpriced.text()


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ([0.0, 0.0, 1.0, None], "2 of the 4 chosen calls have a score below 0.5: --min-reward 0.5"),
        ([0.0, 0.0], "2 of the 2 chosen calls have a score below 0.5: --min-reward 0.5"),
        ([1, 2, 4, 5], "2 of the 4 chosen calls have a score below 3: --min-reward 3"),
        ([-1.0, 1.0], "1 of the 2 chosen calls has a score below 0: --min-reward 0"),
    ],
)
def test_low_scores_are_those_below_the_middle_of_their_scale(
    scores: list[float | None], line: str
) -> None:
    assert low_scores(scores).startswith(f"{line} leaves ")


def test_nothing_is_said_without_low_scores() -> None:
    assert low_scores([0.5, 1.0, None]) == ""
    assert low_scores([None, None]) == ""
    assert low_scores([5, 5]) == ""
    assert low_scores([]) == ""


def test_the_report_of_a_plan() -> None:
    plan = report(tuning=FineTuning(demonstrations=2, left_out={}))
    assert plan.is_plan
    assert "2 calls would be imitated; left out: none" in plan.text()
    assert plan.text().endswith("nothing was written: leave --dry-run out to fine-tune")
    nothing = Tokens(calls=2, uncounted=2, input=0, output=0)
    silent = Recorded(attempts=2, agents={}, tokens=nothing, scores=[])
    text = report(recorded=silent, prices=(1, 1)).text()
    assert "calls by agent: none" in text
    assert "none of 2 answered calls" in text
    assert "recorded endpoint, calls of production  unknown: no answer had its usage" in text
