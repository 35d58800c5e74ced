"""Make verl run on CPUs, which it does not support itself.

verl loads this module if `VERL_USE_EXTERNAL_MODULES=lightspan_verl.cpu_platform` and
`VERL_PLATFORM=cpu`. `learner=Verl(…)` sets these variables if the trainer's device is the CPU. The
module imports verl, so it can be imported in verl's environment only.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> Any:
    """Return `torch.cpu` with stubs of the `torch.cuda` functions that verl calls."""
    module = types.ModuleType("lightspan_cpu")
    named = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[:2] != "__"}
    module.__dict__.update(named)
    figures = (
        *("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"),
        "reset_peak_memory_stats",
    )
    for name in figures:
        setattr(module, name, lambda *args, **options: 0)
    for name in ("empty_cache", "synchronize", "ipc_collect"):
        setattr(module, name, lambda *args, **options: None)
    module.__dict__["mem_get_info"] = lambda *args, **options: (0, 0)
    module.__dict__["get_device_name"] = lambda *args, **options: "cpu"
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):  # type: ignore[misc]
    """A verl platform whose only device is the CPU. The ranks communicate by gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
