"""Groups in flight: which have ended, in which order, and what is taken."""

from __future__ import annotations

import pytest

from lightspan.errors import ConfigError
from lightspan.schema.records import Rollout, RolloutState, RolloutStatus
from lightspan.training.flights import Flights


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
def flights() -> Flights:
    flying = Flights()
    for group in "abc":
        flying.add(rollouts(group))
    return flying


def names(states: list[RolloutState]) -> list[str]:
    return [state.rollout.rollout_id for state in states]


def test_a_group_has_ended_with_its_last_rollout(flights: Flights) -> None:
    assert names(flights.see(ended("b1", "x", "c0"))) == ["b1", "c0"]
    assert flights.ready(1, []) is None
    assert names(flights.see(ended("b1", "b0"))) == ["b0"]
    assert flights.ready(1, []) == ["b"]
    assert flights.ready(2, []) is None
    assert (flights.left(1, []), flights.left(2, []), flights.left(3, [])) == (0, 1, 3)


def test_the_first_are_waited_for_and_the_others_come_as_they_end(flights: Flights) -> None:
    flights.see(ended("c0", "c1", "b0", "b1"))
    assert flights.ready(2, ["a"]) is None
    assert (flights.left(2, ["a"]), flights.left(2, ["b"])) == (2, 0)
    flights.see(ended("a0", "a1"))
    assert flights.ready(2, ["a"]) == ["a", "c"]
    assert flights.ready(3, ["b", "a"]) == ["b", "a", "c"]
    assert names(flights.pop(["a", "c"])) == ["a0", "a1", "c0", "c1"]
    assert flights.ready(1, []) == ["b"]
    assert (flights.rollouts(1), flights.left(1, []), flights.run_id) == (2, 0, "run")


def test_all_of_it_is_forgotten(flights: Flights) -> None:
    flights.see(ended("a0", "a1", "b0"))
    assert flights.forget() == ["b1", "c0", "c1"]
    assert not flights
    assert flights.see(ended("b1")) == []
    flights.add(rollouts("d"))
    flights.see(ended("d0", "d1"))
    assert flights.ready(1, []) == ["d"]


@pytest.mark.parametrize(
    ("count", "first", "error"),
    [
        (4, [], r"take\(4\): 3 groups are in flight"),
        (1, ["a", "b"], r"take\(1\): 3 groups are in flight, and 2 are to be the first"),
        (1, ["z"], r"take\(first=\['z'\]\): no such group"),
        (1, "abc", r"take\(first='abc'\): give a list of ids, such as \['abc'\]"),
        (1.5, [], r"take: count=1\.5 must be a whole number"),
        (-1, [], r"take: count=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_taken(flights: Flights, count: int, first: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        flights.check(count, first)
