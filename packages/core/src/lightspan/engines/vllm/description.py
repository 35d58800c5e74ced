"""What a user says of vLLM: `engine=VLLM(…)`. The trainer makes an engine of it. Loads no torch."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan.engines.protocol import ToolParserName
from lightspan.errors import ConfigError, short_tracebacks
from lightspan.schema.checks import check_choice, check_number, check_url, check_whole

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
    """To start for each policy, or for all that are LoRA beside the same model. The calls of one
    rollout go to one of them."""
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

    @short_tracebacks
    def __post_init__(self) -> None:
        self._take_lists()
        if bool(self.python) == bool(self.addresses):
            given = "both" if self.python else "neither"
            raise ConfigError(
                f"VLLM: give python=, the interpreter of vLLM's environment, or addresses= of "
                f"servers that run already; {given} was given"
            )
        self._check_addresses()
        check_whole("VLLM: servers", self.servers, 1)
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

    @property
    def link(self) -> Link | None:
        """How weights are sent; None where servers read files of ours."""
        return None if self.transfer == "files" else Link(self.transfer, self.trainer_host)

    def waiting(self, logs: Path) -> str:
        """What a person is told who waits for the servers.

        Args:
            logs: the folder of what they say.
        """
        if self.addresses:
            return "looking for the vLLM servers"
        return f"starting vLLM, which takes a minute or more; what it says: {logs}/vllm-*.log"

    def _take_lists(self) -> None:
        """Lists are as good as tuples, and later changes of the caller's do not count."""
        given: Any = self.addresses
        several = isinstance(given, Mapping)
        lists = [*(given.values() if several else [given]), self.arguments, self.allow]
        if any(isinstance(each, str) for each in lists):
            raise ConfigError("VLLM: addresses, allow and arguments are lists of texts, not a text")
        listed = {name: tuple(each) for name, each in given.items()} if several else tuple(given)
        kept = {
            "addresses": listed,
            "allow": tuple(self.allow),
            "arguments": tuple(self.arguments),
            "environment": dict(self.environment),
            "python": str(self.python),
            "exchange": str(self.exchange),
        }
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)

    def _check_addresses(self) -> None:
        given = self.addresses
        lists = given.values() if isinstance(given, dict) else [given]
        every = [address for addresses in lists for address in addresses]
        if given and not all(lists):
            raise ConfigError(f"VLLM: addresses={given!r}: each policy needs at least one")
        for address in every:
            check_url(address, "VLLM: the address")
            host = urlsplit(address).hostname or ""
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
            if not isinstance(argument, str):
                raise ConfigError(f"VLLM: the argument {argument!r} must be a text")
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


def _check_once(addresses: Sequence[str]) -> None:
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ConfigError(
            f"VLLM: the address {twice[0]} is given twice; a server has the weights of one policy, "
            "or LoRA of several beside those of one model"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
