"""Attention within prefix trees of token sequences. Private to this package.

`install` replaces a model's attention once, by transformers' `AttentionInterface`. A forward pass
with the argument `tree` then computes attention in trees. Without it, attention is as before. The
embedded engine has another attention of its own (`lightspan_torch.engine._attention`).
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from lightspan_torch.engine.weights import set_text_attention, text_attention

NAME: Final = "lightspan_tree"

_CHANGES: Final = ("attention_mask", "position_bias", "sliding_window", "softcap", "s_aux")
"""Arguments of an attention that limit or change its scores. transformers makes no mask for an
attention of ours, so a mask is the model's own."""
_LENGTH_DEPENDENT: Final = ("dynamic", "longrope")
"""Kinds of rotary embeddings that depend on the longest position in the batch."""


class TreeContext(Protocol):
    """The type of the argument `tree` of a forward pass, which computes attention in prefix trees.

    It is a protocol, because its only implementation, in `tree_forward`, imports this module.
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Return the attention output, [B, T, heads, size]; see `attention` for the arguments."""
        ...


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within prefix trees.

    A prefix tree holds several token sequences, and each token of a common prefix once.

    Args:
        query: [B, heads, T, size].
        key: [B, key heads, T, size]; `value` has the same shape.
        attention_mask: used only without `tree`.
        scaling: factor of the scores; None for 1/√size.
        tree: computes the attention of the pass; None for transformers' plain `sdpa` attention.

    Returns:
        The output, [B, T, heads, size], and None in place of the attention weights.

    Raises:
        ValueError: the model limits or changes the scores, which trees would ignore.
    """
    if tree is None and attention_mask is None and _repeats_keys(query, None):
        return attend(query, key, value, None, scaling).transpose(1, 2).contiguous(), None
    if tree is None:
        sdpa: Any = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
        output: tuple[Tensor, None] = sdpa(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    options = {"attention_mask": attention_mask, **kwargs}
    if names := [name for name in _CHANGES if _is_set(options.get(name))]:
        raise ValueError(f"its attention has {' and '.join(names)}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return tree.attend(layer, query, key, value, scaling).contiguous(), None


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Return the attention output, [B, heads, T, size].

    Args:
        query: [B, heads, T, size].
        key: [B, key heads, keys, size], possibly with fewer heads than `query`.
        value: [B, key heads, keys, size].
        mask: added to the scores; None for causal attention.
        scaling: factor of the scores; None for 1/√size.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _repeats_keys(query, mask):
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        groups = 1
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=groups > 1,
    )


def _repeats_keys(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether keys are repeated for the heads that share them.

    Otherwise, a GPU uses its slowest kernel, whose memory grows with the square of the tokens: its
    others take no shared keys with a mask, and none in float32.
    """
    return query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is 0 where a key is visible and minus infinity elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


def causal(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a causal mask, [queries, keys], if the queries are the last of the tokens.

    It is 0 where a token attends to a key, and minus infinity elsewhere.

    Args:
        queries: number of queries.
        keys: number of tokens, each of which has a key.
        dtype: data type of the mask.
        device: device of the mask.
    """
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return additive(visible, dtype)


def install(model: Any) -> None:
    """Replace the attention of the model's text part by `attention`. Idempotent."""
    if text_attention(model) != NAME:
        AttentionInterface.register(NAME, attention)
        set_text_attention(model, NAME)


def refusal(model: Any) -> str:
    """Return why a model cannot use attention within trees; "" if it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    window = getattr(config, "sliding_window", None)
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if text_attention(model) not in ("sdpa", NAME):
        return f"its attention is {text_attention(model)}, not sdpa"
    if kinds != {"full_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    if window and not getattr(config, "layer_types", None):
        return "it attends within a sliding window"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention logits are capped"
    if isinstance(rope, dict) and rope.get("rope_type") in _LENGTH_DEPENDENT:
        return f"its rotary embeddings are of the kind {rope['rope_type']}"
    return ""
