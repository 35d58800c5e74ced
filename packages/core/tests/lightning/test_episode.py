"""Test episodes: calls in causal order, each with its agent, outcome and rewards."""

import math

import msgspec
import pytest

from lightspan.algorithms.metrics import rollout_metrics
from lightspan.lightning import build_episode
from lightspan.lightning.episode import dimension_means, lowest_reward, named_means, score_failure
from lightspan.lightning.span_tree import build_tree, walk
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing
from lightspan.schema.spans import SpanEvent, SpanKind, SpanLink, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan.training.results import Evaluation
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
    make_span,
)


def build(spans=(), records=(), *, failure_reward=None, **attempt):
    episode = build_episode(make_attempt(**attempt), make_rollout(), spans, records)
    return score_failure(episode, failure_reward)


def ids(episode):
    return [call.call_id for call in episode.calls]


# --- facts ------------------------------------------------------------------------------------


def test_an_episode_states_the_facts_of_its_attempt():
    rollout = make_rollout(mode=Mode.VAL)
    attempt = make_attempt(reward=0.5, capture_errors=["lost a span"])
    episode = build_episode(attempt, rollout, [], [])
    assert (episode.rollout_id, episode.attempt_id) == ("ro-1", "at-1")
    assert (episode.task_id, episode.group_id, episode.mode) == ("task-g", "g", Mode.VAL)
    assert (episode.reward, episode.reward_source, episode.outcome) == (0.5, "returned", Outcome.OK)
    assert episode.capture_errors == ("lost a span",)
    assert episode.calls == ()
    assert episode.notes == ()


def test_without_a_group_the_rollouts_of_a_task_are_one():
    rollout = make_rollout(group_id="", task_id="t7")
    assert build_episode(make_attempt(), rollout, [], []).group_id == "t7"


def test_what_belongs_to_another_attempt_is_ignored():
    episode = build(
        [make_call_span("theirs", attempt="2"), make_span("s1", SpanKind.AGENT, attempt_id="")],
        [make_record("theirs", attempt="2"), make_record("ours")],
    )
    assert ids(episode) == ["ours"]
    assert len(episode.spans) == 1


@pytest.mark.parametrize(
    ("status", "outcome", "finished"),
    [
        (AttemptStatus.SUCCEEDED, Outcome.OK, True),
        (AttemptStatus.SUCCEEDED, None, True),
        (AttemptStatus.FAILED, Outcome.APP_ERROR, True),
        (AttemptStatus.TIMEOUT, Outcome.TIMEOUT, True),
        (AttemptStatus.FAILED, Outcome.INFRASTRUCTURE, False),
        (AttemptStatus.LOST, Outcome.INFRASTRUCTURE, False),
        (AttemptStatus.CANCELLED, Outcome.CANCELLED, False),
        (AttemptStatus.RUNNING, None, False),
    ],
)
def test_only_an_attempt_that_ended_by_itself_is_finished(status, outcome, finished):
    assert build(status=status, outcome=outcome).finished is finished


# --- calls ------------------------------------------------------------------------------------


def test_a_call_is_its_record_and_its_span():
    attributes = {c.ROUTE: "policy", c.FINISH_REASONS: ["stop"]}
    span = make_call_span("c1", "team/writer", (5, 9), attributes, start_ns=7)
    record = make_record("c1", [1], [2, 3], (5, 9), agent_path="team/writer", span_id="span-c1")
    (call,) = build([span], [record]).calls
    assert call.key == ("c1", 0)
    assert (call.agent_path, call.agent) == ("team/writer", "writer")
    assert call.record is record
    assert call.span is span
    assert call.span_id == "span-c1"
    assert (call.sequence_start, call.sequence_end) == (5, 9)
    assert (call.outcome, call.route, call.policy) == (CallOutcome.OK, Route.POLICY, "policy")
    assert (call.finish, call.reward, call.rewards) == ("stop", None, ())


def test_a_call_may_have_a_record_alone_or_a_span_alone():
    alone = make_call_span("b", sequence=(3, 4), attributes={c.FINISH_REASONS: ["length"]})
    episode = build([alone], [make_record("a", sequence=(1, 2), span_id="s-a")])
    first, second = episode.calls
    assert (first.call_id, first.span, first.span_id, first.route) == ("a", None, "s-a", None)
    assert (second.call_id, second.record, second.policy) == ("b", None, "")
    assert second.finish == "length"


def test_choices_of_one_call_are_calls_of_one_id():
    records = [make_record("c1", response=[n], choice=n) for n in (2, 0, 1)]
    calls = build([make_call_span("c1", sequence=(1, 2))], records).calls
    assert [call.key for call in calls] == [("c1", 0), ("c1", 1), ("c1", 2)]
    assert [call.record.response_ids for call in calls] == [[0], [1], [2]]


def test_a_choice_without_any_token_is_a_call_without_record():
    span = make_call_span("c1", sequence=(1, 2), attributes={c.REQUEST_CHOICES: 3})
    calls = build([span], [make_record("c1", choice=0), make_record("c1", choice=2)]).calls
    assert [(call.choice, call.record is None) for call in calls] == [
        (0, False),
        (1, True),
        (2, False),
    ]


def test_retries_of_one_call_id_are_one_call():
    spans = [make_call_span("c1", sequence=(n, n + 1), span_id=f"s{n}") for n in (1, 3)]
    record = make_record("c1", sequence=(1, 2))
    (call,) = build(spans, [record, record]).calls
    assert call.span_id == "s1"


def test_two_different_records_of_one_call_are_noted_and_one_counts_whatever_the_order():
    one, two = make_record("c1", response=[3]), make_record("c1", response=[4])
    episodes = [build([], records) for records in ([one, two], [two, one], [one, two, one])]
    assert [episode.calls[0].record.response_ids for episode in episodes] == [[3]] * 3
    assert {episode.notes for episode in episodes} == {("call c1 choice 0 has two token records",)}


def test_a_foreign_instrumentations_span_around_a_call_is_no_call_of_its_own():
    spans = [
        make_span("outer", SpanKind.LLM, parent_id="step"),
        make_span("wrapper", SpanKind.LLM, parent_id="outer"),
        make_span("http", SpanKind.OTHER, parent_id="wrapper"),
        make_call_span("c1", sequence=(1, 2), parent_id="http"),
        make_span("alone", SpanKind.LLM, parent_id="step"),
        make_span("step", SpanKind.AGENT),
    ]
    assert ids(build(spans)) == ["c1", "span:alone"]


def test_the_call_says_who_acted_in_whichever_dialect():
    own = make_span("s1", attributes={c.AGENT_PATH: "team/writer"}, start_ns=1)
    semconv = make_span("s2", attributes={c.AGENT_NAME: "a/b"}, start_ns=2)
    inference = make_span("s3", attributes={c.OPENINFERENCE_AGENT: "checker"}, start_ns=3)
    nobody = make_span("s4", start_ns=4)
    calls = build([own, semconv, inference, nobody]).calls
    assert [call.agent_path for call in calls] == ["team/writer", "a%2Fb", "checker", "app"]
    assert [call.agent for call in calls] == ["writer", "a/b", "checker", "app"]


def test_a_record_without_a_path_takes_that_of_its_span():
    record = make_record("c1", agent_path="")
    assert build([make_call_span("c1", "x/y")], [record]).calls[0].agent_path == "x/y"
    assert build([], [record]).calls[0].agent_path == "app"


# --- order ------------------------------------------------------------------------------------


def test_calls_past_the_gateway_are_shown_by_start_time_and_have_no_sequence():
    spans = [
        make_call_span("app-late", start_ns=35),
        make_call_span("g1", sequence=(1, 2), start_ns=10),
        make_call_span("g2", sequence=(3, 4), start_ns=20),
        make_call_span("g3", sequence=(5, 6), start_ns=30),
        make_call_span("app-mid", start_ns=15),
        make_call_span("app-untimed"),
    ]
    episode = build(spans)
    assert ids(episode) == ["g1", "app-mid", "g2", "g3", "app-late", "app-untimed"]
    assert [call.sequence_start for call in episode.calls] == [1, None, 3, 5, None, None]


# --- outcomes ---------------------------------------------------------------------------------

UNDELIVERED = {c.CALL_OUTCOME: "undelivered"}
RESAMPLED = {c.CALL_RESAMPLED: True, c.CALL_OUTCOME: "ok"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, CallOutcome.OK),
        ({"status": SpanStatus.ERROR}, CallOutcome.ERROR),
        ({"attributes": UNDELIVERED, "status": SpanStatus.ERROR}, CallOutcome.UNDELIVERED),
        ({"attributes": {c.CALL_OUTCOME: "cancelled"}}, CallOutcome.CANCELLED),
        ({"attributes": {c.CALL_OUTCOME: "ok"}}, CallOutcome.OK),
        ({"attributes": {c.CALL_OUTCOME: "gone"}}, CallOutcome.OK),
        (
            {"status": SpanStatus.ERROR, "events": [SpanEvent("delivery", 1, UNDELIVERED)]},
            CallOutcome.UNDELIVERED,
        ),
    ],
)
def test_a_span_says_what_became_of_its_call(fields, expected):
    fields = {"span_id": "s1", **fields}
    span = make_call_span("c1", sequence=(1, 2), **fields)
    for records in ([], [make_record("c1")]):
        assert build([span], records).calls[0].outcome is expected


def test_an_answer_that_the_app_never_got_is_undelivered_though_the_gateway_sent_it():
    sent = make_call_span("c1", sequence=(1, 2), attributes={c.CALL_OUTCOME: "ok"})
    missed = make_call_span("c1", span_id="app", attributes=UNDELIVERED, status=SpanStatus.ERROR)
    for spans in ([sent, missed], [missed, sent]):
        call = build(spans, [make_record("c1")]).calls[0]
        assert call.outcome is CallOutcome.UNDELIVERED
        assert call.span is sent


def test_a_retry_that_fetched_the_answer_makes_the_call_good():
    first = make_call_span("c1", sequence=(1, 2), span_id="s1", attributes=UNDELIVERED)
    retry = make_call_span("c1", sequence=(3, 4), span_id="s2", attributes={c.CALL_OUTCOME: "ok"})
    for spans in ([first, retry], [retry, first]):
        assert build(spans, [make_record("c1")]).calls[0].outcome is CallOutcome.OK
    again = make_call_span("c1", sequence=(5, 6), span_id="s3", attributes=UNDELIVERED)
    assert build([again, retry, first]).calls[0].outcome is CallOutcome.UNDELIVERED


def test_a_reward_without_an_answer_that_never_came_is_not_the_policys():
    gone = make_record("c1", outcome=CallOutcome.UNDELIVERED, prompt=[1, 2])
    fine = make_record("c2", prompt=[3])
    episode = build([], [gone, fine], reward=1.0)
    assert (episode.reward, episode.scored(), episode.scored(step_rewards=True)) == (
        None,
        False,
        False,
    )
    assert episode.unscored == (
        "an answer to writer never reached the app, which went on without it"
    )
    again = make_record("c3", prompt=[1, 2])
    assert build([], [gone, fine, again], reward=1.0).reward == 1.0
    # the app's own process saw the failure, so that its runner has decided
    for outcome in ("undelivered", "cancelled"):
        own = make_call_span("c1", span_id="app", attributes={c.CALL_OUTCOME: outcome})
        assert build([own], [gone, fine], reward=1.0).reward == 1.0


def test_a_call_that_was_sampled_anew_stays_so_whatever_became_of_it_later():
    again = make_call_span("c1", sequence=(1, 2), span_id="s1", attributes=RESAMPLED)
    retry = make_call_span("c1", sequence=(3, 4), span_id="s2", attributes={c.CALL_OUTCOME: "ok"})
    for spans in ([again], [again, retry], [retry, again]):
        assert build(spans, [make_record("c1")]).calls[0].outcome is CallOutcome.RESAMPLED


# --- late -------------------------------------------------------------------------------------


def test_what_is_late_never_enters_the_calls_and_is_counted():
    episode = build(
        [make_call_span("c2", sequence=(3, 4), late=True), make_reward_span("r", 9.0, late=True)],
        [make_record("c1"), make_record("c2", sequence=(3, 4), late=True)],
        reward=None,
    )
    assert ids(episode) == ["c1"]
    assert [call.call_id for call in episode.late_calls] == ["c2"]
    assert episode.late == 3
    assert episode.reward is None
    assert episode.spans == ()


def test_what_the_app_says_in_time_of_a_stream_it_left_stands():
    left = make_call_span("c1", attributes={c.CALL_OUTCOME: "cancelled"}, span_id="app")
    late = make_call_span("c1", sequence=(1, 2), late=True)
    episode = build([left, late], [make_record("c1", late=True)])
    [call] = episode.calls
    assert (call.call_id, call.outcome, call.record) == ("c1", CallOutcome.CANCELLED, None)
    assert episode.late_calls == ()
    assert episode.late == 2


# --- rewards ----------------------------------------------------------------------------------


def emitted(*values):
    return [make_reward_span(f"r{n}", None, {c.REWARD_VALUE: v}) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("returned", "emissions", "reward", "source", "notes"),
    [
        (1.0, [0.25], 1.0, "returned", ("the app returned 1.0 but emitted 0.25: 1.0 counts",)),
        (1.0, [1.0], 1.0, "returned", ()),
        (None, [0.2, 0.7], 0.7, "emitted", ("2 differing rewards emitted: the last, 0.7, wins",)),
        (None, [True], 1.0, "emitted", ()),
        (None, [math.nan], None, "emitted", None),
        (None, [-1e101], None, "emitted", None),
        (None, ["1"], None, "emitted", None),
        (None, [], None, None, ()),
    ],
)
def test_the_reward_is_what_was_returned_else_the_last_emission(
    returned, emissions, reward, source, notes
):
    episode = build(emitted(*emissions), reward=returned)
    assert (episode.reward, episode.reward_source) == (reward, source)
    assert episode.scored() is (reward is not None)
    assert notes is None or episode.notes == notes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_returned_nan_is_unscored_and_still_wins_over_an_emission(value):
    episode = build([make_reward_span("r", 0.5)], reward=value)
    assert (episode.reward, episode.reward_source) == (None, "returned")
    assert len(episode.notes) == 1
    assert not episode.scored()
    assert not episode.scored(step_rewards=True)


def test_named_dimensions_are_kept():
    attributes = {c.REWARD_DIMENSION + "f1": 0.5, c.REWARD_DIMENSION + "bad": math.nan}
    episode = build([make_reward_span("r", 0.5, attributes)], reward=None)
    assert episode.dimensions == {"f1": 0.5}
    attempt = make_attempt(reward=None)
    returned = msgspec.structs.replace(attempt, reward=Reward(1.0, {"a": 1.0}))
    assert build_episode(returned, make_rollout(), [], []).dimensions == {"a": 1.0}


def test_means_of_named_rewards_are_over_the_scored_episodes_that_have_them():
    def scored(value, **named):
        returned = msgspec.structs.replace(make_attempt(reward=None), reward=Reward(value, named))
        return build_episode(returned, make_rollout(), [], [])

    episodes = [scored(1.0, reward=1.0, f1=0.5, s=2.0), scored(0.0, reward=0.0, f1=1.0)]
    episodes += [scored(0.5, f1=0.75)]
    means = dimension_means([*episodes, scored(None, f1=9.0)])
    assert means == {"dimension/f1": 0.75, "dimension/s": 2.0, "dimension_n/s": 1.0}
    assert named_means(means) == ", f1 0.75, s 2 (n=1)"
    assert dimension_means([*episodes, build(reward=1.0)])["dimension_n/f1"] == 3.0
    assert rollout_metrics(episodes)["dimension/f1"] == 0.75
    assert Evaluation.of(0, episodes, routing=Routing()).metrics()["dimension/s"] == 2.0


def test_rewards_on_a_call_its_span_or_by_link_stay_with_that_call():
    spans = [
        make_call_span("c1", sequence=(1, 2)),
        make_call_span("c2", sequence=(3, 4)),
        make_call_span("c3", sequence=(5, 6)),
        make_reward_span("r1", 0.1, {c.REWARD_CALL_ID: "c1"}),
        make_reward_span("r2", 0.2, {c.REWARD_SPAN_ID: "span-c2"}),
        make_reward_span("r3", 0.3, links=[SpanLink("0" * 32, "span-c3")]),
    ]
    episode = build(spans, reward=None)
    assert [call.reward for call in episode.calls] == [0.1, 0.2, 0.3]
    assert episode.reward is None
    assert not episode.scored()
    assert episode.scored(step_rewards=True)


def test_several_rewards_on_a_call_are_not_summed():
    target = {c.REWARD_CALL_ID: "c1"}
    rewards = [make_reward_span(f"r{n}", float(n), target, start_ns=n) for n in (2, 3, 1)]
    episode = build(rewards, [make_record("c1")])
    assert [reward.value for reward in episode.calls[0].rewards] == [1.0, 2.0, 3.0]
    assert episode.stray_rewards == 0
    assert episode.calls[0].reward == 3.0
    assert episode.notes == ("3 rewards on call c1: the last one counts",)


def test_a_reward_on_something_that_is_no_call_enters_nothing():
    spans = [
        make_span("tool", SpanKind.TOOL),
        make_reward_span("r", 5.0, {c.REWARD_SPAN_ID: "tool"}),
    ]
    episode = build(spans, [make_record("c1")], reward=None)
    assert episode.reward is None
    assert episode.calls[0].reward is None
    assert episode.notes == ("a reward was emitted on tool, which is no call: it is unused",)
    assert episode.stray_rewards == 1
    assert build([make_reward_span("r", 5.0)], [make_record("c1")]).stray_rewards == 0


@pytest.mark.parametrize("outcome", [Outcome.APP_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW])
def test_a_failed_app_gets_the_failure_reward_only_if_asked_for(outcome):
    failed = {"status": AttemptStatus.FAILED, "outcome": outcome, "reward": None}
    assert build(**failed).reward is None
    episode = build(**failed, failure_reward=-1.0)
    assert (episode.reward, episode.reward_source) == (-1.0, "failure")
    given = build([make_reward_span("r", 0.5)], **failed, failure_reward=-1.0)
    assert (given.reward, given.reward_source) == (0.5, "emitted")


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (AttemptStatus.LOST, Outcome.INFRASTRUCTURE),
        (AttemptStatus.FAILED, Outcome.INFRASTRUCTURE),
        (AttemptStatus.CANCELLED, Outcome.CANCELLED),
        (AttemptStatus.LOST, None),
    ],
)
def test_an_infrastructure_failure_is_never_scored(status, outcome):
    reward = make_reward_span("r", 1.0)
    episode = build([reward], status=status, outcome=outcome, reward=1.0, failure_reward=0.0)
    assert episode.reward is None
    assert not episode.scored(step_rewards=True)


def test_the_lowest_reward_is_that_of_scored_episodes_and_at_most_zero():
    failed = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "reward": None}
    on_calls = [make_reward_span(f"r{n}", -1.0, {c.REWARD_CALL_ID: "c1"}) for n in (1, 2)]
    in_steps = build(on_calls, [make_record("c1")], reward=None)
    assert lowest_reward([build(reward=2.0), build(reward=None)], 0.0) == 0.0
    assert lowest_reward([build(reward=-0.5), build(reward=1.0)], 0.0) == -0.5
    assert lowest_reward([build(reward=-0.5)], -3.0) == -3.0
    assert lowest_reward([in_steps, build(reward=-0.5)], 0.0) == -1.0  # no final reward: the calls'
    assert lowest_reward([build(**failed)], 0.0) == 0.0
    assert score_failure(build(**failed), -3.0).reward == -3.0
    assert score_failure(build(**failed), None).reward is None
    assert build(**failed, failure_reward="lowest").reward == 0.0
    no_reward = build([make_reward_span("r1", 0.3), make_reward_span("r2", math.nan)], **failed)
    assert score_failure(no_reward, -3.0).reward == -3.0  # the last emission counts, and is none
    assert score_failure(no_reward, -3.0).reward_source == "failure"
    assert score_failure(build(reward=None), -3.0).reward is None  # unscored, and no failure
    assert score_failure(build(reward=math.nan), -3.0).reward is None


def block(span_id, start, end, *, failed=False, path="writer", parent="root"):
    status = SpanStatus.ERROR if failed else SpanStatus.OK
    attributes = {c.AGENT_PATH: path}
    return make_span(
        span_id,
        kind=SpanKind.AGENT,
        parent_id=parent,
        start_ns=start,
        end_ns=end,
        status=status,
        attributes=attributes,
    )


def test_calls_of_an_agent_that_failed_and_was_retried_are_known():
    spans = [
        block("team", 1, 90, path="team"),
        block("try1", 1, 10, failed=True, parent="team"),
        block("inner", 2, 9, path="writer/helper", parent="try1"),
        block("try2", 11, 20, failed=True, parent="team"),
        block("try3", 21, 30, parent="team"),
        block("last", 40, 50, failed=True, path="checker"),  # its error was not answered by a retry
        block("other", 60, 70, path="checker", parent="team"),
        *(make_call_span(f"c{n}", parent_id=p) for n, p in enumerate(("inner", "try2", "try3"))),
        make_call_span("c3", parent_id="last"),
        make_call_span("c4", parent_id="circle"),
        block("circle", 1, 2, path="x", parent="circle"),
    ]
    records = [make_record(f"c{n}") for n in range(5)]
    episode = build(spans, records)
    assert episode.retried == {("c0", 0), ("c1", 0)}
    assert score_failure(episode, -1.0).failure_reward == -1.0
    assert score_failure(episode, -1.0).reward == episode.reward
    assert not build(spans[4:5], records).retried
    failed_call = make_call_span("c5", parent_id="try2", attributes={c.CALL_OUTCOME: "error"})
    assert build([*spans, failed_call], records).retried == {("c0", 0)}


def test_an_agent_that_runs_again_with_the_same_prompt_was_retried():
    """Only the prompt tells a retry in another block from a run on something else."""
    spans = [
        block("visit1", 1, 10, path="node"),
        block("try1", 2, 9, path="node/sub", parent="visit1", failed=True),
        block("visit2", 11, 20, path="node"),
        block("item", 12, 19, path="node/sub", parent="visit2", failed=True),
        block("visit3", 21, 30, path="node"),
        block("try2", 22, 29, path="node/sub", parent="visit3"),
        block("other", 31, 40, path="other"),
        *(
            make_call_span(f"c{n}", (n, n), parent_id=parent)
            for n, parent in enumerate(("try1", "try1", "item", "try2", "try2", "other"))
        ),
    ]
    prompts = [(1, 2), (1, 2, 3), (5, 6), (1, 2), (1, 2, 4), (5, 6)]
    records = [make_record(f"c{n}", prompt, sequence=(n, n)) for n, prompt in enumerate(prompts)]
    assert build(spans, records).retried == {("c0", 0), ("c1", 0)}
    resumed = [
        span.replace(attributes={**span.attributes, c.AGENT_RESUMED: True})
        if span.span_id in ("try2", "circle")
        else span
        for span in [*spans, block("circle", 31, 40, path="node/sub", parent="visit2")]
    ]
    assert build(resumed, records).retried == {("c0", 0), ("c1", 0)}  # by the prompt alone
    # siblings that overlap in time are no tries of each other
    parallel = [block("try2", 8, 29, path="node/sub", parent="visit3"), *spans]
    parallel = [span for span in parallel if span.span_id != "try2" or span.start_ns == 8]
    assert not build(parallel, records).retried


# --- the tree ---------------------------------------------------------------------------------


def names(spans):
    return [(depth, node.span.span_id) for depth, node in walk(build_tree(spans))]


def test_the_tree_is_by_parent_ids_and_siblings_by_time():
    spans = [
        make_span("b", SpanKind.AGENT, parent_id="root", start_ns=3),
        make_span("a", SpanKind.AGENT, parent_id="root", start_ns=2),
        make_span("leaf", SpanKind.TOOL, parent_id="b", start_ns=4),
        make_span("root", SpanKind.OTHER, start_ns=1),
        make_span("a", SpanKind.AGENT, parent_id="root", start_ns=2),
    ]
    assert names(spans) == [(0, "root"), (1, "a"), (1, "b"), (2, "leaf")]


def test_the_spans_of_a_circle_of_parents_are_roots():
    spans = [
        make_span("a", parent_id="c", start_ns=3),
        make_span("b", parent_id="a", start_ns=1),
        make_span("c", parent_id="b", start_ns=2),
        make_span("tail", parent_id="a", start_ns=0),
        make_span("self", parent_id="self", start_ns=5),
    ]
    assert names(spans) == [(0, "tail"), (0, "b"), (0, "c"), (0, "a"), (0, "self")]
