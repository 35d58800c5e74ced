"""Replacing an attribute of somebody else's class, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_INHERITED: Final = object()


class Patch:
    """One attribute of a class, with ours in its place until `undo`.

    Args:
        owner: the class.
        name: of the attribute, which the class may inherit.
        make: makes ours; it is given this patch.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Patch], Any]) -> None:
        self.on = True
        """False after `undo`: ours must do nothing any more, and may still be called, by what
        somebody wrapped around it."""
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name, _INHERITED)
        self._ours = make(self)
        setattr(owner, name, self._ours)

    def undo(self) -> None:
        """Leave the class as it was; what somebody put in our place stays."""
        self.on = False
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
