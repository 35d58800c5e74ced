"""Protocol of learners, and the settings of losses, optimisers, adapters and critics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args, runtime_checkable

import msgspec

from lightspan.errors import ConfigError, UnsupportedError
from lightspan.schema import validation
from lightspan.schema.validation import check_choice, check_kind, check_number, check_whole

if TYPE_CHECKING:
    from lightspan.lightning.rows import Row
    from lightspan.lightning.transitions import TransitionKey
    from lightspan.protocols.engine import EngineCapabilities, TokenEngine
    from lightspan.schema.token_records import TokenRecord

Which = Literal["policy", "base"]
KLEstimator = Literal["k2", "k3"]
LossForm = Literal["clip", "gspo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]
Correction = Literal["auto", "off"]


class LoRA(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of low-rank adapters, which are trained instead of full weights.

    Args:
        dropout: dropout of the adapters' inputs in `SFT`; `LightningRL` refuses it.
        target_modules: names of layers, or one text: `"all-linear"` or a pattern in PEFT's syntax.
            Layers with tied weights (often `lm_head` and `embed_tokens`) are refused.

    Raises:
        ConfigError: a rank below 1, an alpha not above 0, a dropout outside [0, 1), or invalid
            names of layers.
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
        # PEFT's usual form is a list, but this struct has to be hashable
        ordered = sorted(targets) if isinstance(targets, Set) else targets
        msgspec.structs.force_setattr(self, "target_modules", tuple(ordered))


def check_lora(lora: object) -> None:
    """Raise `ConfigError` unless `lora` is None or a `LoRA`."""
    if isinstance(lora, int) and not isinstance(lora, bool):
        raise ConfigError(f"lora={lora!r}: use LoRA(rank={lora})")
    check_kind("lora", lora, LoRA)


FORM_DEFAULTS: Final[Mapping[LossForm, Mapping[str, float | None]]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": None},
}
"""Loss form → its default bounds. Sources (arXiv): clip: clip-higher of DAPO (2503.14476). gspo:
GSPO (2507.18071). cispo: MiniMax-M1 (2506.13585), which has no lower bound and publishes no upper
one; the upper bound is that of ScaleRL (2510.13786).
"""

CORRECTION_CAP: Final = 2.0
"""`importance_cap` of the automatic correction (truncated importance sampling, as in verl)."""
CORRECTION_MASK: Final = 3.0
"""`importance_mask` of the automatic correction (TRL 1.16: `vllm_importance_sampling_clip_max`)."""

_OF_FORM: Final[Any] = msgspec.UNSET
"""Placeholder for a default that depends on the form (`FORM_DEFAULTS`)."""


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Policy-gradient loss, defined in `lightspan_torch.learner.losses`.

    Raises:
        ConfigError: an unknown `form` or `importance_level`; a `clip_low` outside [0, 1]; a
            negative `clip_high`, `kl` or `entropy`; a `dual_clip` not above 1, or with another form
            than `clip`; an `importance_cap` not above 0; an `importance_mask` not above 1; a number
            that is not finite; a setting without effect: another `importance_level` than `token`
            without an `importance_cap`, another `kl_estimator` than `k3` without `kl`, or
            `correction="off"` with an `importance_cap` or `importance_mask`.
    """

    form: LossForm = "clip"
    """`clip`: PPO's loss, with a ratio per token. `gspo`: one clipped ratio per call, the geometric
    mean over its tokens without those that a grammar forces (one more forward pass). `cispo`: a
    ratio per token; clipping bounds the token's weight and never removes its gradient. The papers'
    means over sequences (GSPO) and tokens (CISPO) are `LightningRL(weight=)`."""
    clip_low: float = _OF_FORM
    """The ratio's lower bound is 1 - `clip_low`; 1 means no bound. The default depends on `form`
    (`FORM_DEFAULTS`).
    """
    clip_high: float = _OF_FORM
    """The ratio's upper bound is 1 + `clip_high`; the default depends on `form` (`FORM_DEFAULTS`).
    """
    dual_clip: float | None = _OF_FORM
    """Bound of the ratio for negative advantages, with form `clip`; None for no bound. Default:
    3."""
    kl: float = 0.0
    """Weight of a KL divergence between the policy and the starting weights; `kl_estimator` decides
    of which."""
    kl_estimator: KLEstimator = "k3"
    """`k2` has the gradient of KL(policy‖start), the reverse KL of RLHF. `k3`, the term of GRPO
    (arXiv 2402.03300), has that of KL(start‖policy), although its value estimates KL(policy‖start).
    Both hold per token, for the distributions of the next token after the sampled prefix, and not
    for whole answers. There is no `k1`, because its gradient as a loss is noise around 0.
    """
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    importance_cap: float | None = None
    """Maximum of the importance weight, usually 2; None for no importance weight.

    The weight is the ratio of the learner's to the engine's probability of a token. It corrects for
    engines whose log-probabilities differ from the learner's. `update` then needs `old_logprobs`,
    one more forward pass. Without a weight, the loss's ratio is to the engine's recorded
    log-probabilities, so that their difference is clipped too.
    """
    importance_level: ImportanceLevel = "token"
    """Whether each token has an importance weight, or each call (the product over its tokens)."""
    importance_mask: float | None = None
    """Maximum ratio of a call, the product over its tokens of the learner's to the engine's
    probability. Calls above it get no gradient of the policy loss; they still count in its
    denominator. None for no maximum. It needs `old_logprobs` too.

    `LightningRL` applies it only to calls whose tokens were all sampled by the current weights. For
    other calls (`replay`, `overlap`), the ratio would measure what was learned since. They are not
    masked; their loss's ratio is to the recorded log-probabilities, without an importance weight.
    """
    correction: Correction = "auto"
    """`auto`: if the engine's and the learner's `numerics` differ or are unknown, and neither
    `importance_cap` nor `importance_mask` is set, `LightningRL` uses importance_cap=2 and
    importance_mask=3, both only for calls that the current weights sampled. `off`: it never
    does."""

    def __post_init__(self) -> None:
        kinds = {"form": LossForm, "kl_estimator": KLEstimator, "importance_level": ImportanceLevel}
        kinds["correction"] = Correction
        for name, kind in kinds.items():
            check_choice(f"PolicyLoss: {name}", getattr(self, name), get_args(kind))
        for name, value in FORM_DEFAULTS[self.form].items():
            if getattr(self, name) is _OF_FORM:
                msgspec.structs.force_setattr(self, name, value)
        check_number("PolicyLoss: clip_low", self.clip_low, low=0, high=1)
        for name in ("clip_high", "kl", "entropy"):
            check_number(f"PolicyLoss: {name}", getattr(self, name), low=0)
        check_number("PolicyLoss: dual_clip", self.dual_clip, above=1, optional=True)
        if self.dual_clip is not None and self.form != "clip":
            idle = f"PolicyLoss: dual_clip={self.dual_clip} applies only to form='clip'"
            raise ConfigError(f"{idle}, not {self.form!r}: leave it out")
        check_number("PolicyLoss: importance_cap", self.importance_cap, above=0, optional=True)
        check_number("PolicyLoss: importance_mask", self.importance_mask, above=1, optional=True)
        reason = "without importance_cap=: set that too, such as importance_cap=2.0"
        validation.check_effect(self, "importance_level", self.importance_cap is not None, reason)
        reason = "with importance_cap= or importance_mask=, which turn it off too: leave it out"
        validation.check_effect(self, "correction", not self.needs_old_logprobs, reason)
        validation.check_effect(self, "kl_estimator", self.kl, "without kl=: set it, as kl=0.02")

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `Learner.update` needs the learner's log-probabilities before the update."""
        return self.importance_cap is not None or self.importance_mask is not None

    def corrected(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> PolicyLoss:
        """Return this loss, with the automatic correction if it applies (see `correction`)."""
        is_same = bool(engine.numerics) and engine.numerics == learner.numerics
        if is_same or self.needs_old_logprobs or self.correction == "off":
            return self
        bound = CORRECTION_MASK if learner.importance_mask else None
        return msgspec.structs.replace(self, importance_cap=CORRECTION_CAP, importance_mask=bound)


class SFTLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Negative log-likelihood loss."""


Loss = PolicyLoss | SFTLoss


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Optimiser settings.

    Raises:
        ConfigError: a rate or `max_grad_norm` not above 0; betas that are not two numbers in
            [0, 1); a negative `weight_decay` or `warmup_steps`; `decay_steps` below 1; a
            `muon_learning_rate` with another `name` than `muon`.
    """

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: torch.optim.Muon on the 2-D hidden matrices, AdamW on the rest."""
    learning_rate: float = 1e-6
    muon_learning_rate: float = 0.01
    """Rate of the matrices that `muon` trains."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Decay of matrices; norms and biases do not decay."""
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Steps after the warm-up over which the learning rate falls linearly to a twentieth, which it
    then keeps; None keeps it constant."""

    def __post_init__(self) -> None:
        check_choice("Optimizer: name", self.name, ("adamw", "muon"))
        check_number("Optimizer: learning_rate", self.learning_rate, above=0)
        check_number("Optimizer: muon_learning_rate", self.muon_learning_rate, above=0)
        reason = f"with name={self.name!r}: set learning_rate=, or name='muon'"
        validation.check_effect(self, "muon_learning_rate", self.name == "muon", reason)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ConfigError(f"Optimizer: betas={self.betas!r} must be two numbers")
        for place, beta in enumerate(self.betas):
            check_number(f"Optimizer: betas[{place}]", beta, low=0, below=1)
        check_number("Optimizer: weight_decay", self.weight_decay, low=0)
        check_number("Optimizer: max_grad_norm", self.max_grad_norm, above=0, optional=True)
        check_whole("Optimizer: warmup_steps", self.warmup_steps, 0)
        check_whole("Optimizer: decay_steps", self.decay_steps, 1, optional=True)


class Critic(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a critic: a model that predicts the rewards that follow a call of a policy.

    A linear head (hidden size + 1 parameters) reads the policy's last hidden state at the last
    token of a call's prompt; its gradient does not reach the policy. Each update fits the head to
    the targets (`Row.value_targets`) of this and earlier updates.

    Raises:
        ConfigError: a rate not above 0; fewer than 1 of `steps` or `batches`; a negative
            `weight_decay` or `warmup`; a `lam` outside [0, 1].
    """

    learning_rate: float = 0.2
    """Maximum change of a value per step, in standard deviations of the targets, for a call whose
    state is one standard deviation from the mean in each dimension; it grows with this distance. It
    falls to 0 over the `steps` of each update. A rate of Adam as for the policy would depend on the
    model, because a step of Adam changes a value by the rate times the hidden size."""
    steps: int = 12
    """AdamW steps per update, each on all stored calls."""
    batches: int = 6
    """Number of updates whose hidden states are stored, including the current one. The states of
    earlier updates are of older weights; storing fewer makes values less stale, but noisier."""
    weight_decay: float = 0.1
    """Decay of every value towards the mean of the targets, by at most the fraction
    `learning_rate` · `weight_decay` per step. It keeps the values of uninformative prompts near the
    mean."""
    lam: float | None = None
    """Lambda of generalised advantage estimation, once the values are trusted; before that, lambda
    is 1 (`lightspan.lightning.gae`). None for .95 with `estimator="ppo"`, and for 1, which is
    unbiased, with groups.
    """
    warmup: int = 5
    """Minimum number of iterations with lambda 1; refused if `lam` is 1 anyway."""

    def __post_init__(self) -> None:
        check_number("Critic: learning_rate", self.learning_rate, above=0)
        for name, low in (("steps", 1), ("batches", 1), ("warmup", 0)):
            check_whole(f"Critic: {name}", getattr(self, name), low)
        check_number("Critic: weight_decay", self.weight_decay, low=0)
        check_number("Critic: lam", self.lam, low=0, high=1, optional=True)


class LearnerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Features that a learner supports; use of an unsupported feature raises an error."""

    policies: int | None = None
    """Maximum number of policies; None for no limit."""
    kl: bool = True
    entropy: bool = True
    lora: bool = True
    lora_dropout: bool = True
    """Whether `LoRA.dropout` is supported."""
    mixed_temperatures: bool = True
    """Whether one batch may mix sampling temperatures."""
    optimizers: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")
    """Supported values of `Optimizer.name`."""
    trainable_truncation: bool = False
    """Whether log-probabilities of calls under top-p or top-k are computed over the kept tokens
    alone, as in the engine. Such calls are trained if the engine has the capability of this name
    too.
    """
    trainable_grammar: bool = False
    """Whether log-probabilities are computed over the tokens that a grammar or a forced tool choice
    allows. Such calls are trained if the engine has the capability of this name too.
    """
    values: bool = False
    """Whether a `Critic` is supported."""
    images: bool = False
    """Whether rows with images are supported."""
    loss_forms: tuple[LossForm, ...] = ("clip",)
    """Supported values of `PolicyLoss.form`."""
    importance_levels: tuple[ImportanceLevel, ...] = ("token",)
    """Supported values of `PolicyLoss.importance_level`."""
    importance_mask: bool = False
    """Whether `PolicyLoss.importance_mask` is supported."""
    numerics: str = ""
    """The same as `EngineCapabilities.numerics`, of the learner."""

    def unsupported(self, optimizer: Optimizer, adapters: Sequence[LoRA | None]) -> list[str]:
        """Return as texts the given settings that the learner does not support.

        Args:
            optimizer: settings of the optimiser.
            adapters: LoRA settings of each policy; None for training of full weights.
        """
        loras = [lora for lora in adapters if lora is not None]
        dropout = max((lora.dropout for lora in loras), default=0.0)
        refused = {
            "LoRA": bool(loras) and not self.lora,
            f"LoRA(dropout={dropout:g})": dropout > 0 and not self.lora_dropout,
            f"Optimizer(name={optimizer.name!r})": optimizer.name not in self.optimizers,
        }
        return [name for name, is_refused in refused.items() if is_refused]

    def check_temperatures(self, rows: Sequence[Row]) -> None:
        """Raise `UnsupportedError` if trained tokens have different temperatures.

        With the capability `mixed_temperatures` nothing is checked.
        """
        if self.mixed_temperatures:
            return
        temperatures = sorted({t for row in rows for t in compress(row.temperatures, row.mask)})
        if len(temperatures) > 1:
            raise UnsupportedError(
                f"the learner does not support tokens of different temperatures in one update "
                f"(mixed_temperatures), and these were sampled at {temperatures}: sample all at "
                "one temperature, or use the torch learner"
            )

    def refusals(self, loss: Loss) -> list[str]:
        """Return the unsupported settings of a loss, as texts; empty if all are supported."""
        if not isinstance(loss, PolicyLoss):
            return []
        refused = {
            f"the loss form {loss.form!r} (PolicyLoss.form)": loss.form not in self.loss_forms,
            "a KL term (PolicyLoss.kl)": loss.kl != 0 and not self.kl,
            "an entropy bonus (PolicyLoss.entropy)": loss.entropy != 0 and not self.entropy,
            f"importance weights per {loss.importance_level} (PolicyLoss.importance_level)": (
                loss.importance_level not in self.importance_levels
            ),
            "masks of calls (PolicyLoss.importance_mask)": (
                loss.importance_mask is not None and not self.importance_mask
            ),
        }
        return [name for name, is_refused in refused.items() if is_refused]


@runtime_checkable
class Learner(Protocol):
    """Trains the weights of policies. It minimises the sum of weight · loss over the rows' tokens.

    It is synchronous, and used by one thread at a time: a worker thread of the trainer.
    """

    @property
    def capabilities(self) -> LearnerCapabilities: ...

    def policies(self) -> list[str]: ...

    def grammar_mismatches(self, records: Sequence[TokenRecord]) -> dict[TransitionKey, str]:
        """Return key → reason, for each record that cannot be scored under its grammar.

        Either another library compiled the grammar, or the grammar as compiled here does not allow
        the record's tokens. Called only with the capability `trainable_grammar`.

        Args:
            records: token records of this learner's policies.
        """
        return {}

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        """Return, per row, the log-probability of each token given the tokens before it.

        The row's temperatures are applied; under a grammar (`Row.constraints`), probabilities are
        normalised over the allowed tokens. Entry 0 is 0.0, so that lists are as long as `row.ids`.

        Args:
            which: `"policy"` for the current weights, `"base"` for the starting weights.

        Raises:
            DataError: a row is invalid, or its tokens do not follow their grammar.
        """

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return, per row, the critic's value of each call (`Row.responses`).

        The values are computed with the current weights and the current head of the critic. They
        are 0.0 before the critic is first fitted.

        Raises:
            ConfigError: the learner has no critic.
            DataError: a row is invalid, its tokens do not follow their grammar, or a call has an
                empty prompt.
        """
        raise ConfigError("this learner has no critic: its capabilities say values=False")

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """Make one optimiser step per policy on rows of whole rollouts, and return metrics.

        If rows have value targets, the critic is fitted after the step. Its gradient does not reach
        the policy. These metrics describe it:

        - `value_loss`: the mean over calls of (value - target)², before the fit
        - `explained_variance`: present if the targets vary, also from values before the fit
        - `value_calls`: the number of calls with a target

        If the loss or the gradient is not finite, no weights change, and the metric `skipped` is 1.

        Metrics: loss, grad_norm, learning_rate, entropy, kl, clip_fraction, ratio_mean, ratio_max,
        logprob_gap_mean, logprob_gap_max, tokens, rows, skipped.

        Args:
            rows: rows to train.
            loss: loss of each token.
            old_logprobs: log-probabilities that `score` returned for the rows before the first
                update on their batch. The loss then uses the ratio of the current probabilities to
                these, times the importance weight min(old / recorded, `importance_cap`). If None,
                the loss uses the ratio of the current probabilities to the recorded ones.

        Raises:
            ConfigError: an `importance_cap` or `importance_mask` without `old_logprobs`; value
                targets without a critic.
            DataError: a row is invalid; its tokens do not follow their grammar; it has not one
                value target per call; the loss is of whole calls and a row has no `Row.responses`.
            UnsupportedError: the `capabilities` do not include the loss.
        """

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        """Copy the weights of each policy to the engine.

        Args:
            engine: engine that serves the policies.
            versions: policy → its new version.
        """

    def save(self, folder: Path) -> None:
        """Write the complete state to `folder`, without pickle.

        It has weights, optimiser, step counts, random state and critic.
        """

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote.

        If that state has no critic, the critic starts untrained.

        Raises:
            CheckpointError: the checkpoint cannot be read, or has other policies or settings.
        """

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        """Write model and tokenizer to `folder`, in the form that `AutoModelForCausalLM` loads.

        Args:
            policy: name of the policy.
            folder: folder to write.
            merge: with LoRA, whether to write the merged model; if not, only the adapter is
                written, in PEFT's format.
        """

    def weight_hash(self, policy: str) -> str:
        """Return the SHA-256 of the policy's weights."""

    def usage(self) -> dict[str, float]:
        """Return the counters `cpu_s` (CPU-seconds of the learner), `tokens` and `updates`."""

    def state(self) -> dict[str, Any]:
        """Return the learner's settings and library versions, as JSON values."""


class LearnerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner is built for: models, adapters, optimiser, critic and a device."""

    models: Mapping[str, Any]
    """Policy → model: a name, a folder, or a loaded model."""
    lora: Mapping[str, LoRA | None]
    """Policy → its adapters; None for full weights."""
    optimizer: Optimizer
    critic: Critic | None = None
    seed: int = 0
    device: str = "cpu"


@runtime_checkable
class LearnerSpec(Protocol):
    """Configuration of a learner, from which a trainer builds it.

    Plugins provide such classes by the entry points `lightspan.learners`. If the learner has a
    method `close`, it is called at the end of the run.
    """

    def check(self, device: str) -> None:
        """Raise `ConfigError` if the learner cannot use the trainer's device."""

    def build(self, request: LearnerRequest) -> Learner:
        """Build the learner.

        Raises:
            ConfigError: a setting is not supported.
            ModelError: a model cannot be loaded.
        """

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Return the memory that the learner needs for one policy: part → bytes.

        Args:
            parameters: number of parameters of the policy's model.
            lora: number of LoRA parameters; 0 for training of full weights.
            device: the trainer's device.
            reference: whether the loss has a KL term.
        """

    def describe(self, device: str) -> str:
        """Return a line to print while the learner is built; empty for none.

        Args:
            device: the trainer's device.
        """
