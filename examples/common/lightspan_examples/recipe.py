"""Settings of an example's training, and the arguments of `LightningRL` made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lightspan import Optimizer

if TYPE_CHECKING:
    from lightspan_torch.sft.algorithm import Turns


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """Settings of the small model's warm start: supervised fine-tuning on demonstrations."""

    train_vision: ClassVar[bool] = False
    """Whether the vision part of the model is trained too; a subclass may say so."""
    demonstrations: int = 16_000
    batch: int = 16
    learning_rate: float = 3e-3
    """Learning rate of AdamW, which trains all parameters except the hidden matrices."""
    muon_learning_rate: float = 0.01
    warmup_steps: int = 30
    prompt_weight: float = 0.2
    """Weight of a prompt token in the loss; the weight of an answer token is 1."""
    turns: Turns = "last"
    """Which assistant messages of a chat are trained on."""
    vocabulary: int = 896
    """Size of the tokenizer's vocabulary, including bytes and special tokens."""
    context: int = 512
    """Maximum number of tokens of a prompt with its answer."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of an example's training."""

    imitation: Imitation = field(default_factory=Imitation)
    steps: int
    group_size: int
    """Rollouts per task."""
    tasks_per_step: int
    minibatches: int
    """Optimiser steps per iteration."""
    learning_rate: float | None = None
    """Learning rate of AdamW; None lets LightningRL choose one from the model's size."""
    warmup: int = 0
    """Optimiser steps over which `learning_rate` rises to its value. Without a warm-up, AdamW's
    first steps would be equally large in every direction.
    """
    decay: float | None = None
    """Share of the run, 0 to 1, over which `learning_rate` falls to a twentieth; None keeps it
    constant.
    """
    temperature: float
    """Sampling temperature of training rollouts and of all evaluations."""
    max_tokens: int
    """Maximum number of tokens of one answer of the model."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `LightningRL` that the recipe sets."""
        return {
            "group_size": self.group_size,
            "tasks_per_step": self.tasks_per_step,
            "minibatches": self.minibatches,
            "optimizer": self._optimizer(),
            "temperature": self.temperature,
            "failure_reward": 0.0,
        }

    def _optimizer(self) -> Optimizer | None:
        if self.learning_rate is None:
            return None
        return Optimizer(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup,
            decay_steps=self._decay_steps(),
        )

    def _decay_steps(self) -> int | None:
        """Return the number of optimiser steps after the warm-up over which the learning rate
        falls; None if `decay` is None.
        """
        if self.decay is None:
            return None
        return max(1, round(self.decay * self.steps * self.minibatches) - self.warmup)
