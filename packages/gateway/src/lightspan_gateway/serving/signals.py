"""How a server is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that a signal sets; afterwards a signal ends the process, as it always would."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in _STOP_SIGNALS:
        with suppress(ValueError, RuntimeError):  # not the main thread
            loop.add_signal_handler(number, stopping.set)
    try:
        yield stopping
    finally:
        for number in _STOP_SIGNALS:
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)
