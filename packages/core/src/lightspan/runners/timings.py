"""Times and limits of runners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTimings:
    """Times and limits of runners, of their processes and of the watchdog in them.

    The defaults fit attempts that take from a second to an hour; tests use shorter times.
    """

    max_work_poll_s: float = 20.0
    """Maximum seconds to wait for work in the store before the next claim. Half a lease is a
    maximum too."""
    claim_pause_s: float = 0.02
    """Average seconds between claims while the store reports work of which this runner gets
    none."""
    gateway_retry_s: float = 20.0
    """Maximum seconds to wait for an unreachable gateway before its attempts are claimed again. A
    trainer that died has been detected by then. If the trainer is alive and only its gateway cannot
    be reached, attempts have to fail."""
    probe_interval_s: float = 0.5
    """Seconds between two probes of an unreachable gateway."""
    heartbeats_per_lease: int = 6
    """How often a lease is extended within its length."""
    watchdog_interval_s: float = 0.25
    """Seconds between two checks of the event loop, and between two heartbeats to the parent."""
    blocked_warning_s: float = 10.0
    """Seconds that an attempt may block the event loop before a warning is logged."""
    quick_death_s: float = 10.0
    """Seconds after the start of a process within which its death is quick. Only processes that
    have claimed no attempt count."""
    max_quick_deaths: int = 5
    """Consecutive quick deaths after which the runners give up."""
    min_silence_s: float = 5.0
    """Minimum seconds without a heartbeat before a process is ended, however short the lease."""
    poll_interval_s: float = 0.1
    """Seconds between two checks of the runner processes by their parent."""
    store_retry_s: float = 1.0
    """Seconds between two tries to open a store whose server does not answer."""
    orphan_timeout_s: float = 8.0
    """Seconds that apps may take to end after the parent has ended or closed the pipe. It must be
    less than `end_timeout_s`, because a living parent kills the process after `end_timeout_s`."""
    abort_timeout_s: float = 2.0
    """Seconds that a claim under way may take when the runner is aborted. The store may be away."""
    end_timeout_s: float = 10.0
    """Seconds that processes may take to end before they are killed."""
    exit_timeout_s: float = 3.0
    """Seconds that a process without work waits for the app's tasks and threads before it ends."""
