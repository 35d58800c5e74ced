"""Every setting of an example's training, and the arguments of LightningRL that follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightspan import Optimizer, PolicyLoss
from lightspan.algorithms.sft import Turns


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """The warm start of the small model."""

    demonstrations: int = 16_000
    batch: int = 16
    learning_rate: float = 3e-3
    """Of AdamW, for what is no hidden matrix."""
    muon_learning_rate: float = 0.01
    warmup_steps: int = 30
    prompt_weight: float = 0.2
    """Of the prompt's tokens in the loss; the answer's is 1."""
    turns: Turns = "last"
    """Of a chat that are imitated."""
    vocabulary: int = 896
    """Pieces of the tokenizer, the bytes and the special tokens included."""
    context: int = 512
    """Tokens."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting of an example's training."""

    imitation: Imitation = field(default_factory=Imitation)
    steps: int = 20
    group_size: int = 8
    tasks_per_step: int = 16
    minibatches: int = 2
    learning_rate: float = 4e-4
    decay: float | None = None
    """Share of the run over which the rate falls to a twentieth; None keeps it."""
    temperature: float = 0.7
    """Of rollouts and of evaluations, before and after."""
    max_tokens: int = 48
    """Of one answer of the model."""


def rl_options(recipe: Recipe, seed: int) -> dict[str, Any]:
    """The arguments of LightningRL that a recipe fixes."""
    return {
        "group_size": recipe.group_size,
        "tasks_per_step": recipe.tasks_per_step,
        "minibatches": recipe.minibatches,
        "optimizer": Optimizer(learning_rate=recipe.learning_rate, decay_steps=decay_steps(recipe)),
        "temperature": recipe.temperature,
        "loss": PolicyLoss(clip_low=0.2, clip_high=0.28),
        "failure_reward": 0.0,
        "seed": seed,
    }


def decay_steps(recipe: Recipe) -> int | None:
    """Updates over which the learning rate falls."""
    if recipe.decay is None:
        return None
    return max(1, round(recipe.decay * recipe.steps * recipe.minibatches))
