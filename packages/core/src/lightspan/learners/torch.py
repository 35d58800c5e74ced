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
import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from lightspan.engines import TokenEngine
from lightspan.engines.transformers import check_device
from lightspan.errors import CheckpointError, ConfigError, DataError, NotFoundError
from lightspan.learners import (
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    Optimizer,
    PolicyLoss,
    Which,
    losses,
)
from lightspan.learners.memory import default_dtype, room
from lightspan.learners.models import Stepper, TrainedModel
from lightspan.learners.passes import Head, Pass, decoder, pair_cost, plan, sweep, tree_refusal
from lightspan.learners.trees import plain as each_by_itself
from lightspan.learners.trees import share
from lightspan.lightning.rows import Row

CAPABILITIES: Final = LearnerCapabilities(
    policies=None, kl=True, entropy=True, lora=True, mixed_temperatures=True
)

FORMAT: Final = 1
"""Version of the checkpoint layout."""

TOKEN_BUDGETS: Final = {"cpu": 2048, "cuda": 4096}
"""By device; a CPU is fastest while a microbatch stays in its cache. On a GPU activations decide:
about 5 GiB per 1,000 tokens for 1.5 B parameters. Not yet run on a GPU."""

LOGITS: Final = 2**24
"""Logits that exist at once."""


def default_token_budget(device: str) -> int:
    """Padded tokens in one forward pass, unless the learner is told otherwise."""
    return TOKEN_BUDGETS.get(torch.device(device).type, 16_384)


class TorchLearner(Learner):
    """Trains one or several policies in this process.

    Args:
        models: policy name → folder, hub name, or a loaded model (which is copied).
        optimizer: how gradients become a step.
        lora: adapters instead of full weights, for all policies or by name.
        device: `"cpu"`, `"cuda"` or `"cuda:0"`.
        dtype: of the weights while training, None for `default_dtype`; the engine keeps its own.
        token_budget: padded tokens in one forward pass; lower it when memory runs out.
        seed: of everything random.
        share_prefixes: compute what rows share once. Where a model cannot, or LoRA's dropout has to
            differ between rows, each row is computed by itself; `state()["share_prefixes"]` says so
            by policy.
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
    ) -> None:
        if not models:
            raise ConfigError("a learner needs at least one policy: models={'name': folder}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, not {token_budget}")
        self._optimizer = optimizer or Optimizer()
        check_device(device)
        self._device = torch.device(device)
        self._budget = token_budget or default_token_budget(device)
        self._seed = seed
        adapters = lora if isinstance(lora, Mapping) else dict.fromkeys(models, lora)
        unknown = sorted(set(adapters) - set(models))
        if unknown:
            raise ConfigError(
                f"lora= names unknown policies: {unknown}; there are {sorted(models)}"
            )
        self._models: dict[str, TrainedModel] = {}
        for policy, source in models.items():
            adapter = adapters.get(policy)
            self._models[policy] = TrainedModel(
                source,
                lora=adapter,
                device=device,
                dtype=dtype or default_dtype(device, adapter),
                seed=seed,
            )
        self._steppers = {
            policy: Stepper(model, self._optimizer) for policy, model in self._models.items()
        }
        self._refusals = {
            policy: tree_refusal(model.plain) if share_prefixes else "share_prefixes=False"
            for policy, model in self._models.items()
        }
        """Policy → why its rows are computed one by one; empty if in trees."""
        self._random = _initial_random_state(seed, self._device)
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
        }

    def weight_hash(self, policy: str) -> str:
        return self._model(policy).hash()

    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        _check(rows, trained=False)
        with self._metered(), self._room("scoring", rows):
            scores: dict[int, list[float]] = {}
            for policy, indices in self._by_policy(rows).items():
                chosen = _ordered(rows, indices)
                tokens = _Tokens([rows[index] for index in chosen], _after_first, self._device)
                found = self._logprobs(policy, which, self._plan(policy, tokens), tokens)
                for index, values in zip(chosen, tokens.by_row(found), strict=True):
                    scores[index] = [0.0, *values]
            return [scores[index] for index in range(len(rows))]

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """One optimiser step per policy.

        Args:
            rows: whole rollouts.
            loss: what is minimised.
            old_logprobs: what `score` said of these rows before the rollout batch's first update.
                Given, the ratio is to these and the truncated importance weight bridges the engine
                and the learner; not given, the ratio is to the recorded log-probabilities
                (`losses`: decoupled, bypass).
        """
        _check(rows, trained=True)
        _check_loss(loss, old_logprobs)
        with self._metered(), self._room("updating", rows):
            parts = {
                policy: self._update_policy(policy, rows, indices, loss, old_logprobs)
                for policy, indices in self._by_policy(rows).items()
            }
        return _combined(parts, rows=len(rows))

    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        for policy, version in versions.items():
            weights = await asyncio.to_thread(self._weights, policy)
            await engine.update(policy, weights, version)
            self._served[policy] = (version, self._steppers[policy].steps)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number, (policy, model) in enumerate(self._models.items()):
                stepper = self._steppers[policy]
                save_file(_compact(model.saved_tensors()), folder / f"weights-{number}.safetensors")
                save_file(
                    _compact(stepper.saved_tensors()), folder / f"optimizer-{number}.safetensors"
                )
            save_file(self._random, folder / "random.safetensors")
            (folder / "learner.json").write_text(json.dumps(self._manifest(), indent=1))
        except OSError as error:
            raise CheckpointError(f"cannot write the checkpoint {folder}: {error}") from error

    def load(self, folder: Path) -> None:
        folder = Path(folder)
        try:
            manifest = json.loads((folder / "learner.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
        self._check_manifest(folder, manifest)
        for number, policy in enumerate(manifest["policies"]):
            entry = manifest["policies"][policy]
            self._models[policy].restore(_read(folder / f"weights-{number}.safetensors"))
            state = _read(folder / f"optimizer-{number}.safetensors")
            self._steppers[policy].restore(state, int(entry["steps"]))
            self._served[policy] = (int(entry["served"][0]), int(entry["served"][1]))
        self._random = _read(folder / "random.safetensors")

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        try:
            self._model(policy).export(Path(folder), merge=merge)
        except OSError as error:
            raise CheckpointError(f"cannot export {policy} to {folder}: {error}") from error

    def _model(self, policy: str) -> TrainedModel:
        try:
            return self._models[policy]
        except KeyError:
            known = ", ".join(sorted(self._models))
            raise NotFoundError(f"the learner has no policy {policy!r}; it has: {known}") from None

    def _weights(self, policy: str) -> dict[str, Tensor]:
        model = self._model(policy)
        with self._metered():
            return model.merged_weights()

    def _by_policy(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """Policy → indices of its rows."""
        indices: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            indices[row.policy].append(index)
        for policy in indices:
            self._model(policy)
        return dict(indices)

    def _update_policy(
        self,
        policy: str,
        rows: Sequence[Row],
        indices: Sequence[int],
        loss: Loss,
        old_logprobs: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        model, stepper = self._models[policy], self._steppers[policy]
        trained = _ordered(rows, [index for index in indices if any(rows[index].mask)])
        version, served_at = self._served[policy]
        tokens = _Tokens(
            [rows[index] for index in trained],
            _masked,
            self._device,
            None if old_logprobs is None else [old_logprobs[index] for index in trained],
            fresh_version=version if served_at == stepper.steps else None,
        )
        passes = self._plan(policy, tokens, dropout=model.dropout)
        if isinstance(loss, PolicyLoss) and loss.kl:
            tokens.base = self._logprobs(policy, "base", passes, tokens)
        tally = _Tally(isinstance(loss, PolicyLoss), rows=len(trained))
        stepper.zero_grad()
        with self._own_random(model.dropout), model.training(), model.using("policy") as plain:
            head = _training_head(model, plain, tokens, loss, tally)
            sweep(passes, self._decoder(policy, plain), head)
        metrics = tally.metrics()
        metrics["learning_rate"] = stepper.learning_rate
        metrics["grad_norm"] = stepper.clip() if trained else 0.0
        fine = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 0.0 if trained and fine else 1.0
        if metrics["skipped"]:
            stepper.zero_grad()
        else:
            stepper.step()
            self._counters["updates"] += 1
        self._counters["tokens"] += metrics["tokens"]
        return metrics

    def _sharing(self, policy: str) -> str:
        """How rows that begin alike are computed, in words."""
        if self._refusals[policy]:
            return f"each row by itself: {self._refusals[policy]}"
        if self._models[policy].dropout:
            return "in trees; each row by itself in updates, so that LoRA's dropout differs"
        return "in trees"

    def _plan(self, policy: str, tokens: _Tokens, *, dropout: bool = False) -> list[Pass]:
        sequences = [row.ids for row in tokens.rows]
        if self._refusals[policy] or dropout:
            trees = each_by_itself(sequences)
        else:
            trees = share(sequences, pair_cost=pair_cost(self._models[policy].plain))
        return plan(sequences, tokens.looked, trees, self._budget, self._device)

    def _decoder(self, policy: str, plain: Any) -> Callable[..., Tensor]:
        if not self._models[policy].hidden_to_logits():
            return _logits_of(plain)
        return decoder(plain, in_trees=not self._refusals[policy])

    @torch.no_grad()
    def _logprobs(
        self, policy: str, which: Which, passes: Sequence[Pass], tokens: _Tokens
    ) -> Tensor:
        """[N] of the tokens, under the weights of now or of before training."""
        model = self._models[policy]
        found = torch.zeros(tokens.targets.shape, device=self._device)
        with model.using(which) as plain:
            head = _scoring_head(model, plain, tokens, found)
            sweep(passes, self._decoder(policy, plain), head)
        return found

    def _manifest(self) -> dict[str, Any]:
        return {
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

    def _check_manifest(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint {folder} has format {manifest.get('format')}; this version of "
                f"lightspan reads {FORMAT}"
            )
        own = self._manifest()
        if set(manifest["policies"]) != set(own["policies"]):
            raise CheckpointError(
                f"the checkpoint {folder} has the policies {sorted(manifest['policies'])}; this "
                f"run has {sorted(own['policies'])}"
            )
        if manifest["optimizer"]["name"] != own["optimizer"]["name"]:
            raise CheckpointError(
                f"the checkpoint {folder} is of optimizer {manifest['optimizer']['name']}; this "
                f"run has {own['optimizer']['name']}"
            )
        for policy, entry in manifest["policies"].items():
            if entry["lora"] != own["policies"][policy]["lora"]:
                raise CheckpointError(
                    f"the checkpoint {folder} has lora={entry['lora']} for policy {policy}; this "
                    f"run has {own['policies'][policy]['lora']}"
                )
            if entry["frozen"] != own["policies"][policy]["frozen"]:
                raise CheckpointError(
                    f"the adapters in {folder} were trained on other weights of policy {policy} "
                    "than this run starts from"
                )

    @contextmanager
    def _own_random(self, needed: bool) -> Iterator[None]:
        """With the learner's random state in torch's global generators.

        Exact only while no engine samples meanwhile, since that draws from the same generators.
        """
        if not needed:
            yield
            return
        cuda = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.set_rng_state(self._random["cpu"])
            for device in cuda:
                torch.cuda.set_rng_state(self._random["cuda"], device)
            yield
            self._random = _random_state(self._device)

    def _room(self, doing: str, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Answer an out-of-memory error with what to lower."""
        full = any(model.lora is None for model in self._models.values())
        return room(doing, rows, device=self._device, token_budget=self._budget, full=full)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Count this thread's CPU time."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._counters["cpu_s"] += time.thread_time() - start


Choose = Callable[[Row], Sequence[bool]]
"""Which tokens of a row are looked at; the first never is."""


def _masked(row: Row) -> Sequence[bool]:
    return row.mask


def _after_first(row: Row) -> Sequence[bool]:
    return [False, *[True] * (len(row.ids) - 1)]


class _Tokens:
    """The looked-at tokens of rows, row after row: N in all.

    Attributes:
        looked: of each row, the places of its looked-at tokens
        targets, temperatures, advantages, weights, behaviour: [N]
        fresh: [N], True where the very weights that are about to be updated sampled the token
        old, base: [N] or None
    """

    def __init__(
        self,
        rows: Sequence[Row],
        choose: Choose,
        device: torch.device,
        old_logprobs: Sequence[Sequence[float]] | None = None,
        fresh_version: int | None = None,
    ) -> None:
        self.rows = rows
        masks = [choose(row) for row in rows]
        self.looked = [list(compress(range(len(mask)), mask)) for mask in masks]
        floats = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        integers = functools.partial(torch.tensor, dtype=torch.int64, device=device)

        def gather(lists: Iterable[Sequence[Any]]) -> list[Any]:
            pairs = zip(lists, masks, strict=True)
            return [value for values, mask in pairs for value in compress(values, mask)]

        self.targets = integers(gather(row.ids for row in rows))
        self.temperatures = floats(gather(row.temperatures for row in rows))
        self.advantages = floats(gather(row.advantages for row in rows))
        self.weights = floats(gather(row.weights for row in rows))
        self.behaviour = floats(gather(row.logprobs for row in rows))
        versions = integers(gather(row.versions for row in rows))
        self.fresh = versions == (-1 if fresh_version is None else fresh_version)
        self.old = None if old_logprobs is None else floats(gather(old_logprobs))
        self.base: Tensor | None = None
        self._kinds, self._kind = _distinct(self.temperatures)

    def by_row(self, values: Tensor) -> list[list[float]]:
        """[N] values as lists."""
        flat = values.tolist()
        ends = list(accumulate(map(len, self.looked), initial=0))
        return [flat[start:end] for start, end in pairwise(ends)]

    def parts(self, made: Pass, size: int) -> Iterator[_Part]:
        """The tokens of a pass, with at most `size` distributions a part.

        Tokens that follow the same node at the same temperature share a distribution.
        """
        if not len(made.entries):
            return
        kinds = len(self._kinds)
        keys = made.places * kinds + self._kind[made.entries]
        distinct, which = _distinct(keys)
        which, order = which.sort(stable=True)
        entries = made.entries[order]
        for start in range(0, len(distinct), size):
            stop = min(start + size, len(distinct))
            first, last = torch.searchsorted(which, which.new_tensor([start, stop])).tolist()
            chosen = distinct[start:stop]
            yield _Part(
                self,
                places=chosen // kinds,
                temperatures=self._kinds[chosen % kinds],
                which=which[first:last] - start,
                entries=entries[first:last],
            )


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values, rising, and which of them each value is."""
    found, which = torch.unique(values, return_inverse=True)
    return found, which


class _Part:
    """Some tokens of a pass, n of them, and the D distributions that they were drawn from.

    Attributes:
        places: [D] nodes of the pass that predict
        temperatures: [D]
        which: [n] the token's distribution
        entries: [n] where the token is in `_Tokens`
        targets, advantages, weights, behaviour, fresh, old, base: [n]; see there
    """

    def __init__(
        self,
        tokens: _Tokens,
        *,
        places: Tensor,
        temperatures: Tensor,
        which: Tensor,
        entries: Tensor,
    ) -> None:
        self.places = places
        self.temperatures = temperatures
        self.which = which
        self.entries = entries
        self.targets = tokens.targets[entries]
        self.advantages = tokens.advantages[entries]
        self.weights = tokens.weights[entries]
        self.behaviour = tokens.behaviour[entries]
        self.fresh = tokens.fresh[entries]
        self.old = None if tokens.old is None else tokens.old[entries]
        self.base = None if tokens.base is None else tokens.base[entries]

    def distributions(self, hidden: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """[D, vocabulary] log-probabilities at the tokens' temperatures."""
        scaled = output(hidden).float() / self.temperatures[:, None]
        return scaled.log_softmax(-1)

    def logprobs(self, distributions: Tensor) -> Tensor:
        """[n]"""
        return distributions[self.which, self.targets]


class _Tally:
    """Sums over the tokens of one policy's update."""

    def __init__(self, policy_gradient: bool, rows: int) -> None:
        self._policy_gradient = policy_gradient
        self._sums: dict[str, float] = defaultdict(float, rows=float(rows))
        self._peaks: dict[str, float] = defaultdict(float)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.detach().double().sum())

    def peak(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._peaks[name] = max(self._peaks[name], float(values.detach().max()))

    def add_gap(self, part: _Part, logprobs: Tensor) -> None:
        """The engine/learner difference, over all tokens and over the fresh ones."""
        gap = (logprobs.detach() - part.behaviour).abs()
        for name, values in (("stale", gap), ("fresh", gap[part.fresh])):
            self.add(f"{name}_gap", values)
            self.peak(f"{name}_gap", values)
            self._sums[f"{name}_tokens"] += values.numel()

    def metrics(self) -> dict[str, float]:
        count = max(self._sums["tokens"], 1.0)
        metrics = {"loss": self._sums["loss"], "tokens": self._sums["tokens"]}
        metrics["entropy"] = self._sums["entropy"] / count
        metrics["rows"] = self._sums["rows"]
        if self._policy_gradient:
            for name in ("kl", "clip_fraction", "ratio_mean"):
                metrics[name] = self._sums[name] / count
            metrics["ratio_max"] = self._peaks["ratio_max"]
            kind = "fresh" if self._sums["fresh_tokens"] else "stale"
            gap_tokens = max(self._sums[f"{kind}_tokens"], 1.0)
            metrics["logprob_gap_mean"] = self._sums[f"{kind}_gap"] / gap_tokens
            metrics["logprob_gap_max"] = self._peaks[f"{kind}_gap"]
            metrics["fresh_tokens"] = self._sums["fresh_tokens"]
        return metrics

    def tokens(self, count: int) -> None:
        self._sums["tokens"] += count


def _training_head(
    model: TrainedModel, plain: Any, tokens: _Tokens, loss: Loss, tally: _Tally
) -> Head:
    """Adds the gradient of Σ weight · loss of a pass's tokens to the head's weights, and returns
    that of the hidden states. No logits outlive it."""
    output, size = _output(model, plain)

    def head(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        found = []
        for part in tokens.parts(made, size):
            states = hidden[part.places]
            leaf = states.detach().requires_grad_(states.requires_grad)
            _backward(part, part.distributions(leaf, output), loss, tally)
            if leaf.grad is not None:
                found.append((states, leaf.grad))
        return found

    return head


def _scoring_head(model: TrainedModel, plain: Any, tokens: _Tokens, found: Tensor) -> Head:
    """Writes the tokens' log-probabilities into `found`, [N]."""
    output, size = _output(model, plain)

    def head(hidden: Tensor, made: Pass) -> list[tuple[Tensor, Tensor]]:
        for part in tokens.parts(made, size):
            distributions = part.distributions(hidden[part.places], output)
            found[part.entries] = part.logprobs(distributions)
        return []

    return head


def _output(model: TrainedModel, plain: Any) -> tuple[Callable[[Tensor], Tensor], int]:
    """What makes logits of hidden states, and how many hidden states at once."""
    size = max(1, LOGITS // plain.config.get_text_config().vocab_size)
    return (plain.get_output_embeddings() if model.hidden_to_logits() else _as_is), size


def _as_is(logits: Tensor) -> Tensor:
    return logits


def _logits_of(plain: Any) -> Callable[..., Tensor]:
    """In place of hidden states, where the head alone does not make logits of them."""

    def decode(ids: Tensor, positions: Tensor | None, tree: object) -> Tensor:
        logits: Tensor = plain(input_ids=ids, use_cache=False).logits
        return logits

    return decode


def _backward(part: _Part, distributions: Tensor, loss: Loss, tally: _Tally) -> None:
    """Add the gradient of Σ weight · loss of some tokens."""
    logprobs = part.logprobs(distributions)
    tally.tokens(logprobs.numel())
    if isinstance(loss, PolicyLoss):
        per_token = _policy_loss(part, loss, distributions, logprobs, tally)
    else:
        per_token = losses.negative_log_likelihood(logprobs)
        with torch.no_grad():
            tally.add("entropy", losses.entropy(distributions.detach())[part.which])
    total = (part.weights * per_token).sum()
    tally.add("loss", total)
    total.backward()  # type: ignore[no-untyped-call]


def _policy_loss(
    part: _Part, loss: PolicyLoss, distributions: Tensor, logprobs: Tensor, tally: _Tally
) -> Tensor:
    """[n] losses; see `lightspan.learners.losses`."""
    tally.add_gap(part, logprobs)
    old = part.behaviour if part.old is None else part.old
    clipped = losses.clipped_ratio_loss(
        logprobs,
        old,
        part.advantages,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )
    per_token = clipped.loss
    if part.old is not None and loss.importance_cap is not None:
        weight = losses.importance_weight(part.old, part.behaviour, loss.importance_cap)
        per_token = per_token * weight
    if part.base is not None:
        divergence = losses.kl_divergence(logprobs, part.base, loss.kl_estimator)
        per_token = per_token + loss.kl * divergence
        tally.add("kl", divergence)
    with torch.set_grad_enabled(loss.entropy != 0):
        spread = losses.entropy(distributions if loss.entropy else distributions.detach())
        spread = spread[part.which]
    if loss.entropy:
        per_token = per_token - loss.entropy * spread
    tally.add("entropy", spread)
    tally.add("clip_fraction", clipped.clipped)
    tally.add("ratio_mean", clipped.ratio)
    tally.peak("ratio_max", clipped.ratio)
    return per_token


def _ordered(rows: Sequence[Row], indices: Iterable[int]) -> list[int]:
    """An order that depends on the rows alone, so that the result does not depend on the given."""

    def key(index: int) -> tuple[Any, ...]:
        row = rows[index]
        return row.ids, row.rollout_id, row.call_ids, row.logprobs, row.advantages, row.weights

    return sorted(indices, key=key)


def _check_loss(loss: Loss, old_logprobs: Sequence[Sequence[float]] | None) -> None:
    if isinstance(loss, PolicyLoss) and loss.importance_cap is not None and old_logprobs is None:
        raise ConfigError(
            f"importance_cap={loss.importance_cap} acts on the learner's own earlier scores: give "
            "old_logprobs, or importance_cap=None"
        )


def _check(rows: Iterable[Row], *, trained: bool) -> None:
    """Raise `DataError` for a row that cannot be computed with."""
    for row in rows:
        size = len(row.ids)
        fields = ("mask", "advantages", "weights", "logprobs", "versions", "temperatures")
        for name in fields:
            if len(getattr(row, name)) != size:
                raise DataError(
                    f"a row of rollout {row.rollout_id} has {size} ids but "
                    f"{len(getattr(row, name))} {name}"
                )
        if size == 0:
            raise DataError(f"a row of rollout {row.rollout_id} has no tokens")
        if trained and row.mask[0]:
            raise DataError(f"the first token of a row of rollout {row.rollout_id} is masked True")
        if min(row.temperatures) <= 0:
            raise DataError(
                f"a row of rollout {row.rollout_id} has temperature {min(row.temperatures)}: "
                "greedily decoded tokens have no log-probabilities to train on"
            )


def _combined(parts: Mapping[str, Mapping[str, float]], rows: int) -> dict[str, float]:
    """One policy: its metrics. Several: totals, and each policy's as `<policy>/<metric>`."""
    if not parts:
        return {"loss": 0.0, "tokens": 0.0, "rows": float(rows), "skipped": 1.0}
    if len(parts) == 1:
        return {**next(iter(parts.values())), "rows": float(rows)}
    combined: dict[str, float] = {}
    tokens = max(sum(part["tokens"] for part in parts.values()), 1.0)
    for name in next(iter(parts.values())):
        values = [part[name] for part in parts.values()]
        if name in ("loss", "tokens", "fresh_tokens"):
            combined[name] = sum(values)
        elif name.endswith("_max") or name in ("skipped", "learning_rate", "grad_norm"):
            combined[name] = max(values)
        else:
            combined[name] = sum(part[name] * part["tokens"] for part in parts.values()) / tokens
    for policy, part in parts.items():
        combined.update({f"{policy}/{name}": value for name, value in part.items()})
    return {**combined, "rows": float(rows)}


def _compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _initial_random_state(seed: int, device: torch.device) -> dict[str, Tensor]:
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        return _random_state(device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


__all__ = ["TorchLearner", "default_token_budget"]
