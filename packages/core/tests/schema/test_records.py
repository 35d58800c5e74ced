"""Records: the state machine's table, rewards, token records."""

from __future__ import annotations

import itertools
import math
import re
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import DataError, IllegalMoveError, RewardError
from lightspan.schema.records import (
    LEGAL_ATTEMPT_MOVES,
    LEGAL_ROLLOUT_MOVES,
    Attempt,
    AttemptStatus,
    RolloutStatus,
    check_attempt_move,
    check_rollout_move,
    new_id,
    rollout_status_after,
)
from lightspan.schema.reward import Reward, parse_reward
from lightspan.schema.token_records import (
    Sampling,
    TokenRecord,
    pack_floats,
    pack_ids,
)

R, A = RolloutStatus, AttemptStatus


# --- the state machine ----------------------------------------------------------------------
@pytest.mark.parametrize(("before", "after"), list(itertools.product(R, R)))
def test_rollout_moves(before: RolloutStatus, after: RolloutStatus) -> None:
    """The table of the module's docstring, pair by pair."""
    legal = {
        R.QUEUED: {R.RUNNING, R.CANCELLED},
        R.RUNNING: {R.SUCCEEDED, R.FAILED, R.QUEUED, R.LOST, R.CANCELLED},
    }
    if after in legal.get(before, set()):
        check_rollout_move(before, after)
        assert (before, after) in LEGAL_ROLLOUT_MOVES
    else:
        with pytest.raises(IllegalMoveError, match=f"from {before} to {after}"):
            check_rollout_move(before, after)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(A, A)))
def test_attempt_moves(before: AttemptStatus, after: AttemptStatus) -> None:
    if before is A.RUNNING and after is not A.RUNNING:
        check_attempt_move(before, after)
        assert (before, after) in LEGAL_ATTEMPT_MOVES
    else:
        with pytest.raises(IllegalMoveError, match=f"from {before} to {after}"):
            check_attempt_move(before, after)


def test_final_statuses() -> None:
    assert {status for status in R if not status.final} == {R.QUEUED, R.RUNNING}
    assert {status for status in A if not status.final} == {A.RUNNING}
    assert {before for before, _ in LEGAL_ROLLOUT_MOVES} == {R.QUEUED, R.RUNNING}
    for status in A:
        attempt = Attempt(attempt_id="a", rollout_id="r", number=1, epoch=1, status=status)
        assert attempt.sealed is status.final


@pytest.mark.parametrize(
    ("attempt", "tries", "allowed", "expected"),
    [
        (A.SUCCEEDED, 0, 3, R.SUCCEEDED),
        (A.SUCCEEDED, 9, 3, R.SUCCEEDED),
        (A.FAILED, 0, 3, R.FAILED),
        (A.TIMEOUT, 0, 3, R.FAILED),
        (A.CANCELLED, 0, 3, R.CANCELLED),
        (A.LOST, 1, 3, R.QUEUED),
        (A.LOST, 2, 3, R.QUEUED),
        (A.LOST, 3, 3, R.LOST),
        (A.LOST, 4, 3, R.LOST),
        (A.LOST, 0, 0, R.LOST),
    ],
)
def test_rollout_after_its_attempt(
    attempt: AttemptStatus, tries: int, allowed: int, expected: RolloutStatus
) -> None:
    assert rollout_status_after(attempt, tries, allowed) is expected
    check_rollout_move(R.RUNNING, expected)


def test_a_running_attempt_ends_nothing() -> None:
    with pytest.raises(IllegalMoveError, match="running"):
        rollout_status_after(A.RUNNING, 0, 3)


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
        (1.5, Reward(1.5)),
        (True, Reward(1.0)),
        (False, Reward(0.0)),
        (-3, Reward(-3.0)),
        (0.1 + 0.2, Reward(0.30000000000000004)),
        (math.nan, Reward(None)),
        (math.inf, Reward(None)),
        (-math.inf, Reward(None)),
        (-1e100, Reward(-1e100)),
        (-sys.float_info.max, Reward(None)),
        (Reward(2.0, {"a": 1.0}), Reward(2.0, {"a": 1.0})),
        ({"reward": 1, "style": 0.5}, Reward(1.0, {"reward": 1.0, "style": 0.5})),
        ({"style": 0.5, "exact": True}, Reward(0.5, {"style": 0.5, "exact": 1.0})),
        ({"reward": math.nan, "style": 0.5}, Reward(None, {"style": 0.5})),
        ({"reward": 1.0, "style": math.inf}, Reward(1.0, {"reward": 1.0})),
    ],
)
def test_parse_reward(value: Any, expected: Reward | None) -> None:
    assert parse_reward(value) == expected


def test_numbers_of_other_libraries_are_numbers() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.25

    assert parse_reward(Scalar()) == Reward(0.25)


def test_the_primary_dimension() -> None:
    assert parse_reward({"a": 1, "b": 2}, primary="b") == Reward(2.0, {"a": 1.0, "b": 2.0})
    with pytest.raises(RewardError, match=r"'c'.*'a'"):
        parse_reward({"a": 1}, primary="c")


@pytest.mark.parametrize(
    "value", ["1.0", b"1", "", {"a": "1"}, {}, [1.0], object(), 1j, {"a": None}]
)
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises(RewardError):
        parse_reward(value)


@pytest.mark.parametrize("value", ["0.7", b"0.7"])
def test_a_text_is_named_in_the_error(value: Any) -> None:
    with pytest.raises(RewardError, match=r"0\.7.*convert"):
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
        ({"versions": [(1, 2)]}, "do not cover 3"),
        ({"versions": [(1, 4)]}, "do not cover 3"),
        ({"versions": [(1, 4), (2, -1)]}, "do not cover 3"),
        ({"versions": [(1, 3), (2, 0)]}, "do not cover 3"),
        ({"versions": []}, "do not cover 3"),
        ({"logprobs": [-0.5, math.nan, 0.0]}, "finite"),
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
    assert array("i", data).tolist() == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_are_exact_in_32_bits(values: list[float]) -> None:
    assert array("f", pack_floats(values)).tolist() == values


def test_arrays_are_little_endian() -> None:
    assert sys.byteorder == "little", "pack_ids must swap bytes here"
    assert pack_ids([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert pack_floats([1.0]) == b"\x00\x00\x80\x3f"
    assert array("i").itemsize == 4


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
