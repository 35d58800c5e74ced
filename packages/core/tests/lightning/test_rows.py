"""Test rows: exact prefix merging over a set of open rows."""

import math
import string

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan.lightning import Rejection, Transition, build_rows
from lightspan.lightning.rows import merge, usable_transitions
from lightspan.schema.images import PromptImage
from lightspan.schema.token_records import Sampling, pack_floats
from lightspan_testing.strategies import make_record

ALPHABET = string.ascii_letters


def ids(text):
    return [ALPHABET.index(letter) for letter in text]


def transition(call_id, prompt, response, *, rollout="1", policy="policy", agent="w", **fields):
    """Build a transition whose prompt and response are texts with one letter per token."""
    choice = fields.pop("choice", 0)
    record = make_record(
        call_id, ids(prompt), ids(response), attempt=rollout, choice=choice, policy=policy, **fields
    )
    return Transition(f"ro-{rollout}", f"at-{rollout}", "t", "g", agent, policy, record, 0)


def shown(rows):
    """Return rows as letters, with trained tokens in brackets."""
    text = []
    for row in rows:
        parts = [
            f"[{ALPHABET[token]}]" if trained else ALPHABET[token]
            for token, trained in zip(row.ids, row.mask, strict=True)
        ]
        text.append("".join(parts).replace("][", ""))
    return text


def merged(*calls):
    return shown(build_rows([transition(f"c{n}", *call) for n, call in enumerate(calls)]).rows)


# --- what merges ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        ([], []),
        ([("P", "a"), ("PaQ", "b"), ("PaQbR", "c")], ["P[a]Q[b]R[c]"]),
        ([("P", "ab"), ("Pab", "cd"), ("Pabcd", "e")], ["P[abcde]"]),  # nothing in between
        ([("PQ", "a")] * 2, ["PQ[a]"] * 2),  # the same call again
        ([("PQ", "ab"), ("PQaXR", "c"), ("PQaXRcS", "d")], ["PQ[ab]", "PQaXR[c]S[d]"]),
        ([("P", "a"), ("PaQ", "b"), ("PaR", "c")], ["P[a]Q[b]", "PaR[c]"]),
        # the longest open row goes on
        ([("P", "a"), ("PaQ", "b"), ("P", "a"), ("PaQbR", "c")], ["P[a]Q[b]R[c]", "P[a]"]),
        # a row that a longer one left behind is still open
        (
            [("P", "a"), ("PaQRS", "b"), ("P", "a"), ("PaQX", "c"), ("PaQRSbT", "d")],
            ["P[a]QRS[b]T[d]", "P[a]QX[c]"],
        ),
    ],
)
def test_calls_merge_where_a_prompt_goes_on_from_a_row(calls, rows):
    assert merged(*calls) == rows


def test_choices_of_one_call_are_rows_of_their_own_and_the_used_one_goes_on():
    calls = [transition("c", "P", letter, choice=n) for n, letter in enumerate("abc")]
    rows = build_rows([*calls, transition("d", "PbQ", "e")]).rows
    assert shown(rows) == ["P[a]", "P[b]Q[e]", "P[c]"]
    assert rows[1].call_ids == (("c", 1), ("d", 0))


def test_rollouts_and_policies_never_share_a_row():
    calls = [
        transition("c0", "P", "a"),
        transition("c1", "PaQ", "b", rollout="2"),
        transition("c2", "PaQ", "b", policy="other"),
        transition("c3", "PaQ", "b"),
    ]
    rows = build_rows(calls).rows
    assert [(row.rollout_id, row.policy) for row in rows] == [
        ("ro-1", "policy"),
        ("ro-2", "policy"),
        ("ro-1", "other"),
    ]
    assert shown(rows) == ["P[a]Q[b]", "PaQ[b]", "PaQ[b]"]


# --- what a row holds -------------------------------------------------------------------------


def test_a_row_holds_every_tokens_facts():
    calls = [
        transition("c0", "PQ", "ab", logprobs=[-0.5, -1.0], versions=[(3, 1), (4, 1)]),
        transition(
            "c1",
            "PQabR",
            "c",
            logprobs=[-2.0],
            versions=[(5, 1)],
            sampling=Sampling(temperature=0.5),
        ),
    ]
    ((row,), rejected) = build_rows(calls, advantages=[2.0, -1.0], token_weights=[0.25, 0.5])
    assert rejected == {}
    assert row.ids == ids("PQabRc")
    assert row.mask == [False, False, True, True, False, True]
    assert row.advantages == [0.0, 0.0, 2.0, 2.0, 0.0, -1.0]
    assert row.weights == [0.0, 0.0, 0.25, 0.25, 0.0, 0.5]
    assert row.logprobs == [0.0, 0.0, -0.5, -1.0, 0.0, -2.0]
    assert row.versions == [0, 0, 3, 4, 0, 5]
    assert row.temperatures == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    assert row.call_ids == (("c0", 0), ("c1", 0))
    assert row.responses == ((2, 2), (5, 1))
    assert (row.rollout_id, row.policy) == ("ro-1", "policy")


def test_value_targets_are_one_per_call():
    calls = [
        transition("c0", "PQ", "ab"),
        transition("d", "Z", "a"),
        transition("c1", "PQabR", "c"),
    ]
    rows = build_rows(calls, value_targets=[0.5, math.nan, -1.0]).rows
    assert rows[0].value_targets == (0.5, -1.0)
    assert math.isnan(rows[1].value_targets[0])
    assert [row.value_targets for row in build_rows(calls).rows] == [(), ()]


# --- what cannot be a row ---------------------------------------------------------------------


def test_longer_than_allowed_is_rejected_never_cut():
    calls = [transition("c0", "PQ", "ab"), transition("c1", "PQabR", "cde")]
    rows, rejected = build_rows(calls, max_length=7)
    assert shown(rows) == ["PQ[ab]"]
    assert rejected == {("at-1", "c1", 0): Rejection.OUT_OF_CONTEXT}
    assert shown(build_rows(calls, max_length=8).rows) == ["PQ[ab]R[cde]"]


def spoiled(call, **fields):
    record = msgspec.structs.replace(call.record, **fields)
    return msgspec.structs.replace(call, record=record)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprob_data": b""}, Rejection.NO_LOGPROBS),
        ({"logprob_data": pack_floats([float("nan")])}, Rejection.NO_LOGPROBS),
        ({"logprob_data": pack_floats([float("-inf")])}, Rejection.NO_LOGPROBS),
        ({"response": b"", "logprob_data": b""}, Rejection.EMPTY_RESPONSE),
    ],
)
def test_what_cannot_be_used_is_rejected_alone(fields, reason):
    calls = [transition("c0", "P", "a"), spoiled(transition("c1", "PaQ", "b"), **fields)]
    rows, rejected = build_rows(calls)
    assert shown(rows) == ["P[a]"]
    assert rows[0].logprobs == [0.0, -0.5]
    assert rejected == {("at-1", "c1", 0): reason}
    assert usable_transitions(calls)[1] == rejected


# --- properties -------------------------------------------------------------------------------


def naive(transitions):
    """Merge exact prefixes by comparing each call with every open row."""
    chains = []
    for found in transitions:
        fitting = [
            chain
            for chain in chains
            if found.record.prompt_ids[: chain[-1].length]
            == chain[-1].record.prompt_ids + chain[-1].record.response_ids
        ]
        if fitting:
            longest = max(chain[-1].length for chain in fitting)
            chain = [chain for chain in fitting if chain[-1].length == longest][-1]
            chains.remove(chain)  # of equal ones, the row that was extended last is extended
            chains.append([*chain, found])
        else:
            chains.append([found])
    return chains


@st.composite
def conversations(draw):
    """Generate calls whose prompts often, but not always, continue an earlier call."""
    calls = []
    for number in range(draw(st.integers(0, 14))):
        base = []
        if calls and draw(st.integers(0, 3)):
            earlier = draw(st.sampled_from(calls))
            base = earlier.record.prompt_ids + earlier.record.response_ids
            base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        prompt = base + draw(st.lists(st.integers(0, 2), max_size=3))
        response = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        record = make_record(
            f"c{number}", prompt, response, logprobs=[-number - 1.0] * len(response)
        )
        calls.append(Transition("ro-1", "at-1", "t", "g", "w", "policy", record, 0))
    return calls


@given(conversations())
def test_each_row_is_token_for_token_what_was_consumed_and_sampled(calls):
    """Check that trained tokens are the sampled ones in order, preceded by their prompt."""
    by_key = {call.call_key: call for call in calls}
    rows = build_rows(calls).rows
    assert sorted(key for row in rows for key in row.call_ids) == sorted(by_key)
    for row in rows:
        chain = [by_key[key] for key in row.call_ids]
        sampled = [token for call in chain for token in call.record.response_ids]
        assert [t for t, trained in zip(row.ids, row.mask, strict=True) if trained] == sampled
        logprobs = [value for call in chain for value in call.record.logprobs]
        assert [v for v, trained in zip(row.logprobs, row.mask, strict=True) if trained] == logprobs
        for call in chain:
            before = len(call.record.prompt_ids)
            assert row.ids[:before] == call.record.prompt_ids
            assert row.ids[before : call.length] == call.record.response_ids
            assert all(row.mask[before : call.length])
        assert row.responses == tuple((len(c.record.prompt_ids), c.tokens) for c in chain)
        assert sum(row.mask) == len(sampled)


@given(conversations())
def test_the_sorted_rows_find_what_comparing_with_each_finds(calls):
    def sizes(chains):
        return sorted([call.length for call in chain] for chain in chains)

    assert len(merge(calls)) == len(naive(calls))
    assert sizes(merge(calls)) == sizes(naive(calls))


def test_attempts_of_one_rollout_never_share_a_row():
    first = transition("c0", "P", "a")
    other = msgspec.structs.replace(transition("c1", "PaQ", "b"), attempt_id="at-2")
    rows = build_rows([first, other, transition("c2", "PaQ", "c")]).rows
    assert shown(rows) == ["P[a]Q[c]", "PaQ[b]"]


# --- images -----------------------------------------------------------------------------------


def with_images(call_id, prompt, response, *images):
    """Build a transition; an image is (digest, start), two placeholders long."""
    runs = tuple(
        PromptImage(digest=digest, grid=(1, 2), start=start, length=2, data=b"png")
        for digest, start in images
    )
    return transition(call_id, prompt, response, images=runs)


def test_calls_about_one_image_merge_and_the_row_has_all_images():
    calls = [
        with_images("c", "AiiB", "a", ("1", 1)),
        with_images("d", "AiiBaCiiD", "b", ("1", 1), ("2", 6)),
    ]
    [row] = build_rows(calls).rows
    assert shown([row]) == ["AiiB[a]CiiD[b]"]
    assert [image.key for image in row.images] == [
        ("1", (1, 2), 1, 2, 0),
        ("2", (1, 2), 6, 2, 0),
    ]
    assert [image.data for image in row.images] == [b"png"] * 2


def test_calls_with_equal_ids_and_other_images_never_merge():
    calls = [with_images("c", "AiiB", "a", ("1", 1)), with_images("d", "AiiBaC", "b", ("2", 1))]
    assert shown(build_rows(calls).rows) == ["AiiB[a]", "AiiBaC[b]"]


def test_a_call_without_the_bytes_of_an_image_is_rejected():
    call = with_images("c", "AiiB", "a", ("1", 1))
    [image] = call.record.images
    record = msgspec.structs.replace(
        call.record, images=(msgspec.structs.replace(image, data=b""),)
    )
    usable, rejected = usable_transitions([msgspec.structs.replace(call, record=record)])
    assert usable == []
    assert list(rejected.values()) == [Rejection.NO_IMAGE]
