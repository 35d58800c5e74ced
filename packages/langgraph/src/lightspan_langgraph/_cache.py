"""Switch LangChain's cache off where the trained model must sample the answer.

`set_llm_cache` and `cache=` accept any subclass of `BaseCache`. Its methods are wrapped in the
classes that define them, so that the app's settings do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from functools import partial
from types import FunctionType
from typing import Any, Final

from langchain_core.caches import BaseCache

from lightspan.instrumentation import Patch, patch_subclasses

IsOff = Callable[[], bool]

METHODS: Final = ("lookup", "update", "alookup", "aupdate")


def switch(is_off: IsOff) -> list[Patch]:
    """Wrap every cache class, so that caches return and store nothing while `is_off()` is true."""
    patches: list[Patch] = []

    def wrap(cache: type) -> None:
        for name in METHODS:
            original = vars(cache).get(name)
            if isinstance(original, FunctionType) and not hasattr(original, "__isabstractmethod__"):
                make = _wrap_async if name.startswith("a") else _wrap_sync
                patches.append(Patch(cache, name, partial(make, original, is_off)))

    patches.append(patch_subclasses(BaseCache, wrap))
    return patches


def _wrap_sync(original: Callable[..., Any], is_off: IsOff, patch: Patch) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if patch.on and is_off() else original(self, *args, **kwargs)

    return method


def _wrap_async(
    original: Callable[..., Awaitable[Any]], is_off: IsOff, patch: Patch
) -> Callable[..., Any]:
    @functools.wraps(original)
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if patch.on and is_off() else await original(self, *args, **kwargs)

    return method
