"""Handling of the signals that stop a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set; restore the default handlers afterwards."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in _STOP_SIGNALS:
        with suppress(ValueError, RuntimeError):  # in another thread than the main one
            loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in _STOP_SIGNALS:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)
