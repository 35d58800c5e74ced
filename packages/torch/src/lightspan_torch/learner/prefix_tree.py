"""Prefix trees of token sequences, in which each shared token occurs once.

The functions here compute with lists of integers only. A *node* is a token together with all tokens
before it. Sequences with a common prefix share its nodes. Nodes are numbered depth first. So every
node comes after its ancestors, and a subtree is an interval of numbers. The longest branch comes
first, so that the long history that an episode's calls share is one interval. The short branches
follow.

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
"""Maximum number of nodes under one square attention mask. Larger trees are computed in pieces, and
a piece in blocks of this many nodes."""


class Tree(NamedTuple):
    """Sequences that are computed together, so that each common prefix is computed once.

    The sequences are in the depth-first order of the tree.
    """

    members: list[int]
    """Indices of the sequences in the tree."""
    starts: list[int]
    """Number of tokens that each member shares with the previous member; 0 for the first. The other
    tokens are the member's own nodes."""
    size: int
    """Number of nodes."""

    @property
    def is_chain(self) -> bool:
        """Whether the tree does not branch, so that plain causal attention is enough."""
        return not any(self.starts) and len(self.members) == 1


class Layout(NamedTuple):
    """The nodes of a tree, in order of their numbers.

    All lists except `paths` have one entry for each node.
    """

    tokens: list[int]
    depths: list[int]
    """Position of each node in the sequences that contain it."""
    ends: list[int]
    """The first node after each node's subtree. i is j or an ancestor of j if i <= j < ends[i]."""
    paths: list[list[int]]
    """For each member of the tree, the nodes of its tokens."""


class Piece(NamedTuple):
    """A part of a tree that is computed in one pass: the nodes from `start` up to `stop` - 1."""

    start: int
    stop: int
    past: list[int]
    """The nodes before `start` that are ancestors of the piece's nodes, from the root down."""


def plain(sequences: Sequence[list[int]]) -> list[Tree]:
    """Return a separate tree for each sequence."""
    return [Tree([index], [0], len(ids)) for index, ids in enumerate(sequences)]


def share(sequences: Sequence[list[int]], *, pair_cost: float, block: int = BLOCK) -> list[Tree]:
    """Group sequences with common prefixes into trees.

    In depth-first order, a sequence is added to the tree of the sequence before it if that costs
    less than computing it alone. A common prefix saves tokens, but attention in a larger tree costs
    more.

    Args:
        sequences: non-empty sequences. Their order does not matter, except among equal ones.
        pair_cost: cost of attention between one query and one key. The unit is the cost of one
            token in the rest of the model.
        block: maximum number of nodes in a tree that is computed with one square mask.
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
    """Return how many pairs of a query and a key a sequence adds to the attention in a tree.

    Args:
        size: number of nodes in the tree before.
        start: number of tokens that the sequence shares with the tree.
        fresh: number of nodes that the sequence adds.
        block: maximum number of nodes in a tree that is computed with one square mask.
    """
    whole = size + fresh
    if whole <= block:
        return whole * whole - size * size
    return fresh * (start + fresh / 2 + block)


# --- depth-first order ------------------------------------------------------------------------


@dataclass(slots=True)
class _Vertex:
    """A prefix at which sequences branch or end, as a vertex of a radix tree."""

    depth: int
    ending: list[int] = field(default_factory=list)
    children: list[_Vertex] = field(default_factory=list)
    height: int = 0
    """Depth of the vertex's deepest descendant."""


def depth_first(sequences: Sequence[list[int]]) -> list[tuple[int, int]]:
    """Order the sequences by a depth-first traversal of their prefixes, the longest branch first.

    Returns:
        For each sequence, in this order: its index, and the number of tokens that it shares with
        the sequence before. No earlier sequence shares more tokens with it.
    """
    order: list[tuple[int, int]] = []
    stack = [(_radix_tree(sequences), 0)]
    while stack:
        vertex, shared = stack.pop()
        if vertex.children:
            ordered = sorted(vertex.children, key=lambda child: -child.height)
            # sequences that end here come last, so they are pushed first
            stack.append((_Vertex(vertex.depth, vertex.ending), vertex.depth))
            stack += [(child, vertex.depth) for child in reversed(ordered[1:])]
            stack.append((ordered[0], shared))
        else:
            for index in vertex.ending:
                order.append((index, shared))
                shared = vertex.depth
    return order


def _radix_tree(sequences: Sequence[list[int]]) -> _Vertex:
    """Build a radix tree from the sorted sequences and the lengths of their common prefixes."""
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
            assert below is not None  # the sequence before is longer than the common prefix
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
    """Number the nodes of a tree, and return what is known about each node."""
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
    """Cut the nodes of a tree into pieces of consecutive nodes.

    A piece stays in memory until its last descendant is computed. The pieces in memory at the same
    time have at most as many nodes as the longest sequence, plus `budget`.

    Args:
        layout: the nodes of the tree.
        budget: maximum number of nodes of a piece. The nodes that one sequence adds to the tree are
            split only where a subtree larger than `budget` branches off. That subtree needs only
            the nodes before the split.
        mask_budget: maximum of queries times keys of a piece with several sequences.
    """
    pieces: list[Piece] = []
    is_whole = False
    for segment in _segments(layout, budget):
        # a subtree joins the last piece only as a whole, or the piece would stay for its rest
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
    """Consecutive nodes that only one sequence adds to a tree: all of these nodes, or a part."""

    start: int
    stop: int
    past: list[int]
    is_small: bool
    """Whether the segment's subtree, from `subtree_start` to before `subtree_stop`, has at most
    `budget` nodes."""
    subtree_start: int
    subtree_stop: int


def _segments(layout: Layout, budget: int) -> Iterator[_Segment]:
    """Yield the nodes that each sequence adds to a tree, in order.

    They are split after each node from which a subtree of more than `budget` nodes branches off.
    """
    splits = set(_large_branchings(layout, budget))
    here = first = last = 0
    for path in layout.paths:
        if path[-1] < here:
            continue  # a prefix of the member before, without own nodes
        stop = path[-1] + 1
        bounds = [here, *sorted(node for node in splits if here < node < stop), stop]
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
    """Yield the numbers of the nodes before which `_segments` splits.

    These are the nodes that follow a node from which a subtree of more than `budget` nodes branches
    off.
    """
    here = 0
    for path in layout.paths:
        if path[-1] >= here:
            depth = layout.depths[here]
            if depth and layout.ends[here] - here > budget:
                yield path[depth - 1] + 1
            here = path[-1] + 1


def intervals(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Group ascending numbers into half-open intervals: [1, 2, 3, 7] → [(1, 4), (7, 8)]."""
    if not nodes:
        return []
    breaks = [place for place, (a, b) in enumerate(pairwise(nodes), 1) if b != a + 1]
    bounds = zip([0, *breaks], [*breaks, len(nodes)], strict=True)
    return [(nodes[first], nodes[last - 1] + 1) for first, last in bounds]


class Source(NamedTuple):
    """Where a piece finds the keys that it needs of earlier nodes."""

    piece: int
    """Index of the earlier piece: the last piece that contains nodes of the past. Its own past
    contains the other nodes."""
    intervals: list[tuple[int, int]]
    """Where the keys are: half-open intervals of the earlier piece's past followed by its nodes."""


def source(pieces: Sequence[Piece], number: int) -> Source | None:
    """Return which earlier piece has the keys that piece `number` needs, and where they are.

    A piece needs the keys of its nodes' ancestors in earlier pieces. Return None if there are none.
    """
    past = pieces[number].past
    if not past:
        return None
    owner = bisect_right([piece.start for piece in pieces], past[-1]) - 1
    start, before = pieces[owner].start, len(pieces[owner].past)
    earlier = bisect_left(past, start)
    own = [before + node - start for node in past[earlier:]]
    return Source(owner, intervals([*range(earlier), *own]))
