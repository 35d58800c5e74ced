"""Times and limits of runners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTimings:
    """Times and limits of runners, of their processes and of the watchdog in them.

    The defaults fit attempts of a second to an hour; tests pass shorter ones.
    """

    max_work_poll_s: float = 20.0
    """Maximum seconds to wait for work before a claim is made anyway."""
    claim_pause_s: float = 0.02
    """Average seconds between claims while the store has work that this runner does not get."""
    gateway_retry_s: float = 20.0
    """Seconds to wait for an unreachable gateway. A trainer that died counts as gone by then;
    attempts of a live trainer must fail if its gateway cannot be reached from here."""
    probe_interval_s: float = 0.5
    """Seconds between two probes of an unreachable gateway."""
    heartbeats_per_lease: int = 6
    """Number of times that a runner extends a lease before it would end."""
    watchdog_interval_s: float = 0.25
    """Seconds between two checks of the event loop, and between two heartbeats to the parent."""
    blocked_warning_s: float = 10.0
    """Seconds that an attempt may block the event loop before a warning."""
    quick_death_s: float = 10.0
    """A process that dies sooner, before it has claimed anything, has an app that cannot run."""
    max_quick_deaths: int = 5
    """Consecutive quick deaths after which the runners give up."""
    min_silence_s: float = 5.0
    """Seconds without a heartbeat that every process may take, however short the lease."""
    poll_interval_s: float = 0.1
    """Seconds between two checks of the processes by their parent."""
    store_retry_s: float = 1.0
    """Seconds between two attempts to open a store whose server does not answer."""
    orphan_timeout_s: float = 8.0
    """Seconds that apps may take to end when the parent is gone. Less than `end_timeout_s`, after
    which a parent that still runs kills the process."""
    end_timeout_s: float = 10.0
    """Seconds that processes may take to end before they are killed."""
    exit_timeout_s: float = 3.0
    """Seconds that a process with no work left waits for tasks and threads of the app."""
