"""Attributes of other people's classes, replaced and put back."""

from __future__ import annotations

from typing import Any

from lightspan.capture.patch import Patch


class Base:
    def ask(self) -> str:
        return "theirs"


class Client(Base):
    def tell(self) -> str:
        return "theirs"


def wrapped(name: str) -> Patch:
    original = getattr(Client, name)

    def make(patch: Patch) -> Any:
        return lambda self: "ours" if patch.on else original(self)

    return Patch(Client, name, make)


def test_what_a_class_has_and_what_it_inherits_is_put_back() -> None:
    for name in ("ask", "tell"):
        before = dict(vars(Client))
        patch = wrapped(name)
        assert getattr(Client(), name)() == "ours"
        patch.undo()
        patch.undo()
        assert dict(vars(Client)) == before
        assert getattr(Client(), name)() == "theirs"


def test_what_somebody_put_in_our_place_stays_and_ours_does_nothing() -> None:
    patch = wrapped("tell")
    ours = Client.tell
    theirs = lambda self: f"around {ours(self)}"  # noqa: E731
    Client.tell = theirs  # type: ignore[method-assign]
    try:
        assert Client().tell() == "around ours"
        patch.undo()
        assert vars(Client)["tell"] is theirs
        assert Client().tell() == "around theirs"
    finally:
        del Client.tell
