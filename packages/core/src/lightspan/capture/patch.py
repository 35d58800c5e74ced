"""Replace an attribute of another library's class, so that the replacement can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_INHERITED: Final = object()


class Patch:
    """A replacement of a class's attribute, from its creation until `undo`.

    Args:
        owner: the class.
        name: name of the attribute, which the class may inherit.
        make: returns the replacement, given this patch.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Patch], Any]) -> None:
        self.on = True
        """False after `undo`. Another library may have wrapped the replacement and still call it.
        It must then only call the original."""
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name, _INHERITED)
        self._original = getattr(owner, name)
        self._ours = make(self)
        setattr(owner, name, self._ours)

    @property
    def is_removed(self) -> bool:
        """Whether another library has removed this patch by restoring an older attribute.

        This happens if the library wrapped the attribute before this patch was made, and puts the
        original back later.
        """
        layers = _layers(vars(self._owner).get(self._name, self._original))
        return self._ours not in layers and layers[-1] is _layers(self._original)[-1]

    def undo(self) -> None:
        """Restore the attribute, unless it has been replaced again since."""
        self.on = False
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._before is _INHERITED:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


def _layers(function: Any) -> list[Any]:
    """Return a function, the function that it wraps, and so on to the innermost."""
    layers = [function]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(wrapped)
    return layers
