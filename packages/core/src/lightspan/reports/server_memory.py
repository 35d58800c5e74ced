"""What vLLM's servers take: of this machine's memory, and of its GPUs.

| part | bytes |
|---|---|
| weights | parameters · bytes of the servers' type; two output layers where they are tied |
| LoRA | rank · widths of linear layers · bytes, for each that has room beside the weights |
| keys and values on a CPU | `VLLM_CPU_KVCACHE_SPACE` |
| a GPU | `--gpu-memory-utilization` of it, whatever is on it: weights, keys and values |
| processes | `PROCESSES` per server, in the host's memory |
| handed over | the weights of each policy whose servers have whole ones; two of one replaced |

What it says of a GPU is not yet run on one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightspan.engines.vllm.checks import room_for
from lightspan.engines.vllm.description import VLLM
from lightspan.engines.vllm.weights import BYTES
from lightspan.reports.forecast import MemoryPart, ModelShape, Place

PROCESSES: Final = 2_520_000_000
"""Of one server's three processes without weights, keys and values: vllm-cpu 0.32, as measured."""
CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"
UTILIZATION: Final = 0.9
"""What vLLM takes of a GPU unless it is told, about."""
_SHARE: Final = "--gpu-memory-utilization"


@dataclass(frozen=True, kw_only=True)
class Served:
    """Policies that share servers."""

    policies: tuple[str, ...]
    shape: ModelShape
    """Of their model."""
    lora_rank: int = 0
    """The highest of their LoRA; 0: the servers have whole weights."""

    @property
    def name(self) -> str:
        """For a person."""
        return "+".join(self.policies)


@dataclass
class ServerMemory:
    """What servers take, and what is not known of it."""

    parts: list[MemoryPart] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def server_memory(
    description: VLLM,
    groups: Sequence[Served],
    *,
    on_gpu: bool,
    capacity: Callable[[str], int | None],
    environ: Mapping[str, str] | None = None,
) -> ServerMemory:
    """The parts of the module's table.

    Args:
        on_gpu: whether the trainer's own device is one: servers are where it is, unless their
            environment names GPUs.
        capacity: device → bytes that it has in all; None where that is not known.
        environ: this process's environment.
    """
    environ = os.environ if environ is None else environ
    found = ServerMemory()
    if description.addresses:
        found.missing.append("memory: that of the servers at VLLM(addresses=…) is not forecast")
    else:
        shown = description.environment.get("CUDA_VISIBLE_DEVICES")
        for group, name in _servers(groups, description.servers):
            found.parts.append(_part(f"{name}: processes", PROCESSES, note="as vllm-cpu's are"))
            if on_gpu or shown:
                _add_gpu(found, description, group, name, _cards(description, environ), capacity)
            else:
                _add_cpu(found, description, group, name, environ)
    found.parts += _exchanged(description, groups)
    return found


def _servers(groups: Sequence[Served], count: int) -> Iterator[tuple[Served, str]]:
    for group in groups:
        for number in range(count):
            which = f" {number}" if count > 1 else ""
            yield group, f"vLLM{which} of {group.name}"


def _part(name: str, size: int, *, note: str = "", device: str = "") -> MemoryPart:
    place: Place = "device" if device else "host"
    return MemoryPart(name=name, bytes=size, place=place, device=device, note=note)


def _add_cpu(
    found: ServerMemory,
    description: VLLM,
    group: Served,
    name: str,
    environ: Mapping[str, str],
) -> None:
    found.parts += _weights(description, group, name)
    space = description.environment.get(CACHE, environ.get(CACHE, ""))
    if not space.isdecimal() or space == "0":
        found.missing.append(
            f"memory: keys and values of {name}, which vLLM itself decides on: give "
            f'VLLM(environment={{"{CACHE}": "4"}}), in GiB'
        )
        return
    size = int(space) * 2**30
    found.parts.append(_part(f"{name}: keys and values", size, note=f"{CACHE}={space}"))


def _add_gpu(
    found: ServerMemory,
    description: VLLM,
    group: Served,
    name: str,
    cards: Sequence[str],
    capacity: Callable[[str], int | None],
) -> None:
    """vLLM fills its share of each GPU with keys and values."""
    share = float(description.flag(_SHARE) or UTILIZATION)
    for card in cards:
        total = capacity(card)
        if total is None:
            size = sum(part.bytes for part in _weights(description, group, name)) // len(cards)
            found.parts.append(_part(f"{name}: weights", size, device=card))
            found.missing.append(f"memory: keys and values of {name} on {card}, not seen from here")
            continue
        note = f"{share:g} of it: weights, keys and values"
        found.parts.append(_part(f"{name}: its share", int(share * total), note=note, device=card))


def _weights(description: VLLM, group: Served, name: str) -> list[MemoryPart]:
    shape, width = group.shape, _width(description, group.shape)
    count = shape.parameters
    if shape.tied and not group.lora_rank:
        count += shape.vocabulary * shape.hidden
    note = f"{count:,} parameters of {width} bytes"
    parts = [_part(f"{name}: weights", count * width, note=note)]
    if group.lora_rank:
        rank, rooms = room_for(group.lora_rank), len(group.policies) + 1
        size = rank * shape.linear_widths * width * rooms
        parts.append(_part(f"{name}: LoRA", size, note=f"room for {rooms} of rank {rank}"))
    return parts


def _width(description: VLLM, shape: ModelShape) -> int:
    return BYTES[description.dtype] if description.dtype else shape.bytes_per_parameter


def _exchanged(description: VLLM, groups: Sequence[Served]) -> list[MemoryPart]:
    """What lies where servers read new weights: the host's memory, `/dev/shm` among it."""
    sizes = {
        group.name: group.shape.parameters * _width(description, group.shape)
        for group in groups
        if not group.lora_rank
    }
    parts = [
        _part(f"handed over: {name}", size, note=f"in {description.exchange}")
        for name, size in sizes.items()
    ]
    if sizes:
        parts.append(
            MemoryPart(
                name="handed over: the next version",
                bytes=max(sizes.values()),
                place="host",
                when="publishing",
                note="beside the one that it replaces",
            )
        )
    return parts


def _cards(description: VLLM, environ: Mapping[str, str]) -> list[str]:
    """The devices of a server, as torch numbers them in this process."""
    own = [each.strip() for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    shown = description.environment.get("CUDA_VISIBLE_DEVICES")
    count = description.tensor_parallel
    if not shown:
        return [f"cuda:{number}" for number in range(count)]
    named = [each.strip() for each in shown.split(",")][:count]
    return [f"cuda:{own.index(each)}" if each in own else f"cuda:{each}" for each in named]
