"""LangChain's cache: it finds nothing, and keeps nothing, where a call's answer is to be a sample.

`set_llm_cache` and `cache=` hold an object of any class below `BaseCache`; its methods are wrapped
in the classes that define them, so that the app's settings stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

from langchain_core.caches import BaseCache

from lightspan.instrumentation import (
    Patch,
    patch_subclasses,
)

IsOff = Callable[[], bool]

METHODS: Final = ("lookup", "update", "alookup", "aupdate")


def switch(is_off: IsOff) -> list[Patch]:
    """Have every cache answer and keep nothing while `is_off()`; undone with the patches."""
    patches: list[Patch] = []

    def wrap(known: type) -> None:
        for name in METHODS:
            original = vars(known).get(name)
            if isinstance(original, FunctionType) and not hasattr(original, "__isabstractmethod__"):
                make = _asynchronous if name.startswith("a") else _synchronous
                patches.append(Patch(known, name, partial(make, original, is_off)))

    patches.append(patch_subclasses(BaseCache, wrap))
    return patches


def _synchronous(original: Callable[..., Any], is_off: IsOff, patch: Patch) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if patch.on and is_off() else original(self, *args, **kwargs)

    return ask


def _asynchronous(
    original: Callable[..., Awaitable[Any]], is_off: IsOff, patch: Patch
) -> Callable[..., Any]:
    @functools.wraps(original)
    async def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if patch.on and is_off() else await original(self, *args, **kwargs)

    return ask
