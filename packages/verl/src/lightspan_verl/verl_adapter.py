"""Adapter of verl 0.9.1: the only module that uses verl's private API.

It can be imported in verl's environment only. To support another version of verl, change this file
and run its tests (`nox -s tests_verl`).

Differences from verl's `TrainingWorker`:

- Log-probabilities are computed at each token's temperature, for selected tokens only.
- AdamW decays matrices only.
- A step whose loss is not finite is skipped, even if its gradient is finite.
- The model's own dropout stays off.

The engine here is registered with verl. verl is not patched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA, Optimizer
from lightspan_torch.learner import losses

KIND: Final = "lightspan"
"""Name under which `Engine` is registered with verl."""

LossFunction = Callable[[Tensor, Tensor, "Batch"], Tensor]
"""Takes [n] log-probabilities, [n] entropies and the batch; returns the loss, which is summed over
ranks."""


@EngineRegistry.register(model_type=KIND, backend=["fsdp2"], device=["cpu", "cuda"])
class Engine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP2 engine with the differences that the module's docstring lists."""

    loss_sum: Callable[[], float] = staticmethod(lambda: 0.0)
    """Returns the sum of this rank's losses in the current step."""
    entropy_trained: bool = False

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.model_config.model_type = "language_model"

    def initialize(self) -> None:
        super().initialize()
        for module in self.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            # some modules pass a rate of their own to functional dropout
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                    setattr(module, name, 0.0)

    def _build_optimizer(self, module: Any) -> torch.optim.Optimizer:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        decay = self.optimizer_config.weight_decay
        groups = [
            {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": decay},
            {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
        ]
        betas = tuple(self.optimizer_config.betas)
        nonempty = [group for group in groups if group["params"]]
        return torch.optim.AdamW(nonempty, lr=self.optimizer_config.lr, betas=betas)

    def optimizer_step(self) -> float:
        total = torch.tensor([self.loss_sum()], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        if not math.isfinite(float(total)):
            self.optimizer_zero_grad()
            return math.nan
        return float(super().optimizer_step())

    @property
    def device(self) -> torch.device:
        """Device of this rank's shard."""
        device: torch.device = next(iter(self.module.parameters())).device
        return device

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Compute the log-probabilities of the selected tokens, each at its own temperature.

        Returns:
            In training, `log_probs` [n] and `entropy` [n] of the n selected tokens. Otherwise only
            `log_probs`, with a value for every token of every row, which is 0 for tokens that are
            not selected.
        """
        batch = Batch(micro_batch)
        logits = output.logits
        padded = torch.nested.to_padded_tensor(
            micro_batch["loss_mask"], 0, output_size=logits.shape[:2]
        ).bool()
        distributions = logits[:, :-1][padded[:, 1:]].float()
        distributions = (distributions / batch["temperatures"][:, None]).log_softmax(-1)
        logprobs = distributions.gather(1, batch["input_ids"][:, None])[:, 0]
        if logits_processor_func is None:
            rows = micro_batch["input_ids"]
            flat = torch.zeros(rows.values().shape, device=logprobs.device)
            flat[batch.selected] = logprobs
            return {"log_probs": torch.nested.nested_tensor_from_jagged(flat, rows.offsets())}
        with torch.set_grad_enabled(self.entropy_trained):
            source = distributions if self.entropy_trained else distributions.detach()
            entropies = losses.entropy(source)
        return {"log_probs": logprobs, "entropy": entropies}


class Batch:
    """The rows of one forward pass. `batch[name]` has the [n] values of their selected tokens."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.selected = data["loss_mask"].values().bool()

    def __getitem__(self, name: str) -> Tensor:
        values: Tensor = self._data[name].values()[self.selected]
        return values

    def get(self, name: str) -> Tensor | None:
        return None if self._data.get(name, None) is None else self[name]

    @property
    def ranks(self) -> int:
        return int(self._data["dp_size"])


class Model:
    """A model in a verl `TrainingWorker`, with its optimiser.

    Args:
        path: folder of the model.
        optimizer: the optimiser's settings.
        lora: settings of LoRA adapters; None to train full weights.
        dtype: data type of forward and backward passes.
        token_budget: approximate number of tokens in one forward pass.
        gradient_checkpointing: whether activations are recomputed in the backward pass.
        param_offload: whether weights and gradients are in host memory between passes.
        optimizer_offload: whether the optimiser's state is in host memory between passes.
        seed: seed of the adapters' initial weights.
    """

    def __init__(
        self,
        path: str,
        *,
        optimizer: Optimizer,
        lora: LoRA | None,
        dtype: str,
        token_budget: int,
        gradient_checkpointing: bool,
        param_offload: bool,
        optimizer_offload: bool,
        seed: int,
    ) -> None:
        self._budget = token_budget
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # for adapters; all ranks get the first rank's weights
            self._worker = TrainingWorker(
                TrainingWorkerConfig(
                    model_type=KIND,
                    model_config=_model_config(path, lora, gradient_checkpointing),
                    engine_config=_engine_config(
                        dtype,
                        token_budget,
                        param_offload=param_offload,
                        optimizer_offload=optimizer_offload,
                    ),
                    optimizer_config=_optimizer_config(optimizer),
                    checkpoint_config=CheckpointConfig(),
                )
            )
            self._worker.reset()
        self._engine: Engine = self._worker.engine

    @property
    def module(self) -> Any:
        """The transformers model, with the adapters in its layers. This rank has a part of it."""
        return self._engine.module

    def synchronize(self) -> None:
        """Wait until copies from the GPU to the host are complete; verl does not wait for them."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._engine.optimizer
        return optimizer

    def score(
        self, rows: Sequence[Row], masks: Sequence[Sequence[bool]], *, adapters: bool = True
    ) -> list[Tensor]:
        """Return for each row a tensor of [len(row.ids)], the log-probabilities of its tokens.

        Tokens that are not selected get 0.

        Args:
            rows: this rank's rows.
            masks: for each row, True for each selected token.
            adapters: whether to use the adapters; False for the weights before training.
        """
        data = _batch(rows, masks)
        tensordict_utils.assign_non_tensor(
            data,
            calculate_entropy=False,
            compute_loss=False,
            global_batch_size=len(rows),
            max_token_len_per_gpu=self._tokens(rows),
            no_lora_adapter=not adapters,
        )
        return list(self._worker.infer_batch(data)["log_probs"].unbind())

    def step(
        self,
        rows: Sequence[Row],
        values: dict[str, Sequence[Tensor]],
        loss: LossFunction,
        *,
        learning_rate: float,
        entropy_trained: bool,
    ) -> float:
        """Take an optimiser step on the rows of all ranks; return the norm of the gradient.

        It is the norm before clipping. If it is NaN or infinite, no step was taken.

        Args:
            rows: this rank's rows.
            values: name of an input of the loss → for each row, a tensor with one value per token.
            loss: the loss function.
            learning_rate: the step's learning rate.
            entropy_trained: whether the loss has an entropy bonus, so that entropies need a
                gradient.
        """
        total = 0.0

        def function(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
            nonlocal total
            batch = Batch(data)
            own = loss(model_output["log_probs"], model_output["entropy"], batch)
            total += float(own.detach())
            return own * batch.ranks, {}  # FSDP averages over ranks, but losses are sums

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.loss_sum = lambda: total
        self._engine.entropy_trained = entropy_trained
        self._worker.set_loss_fn(function)
        data = _batch(rows, [row.mask for row in rows], values)
        tensordict_utils.assign_non_tensor(
            data, global_batch_size=len(rows), max_token_len_per_gpu=self._tokens(rows)
        )
        output = self._worker.train_batch(data)
        metrics = tensordict_utils.get(output, "metrics")
        return float(metrics["grad_norm"])

    def _tokens(self, rows: Sequence[Row]) -> int:
        """Return the maximum number of tokens in a forward pass, which must be equal on all ranks.

        It is the token budget. If a row on any rank is longer, it is the length of the longest row,
        because verl refuses rows that are longer than the maximum.
        """
        longest = torch.tensor([len(row.ids) for row in rows], device=self._engine.device).max()
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX)
        return max(self._budget, int(longest))


def _model_config(path: str, lora: LoRA | None, gradient_checkpointing: bool) -> Any:
    adapters = {}
    if lora is not None:
        targets = lora.target_modules
        adapters = {
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": targets if isinstance(targets, str) else list(targets),
        }
    return HFModelConfig(
        path=path,
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=gradient_checkpointing,
        override_config={"attn_implementation": "sdpa"},
        **adapters,
    )


def _engine_config(
    dtype: str, token_budget: int, *, param_offload: bool, optimizer_offload: bool
) -> Any:
    return FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        param_offload=param_offload,
        optimizer_offload=optimizer_offload,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=token_budget,
        infer_max_token_len_per_gpu=token_budget,
        # True would keep the whole model's gradients on every rank during all passes
        use_no_sync_for_gradient_accumulation=False,
        model_dtype="fp32",
        mixed_precision={
            "param_dtype": {"float32": "fp32", "bfloat16": "bf16"}[dtype],
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
    )


def _optimizer_config(optimizer: Optimizer) -> Any:
    return FSDPOptimizerConfig(
        lr=optimizer.learning_rate,  # replaced at each step, in `Model.step`
        betas=tuple(optimizer.betas),
        weight_decay=optimizer.weight_decay,
        clip_grad=math.inf if optimizer.max_grad_norm is None else optimizer.max_grad_norm,
        total_training_steps=10**9,
        lr_warmup_steps=0,
    )


def _batch(
    rows: Sequence[Row],
    masks: Sequence[Sequence[bool]],
    values: dict[str, Sequence[Tensor]] | None = None,
) -> Any:
    """Convert rows, and values of their tokens, to a `TensorDict` for verl.

    Args:
        rows: the rows.
        masks: for each row, True for each selected token.
        values: name → for each row, a tensor with one value per token; None for no values.
    """
    ids = [torch.tensor(row.ids) for row in rows]
    fields = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "prompts": [row[:1] for row in ids],
        "responses": [row[1:] for row in ids],
        "response_mask": [torch.tensor(mask[1:]).long() for mask in masks],
        "loss_mask": [torch.tensor(mask).long() for mask in masks],
        "temperatures": [torch.tensor(row.temperatures) for row in rows],
        **(values or {}),
    }
    nested = {
        name: torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
        for name, tensors in fields.items()
    }
    # verl requires a temperature, which `Engine.prepare_model_outputs` ignores
    return TensorDict({**nested, "temperature": torch.ones(len(rows))}, batch_size=len(rows))
