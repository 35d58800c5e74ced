"""Test that every call is either trained, frozen or rejected with a reason."""

import msgspec
import pytest

from lightspan.errors import ConfigError, UnknownAgentError, UnsupportedError
from lightspan.lightning import Rejection, Selection, build_episode, classify_calls
from lightspan.lightning.rollout_checks import check_trainable
from lightspan.lightning.selection import (
    CallStatus,
    check_agents,
    parse_optimize,
    sub_agent_patterns,
)
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.routing import Route
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
)

WRITER = Selection.of("writer").routing


def build(records=(), spans=(), mode=Mode.TRAIN, **attempt):
    return build_episode(make_attempt(**attempt), make_rollout(mode=mode), spans, records)


def only(episode, **options):
    (entry,) = classify_calls(episode, WRITER, **options).entries
    return entry


# --- one call ---------------------------------------------------------------------------------


def test_a_selected_call_with_its_tokens_is_trained():
    entry = only(build([make_record("c1")]))
    assert (entry.status, entry.policy, entry.rejection) == (CallStatus.TRAINED, "policy", None)
    assert entry.reason == ""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"outcome": CallOutcome.CANCELLED}, Rejection.CANCELLED),
        ({"outcome": CallOutcome.UNDELIVERED}, Rejection.UNDELIVERED),
        ({"outcome": CallOutcome.RESAMPLED}, Rejection.RESAMPLED),
        ({"outcome": CallOutcome.ERROR}, Rejection.ERROR),
        ({"finish_reason": FinishReason.CANCELLED}, Rejection.CANCELLED),
        ({"policy": "base"}, Rejection.OTHER_POLICY),
        ({"policy": ""}, Rejection.OTHER_POLICY),
        ({"response": []}, Rejection.EMPTY_RESPONSE),
        ({"grammar": "start: X"}, Rejection.CONSTRAINED),
        ({"sampling": Sampling(temperature=0.0)}, Rejection.TEMPERATURE_ZERO),
        ({"sampling": Sampling(top_p=0.9)}, Rejection.TRUNCATED_SAMPLING),
        ({"late": True}, Rejection.LATE),
        ({"finish_reason": FinishReason.LENGTH}, None),
        ({"sampling": Sampling(temperature=0.7, stop=("x",), max_tokens=9)}, None),
    ],
)
def test_what_cannot_be_trained_is_rejected_with_its_reason(fields, expected):
    entry = only(build([make_record("c1", **fields)]))
    assert entry.rejection is expected
    assert entry.status is (CallStatus.TRAINED if expected is None else CallStatus.REJECTED)
    assert bool(entry.reason) is (expected is not None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprob_data": b""}, Rejection.NO_LOGPROBS),
        ({"versions": [(1, 1)]}, Rejection.MALFORMED),
        ({"versions": [(1, 3), (2, -1)]}, Rejection.MALFORMED),
        ({"prompt": b"\0" * 5}, Rejection.MALFORMED),
    ],
)
def test_a_record_whose_arrays_do_not_fit_is_rejected_alone(fields, expected):
    good, bad = make_record("good", response=[3, 4]), make_record("bad", response=[3, 4])
    coverage = classify_calls(build([good, msgspec.structs.replace(bad, **fields)]), WRITER)
    assert [call.call_id for call in coverage.trained] == ["good"]
    assert coverage.rejected[0].rejection is expected


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({}, Rejection.NO_TOKENS), ({c.CALL_OUTCOME: "error"}, Rejection.ERROR)],
)
def test_a_selected_call_without_a_record(attributes, expected):
    span = make_call_span("c1", attributes=attributes)
    assert only(build(spans=[span])).rejection is expected


def test_truncation_and_grammars_are_trained_where_both_sides_declare_it():
    records = [
        make_record("p", sampling=Sampling(top_p=0.9)),
        make_record("g", grammar="start: X", sequence=(3, 4)),
        make_record("z", sampling=Sampling(temperature=0), sequence=(5, 6)),
    ]
    supported = (Rejection.TRUNCATED_SAMPLING, Rejection.CONSTRAINED)
    coverage = classify_calls(build(records), WRITER, supported=supported)
    assert [call.call_id for call in coverage.trained] == ["p", "g"]
    assert coverage.rejected[0].rejection is Rejection.TEMPERATURE_ZERO


def test_longer_than_the_learner_takes_is_rejected_never_cut():
    records = [make_record("fits", [1] * 6, [2] * 2), make_record("long", [1] * 7, [2] * 2)]
    coverage = classify_calls(build(records), WRITER, max_length=8)
    assert [call.call_id for call in coverage.trained] == ["fits"]
    assert coverage.rejected[0].rejection is Rejection.OUT_OF_CONTEXT


# --- the whole episode ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mode": Mode.VAL}, Rejection.MODE_NOT_TRAIN),
        ({"status": AttemptStatus.RUNNING, "outcome": None}, Rejection.UNFINISHED),
        ({"status": AttemptStatus.LOST, "outcome": Outcome.INFRASTRUCTURE}, Rejection.UNFINISHED),
        ({"capture_errors": ["x"]}, Rejection.DAMAGED),
        ({"reward": None}, Rejection.UNSCORED),
    ],
)
def test_what_is_wrong_with_an_episode_rejects_every_selected_call(fields, expected):
    records = [make_record("c1"), make_record("c2", agent_path="checker", sequence=(3, 4))]
    selected, other = classify_calls(build(records, **fields), WRITER).entries
    assert selected.rejection is expected
    assert other.status is CallStatus.FROZEN


def test_what_is_wrong_with_the_call_is_said_rather_than_that_there_is_no_reward():
    record = make_record("c1", sampling=Sampling(top_p=0.5))
    assert only(build([record], reward=None)).rejection is Rejection.TRUNCATED_SAMPLING


def test_a_dry_run_says_what_would_be_trained():
    episode = build([make_record("c1")], mode=Mode.DEV)
    assert only(episode, modes=(Mode.TRAIN, Mode.DEV)).status is CallStatus.TRAINED


def test_rewards_on_calls_score_an_episode_where_the_credit_rule_pays_for_them():
    spans = [make_reward_span("r", 0.5, {c.REWARD_CALL_ID: "c1"})]
    episode = build([make_record("c1")], spans, reward=None)
    assert only(episode).rejection is Rejection.UNSCORED
    assert only(episode, step_rewards=True).status is CallStatus.TRAINED


def test_late_calls_are_covered_too():
    records = [
        make_record("c1"),
        make_record("late", late=True),
        make_record("late-frozen", late=True, agent_path="checker"),
    ]
    coverage = classify_calls(build(records), WRITER)
    assert coverage.counts() == {"trained": 1, "rejected:late": 1, "frozen": 1}
    assert [entry.call.call_id for entry in coverage.selected] == ["c1"]


def test_rejecting_afterwards_changes_trained_calls_only():
    records = [make_record("a"), make_record("b", grammar="start: X", sequence=(3, 4))]
    coverage = classify_calls(build(records), WRITER)
    later = coverage.reject({("a", 0): Rejection.STALE, ("b", 0): Rejection.STALE})
    assert [entry.rejection for entry in later.entries] == [Rejection.STALE, Rejection.CONSTRAINED]
    assert coverage.reject({}) is coverage


# --- optimize= and frozen= --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimize", "expected"),
    [
        ("*", {"*": "p"}),
        ("writer", {"writer": "p"}),
        (["a", "b", "a"], {"a": "p", "b": "p"}),
        (("team/*",), {"team/*": "p"}),
        ({"a": "sql", "b": "sql", "c": "plan"}, {"a": "sql", "b": "sql", "c": "plan"}),
        ({"a": "one"}.keys(), {"a": "p"}),
    ],
)
def test_optimize_takes_a_pattern_several_or_a_mapping(optimize, expected):
    assert parse_optimize(optimize, "p") == expected


@pytest.mark.parametrize(
    "optimize",
    ["", [], {}, [""], ["a", 1], {"a": None}, {"a": ""}, {"a": "base"}, 7, None, "/a", "a/"],
)
def test_optimize_that_says_nothing_usable_is_an_error(optimize):
    with pytest.raises(ConfigError, match="optimize"):
        parse_optimize(optimize, "p")


def test_a_selection_names_its_policies():
    chosen = Selection.of({"writer": "sql", "rewriter": "sql", "planner": "plan"}, "base")
    assert set(chosen.policies) == {"sql", "plan"}
    assert chosen.routing.target("checker").route is Route.BASE


def test_an_agent_cannot_be_optimised_and_frozen():
    with pytest.raises(ConfigError, match=r"\['writer'\] is in optimize and in frozen"):
        Selection.of("writer", {"writer": "base"})


def test_an_unknown_frozen_word_is_a_config_error():
    with pytest.raises(ConfigError, match="frozen='nope'"):
        Selection.of("writer", "nope")


def test_a_name_that_matches_nothing_is_an_error_with_the_candidates():
    chosen = Selection.of(["write_query"])
    with pytest.raises(UnknownAgentError) as caught:
        check_agents(chosen.routing, ["agent/writequery", "agent/check", "app"])
    assert str(caught.value) == (
        "no agent matches 'write_query'. Did you mean 'agent/writequery' or 'writequery'? "
        "Agents: 'agent/check', 'agent/writequery', 'app'"
    )


@pytest.mark.parametrize(
    ("pattern", "paths", "narrower"),
    [
        ("team", ["team/writer", "team/planner", "app"], ["team/*"]),
        ("team", ["team/writer", "team/planner/helper"], ["team/**"]),
        ("t*m", ["tim/a", "tom/b/c", "tam"], ["tim/*", "tom/**"]),
        ("desk/team", ["desk/team/writer", "team/writer"], ["desk/team/*"]),
        ("team", ["desk/team/writer", "team", "steam/writer"], ["desk/team/*"]),
        ("team", ["team/team/writer"], ["team/**"]),
        ("writer", ["team/writer"], []),
    ],
)
def test_patterns_on_sub_agents(pattern, paths, narrower):
    assert sub_agent_patterns(pattern, paths) == narrower


def test_a_name_of_what_holds_agents_is_an_error_with_their_pattern():
    """Check the node of a subgraph, which `agents()` of an adapter does not list as an agent."""
    with pytest.raises(UnknownAgentError) as caught:
        check_agents(Selection.of("resolve").routing, ["resolve/draft", "resolve/check"])
    assert str(caught.value) == (
        "no agent matches 'resolve'. Did you mean 'resolve/*'? "
        "Agents: 'resolve/check', 'resolve/draft'"
    )


def test_a_frozen_name_that_matches_nothing_is_an_error_too():
    chosen = Selection.of("writer", {"chekcer": "base"})
    with pytest.raises(UnknownAgentError, match=r"'chekcer'\. Did you mean 'checker'"):
        check_agents(chosen.routing, ["writer", "checker"])


def test_a_forgotten_adapter_is_what_a_name_is_missing_for():
    """Check the message if no call has an agent name, because the adapter is not installed."""
    with pytest.raises(UnknownAgentError) as caught:
        check_agents(WRITER, ["app"])
    assert str(caught.value) == (
        "no agent matches 'writer'. Agents: 'app', the name of calls without an agent. Install "
        "the adapter of the app's framework and call its instrument() in the app's module, such as "
        'lightspan_langgraph.instrument(); or put `with lightspan.agent("name"):` around the call'
    )
    with pytest.raises(UnknownAgentError, match=r"Agents: 'app', 'checker'$"):
        check_agents(WRITER, ["app", "checker"])


@pytest.mark.parametrize(
    ("code", "is_permanent"),
    [
        (c.UNSUPPORTED_CONTENT, True),
        # another task may have a shorter prompt, or a picture that can be read
        (c.CONTEXT_OVERFLOW, False),
        (c.INVALID_IMAGE, False),
    ],
)
def test_training_goes_on_where_other_calls_may_be_accepted(code, is_permanent):
    refused = {c.CALL_REFUSED: "messages", c.ERROR_TYPE: code, c.CALL_OUTCOME: "error"}
    span = make_call_span("c1", sequence=(1, 2), attributes=refused, status_message="no")
    episode = build(spans=[span])
    if is_permanent:
        with pytest.raises(UnsupportedError, match="writer: 1 call refused: no"):
            check_trainable(WRITER, [episode])
    else:
        assert check_trainable(WRITER, [episode]) is False
