"""Tests of the durable state of a comparison."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightspan.errors import ConfigError
from lightspan_gateway.serving.candidate.client import decide
from lightspan_gateway.serving.candidate.gateway import DecisionRequest
from lightspan_gateway.serving.candidate.sides import side_of
from lightspan_gateway.serving.candidate.state import (
    RETENTION_S,
    Assignment,
    CandidateState,
    Comparison,
    Decision,
    Weights,
)

OLD, NEW, NEWER = Weights("old", "0" * 12), Weights("new", "1" * 12), Weights("newer", "2" * 12)
KEYS = [f"attempt {n}" for n in range(40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "candidate.db"


@pytest.fixture
def state(path: Path) -> Iterator[CandidateState]:
    opened = CandidateState(path)
    yield opened
    opened.close()


def digests_of(state: CandidateState, keys: list[str]) -> dict[str, str]:
    return {key: state.assign(key).digest for key in keys}


def expected(comparison: Comparison, keys: list[str]) -> dict[str, str]:
    return {
        key: comparison.weights(side_of(key, comparison.salt, comparison.share)).digest
        for key in keys
    }


# --- sides ----------------------------------------------------------------------------------
def test_sides_are_those_of_the_hash_and_are_the_same_after_a_restart(
    state: CandidateState, path: Path
) -> None:
    comparison = state.begin(OLD, NEW, 0.3)
    digests = digests_of(state, KEYS)
    assert digests == expected(comparison, KEYS)
    assert set(digests.values()) == {OLD.digest, NEW.digest}
    again = CandidateState(path)
    assert again.begin(OLD, NEW, 0.3) == comparison
    assert digests_of(again, KEYS) == digests
    assert again.begun(comparison.comparison_id) == state.begun(comparison.comparison_id)
    assert sum(again.begun(comparison.comparison_id).values()) == len(KEYS)
    again.close()


@pytest.mark.parametrize(
    ("decision", "winner"), [(Decision.PROMOTED, NEW), (Decision.ROLLED_BACK, OLD)]
)
def test_a_decision_concerns_new_attempts_only(
    state: CandidateState, path: Path, decision: Decision, winner: Weights
) -> None:
    comparison = state.begin(OLD, NEW, 0.5)
    digests = digests_of(state, KEYS)
    other = CandidateState(path)  # the command's process
    other.decide(decision, "a reason")
    other.close()
    assert digests_of(state, KEYS) == digests
    assert [state.assign(key).comparison_id for key in KEYS] == [comparison.comparison_id] * 40
    later = [state.assign(f"later {n}") for n in range(20)]
    assert later == [Assignment(winner.digest, "")] * 20
    latest = state.latest()
    assert (latest.decision, latest.reason, latest.answering) == (decision, "a reason", winner)
    assert state.begin(OLD, NEW, 0.5) == latest  # a restart does not open it again
    assert sum(state.begun(comparison.comparison_id).values()) == len(KEYS)


def test_an_equal_decision_changes_nothing_and_the_opposite_one_does(state: CandidateState) -> None:
    state.begin(OLD, NEW, 0.5)
    first = state.decide(Decision.PROMOTED, "better")
    assert state.decide(Decision.PROMOTED, "again") == first
    assert state.decide(Decision.ROLLED_BACK).answering == OLD


def test_a_decision_about_an_earlier_comparison_is_refused(
    state: CandidateState,
) -> None:
    """A result that was looked at before another comparison began says nothing about that."""
    earlier = state.begin(OLD, NEW, 0.5)
    latest = state.begin(OLD, NEW, 0.7)
    request = DecisionRequest(comparison_id=earlier.comparison_id)
    with pytest.raises(ConfigError, match=f"is not the latest, which is '{latest.comparison_id}'"):
        decide(str(state.path), "promote", request)
    assert state.latest() == latest
    request = DecisionRequest(comparison_id=latest.comparison_id, reason="better")
    assert decide(str(state.path), "promote", request).comparison.decision is Decision.PROMOTED


def test_calls_without_an_id(state: CandidateState) -> None:
    comparison = state.begin(OLD, NEW, 0.5)
    alone = {state.assign(None).digest for _ in range(40)}
    assert alone == {OLD.digest, NEW.digest}  # each is an attempt of its own
    for user in ("user a", "user b", "user c"):
        side = side_of(user, comparison.salt, 0.5)
        assert {state.assign(None, group=user).digest for _ in range(5)} == {
            comparison.weights(side).digest
        }
    state.decide(Decision.ROLLED_BACK)
    assert {state.assign(None, group="user a").digest for _ in range(5)} == {OLD.digest}


@pytest.mark.parametrize("weights", [OLD, NEW])
def test_a_continued_conversation_keeps_its_weights(
    state: CandidateState, weights: Weights
) -> None:
    comparison = state.begin(OLD, NEW, 0.5)
    first = Assignment(weights.digest, comparison.comparison_id)
    state.remember([b"c" * 16], first)
    before = state.begun(comparison.comparison_id)
    assert {state.assign(None, [b"x" * 16, b"c" * 16]) for _ in range(10)} == {first}
    assert state.begun(comparison.comparison_id) == before  # no new attempts
    assert {state.assign(key, [b"c" * 16]) for key in KEYS} == {first}
    state.decide(Decision.PROMOTED if weights == OLD else Decision.ROLLED_BACK)
    assert state.assign("later", [b"c" * 16]) == Assignment(weights.digest, "")


def test_the_sides_of_attempts_are_known_by_their_keys(state: CandidateState) -> None:
    comparison = state.begin(OLD, NEW, 0.5)
    keys = [f"attempt {number}" for number in range(20)]
    digests = digests_of(state, keys)
    assert state.assigned(comparison.comparison_id, [*keys, "attempt 20"]) == digests
    assert state.assigned("00000000", keys) == {}
    state.decide(Decision.PROMOTED)
    state.assign("attempt later")
    assert state.assigned(comparison.comparison_id, ["attempt later"]) == {}


def test_old_attempts_are_forgotten(
    state: CandidateState, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.begin(OLD, NEW, 0.5)
    digests_of(state, KEYS)
    later = time.time() + RETENTION_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    CandidateState(path).close()
    [[count]] = sqlite3.connect(path).execute("SELECT count(*) FROM assignments").fetchall()
    assert count == 0


# --- comparisons ----------------------------------------------------------------------------
def test_another_share_begins_a_comparison_and_moves_no_attempt(state: CandidateState) -> None:
    first = state.begin(OLD, NEW, 0.2)
    digests = digests_of(state, KEYS)
    second = state.begin(OLD, NEW, 0.6)
    assert second.comparison_id != first.comparison_id
    assert second.salt == first.salt
    assert digests_of(state, KEYS) == digests
    new = [f"new {n}" for n in range(40)]
    assert digests_of(state, new) == expected(second, new)
    assert {state.assign(key).comparison_id for key in new} == {second.comparison_id}


def test_a_chat_of_an_earlier_comparison_stays_on_its_side_uncounted(state: CandidateState) -> None:
    """It was assigned with another share, so it would bias the later comparison."""
    first = state.begin(OLD, NEW, 0.2)
    assignment = state.assign("attempt 1")
    state.remember([b"c" * 16], assignment)
    second = state.begin(OLD, NEW, 0.6)
    assert state.assign("attempt 2", [b"c" * 16]) == Assignment(assignment.digest, "")
    assert sum(state.begun(first.comparison_id).values()) == 1
    assert not state.begun(second.comparison_id)


def test_an_attempt_whose_weights_are_no_longer_served_is_assigned_anew(
    state: CandidateState,
) -> None:
    state.begin(OLD, NEW, 0.5)
    assert set(digests_of(state, KEYS).values()) == {OLD.digest, NEW.digest}
    state.decide(Decision.ROLLED_BACK)
    state.begin(OLD, NEWER, 0.5)
    assert set(digests_of(state, KEYS).values()) == {OLD.digest, NEWER.digest}


def test_what_cannot_be_compared_is_an_error(state: CandidateState, path: Path) -> None:
    with pytest.raises(ConfigError, match="has no comparison"):
        state.latest()
    with pytest.raises(ConfigError, match="same weights as old: there is nothing to compare"):
        state.begin(OLD, Weights("copy", OLD.digest), 0.1)
    state.begin(OLD, NEW, 0.1)
    with pytest.raises(ConfigError, match="comparison of new with old that is not decided"):
        state.begin(OLD, NEWER, 0.1)
    state.decide(Decision.PROMOTED)
    with pytest.raises(ConfigError, match=r"new was promoted in place of old: serve it"):
        state.begin(OLD, NEWER, 0.1)
    digests = digests_of(state, KEYS)
    state.begin(NEW, NEWER, 0.0)  # the next one, in the same file
    assert digests_of(state, KEYS) == digests  # all have begun on `new`


def test_two_servers_may_share_a_file_only_for_the_same_weights(
    state: CandidateState, path: Path
) -> None:
    state.begin(OLD, NEW, 0.5)
    other = CandidateState(path)
    other.begin(OLD, NEW, 0.5)
    assert digests_of(state, KEYS) == digests_of(other, KEYS)
    other.decide(Decision.PROMOTED)
    other.begin(NEW, NEWER, 0.5)
    with pytest.raises(ConfigError, match="is used by a server of other weights"):
        state.assign("another")
    other.close()


def test_a_missing_or_unusable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: no candidate has been served there"):
        CandidateState(tmp_path / "missing.db", create=False)
    with pytest.raises(ConfigError, match=r"cannot be kept in .* --candidate-state"):
        CandidateState(tmp_path / "no" / "folder.db")
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(ConfigError, match="cannot be kept in"):
        CandidateState(tmp_path / "text.db")


# --- processes ------------------------------------------------------------------------------
def _assign_for_ever(path: Path, pipe: object) -> None:
    state = CandidateState(path)
    for number in range(10**9):
        assignment = state.assign(f"attempt {number}")
        pipe.send((f"attempt {number}", assignment.digest))  # type: ignore[attr-defined]


def test_a_killed_server_and_a_decision_in_between_move_no_attempt(path: Path) -> None:
    state = CandidateState(path)
    state.begin(OLD, NEW, 0.5)
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    server = context.Process(target=_assign_for_ever, args=(path, writer))
    server.start()
    writer.close()
    seen = dict([reader.recv() for _ in range(200)])
    state.decide(Decision.PROMOTED)
    seen |= dict([reader.recv() for _ in range(200)])
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.join()
    assert set(seen.values()) == {OLD.digest, NEW.digest}
    assert digests_of(state, [*seen]) == seen
    state.close()


def test_a_decision_divides_attempts_that_begin_at_the_same_time(path: Path) -> None:
    """Check that no attempt that begins after `decide` has returned is answered by the loser."""
    state = CandidateState(path)
    state.begin(OLD, NEW, 0.0001)
    decided = threading.Event()
    late: list[Assignment] = []

    def serve() -> None:
        own = CandidateState(path)
        for number in range(2_000):
            was_decided = decided.is_set()
            assignment = own.assign(f"{threading.get_ident()} {number}")
            if was_decided:
                late.append(assignment)
        own.close()

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    state.decide(Decision.PROMOTED)
    decided.set()
    for thread in threads:
        thread.join()
    assert late
    assert {assignment.digest for assignment in late} == {NEW.digest}
    state.close()
