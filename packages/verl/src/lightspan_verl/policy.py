"""One policy on one rank, in verl's environment: scores, steps, weights and checkpoint shards.

Each rank has a part (shard) of the weights. All ranks must make the same calls in the same order,
because forward passes and gathering weights are collective operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightspan.errors import CheckpointError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import PolicyLoss, Which
from lightspan_torch.learner import losses
from lightspan_torch.learner.call_index import call_setting, number_calls
from lightspan_torch.learner.metrics import MetricAccumulator
from lightspan_torch.learner.objective import TokenValues, policy_losses
from lightspan_torch.learner.policy_model import check_untied
from lightspan_verl.rpc import Kind, Score, Setup, Update
from lightspan_verl.shards import SavedShards, Shard, shard_of, write
from lightspan_verl.verl_adapter import Batch, Model

ADAPTER = "default"
"""The name under which PEFT stores the LoRA adapters."""


class Policy:
    """One rank's part (shard) of a policy: of its weights and of the optimiser's state.

    Args:
        setup: the learner's settings.
        policy: the policy's name.
        rank: number of this rank, from 0.
        ranks: number of ranks.

    Raises:
        ConfigError: LoRA adapts a layer that shares its weight with another layer.
    """

    def __init__(self, setup: Setup, policy: str, *, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._path = setup.models[policy]
        self._lora = setup.lora[policy]
        self._setup = setup
        self._model = self._load()
        if self._lora is not None:
            targets = self._lora.target_modules
            check_untied(self._model.module, f"LoRA(target_modules={targets!r})")

    def _load(self, *, adapters: bool = True) -> Model:
        return Model(
            self._path,
            optimizer=self._setup.optimizer,
            lora=self._lora if adapters else None,
            dtype=self._setup.dtype,
            token_budget=self._setup.token_budget,
            gradient_checkpointing=self._setup.gradient_checkpointing,
            param_offload=self._setup.param_offload,
            optimizer_offload=self._setup.optimizer_offload,
            seed=self._setup.seed,
        )

    @cached_property
    def _base(self) -> Model:
        """The model with its weights before training. It is loaded when it is first needed."""
        return self._load(adapters=False)

    # --- computing ------------------------------------------------------------------------
    def score(self, order: Score) -> list[list[float]]:
        """Return the log-probability of each token of each row. A row's first token gets 0."""
        masks = [[False, *[True] * (len(row.ids) - 1)] for row in order.rows]
        return [scores.tolist() for scores in self._scores(order.rows, masks, order.which)]

    def _scores(
        self, rows: Sequence[Row], masks: Sequence[Sequence[bool]], which: Which
    ) -> list[Tensor]:
        if which == "policy":
            return self._model.score(rows, masks)
        if self._lora is not None:
            return self._model.score(rows, masks, adapters=False)
        return self._base.score(rows, masks)

    def update(self, order: Update) -> tuple[MetricAccumulator, float]:
        """Take an optimiser step together with the other ranks.

        Returns:
            The metrics of this rank's rows, and the norm of the whole gradient.
        """
        loss, rows = order.loss, order.rows
        trained_rows = sum(any(row.mask) for row in rows)
        metrics = MetricAccumulator(isinstance(loss, PolicyLoss), rows=trained_rows)
        values = self._values(order)

        def function(logprobs: Tensor, entropies: Tensor, batch: Batch) -> Tensor:
            metrics.count(logprobs.numel())
            if isinstance(loss, PolicyLoss):
                per_token = policy_losses(loss, _values_of(batch), logprobs, entropies, metrics)
            else:
                per_token = -logprobs
                metrics.add("entropy", entropies)
            total = (batch["weights"] * per_token).sum()
            metrics.add("loss", total)
            return total

        norm = self._model.step(
            rows,
            values,
            function,
            learning_rate=order.learning_rate,
            entropy_trained=isinstance(loss, PolicyLoss) and loss.entropy != 0,
        )
        return metrics, norm

    def _values(self, order: Update) -> dict[str, Sequence[Tensor]]:
        """Return the inputs of the loss.

        Returns:
            Name of the input → for each row, a tensor with one value per token.
        """
        rows, loss = order.rows, order.loss
        values: dict[str, Sequence[Tensor]] = {
            "weights": [torch.tensor(row.weights) for row in rows]
        }
        if not isinstance(loss, PolicyLoss):
            return values
        fresh = -1 if order.fresh_version is None else order.fresh_version
        values["behaviour"] = [torch.tensor(row.logprobs) for row in rows]
        values["advantages"] = [torch.tensor(row.advantages) for row in rows]
        values["fresh"] = [(torch.tensor(row.versions) == fresh).long() for row in rows]
        if order.old_logprobs is not None:
            values["old"] = [torch.tensor(logprobs) for logprobs in order.old_logprobs]
        masks = [row.mask for row in rows]
        if loss.kl:
            values["base"] = self._scores(rows, masks, "base")
        if call_setting(loss):
            values.update(self._call_values(rows, loss, values))
        return values

    def _call_values(
        self, rows: Sequence[Row], loss: PolicyLoss, values: dict[str, Sequence[Tensor]]
    ) -> dict[str, Sequence[Tensor]]:
        """Compute the inputs of the loss that are the same for all tokens of a call.

        Returns:
            Name of the input → for each row, a tensor with one value per token.
        """
        masks = [torch.tensor(row.mask) for row in rows]
        selected = [mask.nonzero()[:, 0].tolist() for mask in masks]
        calls = torch.tensor(number_calls(rows, selected, call_setting(loss)), dtype=torch.int64)

        def flat(name: str) -> Tensor:
            return torch.cat([v[m] for v, m in zip(values[name], masks, strict=True)])

        behaviour = flat("behaviour")
        old = flat("old") if "old" in values else behaviour
        call_values = {}
        if loss.form == "gspo":
            scores = self._scores(rows, [row.mask for row in rows], "policy")
            own = torch.cat([v[m] for v, m in zip(scores, masks, strict=True)])
            call_values["call_ratios"] = losses.call_ratios(own, old, calls)
        if loss.importance_level == "sequence" and loss.importance_cap is not None:
            call_values["call_importance"] = losses.call_importance_weight(
                old, behaviour, calls, loss.importance_cap
            )
        if loss.importance_mask is not None:
            call_values["call_kept"] = losses.call_kept(old, behaviour, calls, loss.importance_mask)
        return {name: _by_row(flat_values, masks) for name, flat_values in call_values.items()}

    # --- weights --------------------------------------------------------------------------
    def weights(self, kind: Kind, path: Path | None) -> dict[str, str]:
        """Gather the weights from all ranks, and write them into a file. All ranks must call this.

        Args:
            kind: "trained" for only the weights that are trained. Otherwise all weights are
                written, with the adapters merged into them.
            path: path of the file; None on ranks that do not write.

        Returns:
            Name that is not in the file → name that is, for tied weights, which are written once.
        """
        from safetensors.torch import save_file

        if kind == "trained" and self._lora is not None:
            parts: Iterator[tuple[str, Tensor]] = self._whole(self._trainable())
            aliases: dict[str, str] = {}
        else:
            state, aliases = _without_aliases(self._plain())
            parts = self._whole(state) if self._lora is None else self._merged(state)
        tensors = {name: tensor for name, tensor in parts if path is not None}
        if path is not None:
            save_file(tensors, path)
        return aliases

    def hash(self, *, frozen: bool) -> str:
        """Return the hash of the weights on the first rank, and "" on the others.

        Args:
            frozen: whether to hash only the frozen weights under the adapters.
        """
        from lightspan_torch.engine.weights import hash_weights

        state, _ = _without_aliases(self._plain())
        if frozen:
            state = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
        whole = {name: tensor for name, tensor in self._whole(state) if self._rank == 0}
        return hash_weights(whole) if self._rank == 0 else ""

    def _plain(self) -> dict[str, Any]:
        """Return the state dict of the transformers model, including the adapters.

        PEFT's wrapper around the model is left out.
        """
        module = self._model.module
        plain = module if self._lora is None else module.get_base_model()
        self._model.synchronize()
        state: dict[str, Any] = plain.state_dict(keep_vars=True)
        return state

    def _trainable(self) -> dict[str, Any]:
        self._model.synchronize()
        return {
            name: parameter
            for name, parameter in self._model.module.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def _whole(self, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each tensor in `state`, and the whole tensor, gathered to the CPU."""
        for name, tensor in state.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, whole.detach().to("cpu", copy=True)

    def _check_mergeable(self, state: dict[str, Any]) -> None:
        """Raise `UnsupportedError` if a layer with an adapter is not linear.

        `_merged` would leave out the adapters of such layers.
        """
        linear = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
        other = [name for name in state if ".lora_" in name and not name.endswith(linear)]
        transposed = [
            name
            for name, module in self._model.module.named_modules()
            if getattr(module, "fan_in_fan_out", False)
        ]
        if other or transposed:
            raise UnsupportedError(
                "the verl learner merges LoRA of linear layers only, but "
                f"{(other or transposed)[0]!r} is of another kind: leave it out of "
                "LoRA(target_modules=…), or use the torch learner (learner=Torch(…))"
            )

    @torch.no_grad()
    def _merged(self, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the value of each weight, with adapters merged into the weights.

        The names are those of the model without adapters.
        """
        assert self._lora is not None
        self._check_mergeable(state)
        scale = self._lora.alpha / self._lora.rank
        for name, tensor in self._whole(
            {name: plain for name, plain in state.items() if ".lora_" not in name}
        ):
            layer = name.removesuffix(".base_layer.weight")
            first = f"{layer}.lora_A.{ADAPTER}.weight"
            if layer != name and first in state:
                second = f"{layer}.lora_B.{ADAPTER}.weight"
                pair = dict(self._whole({"A": state[first], "B": state[second]}))
                tensor += scale * (pair["B"] @ pair["A"])
            yield name.replace(".base_layer.", "."), tensor

    # --- checkpoints ----------------------------------------------------------------------
    def save(self, folder: Path, number: int) -> None:
        """Write this rank's part of the policy into a checkpoint.

        Args:
            folder: the checkpoint's folder.
            number: number of the policy in the checkpoint.
        """
        path = folder / f"policy-{number}-rank-{self._rank:03}.safetensors"
        write(path, {**self._weight_shards(), **self._optimizer_shards()})

    def load(self, folder: Path, number: int, steps: int) -> None:
        """Restore this rank's weights and optimiser state from a checkpoint.

        Args:
            folder: the checkpoint's folder.
            number: number of the policy in the checkpoint.
            steps: number of optimiser steps before the checkpoint; if 0, it has no optimiser state.

        Raises:
            CheckpointError: the checkpoint belongs to another model, or cannot be read.
        """
        saved = SavedShards(folder, number)
        weights = self._weight_shards()
        own = set(weights)
        if steps:
            self._make_optimizer_state()
            own |= set(self._optimizer_shards())
        if own != saved.names:
            raise CheckpointError(
                f"the checkpoint {folder} belongs to another model: it differs in "
                f"{sorted(own ^ saved.names)[:5]}"
            )
        for name, shard in weights.items():
            saved.read(name, shard)
        if not steps:
            self._model.optimizer.state.clear()
        else:
            for name, shard in self._optimizer_shards().items():
                saved.read(name, shard)

    def _weight_shards(self) -> dict[str, Shard]:
        state = self._trainable() if self._lora is not None else _without_aliases(self._plain())[0]
        return {f"weights/{name}": self._shard(tensor.detach()) for name, tensor in state.items()}

    def _optimizer_shards(self) -> dict[str, Shard]:
        states = self._model.optimizer.state
        return {
            f"optimizer/{name}/{key}": self._shard(value)
            for name, parameter in self._trainable().items()
            for key, value in states.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def _make_optimizer_state(self) -> None:
        """Create AdamW's state with zeros, so that a checkpoint can be read into it."""
        for parameter in self._trainable().values():
            state = self._model.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter).detach()
                state["exp_avg_sq"] = torch.zeros_like(parameter).detach()

    def _shard(self, tensor: Any) -> Shard:
        return shard_of(tensor, self._rank, self._ranks)


def _values_of(batch: Batch) -> TokenValues:
    return TokenValues(
        behaviour=batch["behaviour"],
        advantages=batch["advantages"],
        fresh=batch["fresh"].bool(),
        old=batch.get("old"),
        base=batch.get("base"),
        call_ratios=batch.get("call_ratios"),
        call_importance=batch.get("call_importance"),
        call_kept=batch.get("call_kept"),
    )


def _by_row(values: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """Return for each row a tensor with one value per token, from the values of trained tokens.

    Args:
        values: [N] values of the trained tokens of all rows.
        masks: for each row, True for each trained token. Other tokens get 0.
    """
    counts = [int(mask.sum()) for mask in masks]
    rows = []
    parts = values.split(counts)  # type: ignore[no-untyped-call]
    for mask, part in zip(masks, parts, strict=True):
        row = torch.zeros(len(mask))
        row[mask] = part
        rows.append(row)
    return rows


def _without_aliases(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Remove all names but one of each tied weight, which is a tensor with several names.

    Returns:
        (name → weight, removed name → name under which the weight is kept)
    """
    first: dict[int, str] = {}
    aliases = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    weights = {name: state[name] for name in state if aliases[name] == name}
    return weights, {name: other for name, other in aliases.items() if name != other}
