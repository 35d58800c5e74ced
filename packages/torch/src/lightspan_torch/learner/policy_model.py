"""A policy's model that is trained (all weights, or LoRA adapters), and its optimisers."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lightspan.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from lightspan.protocols.engine import LoRAWeights
from lightspan.protocols.learner import LoRA, Optimizer, Which
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer
from lightspan_torch.engine.weights import (
    SharedModels,
    hash_weights,
    load_model,
    without_aliases,
    without_bars,
)
from lightspan_torch.vision.features import vision_parameters
from lightspan_torch.vision.processor import copy_processor, takes_images
from lightspan_torch.vision.tokenizer import VisionTokenizer

ADAPTER: Final = "default"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
FINAL_FACTOR: Final = 0.05
"""Lower bound of a decaying learning rate, as a fraction of the full rate."""

_NAME_LAYERS: Final = 'Name the layers to adapt: LoRA(target_modules=["q_proj", "v_proj"])'
_SCALED_LOGITS: Final = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of models that change the output layer's result to get logits."""


def default_dtype(device: str | torch.device, lora: LoRA | None) -> torch.dtype:
    """Return the default data type of a learner's weights.

    It is float32, because bfloat16 rounds away steps as small as 1e-6. On a GPU, weights under LoRA
    adapters are bfloat16, because they are not trained. The adapters stay float32, as in PEFT. Not
    yet run on a GPU.
    """
    if lora is not None and torch.device(device).type == "cuda":
        return torch.bfloat16
    return torch.float32


class TrainedModel:
    """The model of a policy that is trained. Its initial weights are loaded too, if needed.

    Args:
        source: a folder, a hub name, or a loaded model, which is copied.
        lora: settings of the adapters; None to train all weights.
        device: the model's device.
        dtype: data type of the weights.
        seed: seed of the adapters' initial weights.
        shared: loads the frozen weights under adapters, so that policies share them; None to load
            them for this policy alone.
        train_vision: whether the vision part of the model is trained too.
    """

    def __init__(
        self,
        source: Any,
        *,
        lora: LoRA | None,
        device: str,
        dtype: torch.dtype,
        seed: int,
        shared: SharedModels | None = None,
        train_vision: bool = False,
    ) -> None:
        self.lora = lora
        self.train_vision = train_vision
        self._device = device
        self._dtype = dtype
        if lora is None or shared is None:
            model = load_model(source, device=device, dtype=dtype)
        else:
            model = shared.load(source)
        is_module = isinstance(source, torch.nn.Module)
        # KL needs the initial weights, which cannot be read again for a model in memory
        is_kept = is_module and lora is None
        self._source: Any = load_model(source, dtype=dtype) if is_kept else source
        self.hidden_to_logits: Final = _hidden_to_logits(model)
        """Whether the logits are the output layer's result, without scaling or capping."""
        if takes_images(model.config) and lora is None and not train_vision:
            for _, parameter in vision_parameters(model):
                parameter.requires_grad_(False)
        self.model: Any = model if lora is None else _with_adapters(model, lora, seed)
        self._base: Any = None

    @property
    def plain(self) -> Any:
        """The transformers model without PEFT's wrapper. Its layers include the adapters."""
        return self.model if self.lora is None else self.model.get_base_model()

    @property
    def hidden_size(self) -> int:
        """Size of the last hidden state."""
        return int(self.plain.get_output_embeddings().weight.shape[-1])

    @property
    def dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @contextmanager
    def using(self, which: Which) -> Iterator[Any]:
        """Yield the plain model with the weights `which`.

        Args:
            which: "policy" for the current weights, "base" for the weights before training.
        """
        if which == "policy":
            yield self.plain
        elif self.lora is not None:
            with self.model.disable_adapter():
                yield self.plain
        else:
            if self._base is None:  # as large as the model, so it is loaded on demand
                self._base = load_model(self._source, device=self._device, dtype=self._dtype)
                self._base.requires_grad_(False)
            yield self._base

    @contextmanager
    def training(self) -> Iterator[None]:
        """Enable the adapters' dropout in the `with` block.

        The model's own dropout stays off: the log-probabilities of the update must be those of the
        distribution that the engine samples from.
        """
        layers = [
            layer
            for name, layer in self.model.named_modules()
            if self.dropout and isinstance(layer, torch.nn.Dropout) and "lora_dropout" in name
        ]
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights on the CPU, with the adapters merged into them.

        Their names are those of the model without adapters.
        """
        deltas: dict[str, Tensor] = {}
        if self.lora is not None:
            for name, layer in self._adapted():
                # experts' weights are parameters of one module, each with a wrapper of its own
                parameter = getattr(layer, "parameter_name", "weight")
                deltas[_unwrapped(f"{name}.{parameter}")] = layer.get_delta_weight(ADAPTER)
        weights: dict[str, Tensor] = {}
        for name, tensor in self.plain.state_dict().items():
            if ".lora_" in name:
                continue
            name = _unwrapped(name)
            value = tensor + deltas[name] if name in deltas else tensor
            weights[name] = value.detach().to("cpu", copy=True)
        return weights

    @torch.no_grad()
    def lora_weights(self) -> LoRAWeights:
        """Return copies of the adapters on the CPU: name of a layer in the plain model → adapter.

        Raises:
            UnsupportedError: an adapted layer is not linear.
        """
        assert self.lora is not None, "the policy has no adapters"
        layers: dict[str, tuple[Tensor, Tensor]] = {}
        for name, layer in self._adapted():
            if ADAPTER not in layer.lora_A or hasattr(layer, "parameter_name"):
                raise UnsupportedError(
                    f"LoRA(target_modules={self.lora.target_modules!r}) adapts {name}, which is no "
                    "linear layer: engines cannot serve that unmerged. Leave it out, or have the "
                    "policy served merged (Transformers(merge_lora=True), VLLM(merge=True))"
                )
            first, second = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            layers[name] = (first.to("cpu", copy=True), second.to("cpu", copy=True))
        scale = self.lora.alpha / self.lora.rank
        return LoRAWeights(rank=self.lora.rank, scale=scale, layers=layers)

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the layer of each layer that has an adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for name, layer in self.plain.named_modules():
            if isinstance(layer, BaseTunerLayer):
                yield name, layer

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint: the whole model, or the adapters alone."""
        if self.lora is not None:
            return {name: parameter.data for name, parameter in self.trainable().items()}
        return without_aliases(self.model.state_dict())

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Set the weights to the tensors that `saved_tensors` returned.

        Raises:
            CheckpointError: names or shapes differ from the model's.
        """
        own = self.saved_tensors()
        if set(own) != set(tensors):
            names = sorted(set(own) ^ set(tensors))
            raise CheckpointError(
                f"the checkpoint belongs to another model: weights differ: {names[:5]}"
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the checkpoint belongs to another model: {name} has shape "
                    f"{tuple(tensors[name].shape)}, here {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def frozen_hash(self) -> str:
        """Return the hash of the weights under the adapters; "" without LoRA."""
        if self.lora is None:
            return ""
        state = self.plain.state_dict()
        return hash_weights({name: t for name, t in state.items() if ".lora_" not in name})

    def hash(self) -> str:
        return hash_weights(self.plain.state_dict())

    def export(self, folder: Path, *, merge: bool = False) -> None:
        """Save the model, and its tokenizer if the model was loaded from a folder or the hub.

        With LoRA, save the PEFT adapter, which contains the name of its base model. If `merge`,
        save the model with the adapter merged instead.
        """
        with without_bars():
            if self.lora is None:
                self.plain.save_pretrained(folder)
            elif merge:
                # a copy, because merging removes the adapters and training may continue
                copy.deepcopy(self.model).merge_and_unload().save_pretrained(folder)
            else:  # to decide whether to save embeddings, PEFT would query the hub
                self.model.save_pretrained(folder, save_embedding_layers=False)
        if not isinstance(self._source, torch.nn.Module):
            tokenizer = load_tokenizer(self._source)
            tokenizer.tokenizer.save_pretrained(folder)
            if isinstance(tokenizer, VisionTokenizer):
                copy_processor(self._source, folder)

    def tokenizer(self) -> TransformersTokenizer | None:
        """Return the model's tokenizer.

        Return None if the model was passed as an object that has no `name_or_path`.
        """
        source = self._source
        if isinstance(source, torch.nn.Module):
            source = str(getattr(source, "name_or_path", "") or "")
        return load_tokenizer(source) if source else None


def _unwrapped(name: str) -> str:
    """Return a weight's name in the plain model: PEFT wraps adapted layers."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


@torch.no_grad()
def _hidden_to_logits(model: Any) -> bool:
    """Return whether a model's logits are the output layer's result, without scaling or capping.

    Settings alone do not show it, because every model's code names them in its own way; capping
    alone hardly shows in the logits of a few tokens.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) is not None for name in _SCALED_LOGITS):
        return False
    ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    try:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        expected = model.get_output_embeddings()(hidden)
    except (AttributeError, TypeError, RuntimeError):
        return False
    tolerance = 1e-5 if model.dtype == torch.float32 else 0.02
    return bool(torch.dist(logits, expected) <= tolerance * logits.norm())


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Run the `with` block, then set torch's global generators back to their state before it.

    Engines in this process sample with these generators.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def initial_random_state(seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state that torch's global generators have after seeding.

    The generators themselves are left unchanged.
    """
    with forked_random(device):
        torch.manual_seed(seed)
        return random_state(device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's global generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _with_adapters(model: Any, lora: LoRA, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = lora.target_modules
    modules = {name.rpartition(".")[0] for name, _ in vision_parameters(model)}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        exclude_modules=sorted(modules) if takes_images(model.config) else None,
    )
    with forked_random(model.device):
        torch.manual_seed(seed)
        try:
            with quiet_peft():
                adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(
                f"LoRA(target_modules={targets!r}) does not fit {type(model).__name__}: {error}. "
                f"{_NAME_LAYERS}"
            ) from error
    adapted.eval()
    check_untied(adapted, f"LoRA(target_modules={targets!r})")
    try:
        with torch.no_grad():
            adapted(input_ids=torch.tensor([[1, 2, 3, 4]], device=model.device), use_cache=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"LoRA(target_modules={targets!r}) does not fit {type(model).__name__}: a forward pass "
            f"with adapters raised {type(error).__name__}: {error}. {_NAME_LAYERS}"
        ) from error
    return adapted


def check_untied(model: Any, adapters: str) -> None:
    """Raise `ConfigError` if a layer with an adapter shares its weight with another layer.

    An adapter that is merged into a shared weight changes the other layer too.

    Args:
        model: the model with adapters.
        adapters: what the adapters are called in the error message.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.removeprefix("base_model.model."))
    for layers in names.values():
        adapted = [
            name for name in layers if {"base_layer", "original_module"} & {*name.split(".")}
        ]
        if adapted and len(layers) > 1:
            layer = adapted[0].rpartition(".base_layer")[0] or adapted[0]
            other = next(name for name in layers if name != adapted[0])
            raise ConfigError(
                f"{adapters} adapts {layer}, which shares its weight with {other} (as tied "
                "embeddings do): the adapter cannot be merged into one of the two, so that the "
                "served and the saved model would be wrong. Adapt neither of the two"
            )


def adapter_base(folder: str | Path) -> str | None:
    """Return the base model of the PEFT adapter in a folder; None if the folder has no adapter.

    Raises:
        ModelError: the adapter cannot be read, or names no base model.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {error}") from error
    if not base:
        raise ModelError(
            f"the adapter in {folder} names no base model: write the model's folder or name into "
            f"{ADAPTER_CONFIG}, as base_model_name_or_path"
        )
    return str(base)


def load_adapter(
    folder: str | Path,
    *,
    base: str | Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a PEFT adapter and its base model; return the model with the adapter merged into it.

    Args:
        folder: the adapter's folder, with safetensors files.
        base: the base model; None for the base model that the adapter names.
        device: the model's device.
        dtype: data type of the weights; None for the base model's.

    Raises:
        ConfigError: the adapter is for a layer that shares its weight with another layer.
        ModelError: there is no adapter, or the adapter or its base model cannot be loaded.
    """
    named = adapter_base(folder)
    if named is None or not (Path(folder) / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{folder} holds no PEFT adapter: {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} are needed"
        )
    from peft import PeftModel

    model = load_model(base or named, device=device, dtype=dtype)
    try:
        with quiet_peft():
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # PEFT and torch raise many types for shapes and damaged files
        raise ModelError(
            f"the adapter in {folder} does not fit its base model {base or named}, or peft "
            f"{version('peft')} does not fit transformers {version('transformers')}: {error}"
        ) from error
    check_untied(adapted, f"the adapter in {folder}")
    return adapted.merge_and_unload().eval()


def merge_adapter(
    folder: str | Path, target: str | Path, *, base: str | Path | None = None
) -> Path:
    """Merge a PEFT adapter into its base model, write the result and return its folder.

    Args:
        folder: the adapter's folder, such as `runs/sql/model`.
        target: folder for the merged model and its tokenizer.
        base: the base model; None for the base model that the adapter names.

    Raises:
        ConfigError: `target` is `folder`; or see `load_adapter`.
        ModelError: see `load_adapter`; or the tokenizer cannot be loaded.
    """
    if Path(target).resolve() == Path(folder).resolve():
        raise ConfigError(f"give the merged model another folder than the adapter's, {folder}")
    model = load_adapter(folder, base=base)
    has_tokenizer = (Path(folder) / "tokenizer_config.json").is_file()
    source = base or adapter_base(folder)
    assert source is not None
    with without_bars():
        model.save_pretrained(target)
    from transformers import AutoTokenizer

    origin = str(folder if has_tokenizer else source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer of {origin}: {error}") from error
    tokenizer.save_pretrained(target)
    if takes_images(model.config):
        copy_processor(source, Path(target))
    return Path(target)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide the warnings of peft about other libraries in the `with` block."""
    with warnings.catch_warnings():  # peft 0.21 uses a deprecated attribute of transformers 5.23
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        # PEFT adapts itself to GPT-2's layers, and names no layer for its patterns of experts
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings")  # an error here
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
        yield


class Stepper:
    """The optimisers of one model and the schedule of their learning rate."""

    def __init__(self, model: TrainedModel, optimizer: Optimizer) -> None:
        self.steps = 0
        self._settings = optimizer
        self._parameters = model.trainable()
        muon = _hidden_matrices(model) if optimizer.name == "muon" else set()
        rest = [value for name, value in self._parameters.items() if name not in muon]
        self._optimizers: list[torch.optim.Optimizer] = [_adamw(rest, optimizer)] if rest else []
        if muon:
            matrices = [self._parameters[name] for name in sorted(muon)]
            self._optimizers.append(_muon(matrices, optimizer))

    @property
    def learning_rate(self) -> float:
        return self._settings.learning_rate * self._factor

    @property
    def _factor(self) -> float:
        return rate_factor(self._settings, self.steps)

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def clip(self) -> float:
        """Limit the norm of all gradients together to `max_grad_norm`; return the norm before."""
        limit = self._settings.max_grad_norm
        bound = float("inf") if limit is None else limit
        return float(torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), bound))

    def step(self) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self._factor
            optimizer.step()
        self.steps += 1
        self.zero_grad()

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return the optimisers' state to save in a checkpoint: `<parameter>/<state>` → tensor."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Set the optimisers to the state that `saved_tensors` returned after `steps` steps.

        Raises:
            CheckpointError: the state belongs to another optimiser or model.
        """
        names = {name.rpartition("/")[0] for name in tensors}
        unknown = sorted(names - set(self._parameters))
        if unknown or (steps > 0 and names != set(self._parameters)):
            unknown = unknown or sorted(set(self._parameters) - names)
            raise CheckpointError(f"the checkpoint's optimiser state does not fit: {unknown[:5]}")
        for optimizer in self._optimizers:
            optimizer.state.clear()
        owner = {
            id(parameter): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            parameter = self._parameters[name]
            state = owner[id(parameter)].state[parameter]
            state[key] = tensor.to(parameter.device, copy=True)
        self.steps = steps


def rate_factor(settings: Optimizer, steps: int) -> float:
    """Return the factor of the learning rate in the next step, from warm-up and decay.

    The factor rises linearly to 1, which the last step of the warm-up (or the first step) has. Then
    it falls linearly to `FINAL_FACTOR` within `decay_steps` steps.

    Args:
        settings: the optimiser's settings.
        steps: number of steps made before.
    """
    after_peak = steps + 1 - max(1, settings.warmup_steps)
    if after_peak <= 0:
        return (steps + 1) / max(1, settings.warmup_steps)
    if settings.decay_steps is None:
        return 1.0
    return 1 - (1 - FINAL_FACTOR) * min(1.0, after_peak / settings.decay_steps)


def _hidden_matrices(model: TrainedModel) -> set[str]:
    """Return the names of the trainable matrices, except the embeddings and the output layer."""
    layers = (model.plain.get_input_embeddings(), model.plain.get_output_embeddings())
    excluded = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    return {
        name
        for name, parameter in model.trainable().items()
        if parameter.ndim == 2 and id(parameter) not in excluded
    }


def _adamw(parameters: list[torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """Return an AdamW optimiser that decays matrices only, not norms and biases."""
    rate, decay = settings.learning_rate, settings.weight_decay
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": group, "weight_decay": amount, "initial_lr": rate}
        for group, amount in ((matrices, decay), (vectors, 0.0))
        if group
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True)


def _muon(parameters: list[torch.nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    rate = settings.muon_learning_rate
    groups = [{"params": parameters, "initial_lr": rate}]
    if not hasattr(torch.optim, "Muon"):
        raise UnsupportedError(
            "Optimizer(name='muon') needs torch 2.9 or newer, which has torch.optim.Muon, and this "
            f"is torch {torch.__version__}: update torch, or use Optimizer(name='adamw')"
        )
    return torch.optim.Muon(groups, lr=rate, weight_decay=settings.weight_decay)
