"""Forward and backward passes over prefix trees, in which each node is computed once.

Small trees are computed together, as the rows of one padded batch. A tree larger than
`prefix_tree.BLOCK` is computed in *pieces* of at most the token budget, depth first. A piece
attends to itself and to the keys and values (K, V) of its ancestors, which earlier pieces have
stored. The gradient of these keys and values is accumulated in the earlier pieces. The backward
pass of a piece runs when its last descendant is done, and uses the accumulated gradient:

    ∂L/∂(hidden, K, V of the piece) = (∂ of its own tokens' loss, ∂ accumulated from descendants)

So no node is computed twice, however small the budget. Only the pieces along one path, and one
more, are in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from lightspan_torch.engine.positions import takes_cache_position
from lightspan_torch.engine.tokenizer import context_length
from lightspan_torch.engine.weights import set_text_attention, text_attention
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
from lightspan_torch.vision.features import attends_both_ways, embedded

MASK_BUDGETS: Final = {"cpu": 2**20}
"""Device type → maximum of queries times keys in the masks of a piece; 2**24 for other devices.
Every query of a piece is computed with the keys of its deepest branch. So small pieces waste less,
and are no slower on a CPU."""


@dataclass(slots=True)
class Pass:
    """One forward pass over B rows of L nodes, with E selected tokens.

    Its queries attend to the keys of its own nodes and to P earlier keys. The pass with the number
    `source` has stored the earlier keys.
    """

    ids: Tensor
    """[B, L] token ids."""
    entries: Tensor
    """[E] indices of the selected tokens, which are numbered across all passes."""
    places: Tensor
    """[E] index, from 0 to B·L - 1, of the node that predicts each selected token."""
    positions: Tensor | None = None
    """[B, L] positions of the tokens, or [3, B, L] if they have three dimensions; None for 0 … L -
    1, if every row is one sequence."""
    nodes: Tensor | None = None
    """[P + L] node numbers of the keys; the last L are also those of the queries. None for 0 … L -
    1."""
    ends: Tensor | None = None
    """[B, P + L] the first node after each key's subtree; None if nothing branches, so that every
    query attends to all keys up to its own."""
    source: int = -1
    """Number of the pass that stored the first P keys; -1 if P is 0."""
    intervals: list[tuple[int, int]] = field(default_factory=list)
    """Half-open intervals that the first P keys have among the keys of the pass `source`."""
    last_use: int = -1
    """Number of the last pass whose `source` is this pass; -1 if there is none."""
    block: int = BLOCK
    """Maximum number of queries under one mask."""


Selected = Sequence[Sequence[int]]
"""For each sequence, the positions of its selected tokens; position 0 is never selected."""

Positions = Sequence[NDArray[np.int64]]
"""For each sequence, [3, length] positions of its tokens. They are a function of the tokens up to
each."""


def plan(
    sequences: Sequence[list[int]],
    selected: Selected,
    trees: Sequence[Tree],
    budget: int,
    device: torch.device,
    block: int = BLOCK,
    *,
    padded: int | None = None,
    positions: Positions | None = None,
) -> list[Pass]:
    """Return the passes that compute all trees.

    Args:
        sequences: the token sequences.
        selected: for each sequence, the positions of its selected tokens. In `Pass.entries`, these
            tokens are numbered across all sequences.
        trees: the trees of the sequences.
        budget: maximum number of nodes in a pass, including padding. A longer sequence is a pass of
            its own.
        device: device of the passes' tensors.
        block: see `prefix_tree.BLOCK`.
        padded: see `_batches`.
        positions: for each sequence, the positions of its tokens, [3, length]; None if they are
            their indices.
    """
    offsets = list(accumulate(map(len, selected), initial=0))
    planner = _Planner(sequences, selected, offsets, budget, device, block, positions)
    small = [tree for tree in trees if tree.is_chain or tree.size <= block]
    large = [tree for tree in trees if not (tree.is_chain or tree.size <= block)]
    passes = [planner.whole(batch) for batch in _batches(small, sequences, budget, padded)]
    for tree in large:
        passes += planner.pieces(tree, first=len(passes))
    return passes


def _batches(
    trees: Sequence[Tree], sequences: Sequence[list[int]], budget: int, padded: int | None
) -> Iterator[list[Tree]]:
    """Yield batches of trees of similar size, with at most `budget` nodes including padding.

    Trees without branches are not mixed with others, because they need no mask. A tree larger than
    `budget` is a batch of its own. A tree of more than `padded` nodes (None: no limit) is
    batched only with equally large ones: smaller ones must not be padded to its size.
    """
    order = sorted(
        trees, key=lambda tree: (not tree.is_chain, tree.size, sequences[tree.members[0]])
    )
    batch: list[Tree] = []
    for tree in order:
        is_full = (len(batch) + 1) * tree.size > budget
        if batch and padded is not None and tree.size > max(padded, batch[-1].size):
            is_full = True
        if batch and (is_full or tree.is_chain != batch[-1].is_chain):
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Planner:
    """Makes the passes for `plan`; the fields are the arguments of `plan`."""

    sequences: Sequence[list[int]]
    selected: Selected
    offsets: Sequence[int]
    """For each sequence, the index of its first selected token."""
    budget: int
    device: torch.device
    block: int
    positions: Positions | None

    def whole(self, trees: Sequence[Tree]) -> Pass:
        """Return one pass over whole trees, each padded to the size of the largest."""
        length = max(tree.size for tree in trees)
        layouts = [lay_out(tree, self.sequences) for tree in trees]
        entries: list[int] = []
        places: list[int] = []
        for number, (tree, layout) in enumerate(zip(trees, layouts, strict=True)):
            self._collect(tree, layout, entries, places, number * length)
        current_pass = Pass(
            ids=self._integers([_padded(layout.tokens, length) for layout in layouts]),
            entries=self._integers(entries),
            places=self._integers(places),
            block=max(length, self.block),
        )
        if self.positions is not None or not trees[0].is_chain:
            rows = [
                np.pad(each, ((0, 0), (0, length - each.shape[1])))
                for each in map(self._node_positions, trees, layouts)
            ]
            current_pass.positions = self._positions(np.stack(rows, axis=1))
        if not trees[0].is_chain:
            # padding attends to itself, so that its softmax is finite
            ends = [[*layout.ends, *range(len(layout.ends) + 1, length + 1)] for layout in layouts]
            current_pass.ends = self._integers(ends)
        return current_pass

    def pieces(self, tree: Tree, first: int) -> list[Pass]:
        """Return a pass for each piece of a tree.

        Args:
            tree: the tree.
            first: number that the first of these passes gets.
        """
        layout = lay_out(tree, self.sequences)
        positions = self._node_positions(tree, layout)
        pieces = cut(layout, self.budget, MASK_BUDGETS.get(self.device.type, 2**24))
        entries: list[int] = []
        places: list[int] = []
        self._collect(tree, layout, entries, places, 0)
        all_entries, all_places = self._integers(entries), self._integers(places)
        starts = self._integers([piece.start for piece in pieces])
        owners = torch.bucketize(all_places, starts, right=True) - 1
        passes = []
        for number, piece in enumerate(pieces):
            own = owners == number
            passes.append(self._piece(layout, piece, all_entries[own], all_places[own], positions))
            past = source(pieces, number)
            if past is not None:
                passes[-1].source, passes[-1].intervals = first + past.piece, past.intervals
                passes[past.piece].last_use = first + number
        return passes

    def _node_positions(self, tree: Tree, layout: Layout) -> NDArray[np.int64]:
        """Return the positions of a tree's nodes, [1, nodes], or [3, nodes] with three dimensions.

        A node's position is equal in all sequences through it.
        """
        if self.positions is None:
            return np.array([layout.depths])
        result = np.empty((3, tree.size), np.int64)
        for index, path in zip(tree.members, layout.paths, strict=True):
            result[:, path] = self.positions[index][:, : len(path)]
        return result

    def _positions(self, array: NDArray[np.int64]) -> Tensor:
        """Return [1, B, L] or [3, B, L] positions as `Pass.positions`."""
        return torch.from_numpy(array[0] if len(array) == 1 else array).to(self.device)

    def _piece(
        self,
        layout: Layout,
        piece: Piece,
        entries: Tensor,
        places: Tensor,
        positions: NDArray[np.int64],
    ) -> Pass:
        span = slice(piece.start, piece.stop)
        depths = layout.depths[span]
        current_pass = Pass(
            ids=self._integers([layout.tokens[span]]),
            entries=entries,
            places=places - piece.start,
            positions=self._positions(positions[:, None, span]),
            block=self.block,
        )
        if depths != list(range(len(piece.past), len(piece.past) + len(depths))):
            nodes = [*piece.past, *range(piece.start, piece.stop)]
            current_pass.nodes = self._integers(nodes)
            current_pass.ends = self._integers([[layout.ends[node] for node in nodes]])
        return current_pass

    def _collect(
        self, tree: Tree, layout: Layout, entries: list[int], places: list[int], base: int
    ) -> None:
        """Append a tree's selected tokens to `entries`, and the nodes predicting them to `places`.

        Args:
            tree: the tree.
            layout: the nodes of the tree.
            entries: indices of selected tokens, to which this method appends.
            places: nodes, to which this method appends.
            base: number of the tree's first node in the pass.
        """
        for index, path in zip(tree.members, layout.paths, strict=True):
            selected, offset = self.selected[index], self.offsets[index]
            entries += range(offset, offset + len(selected))
            places += [base + path[place - 1] for place in selected]

    def _integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]


# --- computing --------------------------------------------------------------------------------


class _Running:
    """A pass that is being computed, and the keys and values that later passes need of it."""

    def __init__(self, current_pass: Pass, source: _Running | None, is_source: bool) -> None:
        self._pass = current_pass
        self._source = source
        self._is_source = is_source
        self._masks: list[tuple[int, int, Tensor]] = []
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer → keys and values [1, key heads, P + L, size], attached to the autograd graph of
        this pass."""
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        """`_cache` detached from the graph: later passes attend to these tensors, which get their
        gradient."""
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """What `Head` returned for this pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Return the attention output, [B, L, heads, size], for one layer of the model.

        See `TreeContext.attend`.
        """
        if self._source is not None:
            past_keys, past_values = self._source.leaves[layer]
            key = _after(past_keys, self._pass.intervals, key)
            value = _after(past_values, self._pass.intervals, value)
        if self._is_source:
            self._cache[layer] = key, value
            self.leaves[layer] = _leaf(key), _leaf(value)
        length = query.shape[2]
        past = key.shape[2] - length
        if self._pass.ends is None and past <= length:
            # zero queries for the past, whose results are dropped, cost less than masks
            whole = pad(query, (0, 0, past, 0)) if past else query
            attended = _tree_attention.attend(whole, key, value, None, scaling)
            return attended[:, :, past:].transpose(1, 2)
        if not self._masks:
            self._masks = list(_masks(self._pass, key.shape[2], query.dtype))
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
        """Run the backward pass.

        It adds the gradient to the parameters, and to the keys and values that this pass got from
        an earlier pass.
        """
        tensors = [states for states, _ in self.gradients]
        gradients = [gradient for _, gradient in self.gradients]
        for layer, pair in self._cache.items():
            for tensor, leaf in zip(pair, self.leaves[layer], strict=True):
                if leaf.grad is not None:
                    tensors.append(tensor)
                    gradients.append(leaf.grad)
        if tensors:
            torch.autograd.backward(tensors, gradients)


def _after(past: Tensor, intervals: Sequence[tuple[int, int]], own: Tensor) -> Tensor:
    """Return all keys (or all values) that a pass attends to: earlier keys, then its own.

    Args:
        past: keys that an earlier pass has stored.
        intervals: half-open intervals of `past` that are used.
        own: the pass's own keys.

    Returns:
        [1, key heads, P + L, size]
    """
    return torch.cat([*(past[:, :, first:last] for first, last in intervals), own], dim=2)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _masks(current_pass: Pass, keys: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the masks of a pass, one for each block of queries.

    Each item is (first query of the block, query after its last, [B, 1, queries, keys] mask). Keys
    after the last query are left out of the mask.

    Args:
        current_pass: the pass.
        keys: number of keys of the pass.
        dtype: data type of the masks.
    """
    length = current_pass.ids.shape[1]
    past = keys - length
    if current_pass.ends is None:
        causal = _tree_attention.causal(
            min(current_pass.block, length), keys, dtype, current_pass.ids.device
        )
    for first in range(0, length, current_pass.block):
        last = min(length, first + current_pass.block)
        if current_pass.ends is None:
            yield first, last, causal[None, None, first - last :, -(past + last) :]
        else:
            visible = _visible(current_pass, first, last, past)
            yield first, last, _tree_attention.additive(visible[:, None], dtype)


def _visible(current_pass: Pass, first: int, last: int, past: int) -> Tensor:
    """Return which keys some of a pass's queries attend to.

    Args:
        current_pass: the pass.
        first: the first of these queries.
        last: the query after the last of them.
        past: number of keys that an earlier pass has stored.

    Returns:
        [B, last - first, past + last], True where a query attends to a key.
    """
    assert current_pass.ends is not None
    keys = slice(0, past + last)
    if current_pass.nodes is None:
        nodes = torch.arange(current_pass.ids.shape[1], device=current_pass.ids.device)
    else:
        nodes = current_pass.nodes
    queries = nodes[past + first : past + last, None]
    return (nodes[keys] <= queries) & (queries < current_pass.ends[:, None, keys])


Head = Callable[[Tensor, Pass], list[tuple[Tensor, Tensor]]]
"""Takes the [B·L, hidden] states of a pass, and the pass. Returns pairs of a tensor in the pass's
autograd graph and the gradient of that tensor, from which the backward pass starts."""


def sweep(passes: Sequence[Pass], decode: Callable[..., Tensor], head: Head) -> None:
    """Run the forward pass of each pass and, if `head` returns gradients, its backward pass.

    Args:
        passes: the passes returned by `plan`.
        decode: function of (ids, positions, tree) that returns hidden states, [B, L, hidden].
        head: called with the hidden states of each pass; returns their gradients.
    """
    running: dict[int, _Running] = {}
    for number, current_pass in enumerate(passes):
        is_source = current_pass.last_use > number
        current = _Running(current_pass, running.get(current_pass.source), is_source)
        is_plain = current_pass.ends is None and current_pass.source < 0 and not is_source
        hidden = decode(current_pass.ids, current_pass.positions, None if is_plain else current)
        current.gradients = head(hidden.flatten(0, 1), current_pass)
        running[number] = current
        del hidden, current  # a reference would keep the graph alive after its backward pass
        # the last pass first, because it adds gradient to those before it
        while running and passes[next(reversed(running))].last_use <= number:
            running.popitem()[1].backward()


def decoder(
    model: Any, *, in_trees: bool, logits: bool = False, features: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return a function from token ids to a model's last hidden states, the `decode` of `sweep`.

    Args:
        model: the transformers model.
        in_trees: whether to replace the model's attention. Use it only if `tree_refusal` returns
            "".
        logits: whether the function returns logits instead. This is for models whose logits are not
            the output of the last layer alone.
        features: [1 + D, N, hidden] features of images; the id -1 - n stands for the nth of them.
            None if no id is negative.
    """
    inner = model if logits else model.get_decoder()
    # image tokens that attend in both directions: the mask is made above the decoder
    both_ways = features is not None and attends_both_ways(model)
    if both_ways and not logits:
        inner = model.base_model
    if in_trees:
        _tree_attention.install(model)

    def decode(ids: Tensor, positions: Tensor | None, tree: object) -> Tensor:
        options = {"position_ids": positions, "tree": tree}
        extra = {name: value for name, value in options.items() if value is not None}
        if features is None:
            extra["input_ids"] = ids
        else:
            rows = (ids.flatten() < 0).nonzero()[:, 0]
            own = features[:, -1 - ids.flatten()[rows]]
            extra |= embedded(model, ids, rows, own)
            if both_ways:
                extra["token_type_ids"] = (ids < 0).long()
        output = inner(use_cache=False, **extra)
        hidden: Tensor = output.logits if logits else output.last_hidden_state
        return hidden

    return decode


def pair_cost(model: Any) -> float:
    """Return the cost of attention between one query and one key, over all layers.

    The unit is the cost of multiplying one token by the weights of all layers.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # models name their list of layers differently
    weights = sum(parameter.numel() for parameter in model.get_decoder().parameters())
    weights -= model.get_input_embeddings().weight.numel()
    return float(2 * width * config.num_hidden_layers / weights)


@torch.no_grad()
def tree_refusal(model: Any) -> str:
    """Return why a model cannot compute trees; "" if it can.

    Small trees are computed and compared with separate sequences. This test is necessary: a model's
    configuration does not show how its code uses positions and masks, and an update would train on
    wrong log-probabilities without any error.
    """
    reason = _tree_attention.refusal(model)
    if reason:
        return reason
    before = text_attention(model)
    sequences = [[1, 2, 3, 4, 1], [1, 2, 3, 2], [1, 3, 1, 2]]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    try:
        expected = _last_states(model, sequences, in_trees=False)
        for block in (2, BLOCK):
            states = _last_states(model, sequences, in_trees=True, block=block)
            if not torch.dist(states, expected) <= tolerance * expected.norm():
                reason = "its hidden states in a tree differ from those of a sequence"
        if not reason and takes_cache_position(model.get_decoder()) and _counts_itself(model):
            reason = "it counts positions itself"
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"a tree raised {type(error).__name__}: {error}"
    if reason:
        set_text_attention(model, before)
    return reason


def _counts_itself(model: Any) -> bool:
    """Return whether the hidden states depend on `cache_position`, which is equal for all rows."""
    decoder = model.get_decoder()
    ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
    places = torch.arange(4, device=model.device)
    near, far = (
        decoder(input_ids=ids, position_ids=places[None], cache_position=at, use_cache=False)[0]
        for at in (places, places + context_length(model.config) - 4)
    )
    return not torch.equal(near, far)


def _last_states(
    model: Any, sequences: Sequence[list[int]], *, in_trees: bool, block: int = BLOCK
) -> Tensor:
    """Return the hidden state of each sequence's second-to-last token, [sequences, hidden]."""
    selected = [[len(ids) - 1] for ids in sequences]
    trees = share(sequences, pair_cost=0.0) if in_trees else plain(sequences)
    states = [torch.empty(0)] * len(sequences)

    def head(hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
        for entry, place in zip(
            current_pass.entries.tolist(), current_pass.places.tolist(), strict=True
        ):
            states[entry] = hidden[place].float()
        return []

    passes = plan(sequences, selected, trees, 1, model.device, block)
    sweep(passes, decoder(model, in_trees=in_trees), head)
    return torch.stack(states)
