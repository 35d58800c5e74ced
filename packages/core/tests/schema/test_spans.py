"""Test spans: encoding, and attributes with any value of an app."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan.errors import DataError
from lightspan.schema.spans import (
    SCHEMA_VERSION,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanStatus,
    clean_attributes,
    decode_span,
    encode_span,
)

_VALUES = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(), max_size=3),
    st.lists(st.booleans(), max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.lists(st.floats(allow_nan=False), max_size=3),
)
_ATTRIBUTES = st.dictionaries(st.text(), _VALUES, max_size=4)
_TIMES = st.integers(0, 2**63 - 1)
_SPANS = st.builds(
    Span,
    span_id=st.text(),
    trace_id=st.text(),
    name=st.text(),
    rollout_id=st.text(),
    attempt_id=st.text(),
    kind=st.sampled_from(SpanKind),
    parent_id=st.none() | st.text(),
    start_ns=_TIMES,
    end_ns=_TIMES,
    status=st.sampled_from(SpanStatus),
    status_message=st.text(),
    attributes=_ATTRIBUTES,
    events=st.lists(st.builds(SpanEvent, st.text(), _TIMES, _ATTRIBUTES), max_size=2),
    links=st.lists(st.builds(SpanLink, st.text(), st.text(), _ATTRIBUTES), max_size=2),
    resource=_ATTRIBUTES,
    sequence_start=st.none() | _TIMES,
    sequence_end=st.none() | _TIMES,
    late=st.booleans(),
)


@given(st.lists(_SPANS, max_size=3))
def test_spans_survive_the_codec(spans: list[Span]) -> None:
    decoded = [decode_span(encode_span(span)) for span in spans]
    assert decoded == spans
    for before, after in zip(spans, decoded, strict=True):
        assert _types(before.attributes) == _types(after.attributes)


def _types(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return name → type of the value, because 1, 1.0 and True compare equal."""
    return {
        name: [type(item) for item in value] if isinstance(value, list) else type(value)
        for name, value in attributes.items()
    }


def test_a_span_says_as_little_as_it_can() -> None:
    data = encode_span(Span(span_id="a" * 16, trace_id="b" * 32, name="n"))
    assert set(msgspec.msgpack.decode(data)) == {"span_id", "trace_id", "name"}


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81", b"\x90", b"\x80", b"text", b"\xff" * 100])
def test_bytes_that_are_no_span(data: bytes) -> None:
    with pytest.raises(DataError, match="not a span"):
        decode_span(data)


def test_a_newer_schema_is_refused() -> None:
    span = Span(span_id="a", trace_id="b", name="n", schema=SCHEMA_VERSION + 1)
    with pytest.raises(DataError, match=f"span a has schema {SCHEMA_VERSION + 1}.*upgrade"):
        decode_span(encode_span(span))


def test_fields_of_a_later_writer_are_skipped() -> None:
    fields = {"span_id": "a", "trace_id": "b", "name": "n", "novelty": [1]}
    assert decode_span(msgspec.msgpack.encode(fields)).name == "n"


# --- clean_attributes -----------------------------------------------------------------------


class _Level(enum.StrEnum):
    HIGH = "high"


class _Number(enum.IntEnum):
    ONE = 1


class _Double(float):
    """A subclass of float that MessagePack cannot encode, such as numpy.float64."""


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("naïve 🙂", "naïve 🙂"),
        (True, True),
        (-(2**63), -(2**63)),
        (math.inf, math.inf),
        (2**63, "9223372036854775808"),
        (_Level.HIGH, "high"),
        (_Number.ONE, 1),
        (_Double(0.5), 0.5),
        ("half \ud83d a pair", "half \N{REPLACEMENT CHARACTER} a pair"),
        (("a", "b"), ["a", "b"]),
        ([], []),
        ([True, False], [True, False]),
        ([_Level.HIGH, "low"], ["high", "low"]),
        (["\udc00"], ["\N{REPLACEMENT CHARACTER}"]),
        ([1, 2.0], "[1, 2.0]"),
        ([True, 1], "[True, 1]"),
        ([2**70], "[1180591620717411303424]"),
        ({"a": 1}, "{'a': 1}"),
        (_Unprintable(), "<_Unprintable>"),
    ],
)
def test_clean_attributes(value: Any, expected: Any) -> None:
    cleaned = clean_attributes({"key": value, "none": None})
    assert cleaned == {"key": expected}
    assert _types(cleaned) == _types({"key": expected})
    span = Span(span_id="a", trace_id="b", name="n", attributes=cleaned)
    assert decode_span(encode_span(span)) == span


@given(
    st.dictionaries(
        st.text(st.characters()),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text(st.characters())
            | st.binary(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
            ),
        ),
    )
)
def test_anything_cleaned_can_be_stored(values: dict[str, Any]) -> None:
    attributes = clean_attributes(values)
    span = Span(span_id="a", trace_id="b", name="n", attributes=attributes)
    assert encode_span(decode_span(encode_span(span))) == encode_span(span)
