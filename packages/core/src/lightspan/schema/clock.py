"""The real clocks, whatever an app makes of those of `time`.

An app may freeze time, as freezegun does: it puts functions of its own into the module `time` and
wherever a module refers to the real ones (`from time import monotonic`). It does not find these.
Leases and time limits go by them, or they would end at once, or never.
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
"""As `monotonic`, and where the system can tell it goes on while the machine is suspended."""
