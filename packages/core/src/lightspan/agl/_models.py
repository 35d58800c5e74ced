"""Records with the methods that the original's have: checked when made, dumped, copied."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Self

import msgspec

from lightspan.errors import DataError


class Model(msgspec.Struct, kw_only=True):
    """A record whose fields are checked when it is made; plain mappings become records.

    Raises:
        DataError: a field is missing, or not of its type; the message says which.
    """

    def __post_init__(self) -> None:
        for name, kind in _checked(type(self)):
            value = getattr(self, name)
            try:
                setattr(self, name, msgspec.convert(value, kind))
            except msgspec.ValidationError as error:
                raise DataError(f"{type(self).__name__}({name}={value!r:.200}): {error}") from error

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """A record of a mapping; what it does not know is left out.

        Raises:
            DataError: see the class.
        """
        if isinstance(values, cls):
            return values
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise DataError(f"{cls.__name__}: {error}") from error

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """`model_validate` of JSON.

        Raises:
            DataError: see the class; or it is no JSON.
        """
        try:
            return cls.model_validate(msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise DataError(f"{cls.__name__}: {error}") from error

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """Its fields as plain values.

        Args:
            mode: "json" for what JSON can say; "python" leaves what is no record as it is.
            include: only these fields.
            exclude: not these fields.
            exclude_none: leave out what is None, in the records inside too.
        """
        values = {
            name: _plain(value, mode, exclude_none)
            for name, value in self._fields().items()
            if (include is None or name in include) and name not in (exclude or ())
        }
        return {k: v for k, v in values.items() if v is not None or not exclude_none}

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """`model_dump` as JSON."""
        data = msgspec.json.encode(self.model_dump(mode="json", **options))
        return (data if indent is None else msgspec.json.format(data, indent=indent)).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with other values in some fields."""
        made = copy.deepcopy(self) if deep else copy.copy(self)
        for name, value in (update or {}).items():
            setattr(made, name, value)
        return made

    def _fields(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


@cache
def _checked(kind: type[Model]) -> list[tuple[str, Any]]:
    """The fields whose type says something, with it."""
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type) for field in fields if field.type is not Any]


def _plain(value: Any, mode: str, exclude_none: bool) -> Any:
    if isinstance(value, Model):
        return value.model_dump(mode=mode, exclude_none=exclude_none)
    if isinstance(value, Mapping):
        return {key: _plain(item, mode, exclude_none) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, mode, exclude_none) for item in value]
        return tuple(items) if isinstance(value, tuple) and mode == "python" else items
    return msgspec.to_builtins(value, enc_hook=str) if mode == "json" else value
