"""What went wrong, as it travels: the name of an error's class and its message, nothing else."""

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
        *(errors.StaleEpochError, StoreError, StoreFormatError, StoreUnreachableError),
    )
}
"""Those that a store's caller may be given. Any other one is a `StoreError` there."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an operation was not done."""

    kind: str
    """The class of the error."""
    message: str

    @classmethod
    def of(cls, error: LightspanError) -> Failure:
        """What is told of an error."""
        names = (kind.__name__ for kind in type(error).__mro__)
        return cls(kind=next(filter(_KINDS.__contains__, names), "StoreError"), message=str(error))

    def error(self, where: str) -> LightspanError:
        """The error, as a store in this process would raise it.

        Args:
            where: names the store, for an error that does not say itself which one failed.
        """
        kind = _KINDS.get(self.kind, StoreError)
        about_store = kind in (StoreError, StoreFormatError, StoreUnreachableError)
        return kind(f"{where}: {self.message}" if about_store else self.message)
