"""Prices of tokens."""

from __future__ import annotations

import msgspec

from lightspan.schema.validation import check_number

_TOKENS = 1_000_000


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """The price of a model's tokens; all prices of a search need the same currency.

    Raises:
        ConfigError: a price is not a finite number of at least 0.
    """

    input: float
    """Price of a million input tokens."""
    output: float
    """Price of a million output tokens."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_number(f"Price({name}=)", getattr(self, name), low=0)

    def of(self, input_tokens: float, output_tokens: float) -> float:
        """Return the cost of a number of tokens."""
        return (input_tokens * self.input + output_tokens * self.output) / _TOKENS
