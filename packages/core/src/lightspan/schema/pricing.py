"""What tokens cost."""

from __future__ import annotations

import msgspec

from lightspan.schema.validation import check_number

_TOKENS = 1_000_000


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Of a million tokens of a model, in whichever currency: all that are compared have one.

    Raises:
        ConfigError: a price is no finite number, or below 0.
    """

    input: float
    """Of tokens that are sent."""
    output: float
    """Of tokens that are answered."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_number(f"Price({name}=)", getattr(self, name), low=0)

    def of(self, asked: float, answered: float) -> float:
        """What so many tokens cost."""
        return (asked * self.input + answered * self.output) / _TOKENS
