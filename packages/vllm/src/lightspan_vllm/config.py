"""What a user says of vLLM: `engine=VLLM(…)`. The trainer makes an engine of it. Loads no torch."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.engine import EngineRequest, ModelSize, ToolParserName
from lightspan.schema.validation import (
    check_choice,
    check_date,
    check_number,
    check_url,
    check_whole,
)

if TYPE_CHECKING:
    from lightspan_vllm.engine import VLLMEngine

DTYPES: Final = ("float32", "bfloat16", "float16")
TRANSFERS: Final = ("files", "gloo", "nccl")
LOOPBACK: Final = "127.0.0.1"

OURS: Final[Mapping[str, str]] = {
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
    "--logprobs-mode": "it is processed_logprobs, what the sampled distribution has",
    "--generation-config": "it is vllm: the gateway knows how to sample",
    "--weight-transfer-config": "it is how new weights come in",
    "--worker-extension-cls": "it is how new weights come in",
    "--load-format": "weights come from the trainer",
    "--hf-overrides": "it unties tied embeddings",
    "--enable-lora": "policies with LoRA bring it",
    "--max-lora-rank": "it is that of the policies' LoRA",
    "--max-loras": "it is what the policies need",
    "--lora-modules": "LoRA comes from the trainer",
}
"""The flags that lightspan sets itself, and what to do instead."""
PARALLEL: Final = ("--tensor-parallel-size", "-tp")
"""How many devices share the model of a server."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
CPU_CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of keys and values of a server on a CPU."""
MAX_SERVERS: Final = 1024
"""Of one policy: each is a process with a copy of the model."""
# how each is written, for those who wrote something else
_PATHS: Final = {"python": ".venv-vllm/bin/python", "exchange": "/dev/shm"}
_ADDRESSES: Final = "['http://127.0.0.1:8000']"
_VARIABLES: Final = "{'VLLM_CPU_KVCACHE_SPACE': '4'}"


class Link(NamedTuple):
    """How weights are sent to servers."""

    backend: Literal["gloo", "nccl"]
    host: str
    """This machine's address, as servers reach it."""


class VLLM(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM in place of the embedded engine: `Trainer(…, engine=VLLM(python="…/bin/python"))`.

    The trainer starts servers on this machine, and ends them with the run: at least one for each
    policy, and one for all policies that are LoRA beside the same model; or it uses servers that
    somebody started (`addresses`). Either way vLLM has an environment of its own, which needs no
    lightspan.

    Raises:
        ConfigError: neither `python` nor `addresses`, or both; an address of another machine that
            is not in `allow`; a flag in `arguments` that lightspan sets itself; a value out of
            range.
    """

    python: str = ""
    """The interpreter of vLLM's environment."""
    addresses: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """Of servers that run already, such as `http://127.0.0.1:8000`, all of the one policy; or
    policy → addresses, equal ones for policies that are LoRA beside the same model. Whoever reaches
    such a server can change its weights: its development routes ask for no key. So only this
    machine's own addresses are taken, an SSH tunnel's end too, unless `allow` says more."""
    allow: tuple[str, ...] = ()
    """Hosts of other machines that `addresses` may name, in a network that nobody else is in."""
    merge: bool = False
    """Whether policies with LoRA have it merged into whole weights, and servers of their own, as
    other policies have: for a model whose layers vLLM has no LoRA for."""
    servers: int = 1
    """To start for each policy, or for all that are LoRA beside the same model, 1024 at most. The
    calls of one rollout go to one of them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights that answer; None keeps the model's."""
    context_length: int | None = None
    """A shorter context than the model's."""
    arguments: tuple[str, ...] = ()
    """Further flags for vLLM, such as `("--enforce-eager",)`."""
    environment: dict[str, str] = {}
    """Further environment variables, such as `{"VLLM_CPU_KVCACHE_SPACE": "4"}`."""
    tool_parser: ToolParserName | None = None
    """Which parser reads the models' tool calls; None for the one that fits each chat template."""
    template_date: datetime.date | None = None
    """What chat templates that ask for today's date are told; None for the usual day."""
    start_s: float = 900.0
    """How long a server may take until it answers."""
    exchange: str = "/dev/shm"
    """Where weights are kept for servers: a folder in memory, which they read too unless `transfer`
    says otherwise. It holds one copy of each policy in `dtype`, and two while one is replaced."""
    transfer: Literal["files", "gloo", "nccl"] = "files"
    """How whole weights reach servers. `files`: they read `exchange`, on the same machine. `gloo`:
    they are sent over torch.distributed, to any machine. `nccl`: the same from a GPU of the
    trainer's to GPUs that no other rank has."""
    trainer_host: str = LOOPBACK
    """This machine's address as servers reach it, for `gloo` and `nccl`. Who reaches it during an
    update can read the weights: loopback, or a network that nobody else is in."""

    def __post_init__(self) -> None:
        self._check_kinds()
        self._take_lists()
        if bool(self.python) == bool(self.addresses):
            given = "both" if self.python else "neither"
            raise ConfigError(
                f"VLLM: give python=, the interpreter of vLLM's environment, or addresses= of "
                f"servers that run already; {given} was given"
            )
        self._check_addresses()
        check_whole("VLLM: servers", self.servers, 1)
        if self.servers > MAX_SERVERS:
            raise ConfigError(
                f"VLLM: servers={self.servers} must be at most {MAX_SERVERS}: each is a process "
                "with a copy of the model"
            )
        check_number("VLLM: start_s", self.start_s, above=0)
        if self.dtype is not None:
            check_choice("VLLM: dtype", self.dtype, DTYPES)
        if self.context_length is not None:
            check_whole("VLLM: context_length", self.context_length, 2)
        self._check_arguments()
        check_choice("VLLM: transfer", self.transfer, TRANSFERS)
        if self.transfer == "files" and self.trainer_host != LOOPBACK:
            raise ConfigError(
                f"VLLM: trainer_host={self.trainer_host!r} applies only to transfer='gloo' or "
                "'nccl'; with 'files' servers read exchange="
            )

    def addresses_of(self, groups: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Policy → its servers' addresses.

        Args:
            groups: policies that share servers.

        Raises:
            ConfigError: a policy has none, an address is of a policy that is none, or of policies
                that cannot share a server.
        """
        several = [tuple(group) for group in groups]
        names = sorted(name for group in several for name in group)
        if isinstance(self.addresses, dict):
            if set(self.addresses) != set(names):
                raise ConfigError(
                    f"VLLM: addresses= names {sorted(self.addresses)}, and the engine serves "
                    f"{names}: say for each which are its own"
                )
            of_groups = [self.addresses[group[0]] for group in several]
            _check_once([address for addresses in of_groups for address in addresses])
            return dict(self.addresses)
        if len(several) > 1:
            raise ConfigError(
                f"VLLM: addresses= is a list, and the engine serves {names}: a server has the "
                "weights of one policy, or LoRA beside those of one model, so say which: "
                "addresses={policy: [address, …], …}"
            )
        return dict.fromkeys(names, self.addresses)

    def flag(self, *names: str) -> str | None:
        """The value of a flag in `arguments`, however it is spelled; the last one counts. None
        where it is not there."""
        found = None
        for number, argument in enumerate(self.arguments):
            name, is_joined, value = argument.partition("=")
            if name.replace("_", "-") in names:
                following = self.arguments[number + 1 : number + 2]
                found = value if is_joined else "".join(following)
        return found

    @property
    def tensor_parallel(self) -> int:
        """How many devices share the model of a server."""
        return int(self.flag(*PARALLEL) or 1)

    def copies(self, request: EngineRequest) -> list[tuple[str, ...]]:
        """See `EngineSpec.copies`."""
        return [(name,) for name in request.models] if self.merge else request.copies()

    def memory(self, size: ModelSize, device: str) -> dict[str, int]:
        """See `EngineSpec.memory`: on a GPU vLLM's key-value cache fills what is left."""
        del device
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
        """How weights are sent; None where servers read files of ours."""
        return None if self.transfer == "files" else Link(self.transfer, self.trainer_host)

    def build(self, request: EngineRequest) -> VLLMEngine:
        """See `EngineSpec.build`."""
        from lightspan_vllm.engine import VLLMEngine

        lora = {} if self.merge else request.lora
        return VLLMEngine(self, request.models, lora=lora, logs=request.folder, seed=request.seed)

    def describe(self, folder: Path) -> str:
        """See `EngineSpec.describe`."""
        if self.addresses:
            every = dict.fromkeys(address for each in self._lists for address in each)
            return f"looking for the vLLM servers at {', '.join(every)}"
        return f"starting vLLM, which takes a minute or more; what it says: {folder}/vllm-*.log"

    @property
    def _lists(self) -> list[tuple[str, ...]]:
        """Of addresses: one for each policy, or one of all."""
        given = self.addresses
        return list(given.values()) if isinstance(given, dict) else [given]

    def _check_kinds(self) -> None:
        for name, example in _PATHS.items():
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike):
                raise ConfigError(f"VLLM: {name}={value!r} must be a path, such as {example!r}")
        if not str(self.exchange):
            raise ConfigError("VLLM: exchange='' must be a folder, such as '/dev/shm'")
        if not isinstance(self.trainer_host, str) or not self.trainer_host:
            raise ConfigError(
                f"VLLM: trainer_host={self.trainer_host!r} must be this machine's address as a "
                f"text, such as {LOOPBACK!r}"
            )
        if not isinstance(self.merge, bool):
            raise ConfigError(f"VLLM: merge={self.merge!r} must be True or False")
        if self.template_date is not None:
            check_date("VLLM: template_date", self.template_date)

    def _take_lists(self) -> None:
        """Lists are as good as tuples, and later changes of the caller's do not count."""
        given: Any = self.addresses
        if isinstance(given, Mapping):
            listed: Any = {
                _name_of(policy): _texts(f"addresses[{policy!r}]", each, _ADDRESSES)
                for policy, each in given.items()
            }
        else:
            listed = _texts("addresses", given, _ADDRESSES)
        kept = {
            "addresses": listed,
            "allow": _texts("allow", self.allow, "['10.0.0.7']"),
            "arguments": _texts("arguments", self.arguments, "['--max-num-seqs', '64']"),
            "environment": _variables(self.environment),
            "python": str(self.python),
            "exchange": str(self.exchange),
        }
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_addresses(self) -> None:
        lists = self._lists
        if self.addresses and not all(lists):
            raise ConfigError(f"VLLM: addresses={self.addresses!r}: each policy needs at least one")
        for address in [address for each in lists for address in each]:
            check_url(address, "VLLM: the address")
            parts = urlsplit(address)
            if "@" in parts.netloc:  # every message about the server would show it
                raise ConfigError(
                    f"VLLM: the address of {parts.hostname} has a user or a password, which its "
                    "development routes do not ask for: give it without"
                )
            host = parts.hostname or ""
            if not (_is_loopback(host) or host in self.allow):
                raise ConfigError(
                    f"VLLM: {address} is on another machine. Its development routes ask for no "
                    "key: whoever reaches it can read prompts and change weights. Use an SSH "
                    f"tunnel and its local end, or, in a network of your own, allow=[{host!r}]"
                )
        for addresses in lists:
            _check_once(addresses)
        if self.addresses and (self.servers != 1 or self.arguments or self.environment):
            raise ConfigError(
                "VLLM: servers, arguments and environment are of servers that the run starts; "
                "those of addresses= have their own"
            )

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0].replace("_", "-")
            if flag in OURS:
                raise ConfigError(
                    f"VLLM: arguments= has {flag}, which lightspan sets: {OURS[flag]}"
                )
        self._check_parallel()

    def _check_parallel(self) -> None:
        """Raise `ConfigError` for a number of devices that is none, or that its GPUs are not."""
        given = self.flag(*PARALLEL)
        if given is None:
            return
        if not given.isdecimal() or int(given) < 1:
            raise ConfigError(
                f"VLLM: arguments= has {PARALLEL[0]} {given!r}: it must be a whole number of at "
                "least 1"
            )
        shown = self.environment.get(VISIBLE)
        if shown is not None and len(cards := list(filter(None, shown.split(",")))) < int(given):
            raise ConfigError(
                f"VLLM: arguments= has {PARALLEL[0]} {given}, and environment= shows "
                f"{len(cards)} devices ({VISIBLE}={shown!r}): show {given}, or lower the flag"
            )


def _texts(name: str, value: Any, example: str) -> tuple[str, ...]:
    """Raise `ConfigError` unless it is a list of texts."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"VLLM: {name}={value!r} must be a list of texts, such as {example}")
    listed = tuple(value)
    for each in listed:
        if not isinstance(each, str):
            raise ConfigError(
                f"VLLM: {name}={list(listed)!r} must be a list of texts, and {each!r} is none: "
                f"write it as in {example}"
            )
    return listed


def _name_of(policy: Any) -> str:
    if not isinstance(policy, str):
        raise ConfigError(
            f"VLLM: addresses= has {policy!r} for the name of a policy: write it as a text, as in "
            f"{{'sql': {_ADDRESSES}}}"
        )
    return policy


def _variables(value: Any) -> dict[str, str]:
    """Raise `ConfigError` unless they are environment variables."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"VLLM: environment={value!r} must map names to texts, such as {_VARIABLES}"
        )
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(
                f"VLLM: environment= has {name!r} for the name of a variable: write it as in "
                f"{_VARIABLES}"
            )
        if not isinstance(text, str) or "\0" in text:
            fine = repr({name: str(text)}) if isinstance(text, int | float) else _VARIABLES
            raise ConfigError(
                f"VLLM: environment= has {name}={text!r}, which must be a text: write it as in "
                f"{fine}"
            )
    return dict(value)


def _check_once(addresses: Sequence[str]) -> None:
    """Raise `ConfigError` where two are one server, however they are spelled."""
    spelled: dict[object, str] = {}
    for address in addresses:
        former = spelled.get(_server(address))
        if former is not None:
            also = "" if former == address else f" (once as {former})"
            raise ConfigError(
                f"VLLM: the address {address} is given twice{also}; a server has the weights of "
                "one policy, or LoRA of several beside those of one model"
            )
        spelled[_server(address)] = address


def _server(address: str) -> tuple[str, str, int, str]:
    """Which server an address leads to, as `Client` reads it."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(LOOPBACK if host == "localhost" else host))
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1").rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
