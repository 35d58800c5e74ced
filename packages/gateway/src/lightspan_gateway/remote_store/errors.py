"""The encoding of errors: the name of the class and the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from lightspan import errors
from lightspan.errors import LightspanError, StoreError, StoreFormatError, StoreUnreachableError

_KINDS: Final[Mapping[str, type[LightspanError]]] = {
    kind.__name__: kind
    for kind in (
        *(errors.ConflictError, errors.DataError, errors.IllegalMoveError, errors.NotFoundError),
        *(StoreError, StoreFormatError, StoreUnreachableError),
    )
}
"""Name → class of the errors that a client raises; it raises other errors as `StoreError`."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it is sent over HTTP: the name of its class and its message."""

    kind: str
    """Name of the error's class."""
    message: str

    @classmethod
    def of(cls, error: LightspanError) -> Failure:
        """Encode an error."""
        names = (kind.__name__ for kind in type(error).__mro__)
        return cls(kind=next(filter(_KINDS.__contains__, names), "StoreError"), message=str(error))

    def error(self, where: str) -> LightspanError:
        """Return the exception that this failure encodes.

        Args:
            where: name of the store; it is added to messages that do not name the store.
        """
        kind = _KINDS.get(self.kind, StoreError)
        lacks_store = kind in (StoreError, StoreFormatError, StoreUnreachableError)
        return kind(f"{where}: {self.message}" if lacks_store else self.message)
