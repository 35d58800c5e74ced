"""The embedded learner: torch in this process, on a CPU or one GPU.

Rows with a common prefix form a tree, in which each shared token is computed once (`prefix_tree`,
`tree_forward`). The loss is evaluated for each token of each row, so a shared token may have
different advantages and ratios in different rows. A pass has at most `token_budget` tokens. The
gradients of all passes add up to those of one big batch. Trees of similar size are padded on the
right to one size and computed together. Logits are computed only for trained tokens, because logits
need most of the memory and time.

All randomness (LoRA's initial weights and dropout) comes from the learner's own seed. The state of
torch's global generator, with which engines sample, stays unchanged.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightspan.errors import CheckpointError, ConfigError, DataError, NotFoundError
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import TransitionKey
from lightspan.protocols.engine import LoRAWeights, TokenEngine
from lightspan.protocols.learner import (
    Critic,
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    Optimizer,
    PolicyLoss,
    Which,
)
from lightspan.schema.token_records import TokenRecord
from lightspan.schema.validation import check_kind
from lightspan_torch.engine.grammars import LIBRARY, Grammars
from lightspan_torch.engine.oom import explained
from lightspan_torch.engine.positions import exact_length
from lightspan_torch.engine.tokenizer import TransformersTokenizer, context_length
from lightspan_torch.engine.weights import (
    SharedModels,
    avoid_cudnn_attention,
    check_device,
    load_model,
    numerics,
)
from lightspan_torch.learner.call_index import call_setting
from lightspan_torch.learner.checkpoint import (
    FORMAT,
    check_manifest,
    compact,
    read,
    reading,
    write_manifest,
    writing,
)
from lightspan_torch.learner.critic import (
    CallStates,
    ValueHead,
    check_calls,
    check_targets,
    first_tokens,
    targets_of,
)
from lightspan_torch.learner.images import RowImages, checked_vision
from lightspan_torch.learner.masks import Replays
from lightspan_torch.learner.metrics import MetricAccumulator, over_policies
from lightspan_torch.learner.microbatch import advice, default_token_budget
from lightspan_torch.learner.policy_model import (
    Stepper,
    TrainedModel,
    default_dtype,
    forked_random,
    initial_random_state,
    random_state,
)
from lightspan_torch.learner.prefix_tree import Tree, plain as each_by_itself, share
from lightspan_torch.learner.token_losses import (
    FrozenStates,
    RowKey,
    SelectedTokens,
    TrainedScores,
    row_key,
    scoring_head,
    training_head,
)
from lightspan_torch.learner.tree_forward import (
    Pass,
    Selected,
    decoder,
    pair_cost,
    plan,
    sweep,
    tree_refusal,
)
from lightspan_torch.learner.validation import check_loss, check_names, check_rows, ordered
from lightspan_torch.threads import limit_threads
from lightspan_torch.vision.features import Vision

CAPABILITIES: Final = LearnerCapabilities(
    policies=None,
    kl=True,
    entropy=True,
    lora=True,
    mixed_temperatures=True,
    optimizers=("adamw", "muon") if hasattr(torch.optim, "Muon") else ("adamw",),
    trainable_grammar=True,
    values=True,
    loss_forms=("clip", "gspo", "cispo"),
    importance_levels=("token", "sequence"),
    importance_mask=True,
    images=True,
)


class _Passes(NamedTuple):
    """The passes over the rows of one policy, and the images of these rows."""

    passes: Sequence[Pass]
    images: RowImages | None


class TorchLearner(Learner):
    """A learner that trains one or several policies in this process.

    Args:
        models: policy name → folder, hub name, or a loaded model. A loaded model is copied.
        optimizer: the optimiser's settings; None for the defaults of `Optimizer`.
        lora: LoRA settings, for all policies or by policy name; None to train full weights.
            Policies with LoRA on the same model share its weights.
        device: `"cpu"`, `"cuda"` or `"cuda:0"`.
        dtype: data type of the weights; None for `default_dtype`.
        token_budget: maximum number of tokens in one forward pass, padding included; None for a
            default that depends on the device and the models. Lower it when memory runs out.
        seed: seed of all randomness.
        share_prefixes: whether a common prefix of several rows is computed once. Rows are computed
            separately if the model does not support this, or in updates with LoRA's dropout,
            because each row needs its own dropout. `state()["share_prefixes"]` shows it for each
            policy.
        tokenizers: policy name → tokenizer, for policies whose model folder has none. Only calls
            that were sampled under a grammar need a tokenizer.
        critic: settings of the critics that estimate values of calls; None for no critic.
        train_vision: whether the vision part of the model is trained too, for policies
            without LoRA.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        optimizer: Optimizer | None = None,
        lora: LoRA | Mapping[str, LoRA | None] | None = None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        token_budget: int | None = None,
        seed: int = 0,
        share_prefixes: bool = True,
        tokenizers: Mapping[str, TransformersTokenizer] | None = None,
        critic: Critic | None = None,
        train_vision: bool = False,
    ) -> None:
        if not models:
            raise ConfigError("a learner needs at least one policy: models={'name': folder}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, not {token_budget}")
        self._optimizer = optimizer or Optimizer()
        check_kind("critic", critic, Critic)
        check_device(device)
        avoid_cudnn_attention(device)
        limit_threads(device)
        self._device = torch.device(device)
        self._seed = seed
        adapters = lora if isinstance(lora, Mapping) else dict.fromkeys(models, lora)
        self._tokenizers = dict(tokenizers or {})
        check_names("lora", adapters, models)
        check_names("tokenizers", self._tokenizers, models)
        if train_vision and any(adapters.get(policy) for policy in models):
            raise ConfigError(
                "train_vision=True trains all weights, and LoRA adapts the text part alone: leave "
                "train_vision out, or train without LoRA"
            )
        self._models: dict[str, TrainedModel] = {}
        frozen_dtype = dtype or default_dtype(device, LoRA())
        shared = SharedModels(partial(load_model, device=device, dtype=frozen_dtype))
        for policy, source in models.items():
            adapter = adapters.get(policy)
            self._models[policy] = TrainedModel(
                source,
                lora=adapter,
                device=device,
                dtype=dtype or default_dtype(device, adapter),
                seed=seed,
                shared=shared,
                train_vision=train_vision,
            )
        self._steppers = {
            policy: Stepper(model, self._optimizer) for policy, model in self._models.items()
        }
        self._padded = {
            policy: exact_length(model.plain, context_length(model.plain.config))
            for policy, model in self._models.items()
        }
        """Policy → number of tokens up to which rows may be padded to the length of others."""
        self._refusals = {
            policy: tree_refusal(model.plain) if share_prefixes else "share_prefixes=False"
            for policy, model in self._models.items()
        }
        """Policy → why its rows are computed one by one; "" if they are computed in trees."""
        self._visions: dict[str, Vision] = {}
        """Policy → vision part, for policies whose rows had images."""
        self._replays = {policy: Replays(partial(self._grammars, policy)) for policy in models}
        self._critic = critic
        self._heads = {
            policy: ValueHead(model.hidden_size, critic, self._device)
            for policy, model in self._models.items()
            if critic is not None
        }
        """Policy → value head; no entries without a critic."""
        models_of = [model.plain for model in self._models.values()]
        self._budget = token_budget or default_token_budget(device, models_of)
        self._random = initial_random_state(seed, self._device)
        self._served = dict.fromkeys(models, (0, 0))
        """Policy → (last published version, number of optimiser steps at that time)."""
        self._numerics = numerics(models_of)
        self._teacher: FrozenStates | None = None
        self._counters = {"cpu_s": 0.0, "tokens": 0.0, "updates": 0.0}

    @property
    def capabilities(self) -> LearnerCapabilities:
        return msgspec.structs.replace(CAPABILITIES, numerics=self._numerics)

    def policies(self) -> list[str]:
        return list(self._models)

    def usage(self) -> dict[str, float]:
        return dict(self._counters)

    def state(self) -> dict[str, Any]:
        critic = {} if self._critic is None else {"critic": msgspec.to_builtins(self._critic)}
        return {
            "learner": "torch",
            "torch": torch.__version__,
            "device": str(self._device),
            "token_budget": self._budget,
            "share_prefixes": {name: self._sharing(name) for name in self._models},
            "seed": self._seed,
            "optimizer": msgspec.to_builtins(self._optimizer),
            "lora": {name: msgspec.to_builtins(model.lora) for name, model in self._models.items()},
            "steps": {name: stepper.steps for name, stepper in self._steppers.items()},
            **critic,
        }

    def weight_hash(self, policy: str) -> str:
        return self._model(policy).hash()

    def grammar_mismatches(self, records: Sequence[TokenRecord]) -> dict[TransitionKey, str]:
        with self._metered():
            checked = {
                (record.attempt_id, record.call_id, record.choice): self._mismatch(record)
                for record in records
                if record.grammar
            }
        return {key: reason for key, reason in checked.items() if reason}

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        self._check_scored(rows)
        return self._scores_and_states(rows, which, states=False)[0]

    def score_trained(self, rows: Sequence[Row]) -> TrainedScores:
        """Compute what the current weights say about the rows' trained tokens.

        It computes no logits of other tokens, so it takes less time than `score`.

        Raises:
            DataError, NotFoundError: as `score`.
        """
        self._check_scored(rows)
        scores = [[0.0] * len(row.ids) for row in rows]
        states: dict[RowKey, Tensor] = {}
        with self._metered(), self._explain_memory("scoring", rows):
            for policy, indices in self._by_policy(rows).items():
                order = ordered(rows, indices)
                own = [rows[index] for index in order]
                masks = [[False, *row.mask[1:]] for row in own]
                tokens = SelectedTokens(own, masks, self._device, self._replays[policy])
                count, size = len(tokens.targets), self._models[policy].hidden_size
                before = None
                if self._models[policy].hidden_to_logits:
                    before = CallStates(range(count), count, size, self._device)
                passes = self._plan(policy, tokens)
                logprobs = self._logprobs(policy, "policy", passes, tokens, before)
                parts = zip(order, tokens.selected, tokens.by_row(logprobs), strict=True)
                for index, places, values in parts:
                    for place, value in zip(places, values, strict=True):
                        scores[index][place] = value
                if before is not None:
                    counts = [len(places) for places in tokens.selected]
                    split = before.states.cpu().split(counts)  # type: ignore[no-untyped-call]
                    states |= dict(zip(map(row_key, own), split, strict=True))
        return TrainedScores(scores, states)

    def logits_of(self, policy: str) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states of `score_trained` to logits.

        Raises:
            NotFoundError: the policy is unknown.
        """
        plain = self._model(policy).plain
        layer = plain.get_output_embeddings()
        return lambda states: layer(states.to(self._device, plain.dtype))

    @contextmanager
    def taught(self, teacher: FrozenStates | None) -> Iterator[None]:
        """Add KL(policy‖teacher) of each trained token to the loss of updates in the `with` block.

        The divergence is that of the next token, over the whole vocabulary, at the token's
        temperature and under its grammar.

        Args:
            teacher: states of the teacher for all rows of the updates; None to add nothing.
        """
        self._teacher = teacher
        try:
            yield
        finally:
            self._teacher = None

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        self._check_values(rows)
        return self._values_of(rows, self._scores_and_states(rows, None, states=True)[1])

    def _check_scored(self, rows: Sequence[Row]) -> None:
        """Raise `DataError` if a row is invalid, `NotFoundError` if its policy is unknown."""
        check_rows(rows, trained=False)
        self._by_policy(rows)

    def _check_values(self, rows: Sequence[Row]) -> None:
        """Raise an error if the values of the rows' calls cannot be computed.

        Raises:
            ConfigError: the learner has no critic.
            DataError: a row is invalid, or a call has no token before it.
            NotFoundError: a row's policy is unknown.
        """
        if self._critic is None:
            raise ConfigError("this learner has no critic: give critic=Critic() to it")
        self._check_scored(rows)
        check_calls(rows)

    def _scores_and_states(
        self, rows: Sequence[Row], which: Which | None, *, states: bool
    ) -> tuple[list[list[float]], dict[str, Tensor]]:
        """Compute the log-probabilities of rows, and the hidden states that the critic needs.

        Args:
            rows: the rows to score.
            which: the weights to score with; None to compute no log-probabilities.
            states: whether to return hidden states.

        Returns:
            The log-probabilities of each row (empty if `which` is None), and policy → the hidden
            states [C, hidden] that predict the first tokens of its C calls (empty without
            `states`).
        """
        with self._metered(), self._explain_memory("scoring", rows):
            scores: dict[int, list[float]] = {}
            states_by_policy: dict[str, Tensor] = {}
            for policy, indices in self._by_policy(rows).items():
                order = ordered(rows, indices)
                own = [rows[index] for index in order]
                call_states = None
                if which is None:
                    call_states = self._computed_states(policy, own)
                else:
                    masks = [[False, *[True] * (len(row.ids) - 1)] for row in own]
                    tokens = SelectedTokens(own, masks, self._device, self._replays[policy])
                    call_states = self._call_states(policy, tokens) if states else None
                    passes = self._plan(policy, tokens)
                    logprobs = self._logprobs(policy, which, passes, tokens, call_states)
                    for index, row_logprobs in zip(order, tokens.by_row(logprobs), strict=True):
                        scores[index] = [0.0, *row_logprobs]
                if call_states is not None:
                    calls = [len(row.responses) for row in own]
                    parts = call_states.states.split(calls)  # type: ignore[no-untyped-call]
                    by_row = dict(zip(order, parts, strict=True))
                    states_by_policy[policy] = torch.cat([by_row[index] for index in indices])
            return [scores[index] for index in sorted(scores)], states_by_policy

    def _values_of(self, rows: Sequence[Row], states: Mapping[str, Tensor]) -> list[list[float]]:
        """Return the critic's value of each call of each row.

        Args:
            rows: the rows.
            states: policy → hidden states of its calls, from `_scores_and_states`.
        """
        values = {
            policy: iter(self._heads[policy].values(policy_states.to(self._device)))
            for policy, policy_states in states.items()
        }
        return [list(islice(values[row.policy], len(row.responses))) for row in rows]

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        check_rows(rows, trained=True)
        check_loss(loss, old_logprobs)
        self._check_targets(rows)
        by_policy = self._by_policy(rows)
        with self._metered(), self._explain_memory("updating", rows):
            parts = {
                policy: self._step(policy, rows, indices, loss, old_logprobs)
                for policy, indices in by_policy.items()
            }
        return over_policies(parts, rows=len(rows))

    def _fresh_version(self, policy: str) -> int | None:
        """Return the version under which the policy's current weights were published.

        Return None if the weights have changed since the last `publish`.
        """
        version, served_at = self._served[policy]
        return version if served_at == self._steppers[policy].steps else None

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        for policy, version in versions.items():
            as_lora = policy in engine.capabilities.lora and self._model(policy).lora is not None
            weights = await asyncio.to_thread(self._weights, policy, as_lora=as_lora)
            await engine.update(policy, weights, version)
            self._served[policy] = (version, self._steppers[policy].steps)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder = Path(folder)
        with writing(folder):
            for number, (policy, model) in enumerate(self._models.items()):
                stepper = self._steppers[policy]
                save_file(compact(model.saved_tensors()), folder / f"weights-{number}.safetensors")
                save_file(
                    compact(stepper.saved_tensors()), folder / f"optimizer-{number}.safetensors"
                )
                if policy in self._heads:
                    critic = compact(self._heads[policy].saved_tensors())
                    save_file(critic, folder / f"critic-{number}.safetensors")
            save_file(self._random, folder / "random.safetensors")
            write_manifest(folder, self._manifest())

    def load(self, folder: Path) -> None:
        folder = Path(folder)
        with reading(folder) as manifest:
            check_manifest(folder, manifest, self._manifest())
            self._restore(folder, manifest)

    def _restore(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        for number, policy in enumerate(manifest["policies"]):
            entry = manifest["policies"][policy]
            self._models[policy].restore(read(folder / f"weights-{number}.safetensors"))
            state = read(folder / f"optimizer-{number}.safetensors")
            self._steppers[policy].restore(state, int(entry["steps"]))
            if policy in self._heads and "critic" in manifest:
                self._heads[policy].restore(read(folder / f"critic-{number}.safetensors"))
            elif policy in self._heads:
                self._heads[policy].reset()
            self._served[policy] = (int(entry["served"][0]), int(entry["served"][1]))
        self._random = read(folder / "random.safetensors")

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        from safetensors import SafetensorError

        try:
            self._model(policy).export(Path(folder), merge=merge)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot export {policy} to {folder}: {error}") from error

    def _model(self, policy: str) -> TrainedModel:
        try:
            return self._models[policy]
        except KeyError:
            names = ", ".join(sorted(self._models))
            raise NotFoundError(f"the learner has no policy {policy!r}; it has: {names}") from None

    def _grammars(self, policy: str) -> Grammars:
        """Return the compiled grammars for the policy's tokenizer, the same as those of the engine.

        Raises:
            ConfigError: the policy has no tokenizer.
        """
        model = self._model(policy)
        tokenizer = self._tokenizer(
            policy, "has calls that were sampled under a grammar, whose replay"
        )
        return Grammars(
            tokenizer.tokenizer,
            vocabulary=model.plain.config.get_text_config().vocab_size,
            eos_ids=tokenizer.eos_ids,
        )

    def _mismatch(self, record: TokenRecord) -> str:
        """Return why the tokens of a record do not fit its grammar; "" if they do."""
        self._model(record.policy)
        if record.grammar_library != LIBRARY:
            return f"sampled with {record.grammar_library or 'an unknown library'}, not {LIBRARY}"
        try:
            self._replays[record.policy].masks(record.grammar, record.response_ids)
        except DataError as error:
            return str(error)
        return ""

    def _weights(self, policy: str, *, as_lora: bool) -> dict[str, Tensor] | LoRAWeights:
        model = self._model(policy)
        with self._metered():
            return model.lora_weights() if as_lora else model.merged_weights()

    def _by_policy(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """Return the indices of each policy's rows: policy → indices.

        Raises:
            NotFoundError: a row's policy is unknown.
        """
        indices: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            indices[row.policy].append(index)
        for policy in indices:
            self._model(policy)
        return dict(indices)

    def _step(
        self,
        policy: str,
        rows: Sequence[Row],
        indices: Sequence[int],
        loss: Loss,
        old_logprobs: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        """Take one optimiser step for a policy, fit its critic and return the metrics.

        The step is skipped if no row is trained, or if loss or gradient are not finite.
        """
        stepper = self._steppers[policy]
        trained = ordered(rows, [index for index in indices if any(rows[index].mask)])
        tokens = SelectedTokens(
            [rows[index] for index in trained],
            [rows[index].mask for index in trained],
            self._device,
            self._replays[policy],
            None if old_logprobs is None else [old_logprobs[index] for index in trained],
            fresh_version=self._fresh_version(policy),
        )
        stepper.zero_grad()
        accumulator, call_states = self._add_gradients(policy, tokens, loss)
        metrics = accumulator.metrics()
        metrics["learning_rate"] = stepper.learning_rate
        metrics["grad_norm"] = stepper.clip() if metrics["rows"] else 0.0
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 0.0 if metrics["rows"] and is_finite else 1.0
        if metrics["skipped"]:
            stepper.zero_grad()
        else:
            stepper.step()
            self._counters["updates"] += 1
        self._counters["tokens"] += metrics["tokens"]
        if call_states is not None and not metrics["skipped"]:
            metrics |= self._heads[policy].learn(call_states.states, targets_of(tokens.rows))
        return metrics

    def _add_gradients(
        self, policy: str, tokens: SelectedTokens, loss: Loss
    ) -> tuple[MetricAccumulator, CallStates | None]:
        """Compute the loss's gradient, and add it to the parameters.

        Returns:
            The metrics, and the hidden state before each call, for the critic. The states are None
            if no call has a value target.
        """
        model = self._models[policy]
        passes = self._plan(policy, tokens, dropout=model.dropout)
        if isinstance(loss, PolicyLoss) and loss.kl:
            base = self._logprobs(policy, "base", passes, tokens)
            tokens.values = tokens.values._replace(base=base)
        metrics = MetricAccumulator(isinstance(loss, PolicyLoss), rows=len(tokens.rows))
        call_states = None
        if not all(map(math.isnan, targets_of(tokens.rows))):
            call_states = self._call_states(policy, tokens, dropout=model.dropout)
        with (
            self._own_random(model.dropout),
            model.training(),
            model.using("policy") as plain,
        ):
            if isinstance(loss, PolicyLoss) and call_setting(loss):
                tokens.add_call_values(loss, partial(self._old, policy, plain, passes, tokens))
            head = training_head(model, plain, tokens, loss, metrics, self._teacher)
            head = head if call_states is None else call_states.before(head)
            sweep(passes.passes, self._decoder(policy, plain, passes.images), head)
            if passes.images is not None:
                passes.images.backward()
        if model.train_vision:  # some parts have no gradient, such as a pooling that is not used
            for parameter in model.trainable().values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return metrics, call_states

    def _check_targets(self, rows: Sequence[Row]) -> None:
        check_targets(rows)
        if self._critic is None and any(row.value_targets for row in rows):
            raise ConfigError(
                "rows have value targets, but the learner has no critic: give it critic=Critic(), "
                "or rows without value_targets"
            )

    def _call_states(
        self, policy: str, tokens: SelectedTokens, *, dropout: bool = False
    ) -> CallStates:
        """Return a collector of the hidden state before each call of `tokens.rows`, for the critic.

        Usually it is empty, and the passes over `tokens` fill it. If these passes use dropout, or
        the model does not compute logits from hidden states alone, it is filled here by separate
        passes.
        """
        model = self._models[policy]
        if dropout or not model.hidden_to_logits:
            return self._computed_states(policy, tokens.rows)
        first = first_tokens(tokens.rows, tokens.selected)
        return CallStates(first, len(tokens.targets), model.hidden_size, self._device)

    @torch.no_grad()
    def _computed_states(self, policy: str, rows: Sequence[Row]) -> CallStates:
        """Compute the hidden state before each call of `rows`, in separate passes, for the critic.

        Each row is computed only up to its last call. So rows that differ only in the answer to one
        prompt are computed once.
        """
        model = self._models[policy]
        rows = [row for row in rows if row.responses]
        starts = [[response.start for response in row.responses] for row in rows]
        images = self._images(policy, rows)
        whole = [row.ids for row in rows] if images is None else images.sequences
        sequences = [ids[: places[-1]] for ids, places in zip(whole, starts, strict=True)]
        count = sum(map(len, starts))
        states = CallStates(range(count), count, model.hidden_size, self._device)
        trees = self._trees(policy, sequences)
        passes = self._passes(policy, sequences, starts, trees, images)
        with model.using("policy") as plain:
            features = None if images is None else images.features(plain)
            decode = decoder(plain, in_trees=not self._refusals[policy], features=features)
            sweep(passes.passes, decode, states.collect)
        states.is_complete = True
        return states

    def _sharing(self, policy: str) -> str:
        """Describe for `state()` whether a common prefix of rows is computed once."""
        if self._refusals[policy]:
            return f"each row by itself: {self._refusals[policy]}"
        if self._models[policy].dropout:
            return "in trees; each row by itself in updates, so that LoRA's dropout differs"
        return "in trees"

    def _plan(self, policy: str, tokens: SelectedTokens, *, dropout: bool = False) -> _Passes:
        images = self._images(policy, tokens.rows)
        sequences = [row.ids for row in tokens.rows] if images is None else images.sequences
        trees = self._trees(policy, sequences, dropout=dropout)
        return self._passes(policy, sequences, tokens.selected, trees, images)

    def _passes(
        self,
        policy: str,
        sequences: Sequence[list[int]],
        selected: Selected,
        trees: Sequence[Tree],
        images: RowImages | None,
    ) -> _Passes:
        passes = plan(
            sequences,
            selected,
            trees,
            self._budget,
            self._device,
            padded=self._padded[policy],
            positions=None if images is None else images.positions,
        )
        return _Passes(passes, images)

    def _images(self, policy: str, rows: Sequence[Row]) -> RowImages | None:
        """Return the images of one policy's rows; None if they have none.

        Raises:
            ConfigError: the policy has no tokenizer, which has the image processor.
            DataError: an image of a row is missing or does not fit it.
            UnsupportedError: the policy's model takes no images.
        """
        if not any(row.images for row in rows):
            return None
        model = self._models[policy]
        if policy not in self._visions:
            tokenizer = self._tokenizer(policy, "has rows with images, whose preparation")
            self._visions[policy] = checked_vision(
                model.plain, tokenizer, policy, in_trees=not self._refusals[policy]
            )
        return RowImages(self._visions[policy], rows, trained=model.train_vision)

    def _tokenizer(self, policy: str, reason: str) -> TransformersTokenizer:
        """Return a policy's tokenizer.

        Args:
            policy: the policy's name.
            reason: what needs the tokenizer, for the error message.

        Raises:
            ConfigError: the policy has no tokenizer.
        """
        tokenizer = self._tokenizers.get(policy) or self._model(policy).tokenizer()
        if tokenizer is None:
            raise ConfigError(
                f"policy {policy!r} {reason} needs a tokenizer, but its model was not loaded from "
                f"a folder: give tokenizers={{{policy!r}: …}} to the learner"
            )
        return tokenizer

    def _trees(
        self, policy: str, sequences: Sequence[list[int]], *, dropout: bool = False
    ) -> list[Tree]:
        if self._refusals[policy] or dropout:
            return each_by_itself(sequences)
        return share(sequences, pair_cost=pair_cost(self._models[policy].plain))

    def _decoder(self, policy: str, plain: Any, images: RowImages | None) -> Callable[..., Tensor]:
        return decoder(
            plain,
            in_trees=not self._refusals[policy],
            logits=not self._models[policy].hidden_to_logits,
            features=None if images is None else images.features(plain),
        )

    @torch.no_grad()
    def _logprobs(
        self,
        policy: str,
        which: Which,
        passes: _Passes,
        tokens: SelectedTokens,
        call_states: CallStates | None = None,
    ) -> Tensor:
        """Return the log-probabilities of the N tokens, [N].

        Args:
            policy: the policy's name.
            which: "policy" for the current weights, "base" for the weights before training.
            passes: the passes over the tokens.
            tokens: the tokens.
            call_states: collector of hidden states from the passes; None to collect none.
        """
        with self._models[policy].using(which) as plain:
            return self._scores(policy, plain, passes, tokens, call_states)

    @torch.no_grad()
    def _old(self, policy: str, plain: Any, passes: _Passes, tokens: SelectedTokens) -> Tensor:
        """Return the log-probabilities of the tokens before the update, [N].

        Afterwards, the random state is set back, so that the update uses the same dropout.
        """
        with forked_random(self._device):
            return self._scores(policy, plain, passes, tokens)

    def _scores(
        self,
        policy: str,
        plain: Any,
        passes: _Passes,
        tokens: SelectedTokens,
        call_states: CallStates | None = None,
    ) -> Tensor:
        scores = torch.zeros(tokens.targets.shape, device=self._device)
        head = scoring_head(self._models[policy], plain, tokens, scores)
        head = head if call_states is None else call_states.before(head)
        sweep(passes.passes, self._decoder(policy, plain, passes.images), head)
        return scores

    def _manifest(self) -> dict[str, Any]:
        critic = {} if self._critic is None else {"critic": msgspec.to_builtins(self._critic)}
        return {
            **critic,
            "format": FORMAT,
            "optimizer": msgspec.to_builtins(self._optimizer),
            "policies": {
                policy: {
                    "steps": self._steppers[policy].steps,
                    "served": self._served[policy],
                    "lora": msgspec.to_builtins(model.lora),
                    "frozen": model.frozen_hash(),
                }
                for policy, model in self._models.items()
            },
        }

    @contextmanager
    def _own_random(self, needed: bool) -> Iterator[None]:
        """Run the `with` block with the learner's own random state, if `needed`.

        torch's global generators get this state, and their former state at the end. The result is
        reproducible only if no engine samples with these generators at the same time.
        """
        if not needed:
            yield
            return
        with forked_random(self._device):
            torch.set_rng_state(self._random["cpu"])
            if "cuda" in self._random:
                torch.cuda.set_rng_state(self._random["cuda"], self._device)
            yield
            self._random = random_state(self._device)

    def _explain_memory(self, doing: str, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Replace an out-of-memory error in the `with` block by an `OutOfMemoryError` with advice.

        Args:
            doing: "updating" or "scoring".
            rows: the rows being computed.
        """
        longest = max((len(row.ids) for row in rows), default=0)
        full = any(model.lora is None for model in self._models.values())
        return explained(
            f"the learner, {doing} on {self._device} with rows of up to {longest:,} tokens,",
            lambda: advice(self._budget, longest, full),
        )

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Add the CPU time that this thread uses in the `with` block to the counters."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._counters["cpu_s"] += time.thread_time() - start
