"""Learners update weights. Protocol only: implementations are modules of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from lightspan.engines import TokenEngine
    from lightspan.lightning.rows import Row

Which = Literal["policy", "base"]
KLEstimator = Literal["k1", "k2", "k3"]


class LoRA(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters instead of full weights."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The clipped policy-gradient loss per token, as `lightspan.learners.losses` states it."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    """Clip-higher (DAPO, 2503.14476)."""
    dual_clip: float | None = 3.0
    """Bound of the ratio for negative advantages; None for none."""
    kl: float = 0.0
    """Weight of the KL to the starting weights."""
    kl_estimator: KLEstimator = "k3"
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    importance_cap: float | None = None
    """Truncation C of the engine/learner importance weight (2 is usual), for engines whose
    log-probabilities differ from the learner's. `update` then needs `old_logprobs`: one more
    forward pass. None: the ratio is to the recorded log-probs, which corrects for both at once."""


class SFTLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Negative log-likelihood."""


Loss = PolicyLoss | SFTLoss


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """How an update becomes a step."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: torch.optim.Muon on the 2-D hidden matrices, AdamW on the rest."""
    learning_rate: float = 1e-6
    muon_learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Steps over which the rate falls linearly to a twentieth; None keeps it."""


class LearnerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner can honour; the rest is refused by name (design law 6)."""

    policies: int | None = None
    """How many policies at once; None for any number."""
    kl: bool = True
    entropy: bool = True
    lora: bool = True
    mixed_temperatures: bool = True
    trainable_truncation: bool = False
    """Of calls sampled under top-p or top-k it computes log-probabilities as the engine did: over
    the kept tokens alone. They are trained where the engine declares it too (design law 11)."""
    trainable_grammar: bool = False
    """The same of calls sampled under a grammar or a forced tool choice."""


@runtime_checkable
class Learner(Protocol):
    """Minimises the sum of weight · loss over the tokens of rows.

    Synchronous and owned by one thread at a time (the trainer calls it in a worker thread).
    """

    @property
    def capabilities(self) -> LearnerCapabilities: ...

    def policies(self) -> list[str]: ...

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        """Per row, the log-probability of each token but the first given those before it, at the
        row's temperatures; entry 0 is 0.0, so that lists are as long as `row.ids`."""
        ...

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """One optimiser step per policy on these rows (whole rollouts); returns metrics.

        `old_logprobs` is what `score` said of these rows before the first update on their batch:
        the ratio is then to these, times the importance weight min(old / recorded, C). Without
        them the ratio is to the recorded log-probs. Never both: it would count twice.

        A non-finite loss or gradient changes nothing and shows as metric `skipped` = 1.
        Metrics: loss, grad_norm, learning_rate, entropy, kl, clip_fraction, ratio_mean, ratio_max,
        logprob_gap_mean, logprob_gap_max, tokens, rows, skipped.
        """
        ...

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        """Hand the weights of each named policy to the engine, as the given version."""
        ...

    def save(self, folder: Path) -> None:
        """Everything to go on exactly: weights, optimiser, step counts, RNG. No pickle."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of `save`. Raises `CheckpointError`."""
        ...

    def export(self, policy: str, folder: Path) -> None:
        """The model (and tokenizer) as a folder that `AutoModelForCausalLM` loads; with LoRA,
        merged."""
        ...

    def weight_hash(self, policy: str) -> str:
        """SHA-256 over the policy's weights."""
        ...

    def usage(self) -> dict[str, float]:
        """Counters: `cpu_s` (CPU-seconds of the learner), `tokens`, `updates`."""
        ...

    def state(self) -> dict[str, Any]:
        """What `config.json` should say of this learner."""
        ...
