"""Span tree of an attempt, for display; training does not use it.

Spans may come from other programs: parents may be missing or form circles, and a tree may be deeper
than Python's recursion limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightspan.schema.spans import Span


@dataclass(slots=True, eq=False, repr=False)
class SpanNode:
    """A span with its children. Iterate over a tree with `walk`, which does not recurse."""

    span: Span
    children: list[SpanNode] = field(default_factory=list)


def build_tree(spans: Sequence[Span]) -> tuple[SpanNode, ...]:
    """Return the roots of the tree that the parent ids define, for spans in any order.

    Siblings are ordered by start time; spans with a gateway sequence number are ordered by that
    number among themselves. A span that arrived twice occurs once. A span with an unknown parent is
    a root, and so is each span whose ancestors form a circle.
    """
    nodes = {span.span_id: SpanNode(span) for span in sorted(spans, key=_by_time)}
    roots = []
    for node in nodes.values():
        parent = nodes.get(node.span.parent_id or "")
        if parent is not None and parent is not node:
            parent.children.append(node)
        else:
            roots.append(node)
    reached = {node.span.span_id for _, node in walk(roots)}
    roots += [SpanNode(node.span) for key, node in nodes.items() if key not in reached]
    for node in nodes.values():
        node.children = _in_sequence(node.children)
    return tuple(_in_sequence(sorted(roots, key=lambda node: _by_time(node.span))))


def walk(roots: Iterable[SpanNode]) -> Iterator[tuple[int, SpanNode]]:
    """Yield (depth, node), parents before children, siblings in order; without recursion."""
    stack = [(0, node) for node in reversed(list(roots))]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children))


def _in_sequence(nodes: list[SpanNode]) -> list[SpanNode]:
    """Sort the nodes that have a gateway sequence number by it, and return all nodes.

    Nodes without a number keep their positions.
    """
    places = [i for i, node in enumerate(nodes) if node.span.sequence_start is not None]
    ordered = sorted((nodes[i] for i in places), key=lambda node: node.span.sequence_start or 0)
    result = list(nodes)
    for place, node in zip(places, ordered, strict=True):
        result[place] = node
    return result


def _by_time(span: Span) -> tuple[int, str]:
    return span.start_ns, span.span_id
