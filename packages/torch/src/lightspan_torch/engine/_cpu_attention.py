"""Attention on a CPU in which each request of a batch attends to its own keys only.

On a CPU, transformers computes one masked attention of all queries against the keys of all
requests, whose cost is quadratic in the batch. This module computes it per request instead.
Requests that decode one token are padded to a common length, in groups of similar length. A prompt
without cached tokens is computed alone. Prompts with cached tokens are computed together if they
have as many cached and as many new tokens, as the rollouts of a group have.

The attention is registered with `AttentionInterface`, the extension point of transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME: Final = "lightspan_by_request"


class _Group(NamedTuple):
    """G requests with T new tokens each, whose keys are padded to the same number K."""

    rows: Tensor
    """[G·T] indices of the group's query rows, ordered by request."""
    read: slice
    """The slice of `_Plan.read_index` with the cache positions of the group's G·K keys."""
    mask: Tensor
    """[G, 1, T, K] True where a new token attends to a key; [1, 1, T, K] if all requests have the
    same."""


class _Plan(NamedTuple):
    """The plan by which the attention of one batch is computed, in every layer."""

    read_index: Tensor
    """Cache positions of the keys of all groups, concatenated."""
    prompts: list[slice]
    """Query rows of each prompt that has no cached tokens."""
    groups: list[_Group]
    """The requests that have cached tokens."""


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
    """Replace the model's attention by `attention`."""
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
    """Compute the attention of each request's queries to the keys of the same request.

    Args:
        query: [1, heads, T, size], where T counts the new tokens of all requests.
        key: [1, key heads, T, size]; `value` has the same shape.
        attention_mask: used only without `cache`.
        scaling: factor of the scores; None for 1/√size.
        cache: earlier keys and values; None to compute plain causal attention.

    Returns:
        The output, [1, T, heads, size], and None in place of the attention weights.
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
    for group in plan.groups:
        output[group.rows] = _attend_group(
            queries[group.rows], keys[group.read], values[group.read], group.mask, scaling
        )
    return output[None], None


def _attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Return the causal attention of a whole prompt to itself, [T, heads, size]."""
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


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention of [G·T, heads, size] queries to [G·K, key heads, size] keys."""
    new, places = mask.shape[-2:]
    heads, size = queries.shape[1:]
    groups = keys.shape[1]
    repeat = heads // groups
    keys, values = (x.view(-1, places, groups, size).transpose(1, 2) for x in (keys, values))
    # heads that share keys become further queries
    queries = queries.view(-1, new, groups, repeat, size).permute(0, 2, 3, 1, 4)
    output = scaled_dot_product_attention(
        queries.reshape(-1, groups, repeat * new, size),
        keys,
        values,
        attn_mask=mask if new == 1 else mask.repeat(1, 1, repeat, 1),
        scale=scaling,
    )
    output = output.view(-1, groups, repeat, new, size).permute(0, 3, 1, 2, 4)
    return output.reshape(-1, heads, size)


def _plan_of(cache: Any, layer: int, allocator: Any, kwargs: dict[str, Any]) -> _Plan:
    """Return the batch's plan. It is made at layer 0 and stored in `cache` for the later layers."""
    if layer != 0:
        plan: _Plan = cache.lightspan_plan
        return plan
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
        ends_q: where each request's new tokens end among those of all requests, preceded by 0.
        ends_k: where each request's keys end among those of all requests, preceded by 0.
        read_index: cache positions of the keys of all requests, concatenated.
    """
    prompts: list[slice] = []
    members: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for (start, stop), (first, last) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        new, total = stop - start, last - first
        if total == new:
            prompts.append(slice(start, stop))
        else:
            # decoding requests by powers of two, so that padding at most doubles the work
            size = (total - 1).bit_length() if new == 1 else total
            members[new, size].append((start, first, total))
    reads = _Reads(read_index)
    groups = [_group(new, requests, reads) for (new, _), requests in members.items()]
    return _Plan(reads.index(), prompts, groups)


class _Reads:
    """Collects the cache positions of the keys of all groups, each group's in one slice."""

    def __init__(self, read_index: Tensor) -> None:
        self._from = read_index
        self._parts: list[Tensor] = []
        self._size = 0

    def add(self, places: Tensor) -> slice:
        """Add the cache positions at the indices `places` of `read_index`.

        Return the slice that they have in the result of `index()`.
        """
        self._parts.append(self._from[places])
        start, self._size = self._size, self._size + len(places)
        return slice(start, self._size)

    def index(self) -> Tensor:
        return torch.cat(self._parts) if self._parts else self._from[:0]


def _group(new: int, members: Sequence[tuple[int, int, int]], reads: _Reads) -> _Group:
    """Make a group of requests with the same number of new tokens.

    Args:
        new: number of new tokens of each request.
        members: (first query row, first key, number of keys) of each request.
        reads: collector to which the keys' cache positions are added.
    """
    starts, firsts, totals = torch.tensor(members).unbind(1)
    rows = (starts[:, None] + torch.arange(new)).view(-1)
    places = torch.arange(int(totals.max()))
    index = torch.where(places < totals[:, None], firsts[:, None] + places, firsts[:, None])
    if new > 1:  # requests of one length
        totals = totals[:1]
    # a new token attends to itself and to everything before it
    ends = totals[:, None] - torch.arange(new - 1, -1, -1)
    mask = places < ends[:, :, None]
    return _Group(rows, reads.add(index.view(-1)), mask[:, None])
