"""Test attempts of thousands of spans, the examples in docstrings, and imports."""

import ast
import doctest
import importlib
import subprocess
import sys

import pytest

from lightspan.lightning import (
    Selection,
    build_episode,
    classify_calls,
    trained_transitions,
)
from lightspan.lightning.span_tree import walk
from lightspan.schema.spans import SpanKind
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_rollout,
    make_span,
)

ALL = Selection.of("*").routing


def build(records=(), spans=()):
    return build_episode(make_attempt(), make_rollout(), spans, records)


def chain(depth):
    """Return `depth` nested spans, of which the innermost is a model call."""
    spans = [
        make_span(f"{n}", SpanKind.AGENT, parent_id=str(n - 1) if n else None) for n in range(depth)
    ]
    spans.append(make_call_span("c0", sequence=(1, 2), parent_id=str(depth - 1)))
    return spans


def test_depth_ten_thousand_works():
    """Check a chain of 10,000 spans, which must not exceed Python's recursion limit."""
    episode = build([make_record("c0")], chain(10_000))
    assert classify_calls(episode, ALL).counts() == {"trained": 1}
    depths = [depth for depth, _ in walk(episode.tree)]
    assert depths == list(range(10_001))


def test_ten_thousand_nested_foreign_llm_spans_work():
    spans = [
        make_span(str(n), SpanKind.LLM, parent_id=str(n - 1) if n else None) for n in range(10_000)
    ]
    assert [call.call_id for call in build(spans=spans).calls] == ["span:9999"]


class Counting:
    """Count the attribute reads of spans and records, a measure of work that needs no clock."""

    reads = 0

    def __init__(self, value):
        self._value = value

    def __getattr__(self, name):
        Counting.reads += 1
        return getattr(self._value, name)


@pytest.mark.parametrize("nested", [True, False])
def test_the_work_is_linear_in_the_spans(nested):
    def reads(turns):
        spans, records = [], []
        for n in range(turns):
            parent = (f"tool-{n - 1}" if nested else "root") if n else None
            sequence = (2 * n + 1, 2 * n + 2)
            spans.append(make_call_span(f"c{n}", sequence=sequence, parent_id=parent, start_ns=n))
            spans.append(make_span(f"tool-{n}", SpanKind.TOOL, parent_id=parent, start_ns=n))
            records.append(make_record(f"c{n}", sequence=sequence))
        Counting.reads = 0
        episode = build(list(map(Counting, records)), list(map(Counting, spans)))
        assert len(trained_transitions(episode, classify_calls(episode, ALL))) == turns
        return Counting.reads / turns

    assert reads(800) < 1.1 * reads(200)


@pytest.mark.parametrize(
    "module", ["", ".advantages", ".selection", ".transitions", ".credit", ".rows", ".batch"]
)
def test_the_examples_in_docstrings_are_true(module):
    assert doctest.testmod(importlib.import_module("lightspan.lightning" + module)).failed == 0


def test_the_pure_part_needs_nothing_but_msgspec():
    code = (
        "import sys; before = set(sys.modules); import lightspan.lightning; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names))"
    )
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    needed = ast.literal_eval(found.stdout.decode())
    assert needed <= {
        "lightspan",
        "msgspec",
        "typing_extensions",
    }  # msgspec takes the last if there
