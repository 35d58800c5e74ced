"""Settings of the vLLM engine, `engine=VLLM(…)`. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.engine import EngineRequest, ModelSize, ToolParserName
from lightspan.schema.validation import (
    check_choice,
    check_number,
    check_url,
    check_whole,
)
from lightspan_gateway.serving.loopback import is_loopback
from lightspan_torch.engine.config import check_date, model_copies

if TYPE_CHECKING:
    from lightspan_vllm.engine import VLLMEngine

DTYPES: Final = ("float32", "bfloat16", "float16")
TRANSFERS: Final = ("files", "gloo", "nccl")
LOOPBACK: Final = "127.0.0.1"

RESERVED_FLAGS: Final[Mapping[str, str]] = {
    "--model": "the algorithm's",
    "--served-model-name": "the policy's",
    "--host": "servers of a run listen on a socket in a folder that only you can read",
    "--port": "servers of a run listen on a socket in a folder that only you can read",
    "--uds": "servers of a run listen on a socket in a folder that only you can read",
    "--api-key": "servers of a run listen on a socket in a folder that only you can read",
    "--dtype": "use VLLM(dtype=…)",
    "--max-model-len": "use VLLM(context_length=…)",
    "--seed": "use LightningRL(seed=…)",
    "--data-parallel-size": "use VLLM(servers=…)",
    "--logprobs-mode": "it is processed_logprobs, of the sampled distribution",
    "--generation-config": "it is vllm: the gateway sets the sampling parameters",
    "--weight-transfer-config": "lightspan sends weights with it",
    "--worker-extension-cls": "lightspan sends weights with it",
    "--load-format": "weights come from the trainer",
    "--hf-overrides": "it unties tied embeddings",
    "--enable-lora": "it is set for policies with LoRA",
    "--max-lora-rank": "it is that of the policies' LoRA",
    "--max-loras": "it is the number of policies and one",
    "--lora-modules": "LoRA comes from the trainer",
}
"""Flag that lightspan sets itself → why, or which setting to use instead."""
PARALLEL: Final = ("--tensor-parallel-size", "-tp")
"""Names of vLLM's flag for the number of devices that share a server's model."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
CPU_CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable with the size of a server's key-value cache on a CPU, in GiB."""
MAX_SERVERS: Final = 1024
"""Maximum number of servers of a policy; each is a process with a copy of the model."""

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Variable = Annotated[str, msgspec.Meta(pattern=r"^[^=\0]+$")]
_Value = Annotated[str, msgspec.Meta(pattern=r"^[^\0]*$")]
_KINDS: Final[Mapping[str, Any]] = {
    "python": str,
    "addresses": tuple[str, ...] | dict[str, tuple[str, ...]],
    "allow": tuple[str, ...],
    "merge": bool,
    "arguments": tuple[str, ...],
    "environment": dict[_Variable, _Value],
    "exchange": _Text,
    "trainer_host": _Text,
}
"""Setting → the type to which its value is converted."""


class Link(NamedTuple):
    """How weights are sent to servers over the network."""

    backend: Literal["gloo", "nccl"]
    host: str
    """This machine's address, as the servers reach it."""


class VLLM(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM instead of the embedded engine: `Trainer(…, engine=VLLM(python="…/bin/python"))`.

    With `python`, the trainer starts servers on this machine and stops them at the end of the run.
    With `addresses`, it uses servers that run already. LoRA policies of one model share servers.
    Every other policy has its own. vLLM has its own Python environment, in which lightspan is not
    needed.

    Raises:
        ConfigError: neither or both of `python` and `addresses` are given, an address is on another
            machine that is not in `allow`, `arguments` has a flag that lightspan sets, or a value
            is out of range.
    """

    python: str = ""
    """Path of the Python interpreter of vLLM's environment; "" with `addresses`."""
    addresses: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Addresses of running servers, such as `http://127.0.0.1:8000`; empty with `python`.

    With one policy, a tuple of addresses. With several, policy → its addresses; LoRA policies of
    one model have the same addresses. A server's development routes need no key, so that everyone
    who reaches the server can change its weights. So only addresses of this machine, such as the
    end of an SSH tunnel, and hosts in `allow` are accepted.
    """
    allow: tuple[str, ...] = ()
    """Other machines, in a private network, on which servers of `addresses` may be."""
    merge: bool = False
    """Whether LoRA policies are served with merged weights, each on its own servers. Needed if the
    model has layers for which vLLM has no LoRA."""
    servers: int = 1
    """Number of servers to start for each policy, or for all LoRA policies of one model; at most
    1024. All calls of a rollout go to the same server."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the served weights; None for that of the model's files."""
    context_length: int | None = None
    """Maximum number of tokens of prompt and answer; None, or a value above the model's, for the
    model's."""
    arguments: tuple[str, ...] = ()
    """Additional flags for vLLM, such as `("--enforce-eager",)`."""
    environment: dict[str, str] = {}
    """Additional environment variables of the servers, such as `{"VLLM_CPU_KVCACHE_SPACE":
    "4"}`."""
    tool_parser: ToolParserName | None = None
    """Parser of the models' tool calls; None to choose it by each model's chat template."""
    template_date: datetime.date | None = None
    """Date that chat templates see as today's; None for 26 July 2024."""
    start_s: float = 900.0
    """Seconds within which a server must be ready after its start."""
    exchange: str = "/dev/shm"
    """Folder in memory into which weights are written. With `transfer="files"`, servers read them
    there. It contains one copy of each policy's weights in `dtype`, and a second copy during an
    update of the policy."""
    transfer: Literal["files", "gloo", "nccl"] = "files"
    """How whole weights reach the servers. `files`: servers on the same machine read `exchange`.
    `gloo`: over torch.distributed, to any machine. `nccl`: over torch.distributed, from the
    trainer's GPU to the servers' GPUs, which no other process of the broadcast may use."""
    trainer_host: str = LOOPBACK
    """This machine's address, as the servers reach it, for `gloo` and `nccl`. Everyone who reaches
    it during an update can read the weights, so use loopback or a private network."""

    def __post_init__(self) -> None:
        self._convert()
        if bool(self.python) == bool(self.addresses):
            which = "both" if self.python else "neither"
            raise ConfigError(
                f"VLLM: give python=, the interpreter of vLLM's environment, or addresses= of "
                f"servers that run already; {which} was given"
            )
        self._check_addresses()
        check_whole("VLLM: servers", self.servers, 1, MAX_SERVERS)
        check_number("VLLM: start_s", self.start_s, above=0)
        if self.dtype is not None:
            check_choice("VLLM: dtype", self.dtype, DTYPES)
        if self.context_length is not None:
            check_whole("VLLM: context_length", self.context_length, 2)
        if self.template_date is not None:
            check_date("VLLM: template_date", self.template_date)
        self._check_arguments()
        check_choice("VLLM: transfer", self.transfer, TRANSFERS)
        if self.transfer == "files" and self.trainer_host != LOOPBACK:
            raise ConfigError(
                f"VLLM: trainer_host={self.trainer_host!r} applies only to transfer='gloo' or "
                "'nccl'; with 'files' servers read exchange="
            )

    def addresses_of(self, groups: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Return the addresses of the vLLM servers of each policy: policy → addresses.

        Args:
            groups: the policies. Those in one group share servers.

        Raises:
            ConfigError: a policy has no address, an address belongs to an unknown policy, or
                policies of different groups have the same address.
        """
        several = [tuple(group) for group in groups]
        names = sorted(name for group in several for name in group)
        if isinstance(self.addresses, dict):
            if set(self.addresses) != set(names):
                raise ConfigError(
                    f"VLLM: addresses= names {sorted(self.addresses)}, but the engine serves "
                    f"{names}: give the addresses of each of these"
                )
            _check_distinct([address for group in several for address in self.addresses[group[0]]])
            return dict(self.addresses)
        if len(several) > 1:
            raise ConfigError(
                f"VLLM: addresses= is a list, but the engine serves {names}: a server has the "
                "weights of one policy, or LoRA of one model's policies. Give them by policy: "
                "addresses={policy: [address, …], …}"
            )
        return dict.fromkeys(names, self.addresses)

    def flag(self, *names: str) -> str | None:
        """Return the last value that `arguments` has for a flag; None if the flag is absent.

        Args:
            names: the flag's spellings, such as "--tensor-parallel-size" and "-tp".
        """
        last = None
        for number, argument in enumerate(self.arguments):
            name, is_joined, value = argument.partition("=")
            if name.replace("_", "-") in names:
                following = self.arguments[number + 1 : number + 2]
                last = value if is_joined else "".join(following)
        return last

    @property
    def tensor_parallel(self) -> int:
        """Number of devices that share a server's model."""
        return int(self.flag(*PARALLEL) or 1)

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """Return the groups of policies that share one copy of their model (`EngineSpec.copies`).

        Each tuple has the names of the policies that share a copy.
        """
        return [(name,) for name in request.models] if self.merge else model_copies(request)

    def memory(self, size: ModelSize, device: str, policies: int = 1) -> dict[str, int]:
        """Estimate the memory that servers on this machine need: name of a part → bytes.

        Return {} for servers at `addresses`. On a GPU, vLLM's key-value cache is not included,
        because it fills whatever memory remains. Policies share the cache of a server. See
        `EngineSpec.memory`.
        """
        del device, policies
        if self.addresses:  # not on this machine
            return {}
        width = {None: size.weight_bytes, "float32": 4}.get(self.dtype, 2)
        parts = {"engine weights": self.servers * size.parameters * width}
        cache = self.environment.get(CPU_CACHE, os.environ.get(CPU_CACHE, ""))
        if cache.isdecimal() and int(cache):
            parts["key-value cache"] = self.servers * int(cache) * 2**30
        return parts

    @property
    def link(self) -> Link | None:
        """How weights are sent over the network; None if servers read files."""
        return None if self.transfer == "files" else Link(self.transfer, self.trainer_host)

    def build(self, request: EngineRequest) -> VLLMEngine:
        """Return the engine, without starting servers (`EngineSpec.build`)."""
        from lightspan_vllm.engine import VLLMEngine

        lora = {} if self.merge else request.lora
        return VLLMEngine(self, request.models, lora=lora, logs=request.folder, seed=request.seed)

    def describe(self, folder: Path) -> str:
        """Return a line to print while the engine starts (`EngineSpec.describe`)."""
        if self.addresses:
            addresses = dict.fromkeys(address for group in self._lists for address in group)
            return f"connecting to the vLLM servers at {', '.join(addresses)}"
        return f"starting vLLM, which takes a minute or more; its output: {folder}/vllm-*.log"

    @property
    def _lists(self) -> list[tuple[str, ...]]:
        """The vLLM servers' addresses: a tuple for each policy, or one tuple for all policies."""
        addresses = self.addresses
        return list(addresses.values()) if isinstance(addresses, dict) else [addresses]

    def _convert(self) -> None:
        """Convert the settings to their types: paths to texts, and lists to tuples.

        A caller's later changes to a list then do not affect the settings.
        """
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            try:
                msgspec.structs.force_setattr(self, name, msgspec.convert(value, kind))
            except msgspec.ValidationError as error:
                shown = list(value) if isinstance(value, dict) else value  # a variable may be a key
                raise ConfigError(f"VLLM: {name}={shown!r}: {error}") from error

    def _check_addresses(self) -> None:
        lists = self._lists
        if self.addresses and not all(lists):
            raise ConfigError(f"VLLM: addresses={self.addresses!r}: each policy needs at least one")
        for address in [address for group in lists for address in group]:
            check_url(address, "VLLM: the address")
            parts = urlsplit(address)
            if "@" in parts.netloc:  # every message about the server would show it
                raise ConfigError(
                    f"VLLM: the address of {parts.hostname} has a user or a password, which its "
                    "development routes do not use: remove it"
                )
            host = parts.hostname or ""
            if not (is_loopback(host) or host in self.allow):
                raise ConfigError(
                    f"VLLM: {address} is on another machine. Its development routes need no key: "
                    "anyone who reaches it can read prompts and change weights. Use an SSH tunnel "
                    f"and its local end, or, in a private network, allow=[{host!r}]"
                )
        for addresses in lists:
            _check_distinct(addresses)
        if self.addresses and (self.servers != 1 or self.arguments or self.environment):
            raise ConfigError(
                "VLLM: servers, arguments and environment apply to servers that the run starts, "
                "not to those of addresses="
            )

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0].replace("_", "-")
            if flag in RESERVED_FLAGS:
                raise ConfigError(
                    f"VLLM: arguments= has {flag}, which lightspan sets: {RESERVED_FLAGS[flag]}"
                )
        self._check_parallel()

    def _check_parallel(self) -> None:
        """Raise `ConfigError` if the number of devices in `arguments` is invalid.

        It must be a positive integer, and not exceed the number of GPUs in `environment`.
        """
        size = self.flag(*PARALLEL)
        if size is None:
            return
        if not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"VLLM: arguments= has {PARALLEL[0]} {size!r}: it must be a whole number of at "
                "least 1"
            )
        visible = self.environment.get(VISIBLE)
        if visible is None:
            return
        count = len(list(filter(None, visible.split(","))))
        if count < int(size):
            raise ConfigError(
                f"VLLM: arguments= has {PARALLEL[0]} {size}, but environment= shows {count} "
                f"devices ({VISIBLE}={visible!r}): show {size}, or lower the flag"
            )


def _check_distinct(addresses: Sequence[str]) -> None:
    """Raise `ConfigError` if two addresses lead to the same vLLM server, in any spelling."""
    spellings: dict[object, str] = {}
    for address in addresses:
        server = _server(address)
        if server in spellings:
            former = spellings[server]
            also = "" if former == address else f" (once as {former})"
            raise ConfigError(
                f"VLLM: the address {address} is given twice{also}; a server has the weights of "
                "one policy, or LoRA of one model's policies"
            )
        spellings[server] = address


def _server(address: str) -> tuple[str, str, int, str]:
    """Return the normalised (scheme, host, port, path) of a server's address.

    Addresses that `Client` treats as equal have the same result.
    """
    parts = urlsplit(address)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(LOOPBACK if host == "localhost" else host))
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
