"""A stand-in for torchvision, for vLLM servers of vision models.

vLLM imports torchvision by the image processors of transformers, even if no server uses them, as
with lightspan, which sends pixels. PyPI's torchvision is a build for CUDA, which does not load
without it. Everywhere else torchvision loads and this file is not needed.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

__path__: list[str] = []
__version__ = "0.0"


class InterpolationMode(enum.Enum):
    """Names of interpolations, which transformers maps to Pillow's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in of torchvision computes nothing")


def _name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing


_MODULES = (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)
for _module in _MODULES:
    made = types.ModuleType(f"{__name__}.{_module}")
    vars(made).update(__path__=[], __getattr__=_name, InterpolationMode=InterpolationMode)
    sys.modules[made.__name__] = made
    parent, _, own = made.__name__.rpartition(".")
    setattr(sys.modules[parent], own, made)
