"""Attention per request over a batch of different lengths, on a CPU.

On a CPU, transformers computes one masked attention of all queries against the keys of all
requests, whose cost is quadratic in the batch. Here each request attends to its own keys only.
Decoding requests are padded to a common length, in groups of similar length. A prompt is computed
alone, or with prompts that have as many cached and as many new tokens, as in a group of rollouts.

Registered with `AttentionInterface`, the extension point of transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME: Final = "lightspan_by_request"


class _Continued(NamedTuple):
    """G requests with T new tokens each, after the same number of keys in the cache."""

    rows: Tensor
    """[G·T] query rows, request by request."""
    read: slice
    """The G·K keys among those read."""
    mask: Tensor
    """[T, K], True where a new token attends."""


class _Group(NamedTuple):
    """G decoding requests, padded to K keys."""

    rows: Tensor
    """[G] query rows."""
    read: slice
    """The G·K keys among those read."""
    mask: Tensor
    """[G, 1, 1, K], True where there is a key."""


class _Plan(NamedTuple):
    """The attention plan of one batch, the same for all layers."""

    read_index: Tensor
    prompts: list[slice]
    """Query rows of each prompt without cached tokens."""
    continued: list[_Continued]
    groups: list[_Group]


def supported(model: Any) -> bool:
    """Return whether the model's attention is plain causal attention on a CPU."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        model.device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and set(layers) == {"full_attention"}
        and (bool(getattr(config, "layer_types", None)) or not getattr(config, "sliding_window", 0))
        and getattr(config, "attn_logit_softcapping", None) is None
    )


def install(model: Any) -> None:
    """Replace the model's attention by this module's."""
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each request.

    Args:
        query: [1, heads, T, size]; key and value: [1, key heads, T, size], new tokens only.
        cache: earlier keys and values; without it, plain causal attention is computed.

    Returns:
        [1, T, heads, size]
    """
    if cache is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    allocator = cache.layer_to_allocator[layer]
    plan = _plan_of(cache, layer, allocator, kwargs)
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = allocator.update(
        new_keys, new_values, layer, plan.read_index, kwargs["write_index"][allocator.index]
    )
    queries = query[0].transpose(0, 1)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for span in plan.prompts:
        output[span] = _attend_prompt(queries[span], new_keys[span], new_values[span], scaling)
    for part in plan.continued:
        output[part.rows] = _attend_continued(
            queries[part.rows], keys[part.read], values[part.read], part.mask, scaling
        )
    for group in plan.groups:
        output[group.rows] = _attend_group(
            queries[group.rows], keys[group.read], values[group.read], group.mask, scaling
        )
    return output[None], None


def _attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Compute attention of a whole prompt's [T, heads, size] queries to its own keys."""
    repeat = queries.shape[1] // keys.shape[1]
    if repeat > 1:
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
    output = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        is_causal=True,
        scale=scaling,
    )
    return output[0].transpose(0, 1)


def _attend_continued(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention of [G·T, heads, size] queries to [G·K, key heads, size] keys, masked by
    [T, K]."""
    new, seen = mask.shape
    heads, size = queries.shape[1:]
    groups = keys.shape[1]
    repeat = heads // groups
    keys, values = (x.view(-1, seen, groups, size).transpose(1, 2) for x in (keys, values))
    # heads that share keys become further queries
    queries = queries.view(-1, new, groups, repeat, size).permute(0, 2, 3, 1, 4)
    output = scaled_dot_product_attention(
        queries.reshape(-1, groups, repeat * new, size),
        keys,
        values,
        attn_mask=mask.repeat(repeat, 1),
        scale=scaling,
    )
    output = output.view(-1, groups, repeat, new, size).permute(0, 3, 1, 2, 4)
    return output.reshape(-1, heads, size)


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Compute attention of [G, heads, size] queries to [G·K, key heads, size] keys."""
    count, heads, size = queries.shape
    groups = keys.shape[1]
    keys, values = (x.view(count, -1, groups, size).transpose(1, 2) for x in (keys, values))
    output = scaled_dot_product_attention(
        queries.view(count, groups, heads // groups, size),
        keys,
        values,
        attn_mask=mask,
        scale=scaling,
    )
    return output.reshape(count, heads, size)


def _plan_of(cache: Any, layer: int, allocator: Any, kwargs: dict[str, Any]) -> _Plan:
    """Return the batch's plan, made at the first layer and stored in the cache for the others."""
    if layer != 0:
        kept: _Plan = cache.lightspan_plan
        return kept
    plan = _make_plan(
        kwargs["cu_seq_lens_q"].tolist(),
        kwargs["cu_seq_lens_k"][allocator.layer_type].tolist(),
        kwargs["read_index"][allocator.index],
    )
    cache.lightspan_plan = plan
    return plan


def _make_plan(ends_q: Sequence[int], ends_k: Sequence[int], read_index: Tensor) -> _Plan:
    """Make the attention plan of a batch.

    Args:
        ends_q, ends_k: cumulative numbers of new tokens and of keys, from 0.
        read_index: cache positions of the keys of all requests, concatenated.
    """
    prompts: list[slice] = []
    continued: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    decoding: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for number in range(len(ends_q) - 1):
        start, stop = ends_q[number], ends_q[number + 1]
        first, last = ends_k[number], ends_k[number + 1]
        new, seen = stop - start, last - first
        if seen == new:
            prompts.append(slice(start, stop))
        elif new == 1:
            # grouped by powers of two, so that padding at most doubles the work
            decoding[(seen - 1).bit_length()].append((start, first, last))
        else:
            continued[new, seen].append((start, first))
    reads = _Reads(read_index)
    parts = [_continued(*sizes, members, reads) for sizes, members in continued.items()]
    groups = [_group(members, reads) for members in decoding.values()]
    return _Plan(reads.index(), prompts, parts, groups)


class _Reads:
    """Collector of the cache positions to read."""

    def __init__(self, read_index: Tensor) -> None:
        self._from = read_index
        self._parts: list[Tensor] = []
        self._size = 0

    def add(self, places: Tensor) -> slice:
        """Add positions of the read index; return their slice among all that is read."""
        self._parts.append(self._from[places])
        start, self._size = self._size, self._size + len(places)
        return slice(start, self._size)

    def index(self) -> Tensor:
        return torch.cat(self._parts) if self._parts else self._from[:0]


def _continued(
    new: int, seen: int, members: Sequence[tuple[int, int]], reads: _Reads
) -> _Continued:
    starts, firsts = torch.tensor(members).unbind(1)
    rows = (starts[:, None] + torch.arange(new)).view(-1)
    read = reads.add((firsts[:, None] + torch.arange(seen)).view(-1))
    return _Continued(rows, read, torch.ones(new, seen, dtype=torch.bool).tril(seen - new))


def _group(members: Sequence[tuple[int, int, int]], reads: _Reads) -> _Group:
    rows, firsts, lasts = torch.tensor(members).unbind(1)
    lengths = lasts - firsts
    places = torch.arange(int(lengths.max()))
    mask = places < lengths[:, None]
    index = torch.where(mask, firsts[:, None] + places, firsts[:, None])
    return _Group(rows, reads.add(index.view(-1)), mask[:, None, None])
