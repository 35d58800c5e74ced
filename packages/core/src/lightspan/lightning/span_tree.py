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
    a root, and so is the earliest span of each circle of parents.
    """
    nodes = {span.span_id: SpanNode(span) for span in sorted(spans, key=_by_time)}
    roots = []
    for node in nodes.values():
        parent = nodes.get(node.span.parent_id or "")
        if parent is not None and parent is not node:
            parent.children.append(node)
        else:
            roots.append(node)
    roots += _break_circles(nodes, roots)
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


def _break_circles(nodes: dict[str, SpanNode], roots: Sequence[SpanNode]) -> list[SpanNode]:
    """Detach the earliest node of each circle of parents from its parent; return these nodes."""
    reached = {node.span.span_id for _, node in walk(roots)}
    detached = []
    for span_id, node in nodes.items():
        if span_id in reached:
            continue
        first = _first_of_circle(nodes, node)
        nodes[first.span.parent_id or ""].children.remove(first)
        detached.append(first)
        reached.update(below.span.span_id for _, below in walk([first]))
    return detached


def _first_of_circle(nodes: dict[str, SpanNode], node: SpanNode) -> SpanNode:
    """Return the earliest node of the circle among the node's ancestors."""
    path: dict[str, None] = {}
    while node.span.span_id not in path:
        path[node.span.span_id] = None
        node = nodes[node.span.parent_id or ""]  # exists: a node without a parent is a root
    span_ids = list(path)
    circle = span_ids[span_ids.index(node.span.span_id) :]
    return min((nodes[span_id] for span_id in circle), key=lambda node: _by_time(node.span))


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
