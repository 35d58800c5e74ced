"""Tests of patches of another library's class under wrappers of other instrumentations."""

from __future__ import annotations

import functools
from typing import Any

from lightspan.capture.patch import Patch


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


def test_a_patch_is_removed_only_if_what_it_wrapped_is_back() -> None:
    class Client:
        def send(self) -> None: ...

    original: Any = Client.send
    patch = Patch(Client, "send", lambda _: wrapped(original))
    for replacement, is_removed in (
        (Client.send, False),
        (wrapped(Client.send), False),  # wrapped by another
        (wrapped(lambda self: None), False),  # replaced by something else
        (original, True),
        (wrapped(original), True),  # by another, without this patch
    ):
        Client.send = replacement  # type: ignore[method-assign]
        assert patch.is_removed is is_removed


def test_undo_leaves_the_wrapper_of_another() -> None:
    class Client:
        def send(self) -> None: ...

    original: Any = Client.send
    patch = Patch(Client, "send", lambda _: wrapped(original))
    Client.send = another = wrapped(Client.send)  # type: ignore[method-assign]
    patch.undo()
    assert Client.send is another
    assert not patch.on
