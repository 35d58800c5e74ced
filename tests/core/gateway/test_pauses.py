"""The collector passes over what is loaded, not what is made later; threads take short turns."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from lightspan.gateway.pauses import TURN_S, short_pauses


class Node:
    """One that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def is_looked_through(thing: object) -> bool:
    return any(thing is one for one in gc.get_objects())


def test_what_was_there_is_passed_over_and_what_comes_later_is_collected() -> None:
    before = Node()
    with short_pauses():
        assert gc.get_freeze_count() > 10_000
        assert not is_looked_through(before)
        later = Node()
        assert is_looked_through(later)
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    passed = weakref.ref(before)
    del before
    gc.unfreeze()  # what this test's process froze
    gc.collect()
    assert passed() is None
    gc.freeze()


def test_a_heap_that_was_settled_before_is_so_afterwards() -> None:
    gc.unfreeze()
    with short_pauses():
        pass
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with short_pauses():
        pass
    assert gc.get_freeze_count() > 0


def test_threads_take_short_turns_until_then() -> None:
    before = sys.getswitchinterval()
    with short_pauses():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == before
