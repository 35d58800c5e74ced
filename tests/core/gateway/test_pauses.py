"""The collector passes over what is loaded, not what is made later; threads take short turns."""

from __future__ import annotations

import gc
import sys
import weakref
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest

from lightspan.gateway.pauses import TURN_S, short_pauses


class Node:
    """One that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def without_what_the_tests_change() -> Any:
    """The module as it is: in a process of the tests, much is left out where the heap was settled
    before (`tests/conftest.py`)."""
    spec = find_spec("lightspan.gateway.pauses")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    pauses = without_what_the_tests_change()
    gc.unfreeze()
    with pauses.short_pauses():
        pass
    assert gc.get_freeze_count() == 0
    before = Node()
    gc.freeze()
    with pauses.short_pauses():
        gone = weakref.ref(before)
        del before
    assert gone() is None
    assert gc.get_freeze_count() > 0


def test_threads_take_short_turns_until_then() -> None:
    before = sys.getswitchinterval()
    with short_pauses():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == before
