"""What a learner is, and the losses, optimisers and adapters that every learner is told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args, runtime_checkable

import msgspec

from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.gae import DEFAULT_LAMBDA
from lightspan.schema.validation import check_choice, check_kind, check_number, check_whole

if TYPE_CHECKING:
    from lightspan.lightning.rows import Row
    from lightspan.lightning.transitions import TransitionKey
    from lightspan.protocols.engine import TokenEngine
    from lightspan.schema.token_records import TokenRecord

Which = Literal["policy", "base"]
KLEstimator = Literal["k1", "k2", "k3"]
LossForm = Literal["clip", "gspo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]


class LoRA(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters instead of full weights.

    Args:
        target_modules: the names of layers, in any sequence; or one text, which is
            `"all-linear"` or a pattern as PEFT has it.

    Raises:
        ConfigError: a rank below 1, an alpha not above 0, a dropout outside [0, 1), targets that
            are no names.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: Sequence[str] | Literal["all-linear"] = "all-linear"

    def __post_init__(self) -> None:
        check_whole("LoRA: rank", self.rank, 1)
        check_number("LoRA: alpha", self.alpha, above=0)
        check_number("LoRA: dropout", self.dropout, low=0, below=1)
        targets: Any = self.target_modules
        if isinstance(targets, str) and targets:
            return
        is_list = isinstance(targets, Sequence | Set) and not isinstance(targets, str)
        if not is_list or not targets or not all(isinstance(t, str) and t for t in targets):
            raise ConfigError(
                f"LoRA: target_modules={targets!r} must be names of layers, such as "
                '["q_proj", "v_proj"], or "all-linear"'
            )
        # PEFT's usual form is a list, and what is equal is looked up by its hash
        ordered = sorted(targets) if isinstance(targets, Set) else targets
        msgspec.structs.force_setattr(self, "target_modules", tuple(ordered))


def check_lora(lora: object) -> None:
    """Raise `ConfigError` unless it is None or a `LoRA`."""
    if isinstance(lora, int) and not isinstance(lora, bool):
        raise ConfigError(f"lora={lora!r}: use LoRA(rank={lora})")
    check_kind("lora", lora, LoRA)


class _Defaults(msgspec.Struct, frozen=True):
    """What a loss form has where nothing else is said."""

    clip_low: float
    clip_high: float
    dual_clip: float | None


FORM_DEFAULTS: Final[Mapping[LossForm, _Defaults]] = {
    "clip": _Defaults(0.2, 0.28, 3.0),
    "gspo": _Defaults(3e-4, 4e-4, None),
    "cispo": _Defaults(1.0, 4.0, None),
}
"""Clip-higher (DAPO, arXiv 2503.14476); GSPO's own (2507.18071); for CISPO no lower bound, as
published (2506.13585), and the upper one of ScaleRL (2510.13786): MiniMax-M1 gives none."""

_OF_FORM: Final[Any] = msgspec.UNSET
"""Stands for a default that depends on the form."""


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The policy-gradient loss, as `lightspan_torch.learner.losses` states it.

    Raises:
        ConfigError: an unknown `form` or `importance_level`; a `clip_low` outside [0, 1]; a
            negative `clip_high`, `kl` or `entropy`; a `dual_clip` not above 1, or of a form that
            has none; an `importance_cap` not above 0; an `importance_level` without it; anything
            not finite.
    """

    form: LossForm = "clip"
    """`clip`: PPO's, per token. `gspo`: one clipped ratio per call (one more forward pass).
    `cispo`: per token, of which clipping bounds the weight and never takes the gradient."""
    clip_low: float = _OF_FORM
    """The ratio's lower bound is 1 - this: 1 for none. Left out: `FORM_DEFAULTS`."""
    clip_high: float = _OF_FORM
    """The ratio's upper bound is 1 + this. Left out: `FORM_DEFAULTS`."""
    dual_clip: float | None = _OF_FORM
    """Bound of the ratio for negative advantages, of form `clip`; None for none. Left out: 3."""
    kl: float = 0.0
    """Weight of the KL to the starting weights."""
    kl_estimator: KLEstimator = "k3"
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    importance_cap: float | None = None
    """Truncation C of the engine/learner importance weight (2 is usual), for engines whose
    log-probabilities differ from the learner's. `update` then needs `old_logprobs`: one more
    forward pass. None: the ratio is to the recorded log-probs, which corrects for both at once."""
    importance_level: ImportanceLevel = "token"
    """Of what the importance weight is: of each token, or of each call (the product over its
    tokens)."""

    def __post_init__(self) -> None:
        check_choice("PolicyLoss: form", self.form, get_args(LossForm))
        self._fill_in(FORM_DEFAULTS[self.form])
        check_number("PolicyLoss: clip_low", self.clip_low, low=0, high=1)
        check_number("PolicyLoss: clip_high", self.clip_high, low=0)
        if self.dual_clip is not None:
            check_number("PolicyLoss: dual_clip", self.dual_clip, above=1)
            if self.form != "clip":
                raise ConfigError(
                    f"PolicyLoss: dual_clip={self.dual_clip} applies only to form='clip'; form="
                    f"{self.form!r} has none: leave it out, or None"
                )
        check_number("PolicyLoss: kl", self.kl, low=0)
        check_choice("PolicyLoss: kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_number("PolicyLoss: entropy", self.entropy, low=0)
        if self.importance_cap is not None:
            check_number("PolicyLoss: importance_cap", self.importance_cap, above=0)
        levels = get_args(ImportanceLevel)
        check_choice("PolicyLoss: importance_level", self.importance_level, levels)
        if self.importance_cap is None and self.importance_level != "token":
            raise ConfigError(
                f"PolicyLoss: importance_level={self.importance_level!r} applies only to the "
                "importance weight: give importance_cap=2.0, say"
            )

    def _fill_in(self, defaults: _Defaults) -> None:
        for name in defaults.__struct_fields__:
            if getattr(self, name) is _OF_FORM:
                msgspec.structs.force_setattr(self, name, getattr(defaults, name))

    @property
    def of_calls(self) -> str:
        """The setting by which the loss looks at whole calls; empty if at single tokens."""
        if self.form == "gspo":
            return "form='gspo'"
        return "importance_level='sequence'" if self.importance_level == "sequence" else ""


class SFTLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Negative log-likelihood."""


Loss = PolicyLoss | SFTLoss


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """How an update becomes a step.

    Raises:
        ConfigError: a rate or `max_grad_norm` not above 0; betas that are not two numbers in
            [0, 1); a negative `weight_decay` or `warmup_steps`; `decay_steps` below 1.
    """

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

    def __post_init__(self) -> None:
        check_choice("Optimizer: name", self.name, ("adamw", "muon"))
        check_number("Optimizer: learning_rate", self.learning_rate, above=0)
        check_number("Optimizer: muon_learning_rate", self.muon_learning_rate, above=0)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ConfigError(f"Optimizer: betas={self.betas!r} must be two numbers")
        for place, beta in enumerate(self.betas):
            check_number(f"Optimizer: betas[{place}]", beta, low=0, below=1)
        check_number("Optimizer: weight_decay", self.weight_decay, low=0)
        if self.max_grad_norm is not None:
            check_number("Optimizer: max_grad_norm", self.max_grad_norm, above=0)
        check_whole("Optimizer: warmup_steps", self.warmup_steps, 0)
        if self.decay_steps is not None:
            check_whole("Optimizer: decay_steps", self.decay_steps, 1)


class Critic(msgspec.Struct, frozen=True, kw_only=True):
    """Values of calls, learned beside each policy (`Learner.values`).

    A head of hidden + 1 numbers reads what the policy's trunk says at the last token of a call's
    prompt, and moves nothing of the trunk. Each update fits it to `Row.value_targets`, those of the
    update itself and of the ones before it.

    Raises:
        ConfigError: a rate not above 0; fewer than 1 of `steps` or `batches`; a negative
            `weight_decay` or `warmup`; a `lam` outside [0, 1].
    """

    learning_rate: float = 0.2
    """The most that one step moves a value by, in standard deviations of the targets. It falls to
    0 over the `steps` of each update. A multiple of the policy's own rate would mean something else
    for every model: a step of Adam's moves a value by its rate times the hidden size."""
    steps: int = 12
    """AdamW steps per update, each on all calls that are kept."""
    batches: int = 6
    """Updates whose hidden states are kept, the present one included. Those of earlier updates are
    of older weights; the fewer are kept, the less that matters and the noisier values are."""
    weight_decay: float = 0.1
    """Draws every value to the mean of the targets: a step by at most `learning_rate` times this
    part of the way. It is what keeps values near the mean where prompts say nothing."""
    lam: float = DEFAULT_LAMBDA
    """lambda of generalised advantage estimation (`lightspan.lightning.gae`), once values are
    trusted."""
    warmup: int = 5
    """Iterations in which lambda is 1, whatever the values explain."""

    def __post_init__(self) -> None:
        check_number("Critic: learning_rate", self.learning_rate, above=0)
        check_whole("Critic: steps", self.steps, 1)
        check_whole("Critic: batches", self.batches, 1)
        check_number("Critic: weight_decay", self.weight_decay, low=0)
        check_number("Critic: lam", self.lam, low=0, high=1)
        check_whole("Critic: warmup", self.warmup, 0)


class LearnerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner can honour; the rest is refused by name (design law 6)."""

    policies: int | None = None
    """How many policies at once; None for any number."""
    kl: bool = True
    entropy: bool = True
    lora: bool = True
    lora_dropout: bool = True
    """Whether adapters may have a dropout (`LoRA.dropout`)."""
    mixed_temperatures: bool = True
    """Whether tokens of one batch may have been sampled at different temperatures."""
    optimizers: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")
    """Which of `Optimizer.name`."""
    trainable_truncation: bool = False
    """Whether it computes the log-probabilities of calls sampled under top-p or top-k as the engine
    did: over the kept tokens alone. They are trained where the engine declares it too (design law
    11)."""
    trainable_grammar: bool = False
    """The same for calls sampled under a grammar or a forced tool choice."""
    values: bool = False
    """Whether it can have a `Critic`."""
    loss_forms: tuple[LossForm, ...] = ("clip",)
    """Which forms of `PolicyLoss` it computes."""
    importance_levels: tuple[ImportanceLevel, ...] = ("token",)
    """Which levels of importance weights."""

    def unsupported(self, optimizer: Optimizer, adapters: Sequence[LoRA | None]) -> list[str]:
        """What of how a training is set up it does not support, in words.

        Args:
            adapters: those of each policy.
        """
        given = [lora for lora in adapters if lora is not None]
        dropout = max((lora.dropout for lora in given), default=0.0)
        refused = {
            "LoRA": bool(given) and not self.lora,
            f"LoRA(dropout={dropout:g})": dropout > 0 and not self.lora_dropout,
            f"Optimizer(name={optimizer.name!r})": optimizer.name not in self.optimizers,
        }
        return [name for name, is_refused in refused.items() if is_refused]

    def check_temperatures(self, rows: Sequence[Row]) -> None:
        """Raise `UnsupportedError` if tokens that are trained together were sampled at different
        temperatures, and the learner does not compute that."""
        if self.mixed_temperatures:
            return
        found = sorted(
            {
                at
                for row in rows
                for at, mask in zip(row.temperatures, row.mask, strict=True)
                if mask
            }
        )
        if len(found) > 1:
            raise UnsupportedError(
                f"the learner does not support tokens of different temperatures in one update "
                f"(mixed_temperatures), and these were sampled at {found}: sample all at one, or "
                "use the torch learner"
            )

    def refusals(self, loss: Loss) -> list[str]:
        """What of a loss it does not support, in words."""
        if not isinstance(loss, PolicyLoss):
            return []
        refused = {
            f"the loss form {loss.form!r} (PolicyLoss.form)": loss.form not in self.loss_forms,
            "a KL term (PolicyLoss.kl)": loss.kl != 0 and not self.kl,
            "an entropy bonus (PolicyLoss.entropy)": loss.entropy != 0 and not self.entropy,
            f"importance weights per {loss.importance_level} (PolicyLoss.importance_level)": (
                loss.importance_level not in self.importance_levels
            ),
        }
        return [name for name, is_refused in refused.items() if is_refused]


@runtime_checkable
class Learner(Protocol):
    """Minimises the sum of weight · loss over the tokens of rows.

    Synchronous and owned by one thread at a time (the trainer calls it in a worker thread).
    """

    @property
    def capabilities(self) -> LearnerCapabilities: ...

    def policies(self) -> list[str]: ...

    def grammar_mismatches(self, records: Sequence[TokenRecord]) -> dict[TransitionKey, str]:
        """Which of these records, all of policies of this learner, cannot be computed under the
        grammar that they were sampled under, and why: another library compiled it, or it does not
        allow their tokens here. A learner without `trainable_grammar` is not asked."""
        return {}

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        """Per row, the log-probability of each token but the first given those before it, at the
        row's temperatures, and under its grammar (`Row.constraints`) over the allowed tokens alone;
        entry 0 is 0.0, so that lists are as long as `row.ids`.

        Raises:
            DataError: a row cannot be computed with, or its tokens do not follow their grammar.
        """
        ...

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """Per row, the value of each of its calls (`Row.responses`): the target to expect there, by
        the weights and the head of now. A head that was never fitted says 0.0.

        Raises:
            ConfigError: the learner has no critic.
            DataError: as `score`; or a call without a prompt, which has no last token.
        """
        raise ConfigError("this learner has no critic: its capabilities say values=False")

    def score_and_values(self, rows: Sequence[Row]) -> tuple[list[list[float]], list[list[float]]]:
        """`score` and `values` of the weights of now, in one pass where the learner can."""
        return self.score(rows), self.values(rows)

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

        Where rows have `value_targets` the critic is fitted too, after the step: no gradient of it
        reaches the policy. `value_loss`, the mean over calls of (value - target)², and
        `explained_variance` (where targets vary) are of the values from before the fit;
        `value_calls` is how many calls had a target.

        A non-finite loss or gradient changes nothing and shows as metric `skipped` = 1.
        Metrics: loss, grad_norm, learning_rate, entropy, kl, clip_fraction, ratio_mean, ratio_max,
        logprob_gap_mean, logprob_gap_max, tokens, rows, skipped.

        Raises:
            ConfigError: an `importance_cap` without `old_logprobs`; value targets, and no critic to
                be fitted to them.
            DataError: as `score`; value targets that are not one per call; a loss of whole calls,
                and a row that does not say where they are (`Row.responses`).
            UnsupportedError: a loss that `capabilities` do not declare.
        """
        ...

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        """Hand the weights of each named policy to the engine, as the given version."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that is needed to go on exactly: weights, optimiser, step counts, random state,
        critic. No pickle."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. A critic starts anew where there was none.

        Raises:
            CheckpointError: it cannot be read, or is of other policies or settings.
        """
        ...

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        """Write the model (and tokenizer) as a folder that `AutoModelForCausalLM` loads; with LoRA
        the adapter alone, as PEFT has it, or with `merge` the model that it makes of its base."""
        ...

    def weight_hash(self, policy: str) -> str:
        """SHA-256 over the policy's weights."""
        ...

    def usage(self) -> dict[str, float]:
        """What was used so far: `cpu_s` (CPU-seconds of the learner), `tokens`, `updates`."""
        ...

    def state(self) -> dict[str, Any]:
        """What `config.json` should say of this learner."""
        ...


class LearnerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer has a learner train."""

    models: Mapping[str, Any]
    """Policy → model: a name, a folder, or one that is loaded."""
    lora: Mapping[str, LoRA | None]
    """Policy → its adapters; None for whole weights."""
    optimizer: Optimizer
    critic: Critic | None = None
    seed: int = 0
    device: str = "cpu"


@runtime_checkable
class LearnerSpec(Protocol):
    """A learner in words, which a trainer builds (entry points of `lightspan.learners`).

    A learner with a method `close` has it called when the run ends.
    """

    def check(self, device: str) -> None:
        """Raise `ConfigError` for a device of the trainer's that it cannot use."""
        ...

    def build(self, request: LearnerRequest) -> Learner:
        """Build the learner.

        Raises:
            ConfigError: something that it cannot honour.
            ModelError: a model cannot be loaded.
        """
        ...

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Return part → bytes of the learner.

        Args:
            parameters: of a policy's model.
            lora: parameters of LoRA beside them; 0: the model's own are trained.
            device: the trainer's.
            reference: whether there is a KL term.
        """
        ...

    def describe(self, device: str) -> str:
        """Return a line for a person who waits for it to be built; empty for none.

        Args:
            device: the trainer's.
        """
        ...
