"""Import of Agent Lightning's module paths: names of modules here, or an error with a hint."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from lightspan_agl._unsupported import (
    ENVIRONMENT,
    HINTS,
    ONE_PROGRAM,
    RUNNERS,
    SPANS,
    TRACER,
    RefusedName,
)

_PACKAGE: Final = __name__.partition(".")[0]

PATHS: Final = {
    "adapter": "base messages triplet",
    "algorithm": "base fast utils",
    "algorithm.apo": "apo",
    "algorithm.verl": "interface",
    "emitter": "annotation exception message object reward",
    "litagent": "decorator litagent",
    "runner": "agent base legacy",
    "store": "base client_server collection collection_based memory mongo sqlite threading utils",
    "tracer": "base dummy otel weave",
    "trainer": "init_utils legacy registry trainer",
    "types": "core resources tracer",
}
"""Module here → modules of Agent Lightning in it, whose names are in the module here."""

_GATEWAY: Final = "leave llm_proxy= out; the gateway of lightspan serves main_llm"
_ATTRIBUTES: Final = (
    "hand names as texts to attributes=, such as emit_reward(1.0, attributes={'tag': 'fast'})"
)
MODULES: Final = {
    "cli": "use `lightspan --help`",
    "client": ONE_PROGRAM,
    "config": HINTS["lightning_cli"],
    "dashboard": "use `lightspan inspect`",
    "execution": RUNNERS,
    "instrumentation": TRACER,
    "llm_proxy": _GATEWAY,
    "semconv": f"{SPANS}; {_ATTRIBUTES}",
    "server": ONE_PROGRAM,
    "utils": _ATTRIBUTES,
    "utils.id": "use uuid.uuid4().hex",
    "utils.metrics": "use lightspan.Trainer(sinks=…)",
    "utils.server_launcher": ONE_PROGRAM,
    "utils.system_snapshot": ENVIRONMENT,
    "verl": "use VERL(config); for verl itself VERL(config, learner=lightspan.Verl(…))",
}
"""Module of Agent Lightning that is missing here → what to use instead."""


class _Alias(Loader):
    """Loads a module of Agent Lightning whose names are in another module here."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        home = importlib.import_module(self._home)
        module.__doc__ = f"Names of `{self._home}`."
        names = {name: getattr(home, name) for name in home.__all__}
        vars(module).update(names, __all__=list(names), __getattr__=home.__getattr__, __path__=[])


class _Finder(MetaPathFinder):
    """Finds Agent Lightning's modules that no other finder finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or not name:
            return None
        parent, _, leaf = name.rpartition(".")
        if leaf in PATHS.get(parent, "").split():
            return ModuleSpec(fullname, _Alias(f"{_PACKAGE}.{parent}"))
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if hint := MODULES.get(".".join(parts[:length])):
                raise ModuleNotFoundError(f"{package} has no module {name!r}: {hint}", name=name)
        # `from … import name` looks for a module of this name if the attribute is missing.
        try:
            getattr(sys.modules[fullname.rpartition(".")[0]], leaf)
        except RefusedName as error:
            raise ImportError(str(error), name=leaf) from None
        except (AttributeError, KeyError):
            pass
        return None


def install() -> None:
    """Let import statements find Agent Lightning's module paths."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}.") and "__getattr__" in vars(module):
            vars(module).setdefault("__path__", [])  # else Python looks for no modules in it
