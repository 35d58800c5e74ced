"""The embedded learner: torch in this process, on a CPU or one GPU.

Rows are sorted by length and cut into microbatches of at most `token_budget` padded tokens; their
gradients add up, so the result is that of one big batch. Rows are padded on the right without an
attention mask: with causal attention no token sees padding. Logits are computed at trained
positions only, because tokens × vocabulary is most of the memory and time.

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
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from lightspan.engines import TokenEngine
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
from lightspan.learners.models import Stepper, TrainedModel
from lightspan.lightning.rows import Row

CAPABILITIES: Final = LearnerCapabilities(
    policies=None, kl=True, entropy=True, lora=True, mixed_temperatures=True
)

FORMAT: Final = 1
"""Version of the checkpoint layout."""

TOKEN_BUDGETS: Final = {"cpu": 2048}
"""By device; a CPU is fastest while a microbatch stays in its cache."""

SCORED_POSITIONS: Final = 8192
"""Positions whose logits exist at once while scoring."""


class TorchLearner(Learner):
    """Trains one or several policies in this process.

    Args:
        models: policy name → folder, hub name, or a loaded model (which is copied).
        optimizer: how gradients become a step.
        lora: adapters instead of full weights, for all policies or by name.
        device: `"cpu"`, `"cuda"` or `"cuda:0"`.
        dtype: of the weights while training; the engine keeps its own.
        token_budget: padded tokens in one forward pass; lower it when memory runs out.
        seed: of everything random.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        optimizer: Optimizer | None = None,
        lora: LoRA | Mapping[str, LoRA | None] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        token_budget: int | None = None,
        seed: int = 0,
    ) -> None:
        if not models:
            raise ConfigError("a learner needs at least one policy: models={'name': folder}")
        if token_budget is not None and token_budget < 1:
            raise ConfigError(f"token_budget must be at least 1, not {token_budget}")
        self._optimizer = optimizer or Optimizer()
        self._device = torch.device(device)
        self._budget = token_budget or TOKEN_BUDGETS.get(self._device.type, 16_384)
        self._seed = seed
        adapters = lora if isinstance(lora, Mapping) else dict.fromkeys(models, lora)
        unknown = sorted(set(adapters) - set(models))
        if unknown:
            raise ConfigError(
                f"lora= names unknown policies: {unknown}; there are {sorted(models)}"
            )
        self._models: dict[str, TrainedModel] = {}
        for policy, source in models.items():
            self._models[policy] = TrainedModel(
                source, lora=adapters.get(policy), device=device, dtype=dtype, seed=seed
            )
        self._steppers = {
            policy: Stepper(model, self._optimizer) for policy, model in self._models.items()
        }
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
            "seed": self._seed,
            "optimizer": msgspec.to_builtins(self._optimizer),
            "lora": {name: msgspec.to_builtins(model.lora) for name, model in self._models.items()},
            "steps": {name: stepper.steps for name, stepper in self._steppers.items()},
        }

    def weight_hash(self, policy: str) -> str:
        return self._model(policy).hash()

    @torch.no_grad()
    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        _check(rows, trained=False)
        with self._metered():
            scores: dict[int, list[float]] = {}
            for policy, indices in self._by_policy(rows).items():
                model = self._models[policy]
                with model.using(which) as plain:
                    for chosen in _microbatches(rows, indices, self._budget):
                        batch = _Batch(rows, chosen, self._device, _after_first)
                        values = _score(model, plain, batch)
                        scores.update(zip(chosen, values, strict=True))
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
        with self._metered():
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

    def export(self, policy: str, folder: Path) -> None:
        try:
            self._model(policy).export(Path(folder))
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
        trained = [index for index in indices if any(rows[index].mask)]
        tally = _Tally(isinstance(loss, PolicyLoss))
        version, served_at = self._served[policy]
        fresh = version if served_at == stepper.steps else None
        stepper.zero_grad()
        with self._own_random(model.dropout), model.training():
            for chosen in _microbatches(rows, trained, self._budget):
                batch = _Batch(rows, chosen, self._device, _masked, old_logprobs, fresh)
                _backward(model, batch, loss, tally)
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


class _Batch:
    """Rows as tensors. B rows padded to L tokens; N chosen tokens in all.

    Attributes:
        ids: [B, L]
        places: [N], index into B·L of the position that predicts the token
        targets, temperatures, advantages, weights, behaviour, old: [N]
        fresh: [N], True where the very weights that are about to be updated sampled the token
        counts: chosen tokens of each row
    """

    def __init__(
        self,
        rows: Sequence[Row],
        chosen: Sequence[int],
        device: torch.device,
        choose: Choose,
        old_logprobs: Sequence[Sequence[float]] | None = None,
        fresh_version: int | None = None,
    ) -> None:
        batch = [rows[index] for index in chosen]
        masks = [choose(row) for row in batch]
        length = max(len(row.ids) for row in batch)
        floats = functools.partial(torch.tensor, dtype=torch.float32, device=device)
        integers = functools.partial(torch.tensor, dtype=torch.int64, device=device)

        def gather(field: Callable[[Row], Sequence[Any]]) -> list[Any]:
            pairs = zip(batch, masks, strict=True)
            return [value for row, mask in pairs for value in compress(field(row), mask)]

        self.ids = integers([row.ids + [0] * (length - len(row.ids)) for row in batch])
        self.places = integers(
            [
                number * length + place - 1
                for number, mask in enumerate(masks)
                for place in compress(range(len(mask)), mask)
            ]
        )
        self.counts = [sum(mask) for mask in masks]
        self.targets = integers(gather(lambda row: row.ids))
        self.temperatures = floats(gather(lambda row: row.temperatures))
        self.advantages = floats(gather(lambda row: row.advantages))
        self.weights = floats(gather(lambda row: row.weights))
        self.behaviour = floats(gather(lambda row: row.logprobs))
        self.versions = integers(gather(lambda row: row.versions))
        self.fresh = self.versions == (-1 if fresh_version is None else fresh_version)
        self.old: Tensor | None = None
        if old_logprobs is not None:
            old = [compress(old_logprobs[i], m) for i, m in zip(chosen, masks, strict=True)]
            self.old = floats([value for values in old for value in values])


class _Tally:
    """Sums over the tokens of one policy's update."""

    def __init__(self, policy_gradient: bool) -> None:
        self._policy_gradient = policy_gradient
        self._sums: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = defaultdict(float)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.detach().double().sum())

    def peak(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._peaks[name] = max(self._peaks[name], float(values.detach().max()))

    def add_gap(self, batch: _Batch, logprobs: Tensor) -> None:
        """The engine/learner difference, over all tokens and over the fresh ones."""
        gap = (logprobs.detach() - batch.behaviour).abs()
        for name, values in (("stale", gap), ("fresh", gap[batch.fresh])):
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

    def rows(self, count: int, tokens: int) -> None:
        self._sums["rows"] += count
        self._sums["tokens"] += tokens


def _backward(model: TrainedModel, batch: _Batch, loss: Loss, tally: _Tally) -> None:
    """Add the gradient of Σ weight · loss of a microbatch."""
    with model.using("policy") as plain:
        distribution = _log_distribution(model, plain, batch)
    logprobs = distribution.gather(1, batch.targets[:, None]).squeeze(1)
    tally.rows(len(batch.counts), logprobs.numel())
    if isinstance(loss, PolicyLoss):
        per_token = _policy_loss(model, batch, loss, distribution, logprobs, tally)
    else:
        per_token = losses.negative_log_likelihood(logprobs)
        with torch.no_grad():
            tally.add("entropy", losses.entropy(distribution.detach()))
    total = (batch.weights * per_token).sum()
    tally.add("loss", total)
    total.backward()  # type: ignore[no-untyped-call]


def _policy_loss(
    model: TrainedModel,
    batch: _Batch,
    loss: PolicyLoss,
    distribution: Tensor,
    logprobs: Tensor,
    tally: _Tally,
) -> Tensor:
    """[N] losses; see `lightspan.learners.losses`."""
    tally.add_gap(batch, logprobs)
    old = batch.behaviour if batch.old is None else batch.old
    clipped = losses.clipped_ratio_loss(
        logprobs,
        old,
        batch.advantages,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )
    per_token = clipped.loss
    if batch.old is not None and loss.importance_cap is not None:
        weight = losses.importance_weight(batch.old, batch.behaviour, loss.importance_cap)
        per_token = per_token * weight
    if loss.kl:
        divergence = losses.kl_divergence(logprobs, _base(model, batch), loss.kl_estimator)
        per_token = per_token + loss.kl * divergence
        tally.add("kl", divergence)
    with torch.set_grad_enabled(loss.entropy != 0):
        spread = losses.entropy(distribution if loss.entropy else distribution.detach())
    if loss.entropy:
        per_token = per_token - loss.entropy * spread
    tally.add("entropy", spread)
    tally.add("clip_fraction", clipped.clipped)
    tally.add("ratio_mean", clipped.ratio)
    tally.peak("ratio_max", clipped.ratio)
    return per_token


@torch.no_grad()
def _base(model: TrainedModel, batch: _Batch) -> Tensor:
    """[N] log-probabilities under the starting weights."""
    with model.using("base") as plain:
        distribution = _log_distribution(model, plain, batch)
    return distribution.gather(1, batch.targets[:, None]).squeeze(1)


def _hidden(plain: Any, batch: _Batch) -> Tensor:
    """[N, hidden] last hidden states at the chosen places."""
    output = plain.get_decoder()(input_ids=batch.ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden.flatten(0, 1)[batch.places]


def _log_distribution(model: TrainedModel, plain: Any, batch: _Batch) -> Tensor:
    """[N, vocabulary] log-probabilities at the tokens' temperatures."""
    if model.hidden_to_logits():
        logits = plain.get_output_embeddings()(_hidden(plain, batch))
    else:
        logits = plain(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)[batch.places]
    scaled: Tensor = logits.float() / batch.temperatures[:, None]
    return scaled.log_softmax(-1)


def _score(model: TrainedModel, plain: Any, batch: _Batch) -> list[list[float]]:
    """Per row of the batch, 0.0 and then each token's log-probability."""
    if model.hidden_to_logits():
        hidden, head = _hidden(plain, batch), plain.get_output_embeddings()
    else:
        hidden = plain(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)[batch.places]
        head = torch.nn.Identity()
    parts = []
    for start in range(0, len(hidden), SCORED_POSITIONS):
        stop = start + SCORED_POSITIONS
        logits = head(hidden[start:stop]).float() / batch.temperatures[start:stop, None]
        targets = batch.targets[start:stop, None]
        parts.append(logits.log_softmax(-1).gather(1, targets).squeeze(1))
    flat = torch.cat(parts).tolist() if parts else []
    scores, start = [], 0
    for count in batch.counts:
        scores.append([0.0, *flat[start : start + count]])
        start += count
    return scores


def _microbatches(rows: Sequence[Row], indices: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices sorted by length, cut where rows × longest would exceed the budget.

    The order depends on the rows alone, so the result does not depend on how they were given.
    """
    order = sorted(indices, key=lambda index: (len(rows[index].ids), rows[index].ids))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * len(rows[index].ids) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


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


__all__ = ["TorchLearner"]
