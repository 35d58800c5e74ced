"""Times and limits of stores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTimings:
    """Times and limits of the connections of SQLite, PostgreSQL and served stores."""

    busy_timeout_s: float = 30.0
    """SQLite: seconds to wait for another process's lock."""
    max_log_pages: int = 4000
    """SQLite: approximate length of the write-ahead log, in pages, at which it is moved into the
    file. SQLite's default is 1000. A longer log of up to 16 MB saves moving pages that change
    often."""
    database_retry_s: float = 30.0
    """PostgreSQL: seconds for which an operation is retried while the database is unreachable."""
    server_retry_s: float = 60.0
    """Served stores: seconds for which an operation is retried while the server is unreachable."""
    read_timeout_s: float = 30.0
    """Served stores: seconds without an answer after which the connection counts as lost."""
    min_read_timeout_s: float = 1.0
    """Served stores: like `read_timeout_s`, for a heartbeat of the shortest lease."""
