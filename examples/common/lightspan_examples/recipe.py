"""Every setting of an example's training, and the arguments of LightningRL that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightspan import Optimizer

if TYPE_CHECKING:
    from lightspan_torch.sft.algorithm import Turns


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """The warm start of the small model."""

    demonstrations: int = 16_000
    batch: int = 16
    learning_rate: float = 3e-3
    """AdamW's, which learns all but the hidden matrices."""
    muon_learning_rate: float = 0.01
    warmup_steps: int = 30
    prompt_weight: float = 0.2
    """Weight of the prompt's tokens in the loss; an answer's token has 1."""
    turns: Turns = "last"
    """Which of a chat's answers are imitated."""
    vocabulary: int = 896
    """Pieces of the tokenizer, the bytes and the special tokens included."""
    context: int = 512
    """Tokens."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting of an example's training."""

    imitation: Imitation = field(default_factory=Imitation)
    steps: int
    group_size: int
    """Rollouts of each task."""
    tasks_per_step: int
    minibatches: int
    """Updates in each step."""
    learning_rate: float | None = None
    """None: LightningRL's own choice, by the model's size."""
    warmup: int = 0
    """Updates over which a given rate rises: AdamW's first ones are as long in every direction."""
    decay: float | None = None
    """Share of the run over which a given rate falls to a twentieth; None keeps it."""
    temperature: float
    """What rollouts and evaluations are sampled at, before, while and after training."""
    max_tokens: int
    """How long one answer of the model may be."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of LightningRL that it fixes."""
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
        """Updates over which the learning rate falls."""
        if self.decay is None:
            return None
        return max(1, round(self.decay * self.steps * self.minibatches))
