"""The time by which leases of a server's store run, as sessions of many machines make it."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from lightspan.stores._lease_time import STAMP_S, Observer, Told

SESSIONS = 3
START = 1_700_000_000.0

_PAUSES = st.sampled_from([0.25, 2.0, 20.0, 59.0, 70.0, 3_570.0, 3_600.0, 3_602.0])
_STEPS = st.sampled_from([0.0, 0.0, 0.0, 3_600.0, -3_600.0, 86_400.0])
"""None of them, nor several together, is of less than a minute: that would be believed."""
_LOOKS = st.lists(st.tuples(_PAUSES, _STEPS, st.integers(0, SESSIONS - 1), st.booleans()))


class World:
    """A row, a server's clock that is set, and machines whose elapsed times begin anywhere."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.set = START
        self.row = Told(0.0, 0, 0.0)
        self.sessions = [Observer() for _ in range(SESSIONS)]

    def look(self, number: int) -> float:
        """The time that the session sees; the row is written as a store does."""
        elapsed = self.passed + 1_000.0 * number
        told = self.sessions[number].look(self.row, self.passed + self.set, elapsed)
        if told.era != self.row.era or told.time >= self.row.time + STAMP_S:
            self.row = told
        return told.time


@settings(max_examples=500, deadline=None)
@given(looks=_LOOKS)
def test_it_never_runs_faster_than_time(looks: list[tuple[float, float, int, bool]]) -> None:
    """So no lease ends early: whoever gave it, whoever looks, however the clock is set."""
    world = World()
    seen = [(world.look(0), world.passed)]
    for pause, step, number, anew in looks:
        world.passed += pause
        world.set += step
        if anew:
            world.sessions[number] = Observer()
        now = world.look(number)
        assert all(now - time <= world.passed - passed + 1e-5 for time, passed in seen)
        seen.append((now, world.passed))


@settings(max_examples=200, deadline=None)
@given(looks=_LOOKS, steps=st.lists(_STEPS, min_size=5, max_size=5))
def test_it_runs_as_time_does_while_somebody_looks(
    looks: list[tuple[float, float, int, bool]], steps: list[float]
) -> None:
    """So a dead runner's lease ends: nobody who comes or is idle, and no clock, holds it up."""
    world = World()
    for pause, step, number, anew in looks:
        world.passed += pause
        world.set += step
        if anew:
            world.sessions[number] = Observer()
        world.look(number)
    for number in range(SESSIONS):  # whoever is there sees that the others are
        world.look(number)
    for number in range(SESSIONS):
        world.look(number)
    before, passed = world.look(0), world.passed
    for turn, step in enumerate(steps):
        world.passed += 7.0
        world.set += step
        now = [world.look((turn + each) % SESSIONS) for each in range(SESSIONS)]
        assert all(abs(time - before - (world.passed - passed)) < 1e-5 for time in now)


def test_a_server_that_is_away_for_a_moment_costs_nothing() -> None:
    """A new session takes what passed by the server's clock, if it is little."""
    world = World()
    before = world.look(0)
    for _ in range(3):
        world.passed += 2.0
        world.sessions[0] = Observer()
        world.look(0)
    assert abs(world.look(0) - before - 6.0) < 1e-5
