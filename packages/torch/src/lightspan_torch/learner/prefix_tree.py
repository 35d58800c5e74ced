"""Trees of tokens: sequences that begin alike, each shared token once. Pure: lists of integers.

A *node* is a token with everything before it; sequences that begin alike share nodes. Nodes are
numbered depth first, so the ancestors of a node come before it and a subtree is an interval. At a
branching the longest branch comes first: the long common history of an episode is then one run of
nodes, and the short branches that leave it follow together.

Prefix trees for training: Tree Training (arXiv 2511.00413).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from lightspan.lightning.rows import common_prefix

BLOCK: Final = 256
"""Up to so many nodes attend to one another under one square mask. Longer trees are computed in
pieces, and within a piece so many nodes at a time."""


class Tree(NamedTuple):
    """Sequences computed together, depth first."""

    members: list[int]
    """The sequences, as indices into those given."""
    starts: list[int]
    """How many first tokens each shares with the one before it; its own nodes are the rest. The
    first one's is 0."""
    size: int
    """Nodes."""

    @property
    def is_chain(self) -> bool:
        """Nothing branches: plain causal attention will do."""
        return not any(self.starts) and len(self.members) == 1


class Layout(NamedTuple):
    """The nodes of a tree. Lists of length `size` but for `paths`."""

    tokens: list[int]
    depths: list[int]
    """Tokens before the node in its sequences: its position."""
    ends: list[int]
    """The first node after the node's subtree. i is j or an ancestor of j if i <= j < ends[i]."""
    paths: list[list[int]]
    """For each member, the node of each of its tokens."""


class Piece(NamedTuple):
    """The nodes [start, stop) of a tree, computed in one pass."""

    start: int
    stop: int
    past: list[int]
    """The nodes before `start` that nodes of the piece descend from, from the root down."""


def plain(sequences: Sequence[list[int]]) -> list[Tree]:
    """Each sequence by itself."""
    return [Tree([index], [0], len(ids)) for index, ids in enumerate(sequences)]


def share(sequences: Sequence[list[int]], *, pair_cost: float, block: int = BLOCK) -> list[Tree]:
    """Trees that share what is worth sharing.

    A sequence joins the tree of the one before it, in depth-first order, if that is cheaper than
    computing all of it anew: what it saves in tokens may cost more in attention.

    Args:
        sequences: none empty. Equal ones keep their order, else it does not matter.
        pair_cost: what one query and key cost, where a token through the rest of the model costs 1.
        block: nodes under one square mask.
    """
    trees: list[Tree] = []
    size = 0
    for index, start in depth_first(sequences):
        length = len(sequences[index])
        fresh = length - start
        pairs = _pairs(size, start, fresh, block)
        alone = length + pair_cost * length * length / 2
        if trees and fresh + pair_cost * pairs <= alone:
            size += fresh
            tree = trees[-1]
            tree.members.append(index)
            tree.starts.append(start)
            trees[-1] = tree._replace(size=size)
        else:
            trees.append(Tree([index], [0], length))
            size = length
    return trees


def _pairs(size: int, start: int, fresh: int, block: int) -> float:
    """Queries times keys that `fresh` nodes at depth `start` add to a tree of `size` nodes."""
    whole = size + fresh
    if whole <= block:
        return whole * whole - size * size
    return fresh * (start + fresh / 2 + block)


# --- depth-first order ------------------------------------------------------------------------


@dataclass(slots=True)
class _Vertex:
    """Where sequences branch or end."""

    depth: int
    ending: list[int] = field(default_factory=list)
    children: list[_Vertex] = field(default_factory=list)
    height: int = 0
    """Depth of the deepest vertex below."""


def depth_first(sequences: Sequence[list[int]]) -> list[tuple[int, int]]:
    """(index, tokens shared with the one before) of every sequence, the longest branch first.

    The shared part with the one before is also the longest with any before.
    """
    order: list[tuple[int, int]] = []
    stack = [(_radix_tree(sequences), 0)]
    while stack:
        vertex, shared = stack.pop()
        if vertex.children:
            ordered = sorted(vertex.children, key=lambda child: -child.height)
            # what ends here comes last: a stack, so it goes on first
            stack.append((_Vertex(vertex.depth, vertex.ending), vertex.depth))
            stack += [(child, vertex.depth) for child in reversed(ordered[1:])]
            stack.append((ordered[0], shared))
        else:
            for index in vertex.ending:
                order.append((index, shared))
                shared = vertex.depth
    return order


def _radix_tree(sequences: Sequence[list[int]]) -> _Vertex:
    """Built from the sorted sequences and the lengths of their common prefixes."""
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    root = _Vertex(0)
    path = [root]
    for place, index in enumerate(order):
        ids = sequences[index]
        common = common_prefix(sequences[order[place - 1]], ids) if place else 0
        below: _Vertex | None = None
        while path[-1].depth > common:
            below = path.pop()
            path[-1].height = max(path[-1].height, below.height)
        if path[-1].depth < common:
            assert below is not None  # the sequence before is longer than what they share
            middle = _Vertex(common, children=[below], height=below.height)
            path[-1].children[-1] = middle
            path.append(middle)
        if len(ids) > common:
            leaf = _Vertex(len(ids), height=len(ids))
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].ending.append(index)
    for vertex, above in zip(reversed(path[1:]), reversed(path[:-1]), strict=True):
        above.height = max(above.height, vertex.height)
    return root


# --- nodes and pieces -------------------------------------------------------------------------


def lay_out(tree: Tree, sequences: Sequence[list[int]]) -> Layout:
    """The nodes of a tree, numbered."""
    tokens: list[int] = []
    depths: list[int] = []
    ends = [tree.size] * tree.size
    paths: list[list[int]] = []
    path: list[int] = []
    for index, start in zip(tree.members, tree.starts, strict=True):
        ids, here = sequences[index], len(tokens)
        for node in path[start:]:
            ends[node] = here
        tokens += ids[start:]
        depths += range(start, len(ids))
        path = [*path[:start], *range(here, len(tokens))]
        paths.append(path)
    return Layout(tokens, depths, ends, paths)


def cut(layout: Layout, budget: int, mask_budget: int) -> list[Piece]:
    """The nodes of a tree cut into pieces of consecutive ones, in order.

    A piece is needed until the last node that descends from it is done. The nodes of all pieces
    that are needed at once are at most those of the longest sequence and one budget.

    Args:
        budget: nodes of a piece. The own nodes of a member are parted only where a subtree larger
            than the budget branches off: what comes after need not be kept for that subtree.
        mask_budget: queries times keys of a piece with several members.
    """
    pieces: list[Piece] = []
    is_whole = False
    for segment in _segments(layout, budget):
        # a subtree joins others if all of it fits; else they would be needed as long as its rest
        is_root = segment.start == segment.subtree_start
        stop = segment.subtree_stop if is_root else segment.stop
        if pieces and segment.is_small and (is_whole or not is_root):
            size = stop - pieces[-1].start
            if size <= budget and size * (size + len(pieces[-1].past)) <= mask_budget:
                pieces[-1] = pieces[-1]._replace(stop=segment.stop)
                continue
        is_whole = is_root and segment.is_small
        pieces.append(Piece(segment.start, segment.stop, segment.past))
    return pieces


class _Segment(NamedTuple):
    """A member's own nodes, or a part of them."""

    start: int
    stop: int
    past: list[int]
    is_small: bool
    """It is in a subtree of at most `budget` nodes, [subtree_start, subtree_stop)."""
    subtree_start: int
    subtree_stop: int


def _segments(layout: Layout, budget: int) -> Iterator[_Segment]:
    """The members' own nodes in order, parted where a large subtree branches off."""
    parted = set(_large_branchings(layout, budget))
    here = first = last = 0
    for path in layout.paths:
        if path[-1] < here:
            continue  # ends inside the path of the one before: no node of its own
        stop = path[-1] + 1
        bounds = [here, *sorted(node for node in parted if here < node < stop), stop]
        for start, end in pairwise(bounds):
            if start >= last:
                first, last = start, layout.ends[start]
            is_small = last - first <= budget
            past = path[: layout.depths[start]]
            yield _Segment(start, end, past, is_small, first, last)
            if not is_small:
                last = end
        here = stop


def _large_branchings(layout: Layout, budget: int) -> Iterator[int]:
    """The node after each one from which a subtree of more than `budget` nodes branches off."""
    here = 0
    for path in layout.paths:
        if path[-1] >= here:
            depth = layout.depths[here]
            if depth and layout.ends[here] - here > budget:
                yield path[depth - 1] + 1
            here = path[-1] + 1


def intervals(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as half-open intervals."""
    if not nodes:
        return []
    breaks = [place for place, (a, b) in enumerate(pairwise(nodes), 1) if b != a + 1]
    bounds = zip([0, *breaks], [*breaks, len(nodes)], strict=True)
    return [(nodes[first], nodes[last - 1] + 1) for first, last in bounds]


class Source(NamedTuple):
    """Where the past of a piece was computed."""

    piece: int
    """The last one that has nodes of it: that piece's own past is the rest."""
    intervals: list[tuple[int, int]]
    """Half-open, in that piece's past and nodes, one after the other."""


def source(pieces: Sequence[Piece], number: int) -> Source | None:
    """Where the past of a piece was computed; None if it has none."""
    past = pieces[number].past
    if not past:
        return None
    owner = bisect_right([piece.start for piece in pieces], past[-1]) - 1
    start, before = pieces[owner].start, len(pieces[owner].past)
    earlier = bisect_left(past, start)
    own = [before + node - start for node in past[earlier:]]
    return Source(owner, intervals([*range(earlier), *own]))
