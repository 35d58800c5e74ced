"""SpanTree: an attempt's spans as a tree, for people. Nothing that is trained depends on it.

Spans come from programs that we did not write: parents may be missing or form circles, and a tree
may be deeper than Python recurses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightspan.schema.spans import Span


class SpanNode:
    """A span with its children. Walk it with `walk`, which does not recurse."""

    __slots__ = ("children", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.children: list[SpanNode] = []

    def __repr__(self) -> str:
        return f"SpanNode({self.span.name!r}, {len(self.children)} children)"


class SpanTree(NamedTuple):
    """The roots, and how many spans had to become roots."""

    roots: tuple[SpanNode, ...]
    orphans: int
    """How many roots have a parent that is unknown, or that leads back to themselves."""


def build_tree(spans: Sequence[Span]) -> SpanTree:
    """The tree by parent ids alone, whatever the order of arrival; linear, any depth.

    Siblings stand by start time, except that those with a gateway sequence keep its order. A span
    that arrived twice stands once.
    """
    nodes = {span.span_id: SpanNode(span) for span in sorted(spans, key=_by_time)}
    roots, orphans = [], 0
    for node in nodes.values():
        parent = nodes.get(node.span.parent_id or "")
        if parent is not None and parent is not node:
            parent.children.append(node)
        else:
            roots.append(node)
            orphans += node.span.parent_id is not None
    circles = _break_circles(nodes, roots)
    for node in nodes.values():
        node.children = _in_sequence(node.children)
    roots = sorted([*roots, *circles], key=lambda node: _by_time(node.span))
    return SpanTree(tuple(_in_sequence(roots)), orphans + len(circles))


def walk(roots: Iterable[SpanNode]) -> Iterator[tuple[int, SpanNode]]:
    """(depth, node), parents before children, siblings in order; without recursion."""
    stack = [(0, node) for node in reversed(list(roots))]
    while stack:
        depth, node = stack.pop()
        yield depth, node
        stack.extend((depth + 1, child) for child in reversed(node.children))


def _break_circles(nodes: dict[str, SpanNode], roots: Sequence[SpanNode]) -> list[SpanNode]:
    """Make the earliest node of each circle of parents a root; returns these."""
    reached = {node.span.span_id for _, node in walk(roots)}
    broken = []
    for span_id, node in nodes.items():
        if span_id in reached:
            continue
        first = _on_circle(nodes, node)
        nodes[first.span.parent_id or ""].children.remove(first)
        broken.append(first)
        reached.update(below.span.span_id for _, below in walk([first]))
    return broken


def _on_circle(nodes: dict[str, SpanNode], node: SpanNode) -> SpanNode:
    """The earliest node of the circle that the node's ancestors run into."""
    seen: dict[str, None] = {}
    while node.span.span_id not in seen:
        seen[node.span.span_id] = None
        node = nodes[node.span.parent_id or ""]  # there is one: a node without a parent is a root
    path = list(seen)
    circle = path[path.index(node.span.span_id) :]
    return min((nodes[span_id] for span_id in circle), key=lambda node: _by_time(node.span))


def _in_sequence(nodes: list[SpanNode]) -> list[SpanNode]:
    """The nodes, those with a gateway sequence put into its order in the places they hold."""
    places = [i for i, node in enumerate(nodes) if node.span.sequence_start is not None]
    ordered = sorted((nodes[i] for i in places), key=lambda node: node.span.sequence_start or 0)
    result = list(nodes)
    for place, node in zip(places, ordered, strict=True):
        result[place] = node
    return result


def _by_time(span: Span) -> tuple[int, str]:
    return span.start_ns, span.span_id
