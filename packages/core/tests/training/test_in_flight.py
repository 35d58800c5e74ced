"""Test groups in flight: which have ended, in which order, and which are taken."""

from __future__ import annotations

import pytest

from lightspan.errors import ConfigError
from lightspan.schema.records import Rollout, RolloutState, RolloutStatus
from lightspan.training.in_flight import InFlight


def rollouts(group: str, count: int = 2) -> list[Rollout]:
    return [
        Rollout(rollout_id=f"{group}{number}", task=0, task_id="t", run_id="run", group_id=group)
        for number in range(count)
    ]


def ended(*names: str) -> list[RolloutState]:
    known = {each.rollout_id: each for group in "abcd" for each in rollouts(group)}
    unknown = Rollout(rollout_id="x", task=0, task_id="t")
    return [
        RolloutState(rollout=known.get(name, unknown), status=RolloutStatus.SUCCEEDED)
        for name in names
    ]


@pytest.fixture
def in_flight() -> InFlight:
    groups = InFlight()
    for group in "abc":
        groups.add(rollouts(group))
    return groups


def names(states: list[RolloutState]) -> list[str]:
    return [state.rollout.rollout_id for state in states]


def test_a_group_has_ended_with_its_last_rollout(in_flight: InFlight) -> None:
    assert names(in_flight.update(ended("b1", "x", "c0"))) == ["b1", "c0"]
    assert in_flight.ready(1, []) is None
    assert names(in_flight.update(ended("b1", "b0"))) == ["b0"]
    assert in_flight.ready(1, []) == ["b"]
    assert in_flight.ready(2, []) is None
    assert (in_flight.size(1, []), in_flight.size(3, [])) == ((2, 2), (6, 3))
    assert [each.rollout_id for each in in_flight.news()] == ["b1", "c0", "b0"]


def test_the_first_are_waited_for_and_the_others_come_as_they_end(in_flight: InFlight) -> None:
    in_flight.update(ended("c0", "c1", "b0", "b1"))
    assert in_flight.ready(2, ["a"]) is None
    assert (in_flight.size(1, ["a"]), in_flight.size(2, ["a"])) == ((2, 0), (4, 4))
    in_flight.update(ended("a0", "a1"))
    assert in_flight.ready(2, ["a"]) == ["a", "c"]
    assert in_flight.ready(3, ["b", "a"]) == ["b", "a", "c"]
    assert names(in_flight.pop(["a", "c"])) == ["a0", "a1", "c0", "c1"]
    assert in_flight.ready(1, []) == ["b"]
    assert (in_flight.size(1, []), in_flight.run_id) == ((2, 2), "run")


def test_all_of_it_is_forgotten(in_flight: InFlight) -> None:
    in_flight.update(ended("a0", "a1", "b0"))
    assert in_flight.clear() == ["b1", "c0", "c1"]
    assert not in_flight
    assert in_flight.update(ended("b1")) == []
    in_flight.add(rollouts("d"))
    in_flight.update(ended("d0", "d1"))
    assert in_flight.ready(1, []) == ["d"]


@pytest.mark.parametrize(
    ("count", "first", "error"),
    [
        (4, [], r"take\(4\): 3 groups are in flight"),
        (1, ["z"], r"take\(first=\['z'\]\): no such group"),
        (1, "abc", r"take\(first='abc'\): give a list of ids, such as \['abc'\]"),
        (-1, [], r"take: count=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_taken(
    in_flight: InFlight, count: int, first: list[str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        in_flight.check(count, first)
