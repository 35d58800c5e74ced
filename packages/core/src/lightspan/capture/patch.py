"""Reversible replacement of an attribute of another library's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_INHERITED: Final = object()


class Patch:
    """A replaced attribute of a class, until `undo`.

    Args:
        owner: the class.
        name: name of the attribute, which the class may inherit.
        make: returns the replacement, given this patch.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Patch], Any]) -> None:
        self.on = True
        """False after `undo`. The replacement may still be called then, by a wrapper around it, and
        must do nothing."""
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name, _INHERITED)
        self._original = getattr(owner, name)
        self._ours = make(self)
        setattr(owner, name, self._ours)

    @property
    def is_removed(self) -> bool:
        """Whether the attribute, unwrapped, is the original: another instrumentation, which had
        wrapped the original first, has put it back."""
        function = vars(self._owner).get(self._name, self._original)
        while function is not None and function is not self._ours:
            if function is self._original:
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def undo(self) -> None:
        """Restore the attribute, unless another patch has replaced it since."""
        self.on = False
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
