"""Intervals, timeouts and limits of the engine for vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """How often a vLLM server is checked, and how long and how often the engine waits for it."""

    poll_interval_s: float = 0.5
    """Seconds between two polls of a server that is starting or seems to be gone."""
    health_interval_s: float = 5.0
    """Seconds between two health checks of a server with calls. They are needed because a server
    whose engine has died stops listening but does not end while it has calls, which may never be
    answered."""
    health_timeout_s: float = 10.0
    """Seconds after which a health check fails."""
    max_failed_polls: int = 10
    """Number of consecutive failed polls after which a server counts as gone."""
    dying_s: float = 10.0
    """Seconds to wait, after a server returned an error, for a sign that it is ending."""
    keepalive_s: float = 2.0
    """Seconds after which the client closes an idle connection.

    By default vLLM closes a connection after 5 s. The client must close it before, because a call
    that is sent while the server closes the connection is lost.
    """
