"""How many values a body holds is known before they are made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies

from lightspan.stores.remote.values import has_more_values

scalars = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**63), 2**64 - 1)
    | strategies.floats()
    | strategies.text(max_size=40)
    | strategies.binary(max_size=40)
    | strategies.builds(
        msgspec.msgpack.Ext, strategies.integers(0, 127), strategies.binary(max_size=20)
    )
)
anything = strategies.recursive(
    scalars,
    lambda inner: (
        strategies.lists(inner, max_size=20)
        | strategies.dictionaries(strategies.text(max_size=3), inner, max_size=20)
    ),
    max_leaves=60,
)


def number(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(number, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(number, value.values()))
    return 1


@given(anything)
def test_it_counts_what_was_written(value: Any) -> None:
    body, values = msgspec.msgpack.encode(value), number(value)
    assert not has_more_values(body, values)
    assert has_more_values(body, values - 1)


@pytest.mark.parametrize("size", [100, 300, 70_000])
def test_long_ones(size: int) -> None:
    for value in ("x" * size, b"x" * size, [0] * size, msgspec.msgpack.Ext(5, b"x" * size)):
        body, values = msgspec.msgpack.encode(value), number(value)
        assert not has_more_values(body, values)
        assert has_more_values(body, values - 1)


def test_what_ends_too_early() -> None:
    assert not has_more_values(b"\xdd\xff", 5)
    assert not has_more_values(b"\xdb\xff\xff\xff\xff" + b"x" * 20, 5)
    assert has_more_values(b"\x00" * 8, 7)
