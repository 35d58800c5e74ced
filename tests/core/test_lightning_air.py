"""AIR: potentials that change no order, bonuses that do, and what signals see."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightspan import AIR, LightningRL, Trainer
from lightspan import conventions as c
from lightspan.algorithms.measures import batch_metrics, saw_nothing
from lightspan.engines import GenerationRequest
from lightspan.engines.chat import load_tokenizer
from lightspan.errors import ConfigError
from lightspan.inspection import inspect_run
from lightspan.lightning import (
    Batch,
    BatchConfig,
    Credit,
    History,
    Selection,
    ToolError,
    ToolSuccess,
    Trace,
    ValidArguments,
    build_batch,
    build_episode,
    cover,
    discounted,
    grpo,
    potential_rewards,
    shape,
    terminal,
)
from lightspan.lightning.air import check_air, turn_positions
from lightspan.lightning.credit import rewards_after
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import turn_depths
from lightspan.messages import dump
from lightspan.records import AttemptStatus, Mode, Outcome, TokenRecord
from lightspan.rollouts import stored_episodes
from lightspan.spans import Span, SpanKind, SpanStatus
from lightspan.testing.scripted_engine import ScriptedEngine
from lightspan.testing.strategies import (
    attempts,
    make_attempt,
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
    make_span,
)

WRITER = Selection.of("writer").routing
EVERYONE = Selection.of("*").routing

Step = str
"""Of an attempt, in order: `m` a model call, `+` a good tool call, `-` a failing one; `M` one of a
frozen agent."""


def at(sequence: int) -> int:
    """Nanoseconds at which a sequence number is given."""
    return 1_000_000_000 * sequence


def tool(span_id: str, start: int, end: int, *, fails: bool = False, **fields: Any) -> Span:
    named = {c.TOOL_NAME: fields.pop("name", "sql"), **fields.pop("attributes", {})}
    status = SpanStatus.ERROR if fails else SpanStatus.OK
    known = {"start_ns": start, "end_ns": end, "status": status, "attributes": named}
    return make_span(span_id, SpanKind.TOOL, **{**known, **fields})


def call(
    call_id: str, start: int, end: int, *, agent: str = "writer", attempt: str = "1", **fields: Any
) -> tuple[TokenRecord, Span]:
    """A recorded model call with its span, by the gateway's sequence and a clock that agrees."""
    record = make_record(
        call_id, [1, 2], [3], (start, end), attempt, agent_path=agent, span_id=f"span-{call_id}"
    )
    times = {"start_ns": at(start), "end_ns": at(end), "attempt": attempt, **fields}
    return record, make_call_span(call_id, agent, (start, end), **times)


def answers(text: str | None = None, *calls: tuple[str, Any]) -> dict[str, Any]:
    """The attributes of a model call that said this: (id, arguments) for each tool call."""
    made = [{"id": i, "function": {"name": "sql", "arguments": a}} for i, a in calls]
    message = {"role": "assistant", "content": text, "tool_calls": made}
    return {c.OUTPUT_MESSAGES: dump([message])}


def built(
    calls: Sequence[tuple[TokenRecord, Span]],
    tools: Sequence[Span] = (),
    reward: float | None = 1.0,
    name: str = "1",
    **attempt: Any,
) -> Episode:
    spans = [span for _, span in calls] + list(tools)
    records = [record for record, _ in calls]
    return build_episode(make_attempt(name, reward, **attempt), make_rollout(name), spans, records)


def attempt(steps: str, reward: float | None = 1.0, name: str = "1", **facts: Any) -> Episode:
    """An attempt of steps (see `Step`), one after another."""
    calls, tools = [], []
    for place, step in enumerate(steps):
        start, end = 2 * place + 1, 2 * place + 2
        if step in "mM":
            agent = "writer" if step == "m" else "checker"
            calls.append(call(f"c{place}", start, end, agent=agent, attempt=name))
        else:
            span = tool(f"t{place}", at(start), at(end), fails=step == "-", attempt=name)
            tools.append(span)
    return built(calls, tools, reward, name, **facts)


def shaping(
    episode: Episode, air: AIR, credit: Credit | None = None, routing: Any = WRITER
) -> dict[str, float]:
    rule = credit or discounted(1)
    coverage = cover(episode, routing, step_rewards=rule.step_rewards)
    return {key[0]: value for key, value in shape(air, rule, episode, coverage).credits.items()}


def phi(episode: Episode, *signals: Any, routing: Any = WRITER) -> list[float]:
    """The potential before each call, of scale 1."""
    air = AIR(signals=signals or (ToolSuccess(),), scale=1)
    return [-value for value in shaping(episode, air, routing=routing).values()]


def batch(episodes: Sequence[Episode], **config: Any) -> Batch:
    chosen = BatchConfig(**{"credit": discounted(1), "estimator": "dr_grpo", **config})
    steps = chosen.credit.step_rewards
    return build_batch(episodes, [cover(e, WRITER, step_rewards=steps) for e in episodes], chosen)


def advantages(found: Batch) -> dict[tuple[str, str], float]:
    """(rollout, call) → advantage."""
    items = found.explanations.items()
    return {(why.rollout_id, key[1]): why.advantage for key, why in items}


# --- potentials -------------------------------------------------------------------------------


def test_the_potential_is_the_share_of_tool_calls_that_succeeded_so_far() -> None:
    assert phi(attempt("m+m-m+m")) == [0.0, 1.0, 0.5, 2 / 3]
    assert shaping(attempt("m+m-m"), AIR(scale=0.3)) == {"c0": 0.0, "c2": -0.3, "c4": -0.15}


def test_what_is_seen_of_frozen_agents_is_part_of_the_state() -> None:
    assert phi(attempt("M+m-m")) == [1.0, 0.5]


numbers = st.floats(-1, 1, allow_nan=False)
turns_of = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=16)
gammas = st.floats(0.01, 1)


@given(turns_of, gammas)
def test_shaped_returns_telescope(turns: list[tuple[float, float]], gamma: float) -> None:
    """G'_t = G_t - Phi(s_t), any gamma: the sums by the definition of F and of reward-to-go."""
    rewards, potentials = zip(*turns, strict=True)
    extra = potential_rewards(potentials, gamma)

    def to_go(values: Sequence[float], t: int) -> float:
        return math.fsum(gamma ** (k - t) * values[k] for k in range(t, len(values)))

    both = [r + f for r, f in zip(rewards, extra, strict=True)]
    zeros = [0.0] * len(both)
    after = rewards_after(both, zeros, gamma)
    for t, potential in enumerate(potentials):
        assert to_go(both, t) == pytest.approx(to_go(rewards, t) - potential, abs=1e-14)
        assert both[t] + after[t] == pytest.approx(to_go(rewards, t) - potential, abs=1e-13)


@given(st.text("m+-M", max_size=12), numbers, gammas)
def test_credit_with_air_is_the_return_of_shaped_rewards(
    steps: str, reward: float, gamma: float
) -> None:
    """As above, from spans to explanations."""
    episode = attempt(steps + "m", reward)
    found = batch([episode], credit=discounted(gamma), air=AIR(scale=0.7))
    credits = {key[1]: why.credit for key, why in found.explanations.items()}
    potentials = [0.7 * value for value in phi(episode)]
    rewards = potential_rewards(potentials, gamma)
    rewards[-1] += reward
    for t, credit in enumerate(credits.values()):
        expected = math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        assert credit == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    "ending",
    [
        {},
        {"status": AttemptStatus.TIMEOUT, "outcome": Outcome.TIMEOUT},
        {"status": AttemptStatus.FAILED, "outcome": Outcome.CONTEXT_OVERFLOW},
    ],
)
def test_nothing_leaks_into_the_return_where_an_attempt_is_cut_off(ending: dict[str, Any]) -> None:
    """Phi(terminal) = 0, however the attempt ended and whatever was seen last."""
    episode = attempt("m+m+", 0.25, **ending)
    found = batch([episode], credit=discounted(0.5), air=AIR(scale=1.0))
    assert [why.credit for why in found.explanations.values()] == [0.125 - 0.0, 0.25 - 1.0]


@given(st.lists(st.tuples(st.text("+-m", max_size=6), numbers), min_size=2, max_size=5), gammas)
def test_under_identical_assignment_it_would_change_nothing(
    rollouts: list[tuple[str, float]], gamma: float
) -> None:
    """Why `terminal` is refused: every call would get G'_0, and rollouts that start alike have one
    Phi(s_0), which the group's mean takes out."""
    plain, shaped = [], []
    for steps, reward in rollouts:
        potentials = phi(attempt("m" + steps + "m", reward))
        extra = potential_rewards(potentials, gamma)
        last = len(extra) - 1
        plain.append(gamma**last * reward)
        shaped.append(math.fsum([plain[-1], *(gamma**t * f for t, f in enumerate(extra))]))
    for before, after in zip(plain, shaped, strict=True):
        assert after == pytest.approx(before, abs=1e-14)  # Phi(s_0) = 0
    with pytest.raises(ConfigError, match="would change nothing"):
        check_air(AIR(), terminal)


@given(st.text("m+-M", min_size=1, max_size=10), st.text("m+-M", max_size=6), st.booleans())
def test_a_potential_depends_on_what_came_before_alone(before: str, after: str, wins: bool) -> None:
    """Neither the action being scored, nor its tools, nor the reward change it."""
    seen: list[History] = []

    def keep(history: History) -> float:
        seen.append(history)
        return 0.5

    signals = (ToolSuccess(), ToolError(), ValidArguments(), keep)
    short = phi(attempt(before + "m", float(wins)), *signals)
    first = [(h.turn, h.task_id, h.calls, h.tools) for h in seen]
    seen.clear()
    long = phi(attempt(before + "m" + after, 0.5), *signals)
    assert long[: len(short)] == short
    assert [(h.turn, h.task_id, h.calls, h.tools) for h in seen][: len(first)] == first


def test_parallel_calls_share_the_state_of_their_turn() -> None:
    calls = [call("a", 1, 2), call("b", 3, 8), call("d", 5, 6), call("e", 9, 10)]
    tools = [tool("t1", at(2) + 1, at(2) + 2, fails=True), tool("t2", at(3) + 1, at(4))]
    episode = built(calls, tools)
    depths = turn_depths(episode.calls)
    assert depths == [0, 1, 1, 2]
    assert turn_positions(episode.calls, depths) == [1, 3, 9]
    assert shaping(episode, AIR(scale=1)) == {"a": 0.0, "b": 0.0, "d": 0.0, "e": -0.5}


def test_several_signals_are_averaged() -> None:
    def tenth(history: History) -> float:
        return 0.1 * len(history.calls)

    assert phi(attempt("m+mm"), ToolSuccess(), tenth) == pytest.approx([0.0, 0.55, 0.6])


# --- in a batch -------------------------------------------------------------------------------

GROUP = [("m+m+m", 1.0), ("m-m", 0.0), ("m+mm", 0.0), ("mm", 1.0)]


def group(rollouts: Sequence[tuple[str, float | None]] = GROUP) -> list[Episode]:
    return [attempt(steps, reward, str(n)) for n, (steps, reward) in enumerate(rollouts)]


def test_the_bonus_orders_rollouts_anew_and_the_potential_does_not() -> None:
    """R = 0 with five good tool calls against R = 1 with one."""
    pair = group([("m+m+m+m+m+m", 0.0), ("m+m", 1.0)])
    potential = advantages(batch(pair, air=AIR(scale=0.3)))
    bonus = advantages(batch(pair, air=AIR(scale=0.3, mode="bonus")))
    lazy, solved = ("ro-0", "c0"), ("ro-1", "c0")
    assert potential[lazy] == pytest.approx(-0.5 + (0.3 - 0.3) / 2 + 0.15)
    assert potential[lazy] < 0 < potential[solved]
    assert bonus[lazy] > bonus[solved]
    returns = {k: w.credit for k, w in batch(pair, air=AIR(mode="bonus")).explanations.items()}
    assert returns["at-0", "c0", 0] == pytest.approx(1.5)
    assert returns["at-1", "c0", 0] == pytest.approx(1.3)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_statistics_are_those_of_the_rewards(estimator: str) -> None:
    plain = batch(group(), estimator=estimator)
    shaped = batch(group(), estimator=estimator, air=AIR(scale=0.3))
    for key, why in shaped.explanations.items():
        before = plain.explanations[key]
        assert (why.value, why.scale, why.size) == (before.value, before.scale, before.size)
        assert why.credit == pytest.approx(before.credit + (why.shaping or 0.0))
    means = {"ro-0": 0.2, "ro-1": 0.0, "ro-2": 0.2, "ro-3": 0.0}  # of Phi over calls
    for why in shaped.explanations.values():
        others = [value for name, value in means.items() if name != why.rollout_id]
        centre = math.fsum(others) / 3
        before = plain.explanations[next(k for k, w in shaped.explanations.items() if w is why)]
        assert why.baseline == pytest.approx(before.baseline - centre)


def test_at_one_state_the_better_return_has_the_larger_advantage() -> None:
    """Normalisation rescales and shifts; it does not re-order what was tried in one state."""
    found = batch(group([("m+m", r) for r in (0.0, 1.0, 0.25, 0.5)]), estimator="grpo", air=AIR())
    for name in ("c0", "c2"):
        by_reward = [advantages(found)[f"ro-{n}", name] for n in (0, 2, 3, 1)]
        assert by_reward == sorted(by_reward)
        assert len(set(by_reward)) == 4
    plain = grpo([0.0, 1.0, 0.25, 0.5])[1].advantage(1.0)
    shaped = advantages(found)
    assert shaped["ro-1", "c0"] + shaped["ro-1", "c2"] == pytest.approx(2 * plain)


def test_no_rollout_is_paid_for_states_that_it_comes_to_later() -> None:
    """Else the group's mean, which holds its own later potentials, would be a small bonus."""
    first, *rest = group([("mm", 1.0), ("m-mm", 0.0), ("m+m+m", 0.0)])
    good = attempt("m+m+m+m", 1.0, "0")
    bad = attempt("m-m-m-m", 1.0, "0")
    found = [advantages(batch([e, *rest], air=AIR()))["ro-0", "c0"] for e in (good, bad, first)]
    assert found[0] == found[1] == found[2]


def test_a_group_without_variance_teaches_nothing_however_its_potentials_differ() -> None:
    found = batch(group([("m+m", 1.0), ("m-m", 1.0)]), estimator="grpo", air=AIR())
    assert set(advantages(found).values()) == {0.0}
    assert found.counters["groups:identical"] == 1
    bonus = batch(group([("m+m", 1.0), ("m-m", 1.0)]), estimator="grpo", air=AIR(mode="bonus"))
    assert advantages(bonus)["ro-0", "c0"] > 0 > advantages(bonus)["ro-1", "c0"]


@pytest.mark.parametrize("unit", ["rollout", "agent"])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "reinforce++_baseline"])
def test_a_group_sums_to_nothing(unit: str, estimator: str) -> None:
    found = batch(group(), unit=unit, estimator=estimator, air=AIR(scale=0.9))
    by_rollout: dict[str, list[float]] = {}
    for why in found.explanations.values():
        by_rollout.setdefault(why.rollout_id, []).append(why.advantage)
    means = [math.fsum(values) / len(values) for values in by_rollout.values()]
    assert len(means) == 4
    assert max(map(abs, means)) > 0.1
    assert math.fsum(means) == pytest.approx(0.0, abs=1e-15)


def test_agents_are_centred_apart() -> None:
    def rollout(name: str, reward: float, fails: bool) -> Episode:
        made = [call("w", 1, 2, attempt=name), call("r", 5, 6, agent="critic", attempt=name)]
        return built(made, [tool("t", at(3), at(4), fails=fails, attempt=name)], reward, name)

    pair = [rollout("0", 1.0, False), rollout("1", 0.0, True)]
    coverages = [cover(e, EVERYONE, step_rewards=True) for e in pair]
    config = BatchConfig(
        estimator="dr_grpo", unit="agent", credit=discounted(1), air=AIR(scale=0.4)
    )
    found = advantages(build_batch(pair, coverages, config))
    # the writer starts at Phi = 0; the critic of rollout 0 at 0.4, of rollout 1 at 0
    assert found == {
        ("ro-0", "w"): 0.5,
        ("ro-1", "w"): -0.5,
        ("ro-0", "r"): pytest.approx(0.5 - 0.4 + 0.0),
        ("ro-1", "r"): pytest.approx(-0.5 - 0.0 + 0.4),
    }


@pytest.mark.parametrize("mode", ["potential", "bonus"])
def test_shaping_scores_no_unscored_rollout_and_no_evaluation(mode: Any) -> None:
    unscored, scored = group([("m+m", None), ("m+m", 1.0)])
    rollout = make_rollout("2", mode=Mode.VAL)
    evaluated = build_episode(make_attempt("2"), rollout, [], [make_record("c", attempt="2")])
    found = batch([unscored, scored, evaluated], air=AIR(mode=mode))
    assert found.rollouts == ("ro-1",)
    assert (found.counters["unscored"], found.counters["not_train"]) == (1, 1)


def test_measures_tell_shaping_apart_from_the_reward() -> None:
    found = batch(group(), air=AIR(scale=0.3, signals=(ToolSuccess(), ValidArguments())))
    air = {k: v for k, v in batch_metrics(found).items() if k.startswith("air/")}
    # Phi: 0, .15, .15 | 0, 0 | 0, .15, .15 | 0, 0
    assert air == {
        "air/shaping_mean": pytest.approx(-0.06),
        "air/tool_success": 0.75,
        "air/tool_success/seen": 4.0,
        "air/valid_arguments/seen": 0.0,
        "air/unplaced": 0.0,
    }
    assert not saw_nothing(found)
    assert saw_nothing(batch(group([("mm", 1.0), ("m", 0.0)]), air=AIR()))
    assert not saw_nothing(batch(group()))
    assert not any(key.startswith("air") for key in batch_metrics(batch(group())))


def test_an_explanation_says_what_air_added() -> None:
    found = batch(group(), air=AIR(scale=0.3))
    why = found.explanations["at-0", "c4", 0]
    assert (why.credit, why.shaping) == (0.7, -0.3)
    assert "credit 0.7 (discounted(1), AIR -0.3);" in str(why)
    assert "AIR" not in str(batch(group()).explanations["at-0", "c4", 0])


# --- bonuses ----------------------------------------------------------------------------------


def test_a_bonus_is_paid_to_the_turn_that_caused_it_and_discounted_before() -> None:
    air = AIR(scale=0.5, mode="bonus")
    found = shaping(attempt("mm+m-"), air, discounted(0.5))
    assert found == {"c0": 0.25, "c1": 0.5, "c3": 0.0}
    errors = AIR(scale=0.5, mode="bonus", signals=(ToolError(),))
    assert shaping(attempt("mm+m-"), errors, discounted(1)) == {"c0": -0.5, "c1": -0.5, "c3": -0.5}


def test_with_terminal_credit_bonuses_are_part_of_the_return() -> None:
    air = AIR(scale=0.5, mode="bonus")
    assert shaping(attempt("m+m+m-"), air, terminal) == {"c0": 1.0, "c2": 1.0, "c4": 1.0}


def test_of_parallel_calls_the_one_that_asked_for_a_tool_gets_its_bonus() -> None:
    calls = [
        call("a", 1, 2),
        call("b", 3, 8, attributes=answers(None, ("x", "{}"))),
        call("d", 5, 6),
    ]
    used = tool("t", at(8) + 1, at(8) + 2, attributes={c.TOOL_CALL_ID: "x"})
    air = AIR(scale=1, mode="bonus")
    assert shaping(built(calls, [used]), air) == {"a": 1.0, "b": 1.0, "d": 0.0}


def test_what_no_selected_call_did_is_nobodys() -> None:
    episode = attempt("+m+", 1.0)
    coverage = cover(episode, WRITER, step_rewards=True)
    found = shape(AIR(scale=1, mode="bonus"), discounted(1), episode, coverage)
    assert (dict(found.credits), found.unplaced) == ({("c1", 0): 1.0}, 1)


def test_a_function_as_bonus_judges_the_state_after_a_turn() -> None:
    def tools_so_far(history: History) -> float:
        return len(history.tools)

    air = AIR(scale=0.1, mode="bonus", signals=(tools_so_far,))
    found = shaping(attempt("m+mm+"), air, discounted(1))
    assert found == pytest.approx({"c0": 0.1 + 0.1 + 0.2, "c2": 0.1 + 0.2, "c3": 0.2})


# --- signals ----------------------------------------------------------------------------------


def see(episode: Episode, signal: Any) -> list[float]:
    return [seen.value for seen in signal.see(Trace(episode))]


def test_tools_are_chosen_by_name() -> None:
    tools = [
        tool("t1", at(3), at(3) + 1, name="sql_query"),
        tool("t2", at(3), at(3) + 1, name="search", fails=True),
    ]
    episode = built([call("a", 1, 2)], tools)
    assert see(episode, ToolSuccess()) == [1.0, 0.0]
    assert see(episode, ToolSuccess(tools="sql*")) == [1.0]
    assert see(episode, ToolError(tools="search")) == [-1.0]


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
    assert see(episode, ToolError()) == [value - 1 for value in seen]


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        ('{"rows": []}', [0.0]),
        ("[1, 2]", [0.0]),
        ("no such table", [-1.0]),
        ('{"rows": [', [-1.0]),
        (None, [-1.0]),
        ('{"rows": [1… (70000 characters)', []),
        ("[" * 100_000, [-1.0]),
    ],
)
def test_results_that_must_be_json(result: str | None, seen: list[float]) -> None:
    attributes = {} if result is None else {c.TOOL_CALL_RESULT: result}
    episode = built([call("a", 1, 2)], [tool("t", at(3), at(4), attributes=attributes)])
    assert see(episode, ToolError(result="json")) == seen
    assert see(episode, ToolError()) == [0.0]


OFFERED = {c.TOOL_DEFINITIONS: "[]"}


@pytest.mark.parametrize(
    ("attributes", "seen"),
    [
        ({}, []),
        (answers("no tool needed"), []),
        (answers(None, ("x", '{"a": 1}')), [1.0]),
        (answers(None, ("x", {"a": 1})), [1.0]),
        (answers(None, ("x", '{"a": 1}'), ("y", '{"a": ')), [0.0]),
        (answers(None, ("x", "[1]")), [0.0]),
        (answers(None, ("x", None)), [0.0]),
        (answers('<tool_call>{"name": "sql", "arguments": {"q": }}</tool_call>'), [0.0]),
        (answers("<|python_tag|>sql(1)"), [0.0]),
        (answers('{"name": "sql", "parameters": {"q": '), []),
        ({**answers('{"name": "sql", "parameters": {"q": '), **OFFERED}, [0.0]),
        ({**answers('```json\n[{"name": "sql", }]\n```'), **OFFERED}, [0.0]),
        ({**answers('{"answer": 3}'), **OFFERED}, []),
        ({c.OUTPUT_MESSAGES: "[{"}, []),
        ({c.OUTPUT_MESSAGES: "[" * 100_000}, []),
        ({c.OUTPUT_MESSAGES: '{"parts": 3}'}, []),
        ({c.OUTPUT_MESSAGES: '[{"parts": [3, {"type": "tool_call"}]}]'}, [0.0]),
        ({c.OUTPUT_MESSAGES: "[3]"}, []),
    ],
)
def test_valid_arguments(attributes: dict[str, Any], seen: list[float]) -> None:
    assert see(built([call("a", 1, 2, attributes=attributes)]), ValidArguments()) == seen


def test_each_choice_answers_for_itself() -> None:
    good = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"arguments": "{}"}}]}
    bad = {"role": "assistant", "tool_calls": [{"id": "y", "function": {"arguments": "{"}}]}
    span = make_call_span("n", "writer", (1, 2), {c.OUTPUT_MESSAGES: dump([good, bad])})
    records = [make_record("n", choice=k, span_id="span-n") for k in range(2)]
    episode = build_episode(make_attempt(), make_rollout(), [span], records)
    seen = ValidArguments().see(Trace(episode))
    assert [(one.cause, one.value) for one in seen] == [(("n", 0), 1.0), (("n", 1), 0.0)]


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


def _raises(history: History) -> float:
    raise KeyError("query")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_raises, r"the signal _raises failed on task task-g, turn 0: KeyError: 'query'; return"),
        (lambda history: "much", r"<lambda> returned 'much' on task task-g, turn 0: return a fin"),
        (lambda history: math.nan, "returned nan"),
        (lambda history: None, "returned None"),
    ],
)
@pytest.mark.parametrize("mode", ["potential", "bonus"])
def test_a_function_that_fails_is_an_error_that_names_it(
    function: Callable[[History], Any], message: str, mode: Any
) -> None:
    message = message.replace("turn 0", f"turn {int(mode == 'bonus')}")
    with pytest.raises(ConfigError, match=message):
        batch([attempt("m+")], air=AIR(signals=(function,), mode=mode))


# --- where a tool call stands -----------------------------------------------------------------


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
    """By its id, whatever the clocks say."""
    calls = [call("a", 1, 2), call("b", 3, 4, attributes=answers(None, ("x", "{}")))]
    used = tool("t", 5, 6, attributes={c.TOOL_CALL_ID: "x"})
    assert places(built(calls, [used])) == {"t": (4, 4)}
    assert Trace(built(calls, [used])).tools[0].tool.call == ("b", 0)


def test_an_id_that_two_calls_used_says_nothing() -> None:
    named = answers(None, ("call_0", "{}"))
    calls = [call("a", 1, 2, attributes=named), call("b", 3, 4, attributes=named)]
    used = tool("t", at(2) + 1, at(2) + 2, attributes={c.TOOL_CALL_ID: "call_0"})
    assert places(built(calls, [used])) == {"t": (2, 2)}


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
    """The gateway's runs 5 s ahead: tools would seem to end before calls that they followed."""
    ahead = 5_000_000_000
    record, span = call("a", 1, 2, parent_id="node")
    shifted = span.replace(start_ns=at(1) + ahead, end_ns=at(2) + ahead)
    node = make_span("node", SpanKind.AGENT, start_ns=at(1) - 9, end_ns=at(2) + 9)
    spans = [tool("t", at(2) + 10, at(2) + 20), node]
    assert places(built([(record, span)], spans)) == {"t": (2, 2)}
    skewed = built([(record, shifted)], spans)
    assert places(skewed) == {"t": (None, None)}
    coverage = cover(skewed, WRITER, step_rewards=True)
    found = shape(AIR(), discounted(1), skewed, coverage)
    assert (found.unplaced, dict(found.seen)) == (1, {"tool_success": [1.0]})


def test_a_tool_that_begins_before_it_was_asked_for_shows_other_clocks() -> None:
    """Then ids alone place it, and nothing places the other."""
    asker = call("a", 1, 2, attributes=answers(None, ("x", "{}")))
    tools = [
        tool("t", at(1), at(1) + 1, attributes={c.TOOL_CALL_ID: "x"}),
        tool("other", at(2) + 1, at(2) + 2),
    ]
    assert places(built([asker], tools)) == {"t": (2, 2), "other": (None, None)}


def test_a_span_without_a_time_is_unplaced() -> None:
    calls = [call("a", 1, 2)]
    open_ended = [tool("t1", 0, 0), tool("t2", at(3), 0), tool("t3", at(4), at(3))]
    expected = dict.fromkeys(("t1", "t2", "t3"), (None, None))
    assert places(built(calls, open_ended)) == expected


def test_a_call_without_a_span_may_have_begun_at_any_time() -> None:
    """Nothing that ended is in its state, unless ids say so."""
    episode = built([call("a", 1, 2)], [tool("t", at(2) + 1, at(2) + 2)])
    assert places(episode) == {"t": (2, 2)}
    records = [make_record("a"), make_record("b", sequence=(3, 4))]
    used = [tool("t", at(2) + 1, at(2) + 2)]
    unknown = build_episode(make_attempt(), make_rollout(), used, records)
    assert phi(unknown) == [0.0, 0.0]


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
    """Circles, orphans, lying clocks: it never raises, whatever the order of arrival."""
    signals = (ToolSuccess(), ToolError(result="json"), ValidArguments(), lambda h: len(h.tools))
    air = AIR(signals=signals, scale=1, mode=mode)
    spans, records = list(recorded.spans), list(recorded.records)
    random.shuffle(spans)
    random.shuffle(records)
    found = []
    for some in (recorded, recorded._replace(spans=spans, records=records)):
        episode = build_episode(*some)
        coverage = cover(episode, EVERYONE, step_rewards=True)
        shaped = shape(air, discounted(0.5), episode, coverage)
        assert set(shaped.credits) == {entry.call.key for entry in coverage.selected}
        assert all(math.isfinite(value) for value in shaped.credits.values())
        found.append(shaped)
    assert found[0].unplaced == found[1].unplaced
    assert found[0].credits == pytest.approx(found[1].credits)


def test_a_thousand_turns_are_linear_enough() -> None:
    episode = attempt("m+" * 1024)
    potentials = phi(episode)
    assert len(potentials) == 1024
    assert potentials[1:] == [1.0] * 1023


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "prize"}, "mode='prize': use 'potential' or 'bonus'"),
        ({"scale": 0}, "scale=0 must be above 0"),
        ({"scale": math.inf}, "scale=inf must be above 0 and finite"),
        ({"scale": -0.3}, "scale=-0.3 must be above 0"),
        ({"scale": math.nan}, "scale=nan must be above 0 and finite"),
        ({"scale": "a"}, "scale='a' must be above 0 and finite: a number such as 0.3"),
        ({"signals": ()}, "signals is empty"),
        ({"signals": max}, r"signals=<built-in function max> must be a sequence: write signals=\("),
        ({"signals": ToolError()}, r"signals=ToolError\(.*\) must be a sequence"),
        ({"signals": (ToolSuccess,)}, r"the signal ToolSuccess is a class: write ToolSuccess\(\)"),
        ({"signals": ("tool_success",)}, "'tool_success' is no signal"),
        ({"signals": (ToolError(), ToolError())}, "two signals are named 'tool_error'"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AIR(**options)


@pytest.mark.parametrize(
    ("signal", "options", "message"),
    [
        (ToolError, {"result": "xml"}, "ToolError: result='xml': use 'any' or 'json'"),
        (ToolError, {"tools": ""}, "ToolError: tools='': use one glob on the names of tools"),
        (ToolSuccess, {"tools": 5}, "ToolSuccess: tools=5: use one glob on the names of tools"),
    ],
)
def test_impossible_signals(signal: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        signal(**options)


def test_an_async_function_is_no_signal() -> None:
    async def later(history: History) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="the signal later is async"):
        AIR(signals=(later,))  # type: ignore[arg-type]


def test_lightning_rl_takes_it_and_selects_discounted_credit() -> None:
    config = LightningRL("a/model", air=True).batch_config
    assert config.air == AIR()
    assert config.credit == discounted(0.95)
    assert LightningRL("a/model", air=True, gamma=0.5).batch_config.credit == discounted(0.5)
    assert LightningRL("a/model", air=False).batch_config.air is None
    assert LightningRL("a/model").batch_config.credit == terminal
    bonus = LightningRL("a/model", air=AIR(mode="bonus"), credit="terminal").batch_config
    assert bonus.credit == terminal


class Own:
    name, step_rewards = "own", False

    def __call__(self, episode: Episode, coverage: Any) -> dict[Any, float]:
        return {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"air": True, "credit": "terminal"}, 'air= with credit="terminal" would change nothing'),
        ({"air": True, "credit": Own()}, "which the credit rule own does not tell"),
        ({"air": AIR(mode="bonus"), "credit": Own()}, "which the credit rule own does not tell"),
        ({"air": "tool_success"}, "air='tool_success': use True, or lightspan.AIR"),
        ({"air": True, "credit": "terminal", "gamma": 0.5}, 'gamma is of credit="discounted"'),
    ],
)
def test_what_air_contradicts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL("a/model", **options)


def test_config_says_it_as_json() -> None:
    assert LightningRL("a/model").config()["air"] is None
    air = AIR(signals=(ToolSuccess(tools="sql*"), ToolError(result="json"), _raises), scale=0.1)
    config = LightningRL("a/model", air=air).config()
    assert json.loads(json.dumps(config["air"])) == {
        "mode": "potential",
        "scale": 0.1,
        "signals": [
            {"type": "tool_success", "tools": "sql*"},
            {"type": "tool_error", "tools": "*", "result": "json"},
            f"{__name__}:_raises",
        ],
    }
    assert config["credit"] == "discounted(0.95)"


# --- in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"mode": "potential"}, {"mode": "bonus"}])
def test_a_run_shapes_by_its_own_tools(
    apps: Any,
    rl: Callable[..., Any],
    tmp_path: Path,
    ask: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    """From `lightspan.tool` in a runner's process to the learner, the metrics and `inspect`."""
    from tool_app import parsed  # type: ignore[import-not-found]

    algorithm = rl(air=AIR(scale=0.5, **options), gamma=1.0, tasks_per_step=3)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run")
    result = trainer.fit(parsed, ask(3), ask(2, held=1))
    before, line, after = trainer.folder.metrics()
    assert line["air/tool_success/seen"] == line["rollouts"] == 12
    assert line["air/unplaced"] == 0
    rate, mean = line["air/tool_success"], line["air/shaping_mean"]
    assert 0 < rate < 1, "no tool failed, or all: change the seed of the test"
    # potential: nothing before the first call, -0.5 before the second; bonus: 0.5 for the first
    assert mean == pytest.approx(rate * 0.25 * (-1 if options["mode"] == "potential" else 1))
    rewards = [e.reward for e in stored_episodes(trainer.settings.store_url, mode=Mode.TRAIN)]
    assert line["reward"] == pytest.approx(math.fsum(map(float, rewards)) / 12)
    assert all(0 <= reward <= 1 for reward in map(float, rewards))
    assert before["mean"] == result.evaluations[0].interval.mean <= 1
    assert not any(key.startswith("air/") for key in (*before, *after))
    rollout = algorithm.last_batch.rows[0].rollout_id
    assert re.search(
        r"credit \S+ \(discounted\(1\), AIR \S+\); share", inspect_run(trainer.folder.path, rollout)
    )


def test_a_run_does_not_go_on_with_other_settings(
    apps: Any, rl: Callable[..., Any], tmp_path: Path, ask: Callable[..., Any]
) -> None:
    Trainer(rl(air=True), steps=1, folder=tmp_path / "run").fit(apps.spell, ask(2))
    other = Trainer(rl(air=AIR(scale=0.1)), steps=2, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"air: \{'mode': 'potential', 'scale': 0.3, .* now"):
        other.fit(apps.spell, ask(2), resume=True)


def test_a_run_without_tools_is_told_once(
    apps: Any, rl: Callable[..., Any], tmp_path: Path, ask: Callable[..., Any], lines: Any
) -> None:
    trainer = Trainer(rl(air=True), steps=2, folder=tmp_path / "run", reporter=lines)
    trainer.fit(apps.spell, ask(4))
    assert sum("air= saw nothing in this step" in text for text in lines.texts) == 1


def test_tools_of_a_real_agent_are_placed_by_their_ids(
    apps: Any, rl: Callable[..., Any], tmp_path: Path, tiny: Path
) -> None:
    """A LangChain agent, its adapter, the OpenAI client, the gateway: three tool calls, of which
    one fails, and one that the model wrote wrongly."""
    pytest.importorskip("lightspan_langgraph")
    from agent_app import solve  # type: ignore[import-not-found]

    def query(text: str) -> str:
        return f'<tool_call>\n{{"name": "sql", "arguments": {{"query": "{text}"}}}}\n</tool_call>'

    turns = [query("a"), query("from nowhere") + query("b"), "<tool_call>{nothing}</tool_call>"]

    def script(request: GenerationRequest) -> str:
        asked = engine.tokenizer("policy").decode(request.prompt_ids)
        return turns[min(asked.count("<tool_response>"), 2)]

    engine = ScriptedEngine(load_tokenizer(str(tiny)), script, policies={"policy": 0})
    signals = (ToolSuccess(), ValidArguments())
    algorithm = rl(air=AIR(signals=signals, scale=1.0), gamma=1.0, tasks_per_step=1, group_size=2)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run", engine=engine)
    trainer.fit(solve, [{"q": "how many?", "reward": 0.5}])
    episodes = stored_episodes(trainer.settings.store_url, mode=Mode.TRAIN)
    assert len(episodes) == 2
    for episode in episodes:
        assert not episode.damage
        first, second, third = (call.call_id for call in episode.calls)
        found = [(t.tool.call, t.tool.succeeded, t.tool.result) for t in Trace(episode).tools]
        assert sorted(found, key=str) == sorted(
            [
                ((first, 0), True, "[[1]]"),
                ((second, 0), False, None),
                ((second, 0), True, "[[1]]"),
            ],
            key=str,
        )
        assert shaping(episode, AIR(scale=1)) == {
            first: 0.0,
            second: -1.0,
            third: pytest.approx(-2 / 3),
        }
        assert see(episode, ValidArguments()) == [1.0, 1.0, 0.0]
    line = trainer.folder.metrics()[-1]
    assert line["air/tool_success"] == line["air/valid_arguments"] == pytest.approx(2 / 3)
    assert (line["air/tool_success/seen"], line["air/unplaced"]) == (6, 0)
    assert line["air/shaping_mean"] == pytest.approx(-(0 + 1 + (2 / 3 + 1) / 2) / 3)
