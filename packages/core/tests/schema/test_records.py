"""Test records: the state machine's table, rewards, token records."""

from __future__ import annotations

import itertools
import math
import re
import struct
import sys
from array import array
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import DataError, IllegalMoveError, RewardError
from lightspan.schema.records import (
    AttemptStatus,
    RolloutStatus,
    check_attempt_move,
    check_rollout_move,
    new_id,
    rollout_status_after,
)
from lightspan.schema.reward import Reward, parse_reward
from lightspan.schema.token_records import Sampling, TokenRecord, pack_floats, pack_ids

R, A = RolloutStatus, AttemptStatus


# --- the state machine ----------------------------------------------------------------------
def moves(legal: dict[Any, set[Any]]) -> list[tuple[Any, Any, bool]]:
    kinds = list(type(next(iter(legal))))
    pairs = itertools.product(kinds, kinds)
    return [(before, after, after in legal.get(before, ())) for before, after in pairs]


@pytest.mark.parametrize(
    ("before", "after", "is_legal"),
    [
        *moves(
            {
                R.QUEUED: {R.RUNNING, R.CANCELLED},
                R.RUNNING: {R.SUCCEEDED, R.FAILED, R.QUEUED, R.LOST, R.CANCELLED},
            }
        ),
        *moves({A.RUNNING: {*A} - {A.RUNNING}}),
    ],
)
def test_moves(before: Any, after: Any, is_legal: bool) -> None:
    """Check every pair of states in the tables of the module's docstring."""
    check = check_rollout_move if isinstance(before, R) else check_attempt_move
    if is_legal:
        check(before, after)
        return
    with pytest.raises(IllegalMoveError, match=f"from {before} to {after}"):
        check(before, after)


@pytest.mark.parametrize(
    ("attempt", "tries", "allowed", "expected"),
    [
        (A.SUCCEEDED, 9, 3, R.SUCCEEDED),
        (A.FAILED, 0, 3, R.FAILED),
        (A.TIMEOUT, 0, 3, R.FAILED),
        (A.CANCELLED, 0, 3, R.CANCELLED),
        (A.LOST, 2, 3, R.QUEUED),
        (A.LOST, 3, 3, R.LOST),
        (A.LOST, 0, 0, R.LOST),
    ],
)
def test_rollout_after_its_attempt(
    attempt: AttemptStatus, tries: int, allowed: int, expected: RolloutStatus
) -> None:
    assert rollout_status_after(attempt, tries, allowed) is expected
    check_rollout_move(R.RUNNING, expected)


def test_ids_are_fresh_and_begin_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {new_id("ro") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("ro-[0-9a-f]{32}", id) for id in ids)
    times = iter((9, 10, 2**62))
    monkeypatch.setattr(
        "lightspan.schema.records.clock", SimpleNamespace(now_ns=lambda: next(times))
    )
    ordered = [new_id("ro") for _ in range(3)]
    assert ordered == sorted(ordered)


# --- rewards --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0, Reward(0.0)),
        (True, Reward(1.0)),
        (0.1 + 0.2, Reward(0.30000000000000004)),
        (Fraction(1, 4), Reward(0.25)),  # as other libraries' numbers
        (math.nan, Reward(None)),
        (-(10**400), Reward(None)),
        (10**101, Reward(None)),
        (-math.inf, Reward(None)),
        (-sys.float_info.max, Reward(None)),
        (Reward(2.0, {"a": 1.0}), Reward(2.0, {"a": 1.0})),
        ({"reward": 1, "style": 0.5}, Reward(1.0, {"reward": 1.0, "style": 0.5})),
        ({"exact": True}, Reward(1.0, {"exact": 1.0})),
        ({"reward": math.nan, "style": 0.5}, Reward(None, {"style": 0.5})),
        ({"reward": 1.0, "style": math.inf}, Reward(1.0, {"reward": 1.0})),
    ],
)
def test_parse_reward(value: Any, expected: Reward | None) -> None:
    assert parse_reward(value) == expected


def test_the_primary_dimension() -> None:
    assert parse_reward({"a": 1, "b": 2}, primary="b") == Reward(2.0, {"a": 1.0, "b": 2.0})
    with pytest.raises(RewardError, match=r"'c'.*'a'"):
        parse_reward({"a": 1}, primary="c")
    with pytest.raises(RewardError, match=r"which of 'latency_s', 'exact' is the reward\? Give"):
        parse_reward({"latency_s": 2.5, "exact": True})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"reward": None, "b": 1}, r"^'reward' of a reward must be a number or a bool, not None"),
        ({"b": 1, "reward": {"a": 1}}, r"^'reward' of .* not dict: {'a': 1}$"),
        ({"reward": 1, "b": "2"}, r"^'b' of a reward must be a number, not the text '2'; convert"),
        ([1.0], r"^a reward must be a number or a bool, or None or .*, not list: \[1.0\]$"),
    ],
)
def test_the_message_names_the_dimension(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        parse_reward(value)


@pytest.mark.parametrize(
    "value", ["1.0", b"1", "", {"a": "1"}, {}, [1.0], object(), 1j, {"a": None}]
)
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises(RewardError):
        parse_reward(value)


# --- token records --------------------------------------------------------------------------
def _record(**changes: Any) -> TokenRecord:
    fields: dict[str, Any] = {
        "attempt_id": "at",
        "call_id": "call",
        "choice": 0,
        "policy": "main",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "logprobs": [-0.5, 0.0, -2.0],
        "versions": [(1, 2), (2, 1)],
    }
    return TokenRecord.create(**{**fields, **changes})


def test_a_token_record_gives_back_what_it_got() -> None:
    record = _record()
    assert (record.prompt_ids, record.response_ids) == ([1, 2], [3, 4, 5])
    assert record.logprobs == [-0.5, 0.0, -2.0]
    assert record.versions == [(1, 2), (2, 1)]
    assert len(record.prompt) == 2 * 4
    assert len(record.logprob_data) == 3 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": [-0.5]}, "3 response ids but 1 log-probs"),
        ({"versions": [(1, 4)]}, "do not cover 3"),
        ({"versions": [(1, 4), (2, -1)]}, "do not cover 3"),
        ({"versions": []}, "do not cover 3"),
        ({"logprobs": [-0.5, -math.inf, 0.0]}, "finite"),
        ({"logprobs": [-0.5, 0.1, 0.0]}, "at most 0"),
    ],
)
def test_token_records_that_contradict_themselves(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        _record(**changes)


def test_rounding_above_zero_is_forgiven() -> None:
    assert _record(logprobs=[0.0009, 0.0, 0.0]).logprobs[0] == pytest.approx(0.0009)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_are_exact(ids: list[int]) -> None:
    data = pack_ids(ids)
    assert len(data) == 4 * len(ids)
    assert array("i", data).tolist() == list(struct.unpack(f"<{len(ids)}i", data)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_are_exact_in_32_bits(values: list[float]) -> None:
    data = pack_floats(values)
    assert list(struct.unpack(f"<{len(values)}f", data)) == values


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1]])
def test_ids_beyond_32_bits_are_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_ids(ids)


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(), True),
        (Sampling(temperature=0.7, max_tokens=5, stop=("x",)), True),
        (Sampling(top_p=0.9), False),
        (Sampling(top_k=5), False),
        (Sampling(temperature=0.0), False),
    ],
)
def test_exact_sampling(sampling: Sampling, exact: bool) -> None:
    assert sampling.exact is exact
