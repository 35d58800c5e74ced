"""Forecasts: what memory and time a run will take, part by part, before it is started.

Memory is arithmetic on the model's configuration: no weights are loaded. With P parameters of a
policy, of which T are trained, and A, B, C bytes per parameter in the engine, of the learner's
weights, and of those that are trained (C is B, with LoRA 4):

| part | bytes |
|---|---|
| engine weights | A · P per policy; the starting weights once more with `frozen="base"` |
| of LoRA beside them | A · P per model, the starting weights included; C · T per policy |
| key-value cache | tokens · layers · 2 · key-value width · A, per copy of the model |
| learner weights | B · P per policy, with LoRA per model + C · T; B · P more for KL without |
| optimiser | 2 · C · T (AdamW); 1 · C for the matrices that Muon updates |
| gradients | C · T, while updating |
| activations | microbatch tokens · what autograd keeps of a token (`kept_per_token`) · B |
| logits | trained positions of a microbatch · vocabulary · 4 bytes · 4 |
| publishing | B · P in the host's memory, one policy at a time; of LoRA beside them C · T |
| each further rank | a process, and the learner's parts but publishing, on its device |

verl's ranks have shards of it (`shard_memory`), vLLM's servers their share (`server_memory`).
Updating and publishing follow each other, so the larger of the two counts. The tests compare
the forecast with a real run on a CPU; what it says of an accelerator is not yet run on a GPU.

Time is what a dry run measured, scaled to the run's size:

    batch(N)  = overhead + max(N · latency / min(N, runners), N · engine CPU) + tail
    update(N) = step · minibatches + seconds per token · tokens of N rollouts · share that varies
    run       = start + evaluations · batch(V) + steps · (batch(N) + update(N) + publish + save)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from lightspan.engines.hub import check_model_path
from lightspan.engines.tokenizer import context_length
from lightspan.errors import ModelError
from lightspan.learners.protocol import LoRA, Optimizer
from lightspan.schema.routing import BASE_POLICY

FLOAT32: Final = 4
LOGIT_COPIES: Final = 4
"""Logits, at the temperature, their log-softmax, and its gradient."""

Place = Literal["host", "device"]


# --- a model's size ---------------------------------------------------------------------------
class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that memory depends on."""

    parameters: int
    bytes_per_parameter: int
    """Width of the weights as they are saved, and as the engine keeps them."""
    layers: int
    hidden: int
    heads: int
    query: int
    """Heads · size of a head."""
    key_value: int
    """Key-value heads · size of a head."""
    mlp: int
    vocabulary: int
    context: int
    matrices: int = 0
    """Parameters of the 2-D matrices that are neither embedding nor head."""
    tied: bool = False
    """Whether the output layer is the embeddings."""
    linear_widths: int = 0
    """Sum over linear layers but the head of inputs + outputs: LoRA's parameters per rank."""

    def trained(self, lora: LoRA | None) -> int:
        """Parameters that are trained. `target_modules` other than all linear layers count as all
        of them: an upper bound."""
        return self.parameters if lora is None else lora.rank * self.linear_widths


def model_shape(model: str) -> ModelShape:
    """The sizes of a model folder, or of a hub model whose configuration is on this machine.

    Reads the configuration only; nothing is fetched.

    Raises:
        ModelError: the configuration is not here, or does not describe a causal language model.
    """
    from transformers import AutoConfig

    name = check_model_path(model)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"the configuration of {name} is not on this machine: fetch it (`hf download {name} "
            "config.json`), or give a model folder"
        ) from error
    return shape_of_config(config, name)


def shape_of_config(config: Any, name: str = "the model") -> ModelShape:
    """The sizes that a transformers configuration describes.

    Raises:
        ModelError: it does not describe a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lightspan.learners.models import embedding_parameters

    try:
        with torch.device("meta"):  # shapes without memory
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f"the size of {name} is not known: {error}") from error
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    hidden = int(text.hidden_size)
    outside = embedding_parameters(model)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inner = [m for m in linear if m is not model.get_output_embeddings()]
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_per_parameter=_itemsize(getattr(config, "dtype", None)),
        layers=int(text.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        query=heads * size,
        key_value=kv_heads * size,
        mlp=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        vocabulary=int(text.vocab_size),
        context=context_length(config),
        matrices=sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in outside),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        linear_widths=sum(m.in_features + m.out_features for m in inner),
    )


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", None) or FLOAT32)


# --- memory -----------------------------------------------------------------------------------
class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that takes memory."""

    name: str
    bytes: int
    place: Place
    """`host`, or the accelerator; on a CPU everything is in the host's memory."""
    device: str = ""
    """Which accelerator; empty on the host."""
    when: Literal["always", "loading", "updating", "publishing"] = "always"
    note: str = ""
    """What it was computed from."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one accelerator has to hold."""

    device: str
    bytes: int
    """At the peak."""
    free_bytes: int | None = None
    """Now; None where that is not known."""


class MemoryForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs at its peak."""

    device: str
    parts: list[MemoryPart]
    host_bytes: int
    """What the trainer's process takes at its peak, and further ranks and servers with it; runner
    processes come on top."""
    devices: list[DeviceMemory] = []
    """Each accelerator that the run uses."""
    host_free_bytes: int | None = None
    runner_bytes: int | None = None
    """What all runner processes held in the dry run."""
    measured_peak_bytes: int | None = None
    """The most that the dry run's own process held."""

    @property
    def device_bytes(self) -> int | None:
        """The most that one accelerator has to hold; None on a CPU."""
        return max((each.bytes for each in self.devices), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether it fits what is free now; None where that is not known."""
        pairs = [(self.host_bytes + (self.runner_bytes or 0), self.host_free_bytes)]
        pairs += [(each.bytes, each.free_bytes) for each in self.devices]
        fitting = [need <= free for need, free in pairs if free is not None]
        return all(fitting) if fitting else None


class PolicySize(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as memory sees it."""

    shape: ModelShape
    lora: LoRA | None = None
    weight_bytes: int = FLOAT32
    """Per parameter of the learner's weights."""
    model: str = ""
    """What it starts from: the policies with adapters on one model hold its weights once."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.shape.trained(self.lora)

    @property
    def trained_bytes(self) -> int:
        """Per trained parameter: adapters are float32, whatever the weights under them are."""
        return self.weight_bytes if self.lora is None else FLOAT32

    @property
    def own_bytes(self) -> int:
        """Bytes of the learner's weights that are this policy's alone."""
        return self.trained_bytes * self.trained

    @property
    def shared_bytes(self) -> int:
        """Bytes of those that it may share: what is under its adapters."""
        return 0 if self.lora is None else self.weight_bytes * self.shape.parameters


def _held_bytes(sizes: Iterable[PolicySize]) -> int:
    """Bytes of the learner's weights, adapters included."""
    sizes = list(sizes)
    bases = {(size.model, size.weight_bytes): size.shared_bytes for size in sizes if size.lora}
    return sum(size.own_bytes for size in sizes) + sum(bases.values())


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """What the memory of a run depends on."""

    policies: Mapping[str, PolicySize]
    base: ModelShape | None
    """The starting weights, if the engine serves them too; None if it does not."""
    device: str
    optimizer: Optimizer
    cache_tokens: int
    """Key-value cache of one model, in tokens."""
    microbatch_tokens: int
    """Padded tokens of one forward pass of the learner, at most."""
    trained_share: float
    """How much of a pass is trained, at most."""
    process_bytes: int
    """What the process holds before it loads a model."""
    kl: bool = False
    beside: frozenset[str] = frozenset()
    """Policies that the engine serves as LoRA beside one copy of their model's weights, and
    `BASE_POLICY` where that is served from this copy too."""
    engine: Sequence[MemoryPart] | None = None
    """What an engine takes that is none of this process's; None: it is the embedded one."""
    learner: Sequence[MemoryPart] | None = None
    """The same of a learner; None: torch's."""
    ranks: tuple[str, ...] = ()
    """The device of each rank of the learner; empty for one, where the engine is."""


def memory_forecast(inputs: MemoryInputs) -> MemoryForecast:
    """The parts of the module's table, and their peak."""
    ranks = [one_name(device) for device in inputs.ranks or (inputs.device,)]
    parts = [MemoryPart(name="process", bytes=inputs.process_bytes, place="host")]
    if inputs.engine is None:
        parts += on_device(one_name(inputs.device), _engine_parts(inputs))
    else:
        parts += inputs.engine
    parts += _learners(inputs, ranks) if inputs.learner is None else inputs.learner
    used = list(dict.fromkeys(part.device for part in parts if part.device))
    return MemoryForecast(
        device=inputs.device,
        parts=parts,
        host_bytes=_peak([part for part in parts if part.place == "host"]),
        devices=[
            DeviceMemory(device=device, bytes=_peak([p for p in parts if p.device == device]))
            for device in used
        ],
    )


def _learners(inputs: MemoryInputs, ranks: Sequence[str]) -> list[MemoryPart]:
    """Of the torch learner's ranks."""
    learner = _learner_parts(inputs)
    parts = on_device(ranks[0], learner)
    for rank, device in enumerate(ranks[1:], 1):
        parts += _rank_parts(rank, device, inputs.process_bytes, learner)
    return parts


def one_name(device: str) -> str:
    """The device's name with its number, which torch lets people leave out."""
    return "cuda:0" if device == "cuda" else device


def on_device(device: str, parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """The parts where they are, those but of the host on this device."""
    if device.startswith("cpu"):
        return [msgspec.structs.replace(part, place="host") for part in parts]
    return [
        msgspec.structs.replace(part, device=device) if part.place == "device" else part
        for part in parts
    ]


def _rank_parts(
    rank: int, device: str, process_bytes: int, learner: Sequence[MemoryPart]
) -> list[MemoryPart]:
    """Of a further rank: its process, and what rank 0 has but to publish."""
    size = sum(part.bytes for part in learner if part.when != "publishing")
    process = MemoryPart(name=f"rank {rank}: process", bytes=process_bytes, place="host")
    updating = MemoryPart(
        name=f"rank {rank}: learner",
        bytes=size,
        place="device",
        when="updating",
        note=f"on {device}, as rank 0's",
    )
    return [process, *on_device(device, [updating])]


def _peak(parts: Sequence[MemoryPart]) -> int:
    sums = {when: sum(part.bytes for part in parts if part.when == when) for when in _WHEN}
    return sums["always"] + max(sums[when] for when in _WHEN[1:])


_WHEN: Final = ("always", "loading", "updating", "publishing")


def _engine_parts(inputs: MemoryInputs) -> list[MemoryPart]:
    place: Place = "device"
    served = {name: size.shape for name, size in inputs.policies.items()}
    parts = [
        _weights(f"engine: {name}", shape, place)
        for name, shape in served.items()
        if name not in inputs.beside
    ]
    parts += _shared_parts(inputs, place)
    if inputs.base is not None and BASE_POLICY not in inputs.beside:
        parts.append(_weights("engine: starting weights", inputs.base, place))
    shapes = [*served.values(), *([inputs.base] if inputs.base is not None else [])]
    tokens = inputs.cache_tokens
    size = sum(
        tokens * shape.layers * 2 * shape.key_value * shape.bytes_per_parameter for shape in shapes
    )
    note = f"{tokens:,} tokens, {len(shapes)} copies" if len(shapes) > 1 else f"{tokens:,} tokens"
    return [*parts, MemoryPart(name="key-value cache", bytes=size, place=place, note=note)]


def _shared_parts(inputs: MemoryInputs, place: Place) -> list[MemoryPart]:
    """What the engine holds of policies that it serves as LoRA."""
    beside = {name: size for name, size in inputs.policies.items() if name in inputs.beside}
    parts = []
    for model in sorted({size.model for size in beside.values()}):
        names = [name for name, size in beside.items() if size.model == model]
        whole = _weights(f"engine: under {', '.join(names)}", beside[names[0]].shape, place)
        parts.append(whole)
    if beside:
        size = sum(each.trained_bytes * each.trained for each in beside.values())
        note = f"of {', '.join(beside)}"
        parts.append(MemoryPart(name="engine: LoRA", bytes=size, place=place, note=note))
    return parts


def _weights(name: str, shape: ModelShape, place: Place) -> MemoryPart:
    return MemoryPart(
        name=name,
        bytes=shape.parameters * shape.bytes_per_parameter,
        place=place,
        note=f"{shape.parameters:,} parameters of {shape.bytes_per_parameter} bytes",
    )


def _learner_parts(inputs: MemoryInputs) -> list[MemoryPart]:
    place: Place = "device"
    sizes = list(inputs.policies.values())
    trained = sum(size.trained for size in sizes)
    states = sum(size.trained_bytes * _states(size, inputs.optimizer) for size in sizes)
    dtypes = sorted({size.weight_bytes for size in sizes})
    parts = [
        MemoryPart(
            name="learner weights",
            bytes=_held_bytes(sizes),
            place=place,
            note=f"{' and '.join(map(str, dtypes))} bytes per parameter",
        ),
        MemoryPart(
            name="optimiser",
            bytes=states,
            place=place,
            note=f"{inputs.optimizer.name} on {trained:,} parameters",
        ),
    ]
    if inputs.kl:
        full = sum(size.own_bytes for size in sizes if size.lora is None)
        parts.append(MemoryPart(name="starting weights (KL)", bytes=full, place=place))
    parts.append(
        MemoryPart(
            name="gradients",
            bytes=sum(size.trained_bytes * size.trained for size in sizes),
            place=place,
            when="updating",
        )
    )
    parts += _working_parts(inputs, place)
    parts.append(
        MemoryPart(
            name="publishing",
            bytes=max(
                size.own_bytes
                if name in inputs.beside
                else size.weight_bytes * size.shape.parameters
                for name, size in inputs.policies.items()
            ),
            place="host",
            when="publishing",
            note="one copy of the weights on its way to the engine",
        )
    )
    return parts


def _working_parts(inputs: MemoryInputs, place: Place) -> list[MemoryPart]:
    """What one forward and backward pass of the largest policy takes."""
    tokens, sizes = inputs.microbatch_tokens, list(inputs.policies.values())
    kept = max(kept_per_token(size.shape) * size.weight_bytes for size in sizes)
    positions = math.ceil(tokens * min(1.0, inputs.trained_share))
    vocabulary = max(size.shape.vocabulary for size in sizes)
    return [
        MemoryPart(
            name="activations",
            bytes=tokens * kept,
            place=place,
            when="updating",
            note=f"microbatches of {tokens:,} tokens",
        ),
        MemoryPart(
            name="logits",
            bytes=positions * vocabulary * FLOAT32 * LOGIT_COPIES,
            place=place,
            when="updating",
            note=f"{positions:,} trained positions",
        ),
    ]


def kept_per_token(shape: ModelShape) -> int:
    """Numbers that autograd keeps per token of a forward pass, logits apart.

    Of a decoder layer of the Llama kind, with two norms, fused attention and a gated MLP:
    6·hidden + 2·query + 2·key-value + heads + 4·mlp + 2. Other architectures differ.
    """
    attention = 2 * shape.query + 2 * shape.key_value + shape.heads
    return shape.layers * (6 * shape.hidden + attention + 4 * shape.mlp + 2) + 2 * shape.hidden


def _states(size: PolicySize, optimizer: Optimizer) -> int:
    """Numbers that the optimiser keeps."""
    if optimizer.name != "muon":
        return 2 * size.trained
    matrices = size.shape.matrices if size.lora is None else size.trained
    return 2 * size.trained - matrices


# --- time -------------------------------------------------------------------------------------
class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run measured. Seconds of wall time unless said otherwise."""

    start_s: float
    """Time from nothing to runners that wait for work."""
    overhead_s: float
    """Time of a batch before its first rollout begins and after its last has ended."""
    latency_s: float
    """Mean time of a rollout, with as many at once as the dry run had."""
    tail_s: float
    """What the slowest rollout took beyond that."""
    engine_cpu_s: float
    """CPU-seconds of the engine per rollout; 0 where that is no bound (an accelerator)."""
    step_s: float
    """Time of an optimiser step, however few tokens it has."""
    token_s: float
    """Time of an update per token of its rows."""
    publish_s: float
    save_s: float | None
    """Time of a checkpoint; None: not measured."""
    tokens_per_rollout: float
    """Tokens of all rows of a rollout, on average."""
    varying: float
    """Share of the groups that vary: only they are learned from."""


class RunSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much a run does."""

    steps: int
    tasks_per_step: int
    group_size: int
    evaluations: int
    val_tasks: int
    comparisons: int = 0
    """Evaluations on the selection split."""
    selection_tasks: int = 0
    minibatches: int = 1
    checkpoint_every: int = 1
    searches: int = 0
    """Of the steps: those that search for prompts, and update no weights."""
    search_rollouts: int = 0
    """Of all these together, at most."""

    @property
    def updates(self) -> int:
        """Steps that update weights."""
        return self.steps - self.searches

    @property
    def step_rollouts(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def train_rollouts(self) -> int:
        return self.updates * self.step_rollouts + self.search_rollouts

    @property
    def val_rollouts(self) -> int:
        return self.evaluations * self.val_tasks + self.comparisons * self.selection_tasks

    @property
    def rollouts(self) -> int:
        """All rollouts, for training and evaluation."""
        return self.train_rollouts + self.val_rollouts


class TimeForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of wall time that a run takes."""

    start_s: float
    rollouts_s: float
    updates_s: float
    publish_s: float
    save_s: float
    evaluations_s: float
    step_s: float
    """Time of one iteration, without its checkpoint."""
    runners: int
    speed: Speed

    @property
    def total_s(self) -> float:
        return math.fsum(
            (
                self.start_s,
                self.rollouts_s,
                self.updates_s,
                self.publish_s,
                self.save_s,
                self.evaluations_s,
            )
        )


def time_forecast(size: RunSize, speed: Speed, runners: int) -> TimeForecast:
    """The run's time by the formulas of the module."""
    rollouts = batch_seconds(size.step_rollouts, speed, runners)
    update = update_seconds(size, speed)
    saves = math.ceil(size.steps / size.checkpoint_every) + 1 if size.steps else 0
    return TimeForecast(
        start_s=speed.start_s,
        rollouts_s=size.updates * rollouts + batch_seconds(size.search_rollouts, speed, runners),
        updates_s=size.updates * update,
        publish_s=size.updates * speed.publish_s,
        save_s=saves * (speed.save_s or 0.0),
        evaluations_s=size.evaluations * batch_seconds(size.val_tasks, speed, runners)
        + size.comparisons * batch_seconds(size.selection_tasks, speed, runners),
        step_s=rollouts + update + speed.publish_s,
        runners=runners,
        speed=speed,
    )


def batch_seconds(rollouts: int, speed: Speed, runners: int) -> float:
    """Time of a batch of rollouts; see the module."""
    if not rollouts:
        return 0.0
    waiting = rollouts * speed.latency_s / min(rollouts, runners)
    return speed.overhead_s + max(waiting, rollouts * speed.engine_cpu_s) + speed.tail_s


def update_seconds(size: RunSize, speed: Speed) -> float:
    """Time of one iteration's updates; see the module."""
    tokens = size.step_rollouts * speed.tokens_per_rollout * speed.varying
    return size.minibatches * speed.step_s + tokens * speed.token_s
