"""The trainer's side of the verl learner. It sends orders to verl's processes, the ranks."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from lightspan.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    NotFoundError,
    RankError,
    UnsupportedError,
)
from lightspan.lightning.rows import Row
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
from lightspan_torch.engine.hub import locate
from lightspan_torch.engine.parameter_count import count_parameters
from lightspan_torch.learner.call_index import call_setting, number_calls
from lightspan_torch.learner.checkpoint import (
    FORMAT,
    check_manifest,
    read,
    reading,
    write_manifest,
    writing,
)
from lightspan_torch.learner.metrics import MetricAccumulator, over_policies
from lightspan_torch.learner.microbatch import default_token_budget
from lightspan_torch.learner.policy_model import TrainedModel, rate_factor
from lightspan_torch.learner.validation import check_loss, check_names, check_rows, ordered
from lightspan_torch.tempdirs import OwnedTempDir
from lightspan_verl.config import Verl
from lightspan_verl.rpc import (
    Answer,
    Drop,
    Hash,
    Kind,
    Load,
    Order,
    Save,
    Score,
    Setup,
    Update,
    Weights,
)
from lightspan_verl.workers import RESUME_HINT, Workers

CAPABILITIES: Final = LearnerCapabilities(
    policies=None,
    kl=True,
    entropy=True,
    lora=True,
    lora_dropout=False,
    mixed_temperatures=True,
    trainable_grammar=False,
    values=False,
    loss_forms=("clip", "gspo", "cispo"),
    importance_levels=("token", "sequence"),
    importance_mask=True,
    images=False,
    optimizers=("adamw",),
)

_MEMORY: Final = Path("/dev/shm")
"""Folder in memory through which weights come from verl's processes, if they fit into it."""
_PREFIX: Final = "lightspan-verl-"
_WEIGHT_BYTES: Final = 4
"""Bytes of a trained weight, which is float32."""


class VerlLearner(Learner):
    """A learner that trains policies by verl's FSDP2, in verl's processes.

    Args:
        models: policy → folder or hub name.
        workers: verl's processes.
        own: whether `close` ends the processes.
        optimizer, lora, seed: see `TorchLearner`.
        dtype, gradient_checkpointing, param_offload, optimizer_offload: see `Verl`.
        token_budget: see `Verl`; None for a default that depends on the device.
        critic: must be None, because this learner has no critic.

    Raises:
        ConfigError: a model is an object in memory, or `lora` names an unknown policy.
        ModelError: a model does not exist, or has no safetensors files.
        UnsupportedError: an option is not in `capabilities`.
        RankError: a rank ended before it had loaded its models.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        workers: Workers,
        own: bool = False,
        optimizer: Optimizer | None = None,
        lora: LoRA | Mapping[str, LoRA | None] | None = None,
        dtype: str = "float32",
        token_budget: int | None = None,
        gradient_checkpointing: bool = False,
        param_offload: bool = False,
        optimizer_offload: bool = False,
        seed: int = 0,
        critic: Critic | None = None,
    ) -> None:
        loaded = [name for name, model in models.items() if not isinstance(model, str | Path)]
        if loaded:
            raise ConfigError(
                f"the model of policy {loaded[0]!r} is in memory, but verl's processes load models "
                "themselves: give a folder (save_pretrained) or a hub name"
            )
        self._models = {name: _weights_of(model) for name, model in models.items()}
        self._optimizer = optimizer or Optimizer()
        adapters = lora if isinstance(lora, Mapping) else dict.fromkeys(models, lora)
        check_names("lora", adapters, models)
        self._lora = {name: adapters.get(name) for name in models}
        check_options(self._optimizer, self._lora, critic)
        self._workers = workers
        self._owns = own
        self._number = next(self._numbers)
        self._seed = seed
        self._dtype = dtype
        self._budget = token_budget or default_token_budget(workers.devices[0])
        self._steps = dict.fromkeys(models, 0)
        self._served = dict.fromkeys(models, (0, 0))
        """Policy → (last published version, number of optimiser steps at that time)."""
        self._counters = {"cpu_s": 0.0, "tokens": 0.0, "updates": 0.0}
        self._frozen: dict[str, str] = {}
        setup = Setup(
            learner=self._number,
            models=self._models,
            threads=max(1, torch.get_num_threads() // len(workers.devices)),
            optimizer=self._optimizer,
            lora=self._lora,
            dtype=dtype,
            token_budget=self._budget,
            gradient_checkpointing=gradient_checkpointing,
            param_offload=param_offload,
            optimizer_offload=optimizer_offload,
            seed=seed,
        )
        self._versions = workers.together([setup] * len(workers.devices))[0].versions

    @property
    def capabilities(self) -> LearnerCapabilities:
        return CAPABILITIES

    def policies(self) -> list[str]:
        return list(self._models)

    def usage(self) -> dict[str, float]:
        return dict(self._counters)

    def state(self) -> dict[str, Any]:
        return {
            "learner": "verl",
            **self._versions,
            "ranks": list(self._workers.devices),
            "dtype": self._dtype,
            "token_budget": self._budget,
            "seed": self._seed,
            "optimizer": msgspec.to_builtins(self._optimizer),
            "lora": msgspec.to_builtins(self._lora),
            "steps": dict(self._steps),
        }

    def weight_hash(self, policy: str) -> str:
        return self._hash(policy, frozen=False)

    def _hash(self, policy: str, *, frozen: bool) -> str:
        self._check_policy(policy)
        order = Hash(learner=self._number, policy=policy, frozen=frozen)
        return self._all(order)[0].hash

    # --- scores and steps -----------------------------------------------------------------
    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        check_rows(rows, trained=False)
        _check_images(rows)
        self._check_grammars(rows)
        scores = {index: [0.0] for index, row in enumerate(rows) if len(row.ids) == 1}
        for policy, indices in self._by_policy(rows).items():
            order = [i for i in ordered(rows, indices) if i not in scores]
            if not order:
                continue
            parts = [[order[i] for i in part] for part in self._partition(rows, order)]
            padded = _padded([[rows[i] for i in part] for part in parts], policy)
            answers = self._together(
                [
                    Score(learner=self._number, policy=policy, rows=part, which=which)
                    for part in padded
                ]
            )
            for part, answer in zip(parts, answers, strict=True):
                scores.update(zip(part, answer.scores[: len(part)], strict=True))
        return [scores[index] for index in range(len(rows))]

    def _partition(self, rows: Sequence[Row], indices: Sequence[int]) -> list[list[int]]:
        return partition([rows[index] for index in indices], self._size)

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        check_rows(rows, trained=True)
        check_loss(loss, old_logprobs)
        _check_images(rows)
        self._check_grammars(rows)
        if any(row.value_targets for row in rows):
            raise ConfigError("rows have value targets, but the verl learner has no critic")
        by_policy = self._by_policy(rows)
        if setting := call_setting(loss):
            selected = [[i for i, trained in enumerate(row.mask) if trained] for row in rows]
            number_calls(rows, selected, setting)  # raises before any rank takes a step
        parts = {
            policy: self._step(policy, rows, indices, loss, old_logprobs)
            for policy, indices in by_policy.items()
        }
        return over_policies(parts, rows=len(rows))

    def _step(
        self,
        policy: str,
        rows: Sequence[Row],
        indices: Sequence[int],
        loss: Loss,
        old_logprobs: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        """Take one optimiser step for a policy, and return the metrics.

        The step is skipped if no row is trained, or if loss or gradient are not finite.
        """
        trained = [index for index in ordered(rows, indices) if any(rows[index].mask)]
        version, served_at = self._served[policy]
        steps = self._steps[policy]
        rate = self._optimizer.learning_rate * rate_factor(self._optimizer, steps)
        accumulator = MetricAccumulator(isinstance(loss, PolicyLoss), rows=0)
        norm = 0.0
        if trained:
            parts = [[trained[i] for i in part] for part in self._partition(rows, trained)]
            padded = _padded([[rows[i] for i in part] for part in parts], policy)
            orders = [
                Update(
                    learner=self._number,
                    policy=policy,
                    rows=share,
                    loss_of_policy=loss if isinstance(loss, PolicyLoss) else None,
                    old_logprobs=None if old_logprobs is None else _old(share, part, old_logprobs),
                    fresh_version=version if served_at == steps else None,
                    learning_rate=rate,
                )
                for share, part in zip(padded, parts, strict=True)
            ]
            answers = self._together(orders)
            accumulator.replace((answer.sums, answer.maxima) for answer in answers)
            norm = self._common_norm(answers)
        metrics = accumulator.metrics()
        is_taken = bool(trained) and math.isfinite(metrics["loss"]) and math.isfinite(norm)
        metrics.update(grad_norm=norm, learning_rate=rate, skipped=0.0 if is_taken else 1.0)
        if is_taken:
            self._steps[policy] += 1
            self._counters["updates"] += 1
        self._counters["tokens"] += metrics["tokens"]
        return metrics

    def _common_norm(self, answers: Sequence[Answer]) -> float:
        """Return the gradient's norm, and check that all ranks computed the same.

        Raises:
            RankError: the norms differ, so the ranks' weights have diverged.
        """
        first = answers[0].grad_norm
        for rank, answer in enumerate(answers):
            norm = answer.grad_norm
            if norm != first and not (math.isnan(norm) and math.isnan(first)):
                raise RankError(
                    f"{self._workers.name(rank)} has the gradient norm {norm}, but rank 0 has "
                    f"{first}: their weights have diverged. {RESUME_HINT}"
                )
        return first

    # --- weights and checkpoints ----------------------------------------------------------
    async def publish(self, engine: TokenEngine, versions: Mapping[str, int]) -> None:
        for policy, version in versions.items():
            self._check_policy(policy)
            as_lora = policy in engine.capabilities.lora and self._lora[policy] is not None
            weights = await asyncio.to_thread(self._published, policy, as_lora=as_lora)
            await engine.update(policy, weights, version)
            self._served[policy] = (version, self._steps[policy])

    def _published(self, policy: str, *, as_lora: bool) -> dict[str, Tensor] | LoRAWeights:
        if not as_lora:
            return self._weights(policy, "served")
        lora = self._lora[policy]
        assert lora is not None
        tensors = self._weights(policy, "trained")
        layers = {}
        for name, first in tensors.items():
            layer, is_first, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if is_first:
                layers[layer] = (first, tensors[name.replace(".lora_A.", ".lora_B.")])
            elif ".lora_B." not in name:
                raise UnsupportedError(
                    f"LoRA(target_modules={lora.target_modules!r}) adapts {name}, which is no "
                    "linear layer: engines cannot serve that unmerged. Leave it out, or have the "
                    "policy served merged (Transformers(merge_lora=True), VLLM(merge=True))"
                )
        return LoRAWeights(rank=lora.rank, scale=lora.alpha / lora.rank, layers=layers)

    def _weights(self, policy: str, kind: Kind) -> dict[str, Tensor]:
        """Gather the policy's current weights from all ranks, and return them on the CPU."""
        with _temporary_folder(_WEIGHT_BYTES * count_parameters(self._models[policy])) as folder:
            path = folder / "weights.safetensors"
            order = Weights(learner=self._number, policy=policy, kind=kind, path=str(path))
            aliases = self._all(order)[0].aliases
            tensors = {name: tensor.clone() for name, tensor in read(path).items()}
        if kind == "served":
            tensors.update({name: tensors[source] for name, source in aliases.items()})
        return tensors

    def save(self, folder: Path) -> None:
        folder = Path(folder).absolute()
        with writing(folder):
            self._all(Save(learner=self._number, folder=str(folder)))
            write_manifest(folder, self._manifest())

    def load(self, folder: Path) -> None:
        folder = Path(folder).absolute()
        with reading(folder) as manifest:
            if manifest.get("learner") != "verl":
                raise CheckpointError(
                    f"the checkpoint {folder} was not made by the verl learner: resume with the "
                    "learner that made it, or start again from its exported model"
                )
            check_manifest(folder, manifest, self._manifest())
            entries = manifest["policies"]
            steps = {name: int(entry["steps"]) for name, entry in entries.items()}
            served = {
                name: (int(entry["served"][0]), int(entry["served"][1]))
                for name, entry in entries.items()
            }
        self._all(Load(learner=self._number, folder=str(folder), steps=steps))
        self._steps = steps
        self._served = served

    def export(self, policy: str, folder: Path, *, merge: bool = False) -> None:
        from safetensors import SafetensorError

        self._check_policy(policy)
        lora = self._lora[policy]
        tensors = self._weights(policy, "trained")
        model = TrainedModel(
            self._models[policy], lora=lora, device="cpu", dtype=torch.float32, seed=self._seed
        )
        model.restore(tensors)
        try:
            model.export(Path(folder), merge=merge)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot export {policy} to {folder}: {error}") from error

    def close(self) -> None:
        """End the processes if the learner owns them. Idempotent.

        Otherwise keep them running, and delete this learner's weights in them.
        """
        if self._owns:
            self._workers.end()
        else:
            self._all(Drop(learner=self._number))

    def _manifest(self) -> dict[str, Any]:
        for policy, lora in self._lora.items():
            if policy not in self._frozen:
                self._frozen[policy] = self._hash(policy, frozen=True) if lora else ""
        return {
            "learner": "verl",
            "format": FORMAT,
            "ranks": self._size,
            "optimizer": msgspec.to_builtins(self._optimizer),
            "policies": {
                policy: {
                    "steps": self._steps[policy],
                    "served": self._served[policy],
                    "lora": msgspec.to_builtins(self._lora[policy]),
                    "frozen": self._frozen[policy],
                }
                for policy in self._models
            },
        }

    # --- orders ---------------------------------------------------------------------------
    @property
    def _size(self) -> int:
        return len(self._workers.devices)

    def _all(self, order: Order) -> list[Answer]:
        return self._together([order] * self._size)

    def _together(self, orders: Sequence[Order]) -> list[Answer]:
        received = self._workers.together(orders)
        self._counters["cpu_s"] += sum(answer.cpu_s for answer in received)
        return received

    def _by_policy(self, rows: Sequence[Row]) -> dict[str, list[int]]:
        """Return the indices of each policy's rows: policy → indices.

        Raises:
            NotFoundError: a row's policy is unknown.
        """
        indices: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            self._check_policy(row.policy)
            indices.setdefault(row.policy, []).append(index)
        return indices

    def _check_policy(self, policy: str) -> None:
        if policy not in self._models:
            names = ", ".join(sorted(self._models))
            raise NotFoundError(f"the learner has no policy {policy!r}; it has: {names}")

    def _check_grammars(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.constraints:
                raise UnsupportedError(
                    f"a row of rollout {row.rollout_id} was sampled under a grammar, which the "
                    "verl learner does not support (trainable_grammar): use the torch learner"
                )


def _check_images(rows: Sequence[Row]) -> None:
    """Raise `UnsupportedError` if a row has images."""
    if any(row.images for row in rows):
        raise UnsupportedError(
            "rows have images, which the verl learner cannot train on: use the embedded learner, "
            "learner=Torch()"
        )


def _weights_of(model: str | Path) -> str:
    """Return the folder that contains a model's weights.

    Raises:
        ModelError: the model does not exist, or it has no safetensors files. Pickle files are
            refused, because reading them could run foreign code.
    """
    origin = locate(model, "weights")
    if not any(origin.folder.glob("model*.safetensors")):
        raise ModelError(
            f"cannot load the weights of {origin.name}: {origin.folder} has no "
            "model*.safetensors, and weights in other files (.bin, pickles) are never read: save "
            "it with save_pretrained(…, safe_serialization=True)"
        )
    return str(origin.folder)


def partition(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """Divide rows among ranks, and return the indices of each rank's rows.

    Each row, the longest first, goes to the rank that has the fewest tokens so far.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].ids)):
        rank = tokens.index(min(tokens))
        parts[rank].append(index)
        tokens[rank] += len(rows[index].ids)
    return [sorted(part) for part in parts]


def _padded(parts: Sequence[Sequence[Row]], policy: str) -> list[list[Row]]:
    """Return the rows of each rank, with rows added so that all ranks have equally many.

    The ranks compute together, so each must make the same number of passes. An added row has no
    trained tokens.

    Args:
        parts: the rows of each rank.
        policy: policy of the added rows.
    """
    count = max(map(len, parts))
    filler = Row(
        rollout_id="",
        policy=policy,
        ids=[0, 0],
        mask=[False, False],
        advantages=[0.0, 0.0],
        weights=[0.0, 0.0],
        logprobs=[0.0, 0.0],
        versions=[0, 0],
        temperatures=[1.0, 1.0],
    )
    plain = [[replace(row, call_ids=()) for row in part] for part in parts]
    return [[*part, *[filler] * (count - len(part))] for part in plain]


def _old(
    share: Sequence[Row], indices: Sequence[int], old_logprobs: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Select the log-probabilities before the update for the rows of one rank.

    Args:
        share: the rank's own rows, followed by the rows that `_padded` added. Added rows get 0.
        indices: indices of the rank's own rows in `old_logprobs`.
        old_logprobs: log-probabilities of all rows.
    """
    own = [list(old_logprobs[index]) for index in indices]
    return [*own, *([0.0] * len(row.ids) for row in share[len(own) :])]


@contextmanager
def _temporary_folder(size: int) -> Iterator[Path]:
    """Yield a temporary folder, and remove it after the `with` block.

    The folder is in memory if `size` bytes fit there.
    """
    parent = Path(tempfile.gettempdir())
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size:
        parent = _MEMORY
    folder = OwnedTempDir(_PREFIX, parent)
    try:
        yield folder.path
    finally:
        folder.close()


def check_options(
    optimizer: Optimizer | None,
    lora: LoRA | Mapping[str, LoRA | None] | None,
    critic: Critic | None,
) -> None:
    """Raise `UnsupportedError` if an option is not in `CAPABILITIES`."""
    adapters = list(lora.values()) if isinstance(lora, Mapping) else [lora]
    declared = CAPABILITIES.unsupported(optimizer or Optimizer(), adapters)
    declared += ["a critic"] if critic is not None else []
    if declared:
        raise UnsupportedError(
            f"the verl learner does not support {', '.join(declared)}: leave it out, or use "
            "the torch learner (learner=Torch(…))"
        )


def build_learner(
    settings: Verl, models: Mapping[str, Any], *, device: str, **options: Any
) -> VerlLearner:
    """Start verl's processes, and return a learner that ends them when it is closed.

    Args:
        settings: the user's settings.
        models: policy → folder or hub name.
        device: the trainer's device.
        options: further arguments of `VerlLearner`, such as `optimizer` and `lora`.

    Raises:
        ConfigError: see `Verl.rank_devices`, `check_environment` and `VerlLearner`.
        ModelError, UnsupportedError: see `VerlLearner`.
        RankError: a rank ended during its start.
    """
    check_options(options.get("optimizer"), options.get("lora"), options.get("critic"))
    devices = settings.rank_devices(device)
    workers = Workers(
        settings.python, devices, start_s=settings.start_s, timeout_s=settings.timeout_s
    )
    try:
        return VerlLearner(
            models,
            workers=workers,
            own=True,
            dtype=settings.dtype or ("float32" if device == "cpu" else "bfloat16"),
            token_budget=settings.token_budget,
            gradient_checkpointing=settings.gradient_checkpointing,
            param_offload=settings.param_offload,
            optimizer_offload=settings.optimizer_offload,
            **options,
        )
    except BaseException:
        workers.end()
        raise
