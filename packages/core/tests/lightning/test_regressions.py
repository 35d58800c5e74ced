"""One test for each known defect of the original system that concerns the pure part.

Each test states what went wrong there and that it cannot here.
"""

import ast
import doctest
import importlib
import math
import subprocess
import sys

import msgspec
import pytest

import lightspan.lightning
from lightspan.lightning import (
    BatchConfig,
    Rejection,
    Selection,
    build_batch,
    build_episode,
    build_rows,
    classify_calls,
    trained_transitions,
)
from lightspan.lightning.advantages import ZeroReason, dr_grpo, grpo
from lightspan.lightning.batch import split_minibatches
from lightspan.lightning.selection import CallStatus
from lightspan.lightning.span_tree import build_tree, walk
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.reward import parse_reward
from lightspan.schema.spans import SpanKind
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
    make_span,
)
from packages.core.tests.lightning.steps import weight_mass

ALL = Selection.of("*").routing


def build(records=(), spans=(), name="1", reward=1.0, group="g", **attempt):
    return build_episode(
        make_attempt(name, reward, **attempt), make_rollout(name, group), spans, records
    )


def rows_of(*calls):
    """Rows of (prompt, response) calls in order."""
    records = [
        make_record(f"c{n}", prompt, response, (2 * n + 1, 2 * n + 2))
        for n, (prompt, response) in enumerate(calls)
    ]
    episode = build(records)
    return build_rows(trained_transitions(episode, classify_calls(episode, ALL))).rows


def batch_of(*episodes, **settings):
    coverages = [classify_calls(episode, ALL) for episode in episodes]
    return build_batch(episodes, coverages, BatchConfig(**settings))


# --- merging rows (§2c, §2d) ------------------------------------------------------------------


def test_B_a_prompt_without_new_tokens_does_not_shift_the_mask():
    """The slice `[-0:]` appended the whole prompt again."""
    (row,) = rows_of(([1, 2], [3, 4]), ([1, 2, 3, 4], [5]))
    assert row.ids == [1, 2, 3, 4, 5]
    assert row.mask == [False, False, True, True, True]


def test_C_an_identical_call_appends_no_garbage():
    """The prefix test used the new call's response too, so a repeat merged wrongly."""
    rows = rows_of(([1, 2], [3]), ([1, 2], [3]))
    assert [(row.ids, row.mask) for row in rows] == [([1, 2, 3], [False, False, True])] * 2


def test_C_a_prompt_shorter_than_the_row_does_not_merge():
    """Testing the prefix against prompt + response merged a row into a shorter prompt."""
    rows = rows_of(([1], [2, 3, 4]), ([1, 2], [3, 4, 5]))
    assert [row.ids for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_D_a_broken_prefix_never_trains_prompt_tokens_however_long_the_prompt():
    """The overflow of a long prompt went into the response with mask 1, longer than the row."""
    rows = rows_of(([1, 2], [3]), ([9] * 5_000, [4]))
    assert [sum(row.mask) for row in rows] == [1, 1]
    for row in rows:
        lists = (row.mask, row.advantages, row.weights, row.logprobs, row.versions)
        assert {len(values) for values in lists} == {len(row.ids)}
    assert rows[1].mask == [False] * 5_000 + [True]


def test_D_a_prompt_too_long_is_rejected_with_a_reason_and_never_cut():
    records = [make_record("c0"), make_record("c1", [9] * 50, [4], (3, 4))]
    episode = build(records)
    built = build_rows(trained_transitions(episode, classify_calls(episode, ALL)), max_length=50)
    assert [row.ids for row in built.rows] == [[1, 2, 3]]
    assert built.rejected == {("at-1", "c1", 0): Rejection.OUT_OF_CONTEXT}


def test_D_after_a_break_late_in_a_rollout_the_rest_is_still_trained():
    """The first prompt of a row over 2,048 tokens dropped everything after the break."""
    history = list(range(3_000))
    rows = rows_of(([1], [2]), (history, [7]), ([*history, 7, 8], [9]))
    assert [sum(row.mask) for row in rows] == [1, 2]


def test_E_interleaved_sub_agents_merge_each_with_itself():
    """A1 B1 A2 B2 made four rows: only the last open row was tried."""
    rows = rows_of(([1], [10]), ([2], [20]), ([1, 10, 3], [11]), ([2, 20, 4], [21]))
    assert [row.ids for row in rows] == [[1, 10, 3, 11], [2, 20, 4, 21]]


def test_F_one_retokenised_token_costs_one_row_and_no_more():
    """`H` + `AVING` came back as `HAV` + `ING`: a new row, exact; afterwards it merges again."""
    rows = rows_of(([1], [10, 11]), ([1, 12, 13, 2], [3]), ([1, 12, 13, 2, 3, 4], [5]))
    assert [row.ids for row in rows] == [[1, 10, 11], [1, 12, 13, 2, 3, 4, 5]]
    assert [row.mask.count(True) for row in rows] == [2, 2]


def test_log_probabilities_of_one_call_missing_null_nobody_elses():
    """One row without log-probs removed them from the whole batch, with a print."""
    bad = make_record("c1", sequence=(3, 4))
    bad = msgspec.structs.replace(bad, logprob_data=b"")
    batch = batch_of(build([make_record("c0"), bad]), build([], name="2", reward=0.0))
    assert [row.logprobs for row in batch.rows] == [[0.0, 0.0, -0.5]]
    assert batch.counters["rejected:no_logprobs"] == 1


def test_building_rows_changes_no_input():
    """`current_response_log_probs += …` grew the first call's own list (#613)."""
    records = [make_record("c0"), make_record("c1", [1, 2, 3], [4], (3, 4))]
    episode = build(records)
    found = trained_transitions(episode, classify_calls(episode, ALL))
    before = [(t.prompt_ids, t.response_ids, t.logprobs) for t in found]
    first, second = build_rows(found).rows, build_rows(found).rows
    assert first == second
    assert [(t.prompt_ids, t.response_ids, t.logprobs) for t in found] == before


# --- calls (§2a, §2d, §5.4–5.8) ---------------------------------------------------------------


def test_4_calls_stand_in_the_order_they_were_made_not_in_that_of_the_tree():
    """c1, c2, c3, c4 came out c2, c4, c1, c3: depth first, re-attached nodes last."""
    spans = [
        make_span("root", SpanKind.AGENT),
        make_span("a", SpanKind.AGENT, parent_id="root"),
        make_span("b", SpanKind.AGENT, parent_id="root"),
        make_call_span("c2", sequence=(3, 4), parent_id="a"),
        make_call_span("c4", sequence=(7, 8), parent_id="a"),
        make_call_span("c1", sequence=(1, 2), parent_id="b"),
        make_call_span("c3", sequence=(5, 6), parent_id="b"),
    ]
    assert [call.call_id for call in build(spans=spans).calls] == ["c1", "c2", "c3", "c4"]


def test_5_a_parallel_agents_call_stays_its_own_though_anothers_span_covers_it_in_time():
    """Re-attaching by time envelope gave alice's call to bob: agent_match='alice' found nothing."""
    spans = [
        make_span("alice", SpanKind.AGENT, start_ns=0, end_ns=100, attributes={c.AGENT_NAME: "a"}),
        make_span("bob", SpanKind.AGENT, start_ns=40, end_ns=60, attributes={c.AGENT_NAME: "b"}),
        make_call_span("c1", "alice", (1, 2), start_ns=45, end_ns=55),
    ]
    episode = build([make_record("c1", agent_path="alice")], spans)
    coverage = classify_calls(episode, Selection.of("alice").routing)
    assert [call.agent for call in coverage.trained] == ["alice"]


def test_6_rewards_do_not_walk_backwards_onto_earlier_calls():
    """Two rewards after the second call: the extra one went to the first."""
    target = {c.REWARD_CALL_ID: "c1"}
    spans = [
        make_reward_span("r1", 0.5, target, start_ns=10),
        make_reward_span("r2", 0.7, target, start_ns=11),
    ]
    episode = build([make_record("c0"), make_record("c1", sequence=(3, 4))], spans)
    assert [call.reward for call in episode.calls] == [None, 0.7]


def test_6_emitting_and_returning_a_reward_does_not_count_it_twice():
    """`emit_reward` and a returned float were two rewards."""
    episode = build([make_record("c0")], [make_reward_span("r", 1.0)], reward=1.0)
    assert episode.reward == 1.0


def test_7_a_name_matches_exactly():
    """A substring search: 'write_query' also took 'rewrite_query'."""
    records = [
        make_record("c0", agent_path="write_query"),
        make_record("c1", agent_path="rewrite_query", sequence=(3, 4)),
        make_record("c2", agent_path="team/write_query", sequence=(5, 6)),
    ]
    coverage = classify_calls(build(records), Selection.of("write_query").routing)
    assert [call.call_id for call in coverage.trained] == ["c0", "c2"]


def test_2a_an_inner_agent_that_does_not_match_hides_nothing_below_it():
    """A non-matching inner agent switched the match off for its whole subtree."""
    record = make_record("c0", agent_path="team/checker/writer")
    coverage = classify_calls(build([record]), Selection.of("writer").routing)
    assert coverage.counts() == {"trained": 1}


def chain(depth):
    """Spans nested so deep, the last one a call."""
    spans = [
        make_span(f"{n}", SpanKind.AGENT, parent_id=str(n - 1) if n else None) for n in range(depth)
    ]
    spans.append(make_call_span("c0", sequence=(1, 2), parent_id=str(depth - 1)))
    return spans


def test_8_depth_ten_thousand_works():
    """RecursionError on a chain 1,200 deep."""
    episode = build([make_record("c0")], chain(10_000))
    assert classify_calls(episode, ALL).counts() == {"trained": 1}
    depths = [depth for depth, _ in walk(episode.tree)]
    assert depths == list(range(10_001))


def test_8_ten_thousand_nested_foreign_llm_spans_work():
    spans = [
        make_span(str(n), SpanKind.LLM, parent_id=str(n - 1) if n else None) for n in range(10_000)
    ]
    assert [call.call_id for call in build(spans=spans).calls] == ["span:9999"]


def test_8_ten_thousand_circles_of_parents_work():
    spans = [
        make_span(f"{n}{s}", parent_id=f"{n}{'ba'[s == 'b']}") for n in range(5_000) for s in "ab"
    ]
    assert len(build_tree(spans)) == 5_000


class Counting:
    """Attribute reads of spans and records, as a count of work that no clock disturbs."""

    reads = 0

    def __init__(self, value):
        self._value = value

    def __getattr__(self, name):
        Counting.reads += 1
        return getattr(self._value, name)


@pytest.mark.parametrize("nested", [True, False])
def test_8_the_work_is_linear_in_the_spans(nested):
    """Quadratic: 3,074 flat spans took 2,987 ms where 770 took 181."""

    def reads(turns):
        spans, records = [], []
        for n in range(turns):
            parent = (f"tool-{n - 1}" if nested else "root") if n else None
            sequence = (2 * n + 1, 2 * n + 2)
            spans.append(make_call_span(f"c{n}", sequence=sequence, parent_id=parent, start_ns=n))
            spans.append(make_span(f"tool-{n}", SpanKind.TOOL, parent_id=parent, start_ns=n))
            records.append(make_record(f"c{n}", sequence=sequence))
        Counting.reads = 0
        episode = build(list(map(Counting, records)), list(map(Counting, spans)))
        assert len(trained_transitions(episode, classify_calls(episode, ALL))) == turns
        return Counting.reads / turns

    assert reads(800) < 1.1 * reads(200)


def test_23_best_of_n_keeps_every_sample():
    """Calls with equal prompts were taken for retries: 12 became 1."""
    records = [make_record(f"c{n}", [1, 2], [3], (2 * n + 1, 2 * n + 2)) for n in range(12)]
    episode = build(records)
    assert len(build_rows(trained_transitions(episode, classify_calls(episode, ALL))).rows) == 12


def test_every_choice_of_n_is_kept():
    """Only choices[0] was."""
    records = [make_record("c0", response=[n], choice=n) for n in range(3)]
    episode = build(records)
    assert len(build_rows(trained_transitions(episode, classify_calls(episode, ALL))).rows) == 3


def test_22_what_arrives_after_the_end_is_not_trained():
    """Late reward events after the terminal state were accepted."""
    spans = [make_reward_span("r", 1.0, late=True)]
    episode = build([make_record("c0", late=True)], spans, reward=None)
    assert episode.reward is None
    assert episode.calls == ()


# --- rewards (§2c, §2d, algorithms §2.8, §3.10) -----------------------------------------------


def test_rewards_keep_their_precision():
    """bfloat16: 0.901, 0.902 and 0.903 were all 0.90234375, a group without advantage."""
    values = [0.901, 0.902, 0.903]
    episodes = [
        build([make_record("c0", attempt=str(n))], name=str(n), reward=value)
        for n, value in enumerate(values)
    ]
    batch = batch_of(*episodes)
    whys = [batch.explanations[f"at-{n}", "c0", 0] for n in range(3)]
    assert [why.value for why in whys] == values
    assert [why.advantage for why in whys] == pytest.approx([-1.0, 0.0, 1.0])


def test_true_is_one_and_none_is_no_value_and_nan_is_unscored():
    """True became 0.0, a missing reward 0.0, and NaN passed into the statistics."""
    assert parse_reward(True).value == 1.0
    assert parse_reward(None) is None
    assert parse_reward(math.nan).value is None
    assert dr_grpo([True, False])[0].baseline == 0.5
    episodes = [
        build([make_record("c0", attempt=name)], name=name, reward=value)
        for name, value in (("1", 1.0), ("2", 0.0), ("3", None), ("4", math.nan))
    ]
    batch = batch_of(*episodes, estimator="dr_grpo")
    assert {why.baseline for why in batch.explanations.values()} == {0.5}
    assert batch.rollouts == ("ro-1", "ro-2")
    assert all(math.isfinite(a) for row in batch.rows for a in row.advantages)


def test_an_infrastructure_failure_is_not_a_reward_of_zero():
    """A timeout or a pod that was gone trained its calls with reward 0.0."""
    lost = {"status": AttemptStatus.LOST, "outcome": Outcome.INFRASTRUCTURE}
    episodes = [
        build([make_record("c0", attempt="1")], reward=1.0),
        build([make_record("c0", attempt="2")], name="2", reward=None, **lost),
        build([make_record("c0", attempt="3")], name="3", reward=0.5),
    ]
    batch = batch_of(*episodes, estimator="dr_grpo")
    assert batch.rollouts == ("ro-1", "ro-3")
    assert {why.baseline for why in batch.explanations.values()} == {0.75}


def test_the_first_reward_does_not_stick():
    """Only the last reward event counted in 1.0, only the last non-None triplet in 0.3: say so."""
    spans = [make_reward_span(f"r{n}", n / 10, start_ns=n) for n in (1, 2)]
    episode = build(spans=spans, reward=None)
    assert (episode.reward, len(episode.notes)) == (0.2, 1)


def test_10_rewards_on_calls_are_kept_and_reported_where_unused():
    """Intermediate rewards were discarded without a word."""
    spans = [make_reward_span("r", 0.5, {c.REWARD_CALL_ID: "c0"})]
    batch = batch_of(build([make_record("c0")], spans))
    assert batch.counters["unused_step_rewards"] == 1


# --- statistics and weights (§2c, §2d, §5.25) -------------------------------------------------


def two_rollouts():
    """R1 = 1 in three rows, R2 = 0 in one."""
    long = [make_record(f"c{n}", [n + 5], [1, 2], (2 * n + 1, 2 * n + 2)) for n in range(3)]
    return build(long), build([make_record("c0", attempt="2")], name="2", reward=0.0)


def test_a_rollout_with_more_turns_does_not_dominate_the_statistics():
    """Statistics over rows: the baseline was 3/4 (PRs #444, #445, #462)."""
    batch = batch_of(*two_rollouts(), estimator="dr_grpo")
    assert {why.baseline for why in batch.explanations.values()} == {0.5}
    assert len(batch.rows) == 4


def test_the_step_does_not_shrink_as_rollouts_fragment():
    """Divided by rows: 2 rollouts in 3 rows had mass 2/3 together, and R/N changed every step."""
    batch = batch_of(*two_rollouts())
    assert weight_mass(batch) == pytest.approx(1.0)
    by_rollout = dict.fromkeys(batch.rollouts, 0.0)
    for row in batch.rows:
        by_rollout[row.rollout_id] += math.fsum(row.weights)
    assert list(by_rollout.values()) == pytest.approx([0.5, 0.5])


def test_25_statistics_come_before_every_filter():
    """Rows were dropped first; a group reduced to one rollout got mean 0 and std 1."""
    episodes = [
        build([make_record("c0", [1] * 90, attempt="1")], reward=1.0),
        build([make_record("c0", attempt="2")], name="2", reward=0.0),
    ]
    batch = batch_of(*episodes, estimator="dr_grpo", max_length=50)
    assert [row.rollout_id for row in batch.rows] == ["ro-2"]
    assert batch.rows[0].advantages == [0.0, 0.0, -0.5]
    assert batch.size == 2


def test_nothing_is_dropped_so_that_batches_divide():
    """Rows were floored to a multiple of the mini-batch, at random."""
    episodes = [
        build([make_record("c0", attempt=str(n))], name=str(n), reward=2.0**n) for n in range(7)
    ]
    parts = split_minibatches(batch_of(*episodes), 3)
    assert sorted(part.size for part in parts) == [2, 2, 3]
    assert sum(len(part.rows) for part in parts) == 7


def test_the_rows_of_a_rollout_stay_in_one_update():
    """Nothing kept them together: within-rollout policy skew."""
    parts = split_minibatches(batch_of(*two_rollouts()), 2)
    found = [{row.rollout_id for row in part.rows} for part in parts]
    assert sorted(map(len, found)) == [1, 1]
    assert not found[0] & found[1]


def test_each_update_is_weighted_by_its_own_rollouts():
    """The divisor was not rescaled per mini-batch: the step depended on their number."""
    for part in split_minibatches(batch_of(*two_rollouts()), 2):
        assert weight_mass(part) == pytest.approx(1.0)


def test_a_group_of_one_has_advantage_zero():
    """verl: mean 0, std 1, so the advantage was the reward."""
    (statistics,) = grpo([1.0])
    assert (statistics.zero_reason, statistics.advantage(1.0)) == (ZeroReason.GROUP_OF_ONE, 0.0)


def test_a_call_with_nothing_sampled_does_not_raise():
    """Rows with 0 trainable tokens were skipped, then the advantage raised on them."""
    episode = build([make_record("c0", response=[]), make_record("c1", sequence=(3, 4))])
    coverage = classify_calls(episode, ALL)
    assert [entry.status for entry in coverage.entries] == [
        CallStatus.REJECTED,
        CallStatus.TRAINED,
    ]
    batch = build_batch([episode], [coverage], BatchConfig(keep_zero_advantages=True))
    assert len(batch.rows) == 1


# --- documentation that runs ------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["", ".advantages", ".selection", ".transitions", ".credit", ".rows", ".batch"]
)
def test_the_examples_in_docstrings_are_true(module):
    assert doctest.testmod(importlib.import_module("lightspan.lightning" + module)).failed == 0


def test_all_names_exist_and_are_listed():
    names = lightspan.lightning.__all__
    assert names == sorted(names, key=lambda name: (name.upper() != name, name[0].islower(), name))
    assert all(hasattr(lightspan.lightning, name) for name in names)


def test_the_pure_part_needs_nothing_but_msgspec():
    code = (
        "import sys; before = set(sys.modules); import lightspan.lightning; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    needed = ast.literal_eval(found.stdout.decode())
    assert needed <= {
        "lightspan",
        "msgspec",
        "typing_extensions",
    }  # msgspec takes the last if there
