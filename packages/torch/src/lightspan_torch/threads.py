"""Set how torch's CPU threads wait for each other, and how many there are.

torch uses the threads of OpenMP. At the end of each operation they wait for each other, by default
in a loop that uses the CPU (spinning). If other programs use the same CPUs, the thread that the
others wait for may have no CPU. SFT of a small model then took 12 times the CPU time with two
threads as with one. With threads that sleep while they wait, it took the same as with one.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

WAIT_POLICY: Final = "OMP_WAIT_POLICY"
_VARIABLES: Final = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user chooses how threads wait."""
_MAPPED_FILES: Final = Path("/proc/self/maps")
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_is_spinning = False


def sleep_while_waiting() -> None:
    """Set the environment so that OpenMP's threads sleep while they wait for each other.

    Nothing is changed if the environment already states how they wait. It is too late to change it
    if OpenMP is loaded already, with torch or another library.
    """
    global _is_spinning
    if any(os.environ.get(name) for name in _VARIABLES):
        return
    _is_spinning = _has_openmp()
    if not _is_spinning:
        os.environ[WAIT_POLICY] = "PASSIVE"  # programs that this process starts inherit it


def limit_threads(device: str) -> None:
    """Lower the number of torch's threads to the number of usable CPUs, and log it.

    Only the CPUs in the container's quota are usable. If threads spin while they wait, CPUs that
    other programs use are not usable either. The number is not changed if `OMP_NUM_THREADS` is set.

    Args:
        device: device of the model; nothing changes unless it is a CPU.
    """
    if device != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return
    import torch

    threads = torch.get_num_threads()
    quota = _quota()
    room, why = threads, ""
    if quota is not None and quota < threads:
        room, why = quota, f"the container may use {quota} CPUs"
    load = os.getloadavg()[0]
    free = max(1, round((quota or os.cpu_count() or 1) - load))
    if _is_spinning and free < room:
        room = free
        why = (
            f"the machine is busy (load {load:.1f}) and torch was imported before lightspan_torch, "
            f"so its threads spin while they wait; {WAIT_POLICY}=PASSIVE in the environment lets "
            "them sleep"
        )
    if room < threads:
        torch.set_num_threads(room)
        log.warning(
            "torch uses %d of %d threads: %s; OMP_NUM_THREADS sets another number",
            room,
            threads,
            why,
        )


def _has_openmp() -> bool:
    """Return whether this process has loaded OpenMP, with torch or another library."""
    if "torch" in sys.modules:
        return True
    try:
        return "libgomp" in _MAPPED_FILES.read_text()
    except OSError:  # another system
        return False


def _quota() -> int | None:
    """Return the number of whole CPUs that the container may use, at least 1; None for no limit."""
    try:
        limit, period = _QUOTA.read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):  # another system, or "max"
        return None
