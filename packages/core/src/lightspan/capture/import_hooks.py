"""Call a function when a module is imported for the first time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def is_imported(name: str) -> bool:
    """Return whether a module is imported completely.

    False during its import, which is left to its own thread.
    """
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class ImportHook(MetaPathFinder):
    """Calls a function when a module is imported for the first time, without changing the module.

    Args:
        name: name of the module.
        callback: called after the module was executed, in the importing thread, before the
            importing code continues.
    """

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self.callback = name, callback
        self._active = threading.local()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another import hook may call all finders, and so this one, recursively.
        if fullname != self.name or getattr(self._active, "now", False):
            return None
        self._active.now = True
        try:
            others = [finder for finder in sys.meta_path if finder is not self]
            specs = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next(filter(None, specs), None)
        finally:
            self._active.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def stop(self) -> None:
        """Remove the hook."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader(Loader):
    """A module's loader, which calls the hook after the module was executed."""

    def __init__(self, loader: Loader, hook: ImportHook) -> None:
        self._loader, self._hook = loader, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Only after success: a failed import may be repeated.
        if self._hook in sys.meta_path:
            self._hook.stop()
            self._hook.callback()
