"""LoRA beside a model's own weights: what fits a model, and a model that computes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightspan.errors import ConfigError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan.schema.validation import check_whole
from lightspan_torch.engine.weights import beside

_SHOWN: Final = 5


def is_low_rank(
    weights: Mapping[str, Any] | LoRAWeights, policy: str, served: int | None
) -> TypeGuard[LoRAWeights]:
    """Whether these are LoRA weights, as they have to be where the policy is served as LoRA.

    Args:
        weights: for `TokenEngine.update`.
        policy: whose.
        served: the rank that it is served with; 0 if its weights never change; None if whole.

    Raises:
        ModelError: they are not what the policy is served as.
    """
    given = isinstance(weights, LoRAWeights)
    if served == 0:
        raise ModelError(
            f"policy {policy} is served with the model's own weights, and takes no others"
        )
    if served is None and given:
        raise ModelError(
            f"policy {policy} is served with whole weights, and got LoRA weights: merge them, or "
            f"make the engine with lora={{{policy!r}: rank}}"
        )
    if served is not None and not given:
        raise ModelError(
            f"policy {policy} is served as LoRA of rank {served} beside the model's own weights, "
            "and got whole weights: give its learner lora=LoRA(…), or make the engine without "
            f"lora={{{policy!r}: {served}}}"
        )
    return given


def check_low_rank(
    shapes: Mapping[str, tuple[int, ...]], weights: LoRAWeights, policy: str, rank: int
) -> None:
    """Raise `ModelError` for LoRA weights that do not fit, layer by layer.

    Args:
        shapes: of the model's weights, by name.
        weights: what came.
        policy: whose.
        rank: the highest that there is room for.
    """
    if weights.rank > rank:
        raise ModelError(
            f"LoRA weights for policy {policy} have rank {weights.rank}; it is served with {rank}"
        )
    unknown = sorted(name for name in weights.layers if len(shapes.get(f"{name}.weight", ())) != 2)
    if unknown:
        raise ModelError(
            f"LoRA weights for policy {policy} are of layers that the model does not have, or has "
            f"without a matrix: {unknown[:_SHOWN]}"
        )
    for name, (first, second) in weights.layers.items():
        outputs, inputs = shapes[f"{name}.weight"]
        found = (tuple(first.shape), tuple(second.shape))
        if found != ((weights.rank, inputs), (outputs, weights.rank)):
            raise ModelError(
                f"LoRA of layer {name} of policy {policy} has shapes {found[0]} and {found[1]}; "
                f"rank {weights.rank} of this layer has {(weights.rank, inputs)} and "
                f"{(outputs, weights.rank)}"
            )


def check_ranks(ranks: Mapping[str, int], models: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a rank of no policy, or that is none."""
    for policy, rank in ranks.items():
        if policy not in models:
            raise ConfigError(f"lora= names {policy!r}; the engine's policies: {sorted(models)}")
        check_whole(f"lora: the rank of policy {policy}", rank, 0)


class Shared:
    """Models of which several policies have the weights: each is loaded once.

    Args:
        load: a model from what a policy was given with.
    """

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load
        self._models: dict[Any, Any] = {}

    def load(self, source: Any) -> Any:
        """A model of modules of its own around the weights that all of this source have."""
        key = source if isinstance(source, torch.nn.Module) else str(source)
        if key not in self._models:
            self._models[key] = self._load(source)
        return beside(self._models[key])


class LowRank:
    """The LoRA of one policy, added to what the layers of its model say.

    By hooks, so that the model's modules and the names of its weights stay as they are, and its
    tensors can be those of other policies too.

    Args:
        model: of this policy alone, whatever it shares its tensors with.
        rank: the highest.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self._device = model.device
        self._rank = rank
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._modules = dict(model.named_modules())
        self._hooked: set[str] = set()
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}
        self._scale = 1.0

    def change(self, weights: LoRAWeights, policy: str) -> Callable[[], None]:
        """A function that puts these in place of the former. All is checked before it is called.

        Raises:
            ModelError: they do not fit the model.
        """
        check_low_rank(self._shapes, weights, policy, self._rank)
        placed = {
            name: (first.to(self._device), second.to(self._device))
            for name, (first, second) in weights.layers.items()
        }

        def change() -> None:
            self._layers, self._scale = placed, weights.scale
            for name in placed.keys() - self._hooked:
                self._modules[name].register_forward_hook(partial(self._add, name))
                self._hooked.add(name)

        return change

    def tensors(self) -> dict[str, Tensor]:
        """By name, as they are now."""
        return {
            f"{name}.lora_{letter}": tensor
            for name, pair in self._layers.items()
            for letter, tensor in zip("AB", pair, strict=True)
        }

    def _add(
        self, name: str, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """What a layer says, with what its LoRA adds: in the types that PEFT computes it in."""
        pair = self._layers.get(name)
        if pair is None:
            return output
        first, second = pair
        added = linear(linear(inputs[0].to(first.dtype), first), second) * self._scale
        return (output + added).to(output.dtype)
