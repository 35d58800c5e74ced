"""What is loaded is not looked through by the garbage collector; what is made later is."""

from __future__ import annotations

import gc
import weakref

from lightspan.gateway.pauses import settled_memory


class Node:
    """One that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def is_looked_through(thing: object) -> bool:
    return any(thing is one for one in gc.get_objects())


def test_what_was_there_is_passed_over_and_what_comes_later_is_collected() -> None:
    before = Node()
    with settled_memory():
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
    with settled_memory():
        pass
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with settled_memory():
        pass
    assert gc.get_freeze_count() > 0
