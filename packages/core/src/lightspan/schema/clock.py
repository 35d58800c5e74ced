"""The real clocks, also in an app that freezes time.

freezegun replaces the functions of the module `time`, and every reference to them in other modules
(`from time import monotonic`), but not the functions here. Leases and timeouts use these functions;
with a frozen clock a lease or timeout would end at once, or never.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

monotonic: Final = partial(time.monotonic)
now: Final = partial(time.time)
"""Seconds since the epoch."""
now_ns: Final = partial(time.time_ns)
elapsed: Final = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Like `monotonic`, but on Linux also counts the time for which the machine is suspended."""
