"""The embedded learner: torch in this process, on a CPU or one GPU.

Rows that begin alike are computed in trees, every shared token once (`trees`, `passes`); losses are
evaluated per (row, token), so rows with different advantages or ratios stay exact. Passes hold at
most `token_budget` tokens; their gradients add up, so the result is that of one big batch. Trees,
or rows, of similar size are padded on the right. Logits are computed at trained positions only,
because tokens × vocabulary is most of the memory and time.

Everything random (LoRA's initial weights, its dropout) comes from the learner's own seed; torch's
global generator, which engines sample with, is left as it was.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

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
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_torch.engine.weights import check_device
from lightspan_torch.learner.checkpoint import FORMAT, check_manifest, compact, read
from lightspan_torch.learner.critic import (
    CallStates,
    ValueHead,
    check_calls,
    check_targets,
    first_tokens,
    targets_of,
)
from lightspan_torch.learner.masks import Replays
from lightspan_torch.learner.metrics import MetricAccumulator, over_policies
from lightspan_torch.learner.microbatch import advice, default_token_budget
from lightspan_torch.learner.policy_model import (
    Bases,
    Stepper,
    TrainedModel,
    default_dtype,
    forked_random,
    initial_random_state,
    random_state,
)
from lightspan_torch.learner.prefix_tree import Tree, plain as each_by_itself, share
from lightspan_torch.learner.token_losses import (
    SelectedTokens,
    logits_of,
    scoring_head,
    training_head,
)
from lightspan_torch.learner.tree_forward import Pass, decoder, pair_cost, plan, sweep, tree_refusal
from lightspan_torch.learner.validation import check_loss, check_names, check_rows, ordered

CAPABILITIES: Final = LearnerCapabilities(
    policies=None,
    kl=True,
    entropy=True,
    lora=True,
    mixed_temperatures=True,
    trainable_grammar=True,
    values=True,
    loss_forms=("clip", "gspo", "cispo"),
    importance_levels=("token", "sequence"),
)


class TorchLearner(Learner):
    """Trains one or several policies in this process.

    Args:
        models: policy name → folder, hub name, or a loaded model (which is copied).
        optimizer: how gradients become a step.
        lora: adapters instead of full weights, for all policies or by name. Policies with adapters
            that start from the same model hold its weights once.
        device: `"cpu"`, `"cuda"` or `"cuda:0"`.
        dtype: the weights' while training, None for `default_dtype`; the engine keeps its own.
        token_budget: padded tokens in one forward pass; lower it when memory runs out.
        seed: for everything random.
        share_prefixes: compute what rows share once. Where a model cannot, or LoRA's dropout has to
            differ between rows, each row is computed by itself; `state()["share_prefixes"]` says so
            by policy.
        tokenizers: by policy, where it is not the one that lies beside the model. Only calls that
            were sampled under a grammar need one.
        critic: values of calls, a head for each policy; None: none.
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
    ) -> None:
        if not models:
            raise ConfigError("a learner needs at least one policy: models={'name': folder}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, not {token_budget}")
        self._optimizer = optimizer or Optimizer()
        check_kind("critic", critic, Critic)
        check_device(device)
        self._device = torch.device(device)
        self._budget = token_budget or default_token_budget(device)
        self._seed = seed
        adapters = lora if isinstance(lora, Mapping) else dict.fromkeys(models, lora)
        self._tokenizers = dict(tokenizers or {})
        check_names("lora", adapters, models)
        check_names("tokenizers", self._tokenizers, models)
        self._models: dict[str, TrainedModel] = {}
        bases = Bases(device)
        for policy, source in models.items():
            adapter = adapters.get(policy)
            self._models[policy] = TrainedModel(
                source,
                lora=adapter,
                device=device,
                dtype=dtype or default_dtype(device, adapter),
                seed=seed,
                bases=bases,
            )
        self._steppers = {
            policy: Stepper(model, self._optimizer) for policy, model in self._models.items()
        }
        self._refusals = {
            policy: tree_refusal(model.plain) if share_prefixes else "share_prefixes=False"
            for policy, model in self._models.items()
        }
        """Policy → why its rows are computed one by one; empty if in trees."""
        self._replays = {policy: Replays(partial(self._grammars, policy)) for policy in models}
        self._critic = critic
        self._heads = {
            policy: ValueHead(model.hidden_size, critic, self._device)
            for policy, model in self._models.items()
            if critic is not None
        }
        """Policy → its value head; empty without a critic."""
        self._random = initial_random_state(seed, self._device)
        self._served = dict.fromkeys(models, (0, 0))
        """Policy → the version last published, and the step count it was published at."""
        self._counters = {"cpu_s": 0.0, "tokens": 0.0, "updates": 0.0}

    @property
    def capabilities(self) -> LearnerCapabilities:
        return CAPABILITIES

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

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        self._check_values(rows)
        return self._values_of(rows, self._scores_and_states(rows, None, states=True)[1])

    def score_and_values(self, rows: Sequence[Row]) -> tuple[list[list[float]], list[list[float]]]:
        self._check_values(rows)
        scores, states = self._scores_and_states(rows, "policy", states=True)
        return scores, self._values_of(rows, states)

    def _check_scored(self, rows: Sequence[Row]) -> None:
        """Raise for rows that have no scores."""
        check_rows(rows, trained=False)
        self._by_policy(rows)

    def _check_values(self, rows: Sequence[Row]) -> None:
        """Raise for rows whose calls have no values."""
        if self._critic is None:
            raise ConfigError("this learner has no critic: give critic=Critic() to it")
        self._check_scored(rows)
        check_calls(rows)

    def _scores_and_states(
        self, rows: Sequence[Row], which: Which | None, *, states: bool
    ) -> tuple[list[list[float]], dict[str, Tensor]]:
        """(log-probabilities by row, [C, hidden] states by policy at which the calls of its rows
        begin).

        Args:
            which: None: no log-probabilities.
            states: False: no states.
        """
        with self._metered(), self._room("scoring", rows):
            scores: dict[int, list[float]] = {}
            found: dict[str, Tensor] = {}
            for policy, indices in self._by_policy(rows).items():
                chosen = ordered(rows, indices)
                own = [rows[index] for index in chosen]
                begun = None
                if which is None:
                    begun = self._own_pass(policy, own)
                else:
                    masks = [[False, *[True] * (len(row.ids) - 1)] for row in own]
                    tokens = SelectedTokens(own, masks, self._device, self._replays[policy])
                    begun = self._call_states(policy, tokens) if states else None
                    passes = self._plan(policy, tokens)
                    logprobs = tokens.by_row(self._logprobs(policy, which, passes, tokens, begun))
                    scores.update(zip(chosen, ([0.0, *each] for each in logprobs), strict=True))
                if begun is not None:
                    calls = [len(row.responses) for row in own]
                    parts = begun.states.split(calls)  # type: ignore[no-untyped-call]
                    by_row = dict(zip(chosen, parts, strict=True))
                    found[policy] = torch.cat([by_row[index] for index in indices])
            return [scores[index] for index in range(len(rows)) if index in scores], found

    def _values_of(self, rows: Sequence[Row], states: Mapping[str, Tensor]) -> list[list[float]]:
        """The values of the rows' calls, whose states `_scores_and_states` returned."""
        values = {
            policy: iter(self._heads[policy].values(found.to(self._device)))
            for policy, found in states.items()
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
        with self._metered(), self._room("updating", rows):
            parts = {
                policy: self._step(policy, rows, indices, loss, old_logprobs)
                for policy, indices in by_policy.items()
            }
        return over_policies(parts, rows=len(rows))

    def _fresh_version(self, policy: str) -> int | None:
        """Return the version that the policy's weights of now were published as, if they were."""
        version, served_at = self._served[policy]
        return version if served_at == self._steppers[policy].steps else None

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        for policy, version in versions.items():
            as_lora = policy in engine.capabilities.lora and self._model(policy).lora is not None
            weights = await asyncio.to_thread(self._weights, policy, as_lora=as_lora)
            await engine.update(policy, weights, version)
            self._served[policy] = (version, self._steppers[policy].steps)

    def save(self, folder: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
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
            (folder / "learner.json").write_text(json.dumps(self._manifest(), indent=1))
        except (OSError, SafetensorError) as error:  # a full disk is either
            raise CheckpointError(
                f"cannot write the checkpoint {folder}: {error}; see to the disk, then go on from "
                "the one before it with resume=True (--resume)"
            ) from error

    def load(self, folder: Path) -> None:
        folder = Path(folder)
        try:
            manifest = json.loads((folder / "learner.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
        try:
            check_manifest(folder, manifest, self._manifest())
            self._restore(folder, manifest)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged ({type(error).__name__}: {error}): delete it, "
                "and training goes on from the one before it"
            ) from error

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
        """Compiled for the policy's tokenizer, as its engine does.

        Raises:
            ConfigError: it has none.
        """
        model = self._model(policy)
        tokenizer = self._tokenizers.get(policy) or model.tokenizer()
        if tokenizer is None:
            raise ConfigError(
                f"policy {policy!r} has calls that were sampled under a grammar, which its "
                "tokenizer has to replay, but its model was not loaded from a folder: give "
                f"tokenizers={{{policy!r}: …}} to the learner"
            )
        return Grammars(
            tokenizer.tokenizer,
            vocabulary=model.plain.config.get_text_config().vocab_size,
            eos_ids=tokenizer.eos_ids,
        )

    def _mismatch(self, record: TokenRecord) -> str:
        """Why the record cannot be replayed under its grammar; empty if it can."""
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
        """Policy → indices of its rows."""
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
        """Take one optimiser step, fit the critic and return the metrics."""
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
        tally, begun = self._add_gradients(policy, tokens, loss)
        metrics = tally.metrics()
        metrics["learning_rate"] = stepper.learning_rate
        metrics["grad_norm"] = stepper.clip() if metrics["rows"] else 0.0
        fine = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 0.0 if metrics["rows"] and fine else 1.0
        if metrics["skipped"]:
            stepper.zero_grad()
        else:
            stepper.step()
            self._counters["updates"] += 1
        self._counters["tokens"] += metrics["tokens"]
        if begun is not None and not metrics["skipped"]:
            metrics |= self._heads[policy].learn(begun.states, targets_of(tokens.rows))
        return metrics

    def _add_gradients(
        self, policy: str, tokens: SelectedTokens, loss: Loss
    ) -> tuple[MetricAccumulator, CallStates | None]:
        """The sums over the tokens, whose gradient is left at the parameters, and the states at
        which calls begin; None without value targets."""
        model = self._models[policy]
        passes = self._plan(policy, tokens, dropout=model.dropout)
        if isinstance(loss, PolicyLoss) and loss.kl:
            tokens.base = self._logprobs(policy, "base", passes, tokens)
        tally = MetricAccumulator(isinstance(loss, PolicyLoss), rows=len(tokens.rows))
        begun = None
        if not all(map(math.isnan, targets_of(tokens.rows))):
            begun = self._call_states(policy, tokens, dropout=model.dropout)
        with (
            self._own_random(model.dropout),
            model.training(),
            model.using("policy") as plain,
        ):
            if isinstance(loss, PolicyLoss) and loss.of_calls:
                tokens.look_at_calls(loss, lambda: self._before(policy, plain, passes, tokens))
            head = training_head(model, plain, tokens, loss, tally)
            head = head if begun is None else begun.beside(head)
            sweep(passes, self._decoder(policy, plain), head)
        return tally, begun

    def _check_targets(self, rows: Sequence[Row]) -> None:
        check_targets(rows)
        if self._critic is None and any(row.value_targets for row in rows):
            raise ConfigError(
                "rows have value targets, but this learner has no critic: give critic=Critic() to "
                "it, or rows without value_targets"
            )

    def _call_states(
        self, policy: str, tokens: SelectedTokens, *, dropout: bool = False
    ) -> CallStates:
        """What takes the states at which calls begin from passes over these tokens. Where such
        passes do not show them (as logits come instead) or blur them, they are taken by now."""
        model = self._models[policy]
        if dropout or not model.hidden_to_logits():
            return self._own_pass(policy, tokens.rows)
        first = first_tokens(tokens.rows, tokens.looked)
        return CallStates(first, len(tokens.targets), model.hidden_size, self._device)

    @torch.no_grad()
    def _own_pass(self, policy: str, rows: Sequence[Row]) -> CallStates:
        """The states at which calls of the rows begin. Nothing behind the last is computed, so that
        answers to one prompt are one sequence."""
        model = self._models[policy]
        begins = [[response.start for response in row.responses] for row in rows]
        sequences = [
            row.ids[: places[-1]] for row, places in zip(rows, begins, strict=True) if places
        ]
        looked = [places for places in begins if places]
        count = sum(map(len, looked))
        found = CallStates(range(count), count, model.hidden_size, self._device)
        passes = plan(sequences, looked, self._trees(policy, sequences), self._budget, self._device)
        with model.using("policy") as plain:
            decode = decoder(plain, in_trees=not self._refusals[policy])
            sweep(passes, decode, found.take)
        found.done = True
        return found

    def _sharing(self, policy: str) -> str:
        """How rows that begin alike are computed, in words."""
        if self._refusals[policy]:
            return f"each row by itself: {self._refusals[policy]}"
        if self._models[policy].dropout:
            return "in trees; each row by itself in updates, so that LoRA's dropout differs"
        return "in trees"

    def _plan(self, policy: str, tokens: SelectedTokens, *, dropout: bool = False) -> list[Pass]:
        sequences = [row.ids for row in tokens.rows]
        trees = self._trees(policy, sequences, dropout=dropout)
        return plan(sequences, tokens.looked, trees, self._budget, self._device)

    def _trees(
        self, policy: str, sequences: Sequence[list[int]], *, dropout: bool = False
    ) -> list[Tree]:
        if self._refusals[policy] or dropout:
            return each_by_itself(sequences)
        return share(sequences, pair_cost=pair_cost(self._models[policy].plain))

    def _decoder(self, policy: str, plain: Any) -> Callable[..., Tensor]:
        if not self._models[policy].hidden_to_logits():
            return logits_of(plain)
        return decoder(plain, in_trees=not self._refusals[policy])

    @torch.no_grad()
    def _logprobs(
        self,
        policy: str,
        which: Which,
        passes: Sequence[Pass],
        tokens: SelectedTokens,
        begun: CallStates | None = None,
    ) -> Tensor:
        """[N] log-probabilities of the tokens under the weights of now, or of before training.

        Args:
            begun: takes what it needs from the passes.
        """
        with self._models[policy].using(which) as plain:
            return self._swept(policy, plain, passes, tokens, begun)

    @torch.no_grad()
    def _before(
        self, policy: str, plain: Any, passes: Sequence[Pass], tokens: SelectedTokens
    ) -> Tensor:
        """[N] log-probabilities of the tokens as the update is about to compute them: under the
        very dropout that it will draw."""
        with forked_random(self._device):
            return self._swept(policy, plain, passes, tokens)

    def _swept(
        self,
        policy: str,
        plain: Any,
        passes: Sequence[Pass],
        tokens: SelectedTokens,
        begun: CallStates | None = None,
    ) -> Tensor:
        """[N]"""
        scores = torch.zeros(tokens.targets.shape, device=self._device)
        head = scoring_head(self._models[policy], plain, tokens, scores)
        head = head if begun is None else begun.beside(head)
        sweep(passes, self._decoder(policy, plain), head)
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
        """Put the learner's random state into torch's global generators meanwhile.

        Exact only while no engine samples meanwhile, since that draws from the same generators.
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

    def _room(self, doing: str, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Answer an out-of-memory error with what to lower.

        Args:
            doing: "updating" or "scoring".
        """
        longest = max((len(row.ids) for row in rows), default=0)
        full = any(model.lora is None for model in self._models.values())
        return explained(
            f"the learner, {doing} on {self._device} with rows of up to {longest:,} tokens,",
            lambda: advice(self._budget, longest, full),
        )

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count this thread's CPU time."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._counters["cpu_s"] += time.thread_time() - start
