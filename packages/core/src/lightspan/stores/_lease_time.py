"""The time by which leases run: elapsed time that the store keeps, whatever its clocks say.

A clock that is set by an hour would otherwise end every lease, or keep a dead runner's for an hour.
So a lease ends at a number of *store time*. It begins as the seconds since the epoch when the store
is first written to, never goes back, and goes on by what passed as somebody measured it who has the
store open. It never runs faster than time, so no lease ends early; where nobody could look it may
stand still, so a dead runner's lease ends at most its own length after somebody looks again.
What people are shown (when an attempt began, when it ended) stays wall-clock time.

- **In memory** it goes on by the process's monotonic clock.
- **SQLite** has one machine, whose monotonic clock all its processes share. A row has what to add
  to it, for the machine's present boot, and every second of writing the time so far: after another
  boot it goes on from there. While the machine is suspended it stands still, as nobody could be
  heard.
- **PostgreSQL** has many machines and a server whose clock anybody may set. The row of `ends`,
  which every move locks, has the time so far, and each session adds what passed *here* since it
  looked last (suspended time included: the others went on); the furthest one counts. What two of
  them say differs by how late each was answered: by milliseconds, most often. That goes for
  sessions of the row's *era*. Whoever comes anew (a process that starts, one whose server was away)
  begins an era: with the time of the row, and what passed since by the server's clock if that is a
  few seconds at most; if it is more, or less than nothing, either nobody was there or the clock was
  set, and nobody can tell. The others join that era, likewise, at their next look. Else one that
  was idle for an hour would come with that hour, of which the leases that were given meanwhile know
  nothing.
- **Over HTTP** it is the time of the store that is served.
"""

from __future__ import annotations

import math
import secrets
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from lightspan.schema import clock

STAMP_S: Final = 1.0
"""How often, at most, the time is written where nothing else is."""
_TRUSTED_S: Final = 5.0
"""So much of a server's clock is taken as passed: if it was set just then, this much is lost."""
_RECENT_S: Final = 60.0
"""Who looked so recently knows that no more has passed since the row was written."""
_LATENCY_S: Final = 1.0
"""By how much what it knows may be less, because an answer took long."""


class Moment(NamedTuple):
    """A time, as people are shown it and as leases run."""

    wall: float
    lease: float


class Clock(Protocol):
    """What a machine says of the time; tests bring their own."""

    def __call__(self) -> float:
        """Seconds since the epoch. May be set."""
        ...

    def elapsed(self) -> float:
        """Seconds since some time of this boot. Never set."""
        ...

    @property
    def boot(self) -> str:
        """Another one each time the machine starts; empty where the system does not say."""
        ...


class MachineClock(Clock):
    """This machine's clocks; `elapsed` stands still while it is suspended."""

    def __call__(self) -> float:
        return clock.now()

    def elapsed(self) -> float:
        return clock.monotonic()

    @property
    def boot(self) -> str:
        return _boot()


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Told(NamedTuple):
    """What the row of a server's store says."""

    time: float
    era: int
    """0 before anybody looked."""
    at: float
    """The server's clock when it was written."""


class Observer:
    """What one session with a server knows of the store time."""

    def __init__(self) -> None:
        self._era = 0
        self._ahead = 0.0
        """Of this machine's elapsed time, in the era."""
        self._looked = -math.inf
        """When, by this machine's elapsed time."""

    def look(self, told: Told, server: float, elapsed: float) -> Told:
        """The time now, with the row locked: what the row may say from here on.

        Args:
            told: what it says.
            server: the server's clock.
            elapsed: this machine's elapsed time.
        """
        if told.era == 0:
            time, era = server, _new_era()
        elif told.era == self._era:
            time, era = max(told.time, elapsed + self._ahead), told.era
        else:
            time, era = self._later(told, server - told.at, elapsed - self._looked)
        self._era, self._ahead, self._looked = era, time - elapsed, elapsed
        return Told(time, era, server)

    def _later(self, told: Told, since: float, away: float) -> tuple[float, int]:
        """The time and the era for who is of another one.

        Args:
            told: what the row says.
            since: how long, by the server's clock.
            away: how long ago this session looked; the row was written after that.
        """
        if away <= _RECENT_S and 0.0 <= since <= away + _LATENCY_S:
            return told.time + since, told.era
        return told.time + (since if 0.0 <= since <= _TRUSTED_S else 0.0), _new_era()


def _new_era() -> int:
    return secrets.randbits(62) | 1
