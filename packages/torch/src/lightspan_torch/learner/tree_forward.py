"""Trees of sequences through a model, forward and backward, each node once.

Small trees are the lanes of one padded batch. A tree larger than `trees.BLOCK` is computed in
*pieces* of at most the token budget, depth first. A piece attends to itself and to the keys and
values of its path, which earlier pieces left behind; those collect its gradient. When the last
descendant of a piece is done, the piece goes backward in its turn, with what was collected:

    ∂L/∂(hidden, K, V of the piece) = (∂ of its own tokens' loss, ∂ that the descendants left)

So no path is computed twice, however small the budget, and what exists at once is the pieces along
one path and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightspan_torch.learner import _tree_attention
from lightspan_torch.learner.prefix_tree import (
    BLOCK,
    Layout,
    Piece,
    Tree,
    cut,
    lay_out,
    plain,
    share,
    source,
)

MASK_BUDGETS: Final = {"cpu": 2**20}
"""Queries times keys of the masks of a piece, by device; elsewhere 2**24. Every query of a piece
meets the path of the deepest branch in it: small pieces waste less, and are no slower on a CPU."""


@dataclass(slots=True)
class Pass:
    """One forward pass: B lanes of L nodes.

    `entries` are places in a list of looked-at tokens that all passes share, each of which is
    predicted at the node `places` (an index into B·L). E of them in all.
    """

    ids: Tensor
    """[B, L]"""
    entries: Tensor
    """[E]"""
    places: Tensor
    """[E]"""
    positions: Tensor | None = None
    """[B, L]; None if every lane is a sequence by itself."""
    nodes: Tensor | None = None
    """[P + L] numbers of the keys' nodes, the last L of which are the queries'; None if they are
    0 … L - 1."""
    ends: Tensor | None = None
    """[B, P + L] the first node after each key's subtree; None if nothing branches: every query
    sees all keys up to its own."""
    source: int = -1
    """The pass among whose keys the P keys are that come first; -1 for none."""
    intervals: list[tuple[int, int]] = field(default_factory=list)
    """The keys of `source` that are meant, as half-open intervals."""
    last_use: int = -1
    """The last pass that has this one as its source."""
    block: int = BLOCK
    """Queries under one mask."""


Looked = Sequence[Sequence[int]]
"""For each sequence, the places of the tokens that are looked at; 0 is never among them."""


def plan(
    sequences: Sequence[list[int]],
    looked: Looked,
    trees: Sequence[Tree],
    budget: int,
    device: torch.device,
    block: int = BLOCK,
) -> list[Pass]:
    """The passes of all trees.

    `entries` number the looked-at tokens sequence after sequence.

    Args:
        looked: see `Looked`.
        budget: nodes of a pass, padding included; a longer sequence is a pass by itself.
        block: see `trees.BLOCK`.
    """
    offsets = [0]
    for places in looked:
        offsets.append(offsets[-1] + len(places))
    maker = _Planner(sequences, looked, offsets, budget, device, block)
    lanes = [tree for tree in trees if tree.is_chain or tree.size <= block]
    long = [tree for tree in trees if not (tree.is_chain or tree.size <= block)]
    passes = [maker.lanes(batch) for batch in _batches(lanes, sequences, budget)]
    for tree in long:
        passes += maker.pieces(tree, first=len(passes))
    return passes


def _batches(
    trees: Sequence[Tree], sequences: Sequence[list[int]], budget: int
) -> Iterator[list[Tree]]:
    """The trees in batches, by size, cut where trees × largest would exceed the budget. Chains
    stand apart: they need no mask."""
    order = sorted(
        trees, key=lambda tree: (not tree.is_chain, tree.size, sequences[tree.members[0]])
    )
    batch: list[Tree] = []
    for tree in order:
        full = (len(batch) + 1) * tree.size > budget
        if batch and (full or tree.is_chain != batch[-1].is_chain):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the passes of trees; see `plan` for its fields."""

    sequences: Sequence[list[int]]
    looked: Looked
    offsets: Sequence[int]
    """Per sequence, the number of its first looked-at token."""
    budget: int
    device: torch.device
    block: int

    def lanes(self, trees: Sequence[Tree]) -> Pass:
        """Whole trees, padded to the largest."""
        length = max(tree.size for tree in trees)
        layouts = [lay_out(tree, self.sequences) for tree in trees]
        entries: list[int] = []
        places: list[int] = []
        for number, (tree, layout) in enumerate(zip(trees, layouts, strict=True)):
            self._collect(tree, layout, entries, places, number * length)
        made = Pass(
            ids=self._integers([_padded(layout.tokens, length) for layout in layouts]),
            entries=self._integers(entries),
            places=self._integers(places),
            block=max(length, self.block),
        )
        if not trees[0].is_chain:
            made.positions = self._integers([_padded(layout.depths, length) for layout in layouts])
            # padding sees itself, so that its softmax is finite
            alone = range(1, length + 1)
            ends = [[*layout.ends, *alone[len(layout.ends) :]] for layout in layouts]
            made.ends = self._integers(ends)
        return made

    def pieces(self, tree: Tree, first: int) -> list[Pass]:
        """A tree cut, its passes numbered from `first`."""
        layout = lay_out(tree, self.sequences)
        pieces = cut(layout, self.budget, MASK_BUDGETS.get(self.device.type, 2**24))
        entries: list[int] = []
        places: list[int] = []
        self._collect(tree, layout, entries, places, 0)
        all_entries, all_places = self._integers(entries), self._integers(places)
        starts = self._integers([piece.start for piece in pieces])
        owners = torch.bucketize(all_places, starts, right=True) - 1
        made = []
        for number, piece in enumerate(pieces):
            own = owners == number
            made.append(self._piece(layout, piece, all_entries[own], all_places[own]))
            past = source(pieces, number)
            if past is not None:
                made[-1].source, made[-1].intervals = first + past.piece, past.intervals
                made[past.piece].last_use = first + number
        return made

    def _piece(self, layout: Layout, piece: Piece, entries: Tensor, places: Tensor) -> Pass:
        span = slice(piece.start, piece.stop)
        depths = layout.depths[span]
        made = Pass(
            ids=self._integers([layout.tokens[span]]),
            entries=entries,
            places=places - piece.start,
            positions=self._integers([depths]),
            block=self.block,
        )
        if depths != list(range(len(piece.past), len(piece.past) + len(depths))):
            nodes = [*piece.past, *range(piece.start, piece.stop)]
            made.nodes = self._integers(nodes)
            made.ends = self._integers([[layout.ends[node] for node in nodes]])
        return made

    def _collect(
        self, tree: Tree, layout: Layout, entries: list[int], places: list[int], base: int
    ) -> None:
        """Add the looked-at tokens of a tree, and the nodes that predict them."""
        for index, path in zip(tree.members, layout.paths, strict=True):
            looked, offset = self.looked[index], self.offsets[index]
            entries += range(offset, offset + len(looked))
            places += [base + path[place - 1] for place in looked]

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]


# --- computing --------------------------------------------------------------------------------


class _Running:
    """A pass being computed: what its attention needs, and what it keeps for later passes."""

    def __init__(self, made: Pass, source: _Running | None, keep: bool) -> None:
        self._made = made
        self._source = source
        self._keep = keep
        self._masks: list[tuple[int, int, Tensor]] = []
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer → keys and values [1, key heads, P + L, size], in the graph of this pass."""
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        """The same without a graph: what later passes attend to, and leave their gradient at."""
        self.predicting: list[tuple[Tensor, Tensor]] = []
        """See `Head`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """[B, L, heads, size]; see `_attention`."""
        if self._source is not None:
            past_keys, past_values = self._source.leaves[layer]
            key = _after(past_keys, self._made.intervals, key)
            value = _after(past_values, self._made.intervals, value)
        if self._keep:
            self.kept[layer] = key, value
            self.leaves[layer] = _leaf(key), _leaf(value)
        length = query.shape[2]
        past = key.shape[2] - length
        if self._made.ends is None and past <= length:
            # made-up queries for the past, whose results nobody looks at, cost less than masks
            whole = pad(query, (0, 0, past, 0)) if past else query
            attended = _tree_attention.attend(whole, key, value, None, scaling)
            return attended[:, :, past:].transpose(1, 2)
        if not self._masks:
            self._masks = list(_masks(self._made, key.shape[2], query.dtype))
        parts = [
            _tree_attention.attend(
                query[:, :, first:last],
                key[:, :, : mask.shape[-1]],
                value[:, :, : mask.shape[-1]],
                mask,
                scaling,
            ).transpose(1, 2)
            for first, last, mask in self._masks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def backward(self) -> None:
        """Add this pass's gradient to the parameters, and to the leaves of its source."""
        tensors = [states for states, _ in self.predicting]
        gradients = [gradient for _, gradient in self.predicting]
        for layer, pair in self.kept.items():
            for tensor, leaf in zip(pair, self.leaves[layer], strict=True):
                if leaf.grad is not None:
                    tensors.append(tensor)
                    gradients.append(leaf.grad)
        if tensors:
            torch.autograd.backward(tensors, gradients)


def _after(past: Tensor, intervals: Sequence[tuple[int, int]], own: Tensor) -> Tensor:
    """[1, key heads, P + L, size]"""
    return torch.cat([*(past[:, :, first:last] for first, last in intervals), own], dim=2)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _masks(made: Pass, keys: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(first query, last query, [B, 1, queries, keys] mask) of each block of queries; keys after
    the last query are left out."""
    length = made.ids.shape[1]
    past = keys - length
    if made.ends is None:
        causal = _tree_attention.causal(min(made.block, length), keys, dtype, made.ids.device)
    for first in range(0, length, made.block):
        last = min(length, first + made.block)
        if made.ends is None:
            yield first, last, causal[None, None, first - last :, -(past + last) :]
        else:
            visible = _visible(made, first, last, past)
            yield first, last, _tree_attention.additive(visible[:, None], dtype)


def _visible(made: Pass, first: int, last: int, past: int) -> Tensor:
    """[B, last - first, past + last]"""
    assert made.ends is not None
    seen = slice(0, past + last)
    if made.nodes is None:
        nodes = torch.arange(made.ids.shape[1], device=made.ids.device)
    else:
        nodes = made.nodes
    queries = nodes[past + first : past + last, None]
    return (nodes[seen] <= queries) & (queries < made.ends[:, None, seen])


Head = Callable[[Tensor, Pass], list[tuple[Tensor, Tensor]]]
"""([B·L, hidden] of a pass, the pass) → what was taken of it, in its graph, with the gradient."""


def sweep(passes: Sequence[Pass], decode: Callable[..., Tensor], head: Head) -> None:
    """All passes forward and, where there are gradients, backward.

    Args:
        decode: (ids, positions, tree) → [B, L, hidden].
        head: sees what came out of each pass.
    """
    running: dict[int, _Running] = {}
    opened: list[int] = []
    for number, made in enumerate(passes):
        keep = made.last_use > number
        current = _Running(made, running.get(made.source), keep)
        simple = made.ends is None and made.source < 0 and not keep
        hidden = decode(made.ids, made.positions, None if simple else current)
        current.predicting = head(hidden.flatten(0, 1), made)
        del hidden  # as `current` below: the name would keep the graph alive after its backward
        running[number] = current
        opened.append(number)
        del current
        # the last one first: it leaves gradient at those before it
        while opened and passes[opened[-1]].last_use <= number:
            running.pop(opened.pop()).backward()


def decoder(model: Any, *, in_trees: bool) -> Callable[..., Tensor]:
    """`decode` of `sweep`: last hidden states of a transformers model.

    Args:
        in_trees: the model's attention may be replaced (`tree_refusal`).
    """
    inner = model.get_decoder()
    if in_trees:
        _tree_attention.install(model)

    def decode(ids: Tensor, positions: Tensor | None, tree: object) -> Tensor:
        options = {"position_ids": positions, "tree": tree}
        extra = {name: value for name, value in options.items() if value is not None}
        hidden: Tensor = inner(input_ids=ids, use_cache=False, **extra).last_hidden_state
        return hidden

    return decode


def pair_cost(model: Any) -> float:
    """What attending from one token to another costs, where a token through all layers costs 1."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    return float(2 * width * config.num_hidden_layers / weights)


@torch.no_grad()
def tree_refusal(model: Any) -> str:
    """Why a model cannot compute trees; empty if it can.

    It is tried out, because a configuration does not say what a model's code does with positions
    and masks: a wrong tree would train on wrong log-probabilities without any error.
    """
    reason = _tree_attention.refusal(model)
    if reason:
        return reason
    before = model.config._attn_implementation
    sequences = [[1, 2, 3, 4, 1], [1, 2, 3, 2], [1, 3, 1, 2]]
    try:
        expected = _last_states(model, sequences, in_trees=False)
        for block in (2, BLOCK):
            states = _last_states(model, sequences, in_trees=True, block=block)
            if not torch.dist(states, expected) <= 0.05 * expected.norm():
                reason = "its hidden states in a tree differ from those of a sequence"
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"a tree raised {type(error).__name__}: {error}"
    if reason:
        model.set_attn_implementation(before)
    return reason


def _last_states(
    model: Any, sequences: Sequence[list[int]], *, in_trees: bool, block: int = BLOCK
) -> Tensor:
    """[sequences, hidden] at the last but one token of each."""
    looked = [[len(ids) - 1] for ids in sequences]
    trees = share(sequences, pair_cost=0.0) if in_trees else plain(sequences)
    states = [torch.empty(0)] * len(sequences)

    def head(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        for entry, place in zip(made.entries.tolist(), made.places.tolist(), strict=True):
            states[entry] = hidden[place].float()
        return []

    passes = plan(sequences, looked, trees, 1, model.device, block)
    sweep(passes, decoder(model, in_trees=in_trees), head)
    return torch.stack(states)
