"""Ranks that `torchrun` started: every process runs the user's script, and rank 0 alone trains.

Loads torch only where there are such processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from lightspan.errors import ConfigError, RankError
from lightspan.learners.description import Torch

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WORD: Final = "lightspan/word"
"""The key of what rank 0 says to the others at first: `SERVE` or `END`."""
SERVE: Final = "serve"
END: Final = "end"
_WAIT: Final = timedelta(days=365)


def started() -> int:
    """How many processes `torchrun` started; 0: none, or one alone.

    Raises:
        ConfigError: they are on several machines.
    """
    if not all(name in os.environ for name in _NEEDED):
        return 0
    size = int(os.environ["WORLD_SIZE"])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if here != size:
        raise ConfigError(
            f"torchrun has started {size} processes, of which {here} are on this machine: ranks "
            "of the learner are on one machine; give torchrun --nnodes 1"
        )
    return size if size > 1 else 0


def own_rank() -> int:
    """That of this process; 0 where `torchrun` started none."""
    return int(os.environ["RANK"]) if started() else 0


@contextmanager
def joined(described: Torch, device: str) -> Iterator[None]:
    """Where `torchrun` started this process and others: rank 0 goes on, and lets the others end if
    it did not come to need them; another rank serves rank 0 in place of what is inside, and then
    its process ends. Elsewhere nothing.

    Args:
        described: the learner.
        device: the trainer's.
    """
    if not started():
        yield
        return
    if own_rank() == 0:
        try:
            yield
        finally:
            if not Meeting.used:
                Meeting().say(END)
        return
    meeting = Meeting()
    if meeting.hear() == SERVE:
        from lightspan.learners.ranks.group import Group, GroupError, ready, runs
        from lightspan.learners.ranks.worker import serve

        with suppress(GroupError):  # rank 0 has ended, and says why
            devices = described.placed(device, started=started())
            meeting.store.set(ready(own_rank()), runs())
            group = Group(meeting.store, own_rank(), devices, timeout_s=described.timeout_s)
            serve(group)
    raise SystemExit(0)


class Meeting:
    """Where the processes find each other. There is one in the life of a process, because what was
    said there stays."""

    used = False

    def __init__(self) -> None:
        if Meeting.used:
            raise ConfigError(
                "under torchrun a script trains, evaluates or tries out once: the other processes "
                "have ended with the first. Start another torchrun for the next"
            )
        Meeting.used = True
        from lightspan.learners.ranks.group import dist

        try:
            found = next(dist.rendezvous("env://", timeout=_WAIT))
        except (RuntimeError, ValueError) as error:
            raise RankError(f"cannot meet the processes of torchrun: {error}") from error
        self.store: Any = found[0]

    def say(self, word: str) -> None:
        """Tell the others, as rank 0, what they are for."""
        self.store.set(_WORD, word)

    def hear(self) -> str:
        """What rank 0 says; `END` if it has gone."""
        try:
            self.store.wait([_WORD], _WAIT)
            return str(self.store.get(_WORD), "ascii")
        except RuntimeError:
            return END
