"""Doing something to a module once the app imports it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Awaited(MetaPathFinder):
    """Waits for the first import of a module; nothing of it is left in the module.

    Args:
        name: of the module.
        then: is called when the module has been executed, by the thread that imports it and before
            its importer sees it.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then
        self._finding = threading.local()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A finder of somebody else who waits as we do asks all finders, and so us, again.
        if fullname != self.name or getattr(self._finding, "now", False):
            return None
        self._finding.now = True
        try:
            others = [finder for finder in sys.meta_path if finder is not self]
            specs = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next(filter(None, specs), None)
        finally:
            self._finding.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def stop(self) -> None:
        """Wait no longer."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader(Loader):
    """The module's own loader, which the module gets back before it is executed."""

    def __init__(self, loader: Loader, awaited: Awaited) -> None:
        self._loader, self._awaited = loader, awaited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Only now: an import that fails may be tried again.
        if self._awaited in sys.meta_path:
            self._awaited.stop()
            self._awaited.then()
