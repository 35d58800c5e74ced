"""LoRA served without merging: validation, and adapters as forward hooks of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from lightspan.errors import ConfigError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan.schema.validation import check_whole

_MAX_NAMES: Final = 5
"""Maximum number of layer names in an error message."""


def is_low_rank(
    weights: Mapping[str, Any] | LoRAWeights, policy: str, served: int | None
) -> TypeGuard[LoRAWeights]:
    """Return whether an update has LoRA weights; check that this is what the policy needs.

    Args:
        weights: the weights passed to `TokenEngine.update`.
        policy: the policy's name.
        served: the LoRA rank of the policy in the engine; 0 for a policy whose weights never
            change; None for a policy without LoRA.

    Raises:
        ModelError: the update has LoRA weights but the policy needs whole weights, or the reverse;
            or the policy's weights never change.
    """
    is_lora = isinstance(weights, LoRAWeights)
    if served == 0:
        raise ModelError(
            f"policy {policy} is served with the model's own weights, which never change"
        )
    if served is None and is_lora:
        raise ModelError(
            f"policy {policy} is served with whole weights but got LoRA weights: merge them, or "
            f"make the engine with lora={{{policy!r}: rank}}"
        )
    if served is not None and not is_lora:
        raise ModelError(
            f"policy {policy} is served as LoRA of rank {served} but got whole weights: give its "
            f"learner lora=LoRA(…), or make the engine without lora={{{policy!r}: {served}}}"
        )
    return is_lora


def check_low_rank(
    shapes: Mapping[str, tuple[int, ...]], weights: LoRAWeights, policy: str, rank: int
) -> None:
    """Raise `ModelError` unless LoRA weights fit a model.

    Args:
        shapes: weight name → shape in the model.
        weights: the weights to check.
        policy: the policy's name.
        rank: maximum rank of `weights`.
    """
    if weights.rank > rank:
        raise ModelError(
            f"LoRA weights for policy {policy} have rank {weights.rank}; the policy is served with "
            f"rank {rank}"
        )
    unknown = sorted(name for name in weights.layers if len(shapes.get(f"{name}.weight", ())) != 2)
    if unknown:
        raise ModelError(
            f"LoRA weights for policy {policy} are of layers that the model does not have, or has "
            f"without a matrix: {unknown[:_MAX_NAMES]}"
        )
    for name, (first, second) in weights.layers.items():
        outputs, inputs = shapes[f"{name}.weight"]
        actual = (tuple(first.shape), tuple(second.shape))
        expected = ((weights.rank, inputs), (outputs, weights.rank))
        if actual != expected:
            raise ModelError(
                f"LoRA of layer {name} of policy {policy} has shapes {actual[0]} and {actual[1]}; "
                f"rank {weights.rank} of this layer has {expected[0]} and {expected[1]}"
            )


def check_ranks(ranks: Mapping[str, int], models: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a rank is below 0 or its policy is not in `models`."""
    for policy, rank in ranks.items():
        if policy not in models:
            raise ConfigError(f"lora= names {policy!r}; the engine's policies: {sorted(models)}")
        check_whole(f"lora: the rank of policy {policy}", rank, 0)


class LowRank:
    """The LoRA of one policy, added to the outputs of its model's layers.

    Forward hooks add it. The model's modules and weight names are unchanged, so the policy can
    share the model's tensors with other policies.

    Args:
        model: a model object used by this policy alone; only its tensors may be shared.
        rank: maximum rank.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self._device = model.device
        self._rank = rank
        self._modules = dict(model.named_modules())
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        for name, module in self._modules.items():
            if isinstance(module, Conv1D):  # GPT-2's linear layer, whose weight is transposed
                self._shapes[f"{name}.weight"] = (module.nf, module.nx)
        self._hooked: set[str] = set()
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}
        self._scale = 1.0

    def change(self, weights: LoRAWeights, policy: str) -> Callable[[], None]:
        """Check new LoRA weights, and return a function that makes them the current ones.

        Raises:
            ModelError: the weights do not fit the model.
        """
        check_low_rank(self._shapes, weights, policy, self._rank)
        layers = {
            name: (first.to(self._device), second.to(self._device))
            for name, (first, second) in weights.layers.items()
        }

        def change() -> None:
            self._layers, self._scale = layers, weights.scale
            for name in layers.keys() - self._hooked:
                self._modules[name].register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

        return change

    def tensors(self) -> dict[str, Tensor]:
        """Return the current LoRA tensors by name; empty before the first change."""
        return {
            f"{name}.lora_{letter}": tensor
            for name, pair in self._layers.items()
            for letter, tensor in zip("AB", pair, strict=True)
        }

    def _add(
        self, name: str, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Return a layer's output plus the output of its LoRA, in the data types that PEFT uses."""
        pair = self._layers.get(name)
        if pair is None:
            return output
        first, second = pair
        added = linear(linear(inputs[0].to(first.dtype), first), second) * self._scale
        return (output + added).to(output.dtype)
