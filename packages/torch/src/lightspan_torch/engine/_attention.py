"""Attention over the pages of a key-value cache, through transformers' public interface.

A step is one forward pass. The new tokens of all its requests are concatenated in one row, [1, T].
The keyword argument `lightspan_plan` of the model states which keys each token attends to. The
model passes it on to `attention`, which stores the new keys and values, and computes each request's
attention to its own keys. The model gets no cache object, because the name of that argument depends
on the version of transformers. The model makes no mask, because none is registered for `NAME`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from lightspan.errors import ModelError
from lightspan_torch.engine._pages import Pages, PageTable, to_device
from lightspan_torch.engine.oom import is_out_of_memory
from lightspan_torch.engine.positions import exact_length, takes_cache_position
from lightspan_torch.engine.weights import set_text_attention
from lightspan_torch.vision.features import CachedImage, Vision, VisionPrompt, embedded

NAME: Final = "lightspan_pages"


class Chunk(NamedTuple):
    """The tokens of one request that the next step computes.

    Fields: all token ids of the request, its pages in the cache, the number of tokens to compute,
    and the images of the prompt.
    """

    ids: Sequence[int]
    table: PageTable
    size: int
    seen: VisionPrompt | None = None


@dataclass(slots=True)
class _Group:
    """G sequences that are computed in one attention call.

    Each has R queries (new tokens) and K keys (cached tokens to which the queries attend).
    """

    rows: Tensor
    """[G * R] rows of the queries among the new tokens."""
    slots: Tensor
    """[G * K] cache slots of the keys."""
    mask: Tensor
    """[G, R, K], True where a query attends to a key."""
    query_positions: Tensor
    """[G, R]"""
    key_positions: Tensor
    """[G, K], or [1, K] if equal for all"""
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def mask_within(self, window: int | None) -> Tensor:
        """Return the mask for a layer with a sliding window.

        Args:
            window: number of tokens that a query attends to; None for all.
        """
        if not window:
            return self.mask
        if window not in self._windows:
            distance = self.query_positions[:, :, None] - self.key_positions[:, None]
            self._windows[window] = self.mask & (distance < window)
        return self._windows[window]


@dataclass(slots=True)
class Plan:
    """Which keys each new token of one step attends to.

    All layers of the model use the same plan. A layer with a sliding window uses fewer of the keys.
    """

    pages: Pages
    slots: Tensor
    """[T] cache slots of the new tokens."""
    prompts: list[slice]
    """Rows of requests that begin with this step."""
    groups: list[_Group]
    windows: dict[int, int | None] = field(default_factory=dict)
    """Layer that was computed → its sliding window."""


class Step(NamedTuple):
    """The model's inputs for one step."""

    plan: Plan
    ids: Tensor
    """[T]"""
    positions: Tensor
    """[T], or [3, T] if a request has three-dimensional ones."""
    ends: Tensor
    """[chunks] row of each chunk's last token."""
    places: Tensor
    """[T] index of each token in its request."""
    images: Sequence[_Part] = ()
    """The placeholders among the tokens."""


class _Part(NamedTuple):
    """Consecutive placeholders of an image in a step."""

    row: int
    """Row of the first one."""
    image: CachedImage
    features: slice
    """Which features of the image they have."""


def install(model: Any) -> None:
    """Replace the attention of the model's text part by `attention`."""
    AttentionInterface.register(NAME, attention)
    set_text_attention(model, NAME)


def forward(model: Any, step: Step, rows: Tensor, vision: Vision | None = None) -> Tensor:
    """Run the model on a step, and return the logits of some rows, [rows, vocabulary], in float32.

    Args:
        model: the model.
        step: the inputs of the step.
        rows: indices of the tokens whose logits are computed.
        vision: the vision part of the model, if the step has images.

    Raises:
        ModelError: the model did not call `attention`, so the logits are wrong.
    """
    options: dict[str, Any] = {"use_cache": False, "lightspan_plan": step.plan}
    if takes_cache_position(model):
        options["cache_position"] = step.places
    options["position_ids"] = step.positions[..., None, :]
    options |= _inputs(model, step, vision)
    logits: Tensor
    if "visual_pos_masks" in options:  # the whole model does not hand it on
        hidden = model.get_decoder()(**options).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden[rows])
    else:
        logits = model(**options, logits_to_keep=rows).logits[0]
    if not step.plan.windows:
        raise ModelError("the model does not call its attention through transformers' interface")
    return logits.float()


def _inputs(model: Any, step: Step, vision: Vision | None) -> dict[str, Any]:
    """Return the model's arguments for the tokens of a step: ids, or embeddings with features."""
    if not step.images:
        return {"input_ids": step.ids[None]}
    assert vision is not None
    counts = [part.features.stop - part.features.start for part in step.images]
    rows = [
        part.row + place
        for part, count in zip(step.images, counts, strict=True)
        for place in range(count)
    ]
    features = [vision.features(part.image)[:, part.features] for part in step.images]
    device = step.ids.device
    return embedded(
        model, step.ids[None], torch.tensor(rows, device=device), torch.cat(features, dim=1)
    )


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    lightspan_plan: Plan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of each request's new tokens to the tokens of the same request.

    Args:
        module: the attention layer, with its index.
        query: [1, heads, T, size], where T counts the new tokens of all requests.
        key: [1, key heads, T, size].
        value: [1, key heads, T, value size].
        attention_mask: None, because transformers makes none; a mask is the model's own.
        scaling: factor of the scores; None for 1/√size.
        lightspan_plan: which keys are attended to.
        sliding_window: number of tokens that a query attends to; None for all.
        softcap: bound that tanh applies to the scores; None for no bound.
        s_aux: [heads] attention sinks: further scores in the softmax, without a value; None for
            none.
        position_bias: None; not computed here.

    Returns:
        The output, [1, T, heads, value size], and None in place of the attention weights.

    Raises:
        ModelError: the model does not pass its keyword arguments on, or changes its scores by a
            mask or bias of its own.
    """
    plan = lightspan_plan
    if plan is None:
        raise ModelError("the model does not hand keyword arguments on to its attention")
    if attention_mask is not None or position_bias is not None:
        raise ModelError("the model changes its attention by a mask or bias of its own")
    plan.windows[module.layer_idx] = sliding_window
    keys, values = plan.pages.store(module.layer_idx, plan.slots, key, value)
    queries = query[0].transpose(0, 1)
    output = query.new_empty(*queries.shape[:2], value.shape[-1])
    attend = partial(_attend, scaling=scaling, softcap=softcap, sinks=s_aux)
    for span in plan.prompts:
        length = span.stop - span.start
        q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
        if softcap is None and s_aux is None and not (sliding_window and length > sliding_window):
            repeat = q.shape[1] // k.shape[1]
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            output[span] = attended[0].transpose(0, 1)
        else:
            places = torch.arange(length, device=q.device)
            distance = places[:, None] - places
            mask = ((distance >= 0) & (distance < (sliding_window or length)))[None]
            own = (k[0].transpose(0, 1), v[0].transpose(0, 1))
            output[span] = attend(queries[span], *own, mask)
    for group in plan.groups:
        mask = group.mask_within(sliding_window)
        read = (keys.index_select(0, group.slots), values.index_select(0, group.slots))
        output.index_copy_(0, group.rows, attend(queries.index_select(0, group.rows), *read, mask))
    return output[None], None


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of G sequences, each with R queries and K keys.

    Args:
        queries: [G * R, heads, size].
        keys: [G * K, key heads, size].
        values: [G * K, key heads, value size].
        mask: [G, R, K], True where a query attends to a key.
        scaling: factor of the scores; None for 1/√size.
        softcap: bound of the scores; None for no bound.
        sinks: [heads] further scores in the softmax, without a value; None for none.

    Returns:
        [G * R, heads, value size]
    """
    count, rows, places = mask.shape
    heads, size = queries.shape[1:]
    groups = keys.shape[1]
    repeat = heads // groups
    keys, values = (x.view(count, places, groups, -1).transpose(1, 2) for x in (keys, values))
    # heads that share keys become further queries
    queries = queries.view(count, rows, groups, repeat, size).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(count, groups, repeat * rows, size)
    mask = (mask.repeat(1, repeat, 1) if repeat > 1 else mask)[:, None]
    if softcap is None and sinks is None:
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = (queries @ keys.transpose(-1, -2)).float()
        scores = scores * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, groups, repeat, 1, 1).expand(count, -1, -1, rows, 1)
            scores = torch.cat([scores, sink.reshape(count, groups, repeat * rows, 1)], dim=-1)
        output = scores.softmax(-1)[..., :places].to(values.dtype) @ values
    output = output.view(count, groups, repeat, rows, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(count * rows, heads, -1)


# --- the plan of a step ---------------------------------------------------------------------
def make_step(pages: Pages, chunks: Sequence[Chunk], device: torch.device) -> Step:
    """Make the model's inputs for the chunks of one step.

    The caller must have reserved the pages of each chunk in the cache.
    """
    ids: list[int] = []
    places: list[int] = []
    ends: list[int] = []
    images: list[_Part] = []
    prompts: list[slice] = []
    by_prefix: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
    by_size: dict[tuple[int, int], list[tuple[int, Chunk]]] = defaultdict(list)
    for chunk in chunks:
        start, computed = len(ids), chunk.table.computed
        ids += chunk.ids[computed : computed + chunk.size]
        places += range(computed, computed + chunk.size)
        if chunk.seen is not None:
            images += (
                _Part(start + place, run.image, features)
                for place, run, features in chunk.seen.parts(computed, computed + chunk.size)
            )
        ends.append(len(ids) - 1)
        shared = _shared_pages(pages, chunk.table)
        if not computed and not _attends_both_ways(chunk):
            prompts.append(slice(start, len(ids)))
        elif shared:
            by_prefix[chunk.table.pages[shared - 1]].append((start, chunk))
        else:
            by_size[_size(chunk)].append((start, chunk))
    by_shape: dict[tuple[int, ...], list[_Shared]] = defaultdict(list)
    for members in by_prefix.values():
        common = _shared_pages(pages, members[0][1].table) * pages.page_size
        own = sum(_length(chunk) - common for _, chunk in members)
        if len(members) > 1 and own <= 2 * common:
            sequence = _Shared(members, common, sum(chunk.size for _, chunk in members))
            keys = (common + own - 1).bit_length()
            # a GPU computes similar ones together: it waits for the CPU to start each operation
            alone = len(by_shape) if device.type == "cpu" else 0
            by_shape[sequence.rows, keys, alone].append(sequence)
        else:
            for start, chunk in members:
                by_size[_size(chunk)].append((start, chunk))
    groups = [_prefix_group(each, device) for each in by_shape.values()]
    groups += [_padded_group(each, device) for each in by_size.values()]
    slots = [each.table.slots[each.table.computed : _length(each)] for each in chunks]
    plan = Plan(pages, to_device(np.concatenate(slots), device), prompts, groups)
    ids_, places_, ends_ = (torch.tensor(each, device=device) for each in (ids, places, ends))
    return Step(plan, ids_, _positions(chunks, places_), ends_, places_, images)


def _positions(chunks: Sequence[Chunk], places: Tensor) -> Tensor:
    """Return the positions of the tokens of a step; see `Step.positions`."""
    if all(chunk.seen is None or chunk.seen.positions is None for chunk in chunks):
        return places
    parts = []
    for chunk in chunks:
        start, stop = chunk.table.computed, _length(chunk)
        if chunk.seen is None:
            parts.append(np.broadcast_to(np.arange(start, stop), (3, chunk.size)))
        else:
            parts.append(chunk.seen.positions_at(start, stop))
    return to_device(np.concatenate(parts, axis=1), places.device)


def _length(chunk: Chunk) -> int:
    """Return the number of a request's tokens after this step, including those in the cache."""
    return chunk.table.computed + chunk.size


def _size(chunk: Chunk) -> tuple[int, int]:
    """Return a sort key: chunks with equal keys are padded to one length and computed together.

    Equal keys mean equally many new tokens, and lengths in the same range between powers of two. So
    padding at most doubles the work.
    """
    return chunk.size, (_length(chunk) - 1).bit_length()


def _shared_pages(pages: Pages, table: PageTable) -> int:
    """Return how many of a request's first pages other requests use too."""
    complete = table.computed // pages.page_size
    return bisect_left(table.pages, True, 0, complete, key=lambda page: not pages.is_shared(page))


class _Shared(NamedTuple):
    """Requests with a common prefix, as one sequence in which the prefix is read once.

    The sequence has the queries of all members, the keys of the prefix and the keys of each member
    after the prefix.
    """

    members: Sequence[tuple[int, Chunk]]
    """First row and chunk of each request."""
    common: int
    """Number of tokens of the prefix."""
    rows: int
    """Number of queries."""

    def queries(self) -> NDArray[np.int64]:
        """Return [4, queries]: row, position, number of the request, and `_last_keys`."""
        parts = []
        for number, (start, chunk) in enumerate(self.members):
            new = np.arange(chunk.size)
            own = (start + new, chunk.table.computed + new, np.full(chunk.size, number))
            parts.append((*own, _last_keys(chunk)))
        return np.concatenate(parts, axis=1)

    def keys(self) -> NDArray[np.int64]:
        """Return [3, keys]: cache slot, position, and number of the request; -1 of the prefix."""
        first = self.members[0][1].table.slots[: self.common]
        parts = [(first, np.arange(self.common), np.full(self.common, -1))]
        for number, (_, chunk) in enumerate(self.members):
            own = np.arange(self.common, _length(chunk))
            parts.append((chunk.table.slots[own], own, np.full(len(own), number)))
        return np.concatenate(parts, axis=1)


def _prefix_group(sequences: Sequence[_Shared], device: torch.device) -> _Group:
    """Make a group of sequences with equally many queries, padded to the most keys."""
    keys = [each.keys() for each in sequences]
    padded = np.empty((len(keys), 3, max(each.shape[1] for each in keys)), np.int64)
    for row, each in zip(padded, keys, strict=True):
        row[:, : each.shape[1]] = each
        row[:, each.shape[1] :] = ((each[0, 0],), (0,), (-2,))
    slots, key_positions, key_owners = to_device(padded, device).unbind(1)
    queries = to_device(np.stack([each.queries() for each in sequences]), device)
    rows, positions, owners, last = queries.unbind(1)
    is_seen = key_positions[:, None] <= last[:, :, None]
    mask = (key_owners[:, None] == owners[:, :, None]) & is_seen
    mask |= key_owners[:, None] == -1
    return _Group(rows.flatten(), slots.flatten(), mask, positions, key_positions)


def _padded_group(members: Sequence[tuple[int, Chunk]], device: torch.device) -> _Group:
    """Make a group of requests, in which the keys of each are padded to those of the longest.

    Args:
        members: each request's chunk and the row in the step at which it starts. All chunks have
            equally many new tokens.
        device: device of the group's tensors.
    """
    count, longest = members[0][1].size, max(_length(chunk) for _, chunk in members)
    new = np.arange(count)
    starts = np.array([(start, chunk.table.computed) for start, chunk in members])
    slots = np.empty((len(members), longest), np.int64)
    for row, (_, chunk) in zip(slots, members, strict=True):
        length = _length(chunk)
        row[:length], row[length:] = chunk.table.slots[:length], chunk.table.slots[0]
    rows, positions = to_device(starts[:, :, None] + new, device).unbind(1)
    last = positions
    if any(_attends_both_ways(chunk) for _, chunk in members):
        last = to_device(np.stack([_last_keys(chunk) for _, chunk in members]), device)
    places = torch.arange(longest, device=device)[None]
    mask = places[:, None] <= last[:, :, None]  # made there: it may have millions of values
    return _Group(rows.flatten(), to_device(slots.ravel(), device), mask, positions, places)


def _attends_both_ways(chunk: Chunk) -> bool:
    return chunk.seen is not None and chunk.seen.both_ways


def _last_keys(chunk: Chunk) -> NDArray[np.int64]:
    """Return the last token to which each new token attends: itself, or the last of its image."""
    start, stop = chunk.table.computed, _length(chunk)
    return np.arange(start, stop) if chunk.seen is None else chunk.seen.last_keys(start, stop)


# --- whether a model can be served ----------------------------------------------------------
_PROMPTS: Final = ((5, 6, 7, 8, 9, 10, 11), (5, 6, 7, 8, 12, 13, 14, 15, 16))
"""Token ids of two sequences that share a page of four tokens."""
_ORDER: Final = (((0, 7),), ((1, 2),), ((1, 3),), ((0, 1), (1, 1)))
"""Steps of the check: (sequence, number of new tokens), …"""


def install_checked(model: Any, context: int) -> None:
    """Replace the model's attention, and check that the model still computes the same logits.

    For the check, two sequences with a common page are computed in several steps. Their logits are
    compared with those of a plain forward pass.

    Args:
        model: the model.
        context: maximum number of tokens of a request.

    Raises:
        ModelError: the logits differ, or a layer cannot be computed in several steps.
        RuntimeError: memory ran out.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompts = [[token % vocabulary for token in ids] for ids in _PROMPTS]
    try:
        with torch.inference_mode():
            plain = [_plain_logits(model, ids) for ids in prompts]
            exact = exact_length(model, context)
            install(model)
            worst, windows = compare(model, prompts, plain, _ORDER)
    except (ModelError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"in pieces it raises {type(error).__name__}: {error}"
        raise _refusal(model, str(error) if isinstance(error, ModelError) else reason) from error
    if not worst <= tolerance(model, plain):
        raise _refusal(model, f"its logits differ by {worst:.2e} from those of a forward pass")
    if exact < context:
        raise _refusal(
            model,
            f"a request of over {exact} tokens would change the positions of all others in its "
            f"batch, and the context is {context}",
            f"engine=Transformers(context_length={exact})",
        )
    if layer := _layer_without_window(model.config.get_text_config(), windows):
        raise _refusal(model, f"{layer} attends to fewer tokens than its attention is told")


def tolerance(model: Any, logits: Sequence[Tensor]) -> float:
    """Return by how much logits in pieces may differ from those of a plain forward pass."""
    scale = max(float(each.abs().max()) for each in logits)
    return (1e-4 if model.dtype == torch.float32 else 0.05) * max(1.0, scale)


def _refusal(
    model: Any, reason: str, instead: str = "engine=VLLM() (lightspan-vllm)"
) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be served by the embedded engine: {reason}. Use {instead}"
    )


def _plain_logits(model: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(
        input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False
    ).logits[0]
    return logits.float()


def compare(
    model: Any,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Tensor],
    order: Sequence[Sequence[tuple[int, int]]],
    vision: Vision | None = None,
    seen: Sequence[VisionPrompt | None] = (None, None),
) -> tuple[float, dict[int, int | None]]:
    """Compute two prompts in several steps, and compare their logits with `plain`.

    Args:
        model: the model, with its attention installed.
        prompts: the ids of the prompts.
        plain: the logits of each prompt in a plain forward pass.
        order: the steps, each of which has pairs of a prompt and its number of new tokens.
        vision: the vision part of the model, if the prompts have images.
        seen: the images of each prompt.

    Returns:
        The largest difference from `plain`, and layer → its sliding window.
    """
    size = 4
    pages, tables = Pages(2 * sum(map(len, prompts)), size), [PageTable(), PageTable()]
    pages.reserve(tables[0], len(prompts[0]) + 1)
    worst, windows = 0.0, dict[int, int | None]()
    for work in order:
        for sequence, count in work:
            table = tables[sequence]
            if sequence and not table.pages:
                pages.index(tables[0], prompts[0])
                pages.share(table, pages.find(prompts[1]))
                pages.reserve(table, len(prompts[1]))
            table.computed = min(table.computed, len(prompts[sequence]) - count)
        chunks = [
            Chunk(prompts[number], tables[number], count, seen[number]) for number, count in work
        ]
        step = make_step(pages, chunks, model.device)
        rows = torch.arange(len(step.ids), device=model.device)
        logits = forward(model, step, rows, vision)
        starts = [chunk.table.computed for chunk in chunks]
        expected = [plain[n][at : at + count] for at, (n, count) in zip(starts, work, strict=True)]
        worst = max(worst, float((logits - torch.cat(expected)).abs().max()))
        for chunk in chunks:
            chunk.table.computed += chunk.size
        windows |= step.plan.windows
    return worst, windows


def _layer_without_window(config: Any, windows: dict[int, int | None]) -> str:
    """Return the name of a layer that has a sliding window but did not pass it to `attention`.

    The configuration shows which layers have one. The logits of the check do not show the error,
    because its prompts are shorter than a window. Return "" if there is no such layer.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        return "a layer" if window and not any(windows.values()) else ""
    limited = (n for n, kind in enumerate(kinds) if kind != "full_attention" and not windows.get(n))
    return next((f"layer {n} ({kinds[n]})" for n in limited), "")
