"""The learner that a trainer holds where verl trains: it gives orders, and computes nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
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
from lightspan.tempdirs import OwnedTempDir
from lightspan_torch.engine.hub import locate
from lightspan_torch.engine.parameter_count import count_parameters
from lightspan_torch.learner.call_index import number_calls
from lightspan_torch.learner.checkpoint import FORMAT, check_manifest, read
from lightspan_torch.learner.metrics import MetricAccumulator, over_policies
from lightspan_torch.learner.microbatch import default_token_budget
from lightspan_torch.learner.policy_model import TrainedModel, rate_factor
from lightspan_torch.learner.validation import check_loss, check_names, check_rows, ordered
from lightspan_verl.config import Verl
from lightspan_verl.local_ranks import Workers
from lightspan_verl.rank_group import GO_ON, Team
from lightspan_verl.ray_workers import RayWorkers
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
    optimizers=("adamw",),
)

_MEMORY: Final = Path("/dev/shm")
"""Where weights pass from verl's processes to this one, if there is room."""
_PREFIX: Final = "lightspan-verl-"
_WIDEST: Final = 4
"""Bytes of a weight: those of training are float32."""


class VerlLearner(Learner):
    """Trains policies by verl's FSDP2, in verl's processes.

    Args:
        models: policy → folder or hub name.
        workers: verl's processes.
        own: whether `close` ends them.
        options: those of `TorchLearner`, which say the same here.

    Raises:
        ConfigError: a model in memory; a critic.
        ModelError: a model is not there, or is one of pickles.
        UnsupportedError: what `capabilities` do not declare.
        RankError: a rank ended before it had loaded its models.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        workers: Team,
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
                f"the model of policy {loaded[0]!r} is one in memory, and verl's processes load "
                "their own: give a folder (save_pretrained) or a hub name"
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
        """Policy → the version last published, and the step count it was published at."""
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
            **({"where": self._workers.where} if self._workers.where else {}),
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

    # --- computing ------------------------------------------------------------------------
    def score(self, rows: Sequence[Row], which: Which = "policy") -> list[list[float]]:
        check_rows(rows, trained=False)
        self._check_grammars(rows)
        scores = {index: [0.0] for index, row in enumerate(rows) if len(row.ids) == 1}
        for policy, indices in self._by_policy(rows).items():
            chosen = [i for i in ordered(rows, indices) if i not in scores]
            if not chosen:
                continue
            parts = partition([rows[i] for i in chosen], self._size)
            padded = _padded([[rows[chosen[i]] for i in part] for part in parts], policy)
            answers = self._together(
                [
                    Score(learner=self._number, policy=policy, rows=part, which=which)
                    for part in padded
                ]
            )
            for part, answer in zip(parts, answers, strict=True):
                found = answer.scores[: len(part)]
                scores.update(zip((chosen[i] for i in part), found, strict=True))
        return [scores[index] for index in range(len(rows))]

    def update(
        self,
        rows: Sequence[Row],
        loss: Loss,
        *,
        old_logprobs: Sequence[Sequence[float]] | None = None,
    ) -> dict[str, float]:
        check_rows(rows, trained=True)
        check_loss(loss, old_logprobs)
        self._check_grammars(rows)
        if any(row.value_targets for row in rows):
            raise ConfigError("rows have value targets, and the verl learner has no critic")
        by_policy = self._by_policy(rows)
        if isinstance(loss, PolicyLoss) and loss.of_calls:
            looked = [[i for i, trained in enumerate(row.mask) if trained] for row in rows]
            number_calls(rows, looked, loss.of_calls)  # before any rank has begun
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
        """One optimiser step of a policy; its metrics."""
        chosen = [index for index in ordered(rows, indices) if any(rows[index].mask)]
        version, served_at = self._served[policy]
        steps = self._steps[policy]
        rate = self._optimizer.learning_rate * rate_factor(self._optimizer, steps)
        tally = MetricAccumulator(isinstance(loss, PolicyLoss), rows=0)
        norm = 0.0
        if chosen:
            parts = partition([rows[i] for i in chosen], self._size)
            own = [[chosen[i] for i in part] for part in parts]
            padded = _padded([[rows[i] for i in part] for part in own], policy)
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
                for share, part in zip(padded, own, strict=True)
            ]
            answers = self._together(orders)
            tally.replace((answer.sums, answer.peaks) for answer in answers)
            norm = self._agreed_norm(answers)
        metrics = tally.metrics()
        fine = bool(chosen) and math.isfinite(metrics["loss"]) and math.isfinite(norm)
        metrics.update(grad_norm=norm, learning_rate=rate, skipped=0.0 if fine else 1.0)
        if fine:
            self._steps[policy] += 1
            self._counters["updates"] += 1
        self._counters["tokens"] += metrics["tokens"]
        return metrics

    def _agreed_norm(self, answers: Sequence[Answer]) -> float:
        """The gradient's norm, which ranks compute together.

        Raises:
            RankError: they do not agree: their weights have come apart.
        """
        first = answers[0].grad_norm
        for rank, answer in enumerate(answers):
            norm = answer.grad_norm
            if norm != first and not (norm != norm and first != first):  # NaN is none of these
                raise RankError(
                    f"{self._workers.name(rank)} has the gradient norm {norm}, and rank 0 has "
                    f"{first}: their weights have come apart. {GO_ON}"
                )
        return first

    # --- what outlives an update ----------------------------------------------------------
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
            layer, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
            if found:
                layers[layer] = (first, tensors[name.replace(".lora_A.", ".lora_B.")])
            elif ".lora_B." not in name:
                raise UnsupportedError(
                    f"LoRA(target_modules={lora.target_modules!r}) adapts {name}, which is no "
                    "linear layer: an engine that serves LoRA beside the model's own weights "
                    "takes none of that. Leave it out, or have the policy served merged "
                    "(Transformers(merge_lora=True), VLLM(merge=True))"
                )
        return LoRAWeights(rank=lora.rank, scale=lora.alpha / lora.rank, layers=layers)

    def _weights(self, policy: str, kind: Kind) -> dict[str, Tensor]:
        """Those of now, whole, on the CPU."""
        with _passing_folder(_WIDEST * count_parameters(self._models[policy])) as folder:
            path = folder / "weights.safetensors"
            order = Weights(learner=self._number, policy=policy, kind=kind, path=str(path))
            aliases = self._all(order)[0].aliases
            tensors = {name: tensor.clone() for name, tensor in read(path).items()}
        if kind == "served":
            tensors.update({name: tensors[kept] for name, kept in aliases.items()})
        return tensors

    def save(self, folder: Path) -> None:
        folder = Path(folder).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._all(Save(learner=self._number, folder=str(folder)))
            # last: a checkpoint without it is none
            (folder / "learner.json").write_text(json.dumps(self._manifest(), indent=1))
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {folder}: {error}; see to the disk, then go on from "
                "the one before it with resume=True (--resume)"
            ) from error

    def load(self, folder: Path) -> None:
        folder = Path(folder).absolute()
        try:
            manifest = json.loads((folder / "learner.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
        if manifest.get("learner") != "verl":
            raise CheckpointError(
                f"the checkpoint {folder} was not made by the verl learner: go on with the learner "
                "that made it, or begin anew from its exported model"
            )
        try:
            check_manifest(folder, manifest, self._manifest())
            steps = {name: int(each["steps"]) for name, each in manifest["policies"].items()}
            served = {name: each["served"] for name, each in manifest["policies"].items()}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged ({type(error).__name__}: {error}): delete it, "
                "and training goes on from the one before it"
            ) from error
        self._all(Load(learner=self._number, folder=str(folder), steps=steps))
        self._steps = steps
        self._served = {name: (int(pair[0]), int(pair[1])) for name, pair in served.items()}

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
        """Let the ranks forget this learner, or end them if they are its own. Idempotent."""
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
        """Policy → indices of its rows."""
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
                    "verl learner does not compute (trainable_grammar): use the torch learner"
                )


def _weights_of(model: str | Path) -> str:
    """The folder of a model's weights. verl would read a pickle where there is nothing else.

    Raises:
        ModelError: it is not there, or has no safetensors.
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
    """Return the indices of each rank's rows: each row goes, longest first, to the rank with the
    fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].ids)):
        rank = tokens.index(min(tokens))
        parts[rank].append(index)
        tokens[rank] += len(rows[index].ids)
    return [sorted(part) for part in parts]


def _padded(parts: Sequence[Sequence[Row]], policy: str) -> list[list[Row]]:
    """The same number of rows for each rank: verl has all ranks make as many passes, so as the one
    with the most needs. What is added trains nothing."""
    most = max(map(len, parts))
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
    return [[*part, *[filler] * (most - len(part))] for part in plain]


def _old(
    share: Sequence[Row], indices: Sequence[int], old_logprobs: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Earlier scores of a rank's rows, those that were added included."""
    known = [list(old_logprobs[index]) for index in indices]
    return [*known, *([0.0] * len(row.ids) for row in share[len(known) :])]


@contextmanager
def _passing_folder(size: int) -> Iterator[Path]:
    """A folder of ours alone that is gone afterwards, in memory where there is room for that.

    Args:
        size: bytes that are to be written.
    """
    place = Path(tempfile.gettempdir())
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size:
        place = _MEMORY
    passing = OwnedTempDir(_PREFIX, place)
    try:
        yield passing.path
    finally:
        passing.close()


def check_options(
    optimizer: Optimizer | None,
    lora: LoRA | Mapping[str, LoRA | None] | None,
    critic: Critic | None,
) -> None:
    """Raise `UnsupportedError` for what `CAPABILITIES` do not declare."""
    adapters = list(lora.values()) if isinstance(lora, Mapping) else [lora]
    declared = CAPABILITIES.unsupported(optimizer or Optimizer(), adapters)
    declared += ["a critic"] if critic is not None else []
    if declared:
        raise UnsupportedError(
            f"the verl learner does not support {', '.join(declared)}: leave it out, or use "
            "the torch learner (learner=Torch(…))"
        )


def described(
    description: Verl, models: Mapping[str, Any], *, device: str, **options: Any
) -> VerlLearner:
    """The learner that a description stands for, its processes started.

    Args:
        device: the trainer's.
        options: those of `VerlLearner` that the algorithm decides.

    Raises:
        ConfigError: see `Verl.placed`, `check_environment`, `RayWorkers` and `VerlLearner`.
        RankError: a rank ended before it was there.
    """
    check_options(options.get("optimizer"), options.get("lora"), options.get("critic"))
    workers = _started(description, device)
    try:
        return VerlLearner(
            models,
            workers=workers,
            own=True,
            dtype=description.dtype or ("float32" if device == "cpu" else "bfloat16"),
            token_budget=description.token_budget,
            gradient_checkpointing=description.gradient_checkpointing,
            param_offload=description.param_offload,
            optimizer_offload=description.optimizer_offload,
            **options,
        )
    except BaseException:
        workers.end()
        raise


def _started(description: Verl, device: str) -> Team:
    devices = description.placed(device)
    limits = {"start_s": description.start_s, "timeout_s": description.timeout_s}
    if description.ray:
        return RayWorkers(description.python, devices, ray=description.ray, **limits)
    return Workers(description.python, devices, **limits)
