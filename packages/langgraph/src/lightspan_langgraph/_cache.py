"""Switch the caches of LangChain and LangGraph off where the trained model must sample the answer.

LangChain caches answers of models, in any subclass of its `BaseCache` (`set_llm_cache`, `cache=`).
LangGraph caches results of nodes and tasks, in any subclass of its own `BaseCache`
(`compile(cache=…)`, `CachePolicy`). The methods of these classes are wrapped, so that the app's
settings do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Final

from langchain_core.caches import BaseCache as ModelCache
from langgraph.cache.base import BaseCache as NodeCache

from lightspan.instrumentation import Patch, patch_subclasses

IsOff = Callable[[], bool]

METHODS: Final = ("lookup", "update", "alookup", "aupdate")
"""Methods of a cache of models."""
MAX_KEYS: Final = 100_000
"""Maximum number of keys of nodes that are remembered."""


def switch_models(is_off: IsOff) -> list[Patch]:
    """Patch caches of models: while `is_off()` is true, they return nothing and store nothing."""

    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if is_off() else method(*args, **kwargs)

    async def call_async(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if is_off() else await method(*args, **kwargs)

    return _patches(
        ModelCache, {name: call_async if name.startswith("a") else call for name in METHODS}
    )


def switch_nodes(is_off: IsOff) -> list[Patch]:
    """Patch caches of nodes, so that they are not used while `is_off()` is true.

    While it is true they return nothing. A result that was looked up then is not stored, even
    later: LangGraph may store it in another thread, in which `is_off` cannot detect the rollout.
    """
    hidden: set[Any] = set()

    def hide(keys: Iterable[Any]) -> bool:
        if not is_off():
            hidden.difference_update(keys)
            return False
        if len(hidden) > MAX_KEYS:
            hidden.clear()
        hidden.update(keys)
        return True

    def get(method: Callable[..., Any], keys: Any) -> Any:
        return {} if hide(keys) else method(keys)

    async def get_async(method: Callable[..., Any], keys: Any) -> Any:
        return {} if hide(keys) else await method(keys)

    def store(method: Callable[..., Any], pairs: Mapping[Any, Any]) -> Any:
        return method({key: value for key, value in pairs.items() if key not in hidden})

    return _patches(NodeCache, {"get": get, "set": store, "aget": get_async, "aset": store})


def _patches(base: type, replacements: Mapping[str, Callable[..., Any]]) -> list[Patch]:
    """Replace methods (by name) of `base` and of its subclasses."""
    patches: list[Patch] = []

    def wrap(cache: type) -> None:
        for name, replacement in replacements.items():
            original = vars(cache).get(name)
            if isinstance(original, FunctionType) and not hasattr(original, "__isabstractmethod__"):
                patches.append(Patch(cache, name, partial(_wrap, original, replacement)))

    patches.append(patch_subclasses(base, wrap))
    return patches


def _wrap(
    original: Callable[..., Any], replacement: Callable[..., Any], patch: Patch
) -> Callable[..., Any]:
    """Return a method that calls `replacement` with the original method and the arguments."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = partial(original, self)
        return replacement(bound, *args, **kwargs) if patch.on else bound(*args, **kwargs)

    return method
