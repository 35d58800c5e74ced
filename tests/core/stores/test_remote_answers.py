"""Answers that are large are encoded item by item, and read as any other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lightspan.schema.spans import Span
from lightspan.stores.remote.operations import LONG, OPERATIONS, is_long


def span(attempt_id: str, number: int) -> Span:
    return Span(
        span_id=f"{number:016x}",
        trace_id="a" * 32,
        name=f"span {number}",
        rollout_id="ro-1",
        attempt_id=attempt_id,
    )


@pytest.mark.parametrize(("number", "long"), [(1, False), (LONG // 2, False), (LONG, True)])
def test_spans_of_several_attempts(number: int, long: bool) -> None:
    spans = {f"at-{n}": [span(f"at-{n}", index) for index in range(number)] for n in range(2)}
    answer: dict[str, list[Span]] = {**spans, "at-none": []}
    operation = OPERATIONS["spans"]
    assert is_long(answer) == long
    body = operation.encode_answer(answer)
    assert operation.read_answer(body) == answer
    assert (body == msgspec.msgpack.encode(answer)) is not long


@pytest.mark.parametrize(
    ("answer", "long"),
    [
        ([0] * LONG, False),
        ([0] * (LONG + 1), True),
        ({"a": [0] * LONG, "b": [0]}, True),
        ({str(n): n for n in range(LONG + 1)}, False),
        (None, False),
        ("text" * LONG, False),
    ],
)
def test_what_takes_long(answer: Any, long: bool) -> None:
    assert is_long(answer) is long
