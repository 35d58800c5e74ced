"""Attention request by request, over a batch of different lengths, on a CPU.

transformers' own choice on a CPU is one masked attention of all queries against the keys of all
requests: its cost grows with the square of the batch, which keeps batches small. Here each request
meets its own keys only. Requests that decode one token are padded to a common length, in groups of
similar length; a prompt is computed by itself.

It goes in through `AttentionInterface`, the extension point of transformers.
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


class _Prompt(NamedTuple):
    """A request with several new tokens: query rows [start, stop), of which `past` precede."""

    start: int
    stop: int
    past: int
    read: slice
    """Its keys among those read from the cache; unused if `past` is 0."""


class _Group(NamedTuple):
    """G decoding requests, padded to K keys."""

    rows: Tensor
    """[G] query rows."""
    read: slice
    """The G·K keys among those read."""
    mask: Tensor
    """[G, 1, 1, K], True where there is a key."""


class _Plan(NamedTuple):
    """How one batch is attended to; the same for all layers."""

    read_index: Tensor
    prompts: list[_Prompt]
    groups: list[_Group]


def supported(model: Any) -> bool:
    """True if the model's attention is plain causal attention that can be replaced."""
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
    """Let the model attend with this module's function."""
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
        cache: holds what came before; without it this is plain causal attention.

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
    for prompt in plan.prompts:
        span = slice(prompt.start, prompt.stop)
        if prompt.past:
            visible = keys[prompt.read], values[prompt.read]
        else:  # nothing of it is in the cache yet
            visible = new_keys[span], new_values[span]
        output[span] = _attend_prompt(queries[span], *visible, prompt.past, scaling)
    for group in plan.groups:
        output[group.rows] = _attend_group(
            queries[group.rows], keys[group.read], values[group.read], group.mask, scaling
        )
    return output[None], None


def _attend_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, past: int, scaling: float | None
) -> Tensor:
    """[T, heads, size] queries, of which the last sees the last key."""
    repeat = queries.shape[1] // keys.shape[1]
    if repeat > 1:
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
    mask = None
    if past:
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(past)
    output = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return output[0].transpose(0, 1)


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """[G, heads, size] queries against [G·K, key heads, size] keys."""
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
    """The batch's plan, made at the first layer and kept on the cache for the others."""
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
    """How a batch is attended to.

    Args:
        ends_q, ends_k: cumulative numbers of new tokens and of keys, from 0.
        read_index: where the keys of all requests, one after another, lie in the cache.
    """
    prompts: list[_Prompt] = []
    decoding: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    parts: list[Tensor] = []
    read = 0
    for number in range(len(ends_q) - 1):
        start, stop = ends_q[number], ends_q[number + 1]
        first, last = ends_k[number], ends_k[number + 1]
        past = (last - first) - (stop - start)
        if stop - start == 1 and past:
            # grouped by powers of two, so that padding at most doubles the work
            decoding[(last - first - 1).bit_length()].append((start, first, last))
        else:
            here = slice(read, read)
            if past:
                parts.append(read_index[first:last])
                here = slice(read, read := read + last - first)
            prompts.append(_Prompt(start, stop, past, here))
    groups = []
    for members in decoding.values():
        rows, firsts, lasts = torch.tensor(members).unbind(1)
        lengths = lasts - firsts
        places = torch.arange(int(lengths.max()))
        mask = places < lengths[:, None]
        index = torch.where(mask, firsts[:, None] + places, firsts[:, None])
        parts.append(read_index[index.view(-1)])
        groups.append(_Group(rows, slice(read, read := read + index.numel()), mask[:, None, None]))
    return _Plan(torch.cat(parts) if parts else read_index[:0], prompts, groups)
