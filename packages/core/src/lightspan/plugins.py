"""Find and load plugins by their entry points.

A distribution adds a plugin by an entry point of the group `lightspan.<kind>`; the core names no
implementation. Kinds:

    engines    name → `EngineSpec` (`lightspan.protocols.engine`)
    learners   name → `LearnerSpec` (`lightspan.protocols.learner`)
    stores     URL scheme → `StorePlugin` (`lightspan.stores.protocol`)
    gateway    "default" → a callable `(store, engine, *, host, port)` that returns a `Gateway`
    runners    name → a callable without arguments that returns `Runners`
    programs   name → `lightspan_programs.ProgramSpec`: a coding agent that `CodingAgent` starts
    apps       kind of program → a callable that takes a reference and returns a `Program`
               (`lightspan.runners.program`)
    exporters  "default" → a `SpanExporter` (`lightspan.production.exporters`)
    commands   name → an object with `add(subparsers)`: a command of `lightspan`
    sinks      name → a callable without arguments that returns a `MetricSink`
    listeners  name → a callable that takes a `RunEvent`, called after every step and evaluation
    dry_run    name → a callable without arguments, called in the app's process before each attempt
               of a dry run
    reporters  "terminal" → a callable without arguments that returns a `Reporter`
               (`lightspan.progress`), used if the standard output is a terminal
    readers    runner id → a callable that takes (rollout, attempt, spans) and returns (rollout,
               spans); it reads attempts whose spans were received from another program
    frameworks top-level module of a framework → the adapter's module, which has `instrument`,
               `uninstrument` and `agents` (docs/guides/write-an-adapter.md); for the adapters
               of other frameworks, objects of this framework may add agents
    store_routes
               name → a callable that takes a store and returns an object with `PATH` and
               `answer(request, role)`: a path that `lightspan serve --store` answers
    api        name → the object `lightspan.<name>`
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from lightspan.errors import ConfigError, how_to_install

_EXTRAS: Final[dict[str, dict[str, str]]] = {
    "engines": {"transformers": "train", "vllm": "vllm"},
    "learners": {"torch": "train", "verl": "verl"},
    "gateway": {"default": "http"},
    "stores": {"postgresql": "postgres", "http": "http", "https": "http"},
    "runners": {"ray": "ray"},
    "apps": {**dict.fromkeys(("coding-agent", "command"), "programs"), "harbor": "harbor"},
    "commands": {
        **dict.fromkeys(("cancel", "runner", "status"), "cluster"),
        **dict.fromkeys(("compress", "dev", "fork"), "train"),
        **dict.fromkeys(("export", "feedback", "inspect", "prune", "rescore"), "tools"),
        **dict.fromkeys(("candidate", "serve"), "http"),
        "harbor": "harbor",
        "import": "otel",
        "ui": "ui",
    },
    "api": {
        **dict.fromkeys(("APO", "Alternate", "GEPA", "Judge", "Price"), "prompts"),
        **dict.fromkeys(("DevReport", "Preferences", "SFT", "Torch", "Transformers"), "train"),
        **dict.fromkeys(("Distill", "TeacherModel", "TeacherServer", "choose_rate"), "train"),
        **dict.fromkeys(("CodingAgent", "Command"), "programs"),
        "ExternalRunners": "cluster",
        "Hosts": "hosts",
        "RayRunners": "ray",
        "RejectionSampling": "train",
        "VLLM": "vllm",
        "Verl": "verl",
        "tasks_from_store": "tools",
    },
}
"""Kind → name of a plugin in this repository → the extra of `lightspan` that installs the
plugin."""


def extra_of(kind: str, name: str) -> str | None:
    """Return the extra of `lightspan` that installs a plugin (as in `lightspan[vllm]`).

    None if no extra installs it, because the plugin belongs to another project.
    """
    return _EXTRAS.get(kind, {}).get(name)


@functools.cache
def installed_plugins(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of the plugins of a kind by name, sorted by name.

    Of several with the same name, the first is returned.
    """
    points = reversed(tuple(entry_points(group=f"lightspan.{kind}")))
    return dict(sorted({point.name: point for point in points}.items()))


def load_plugin(kind: str, name: str) -> Any:
    """Load a plugin, and return the object that its entry point names.

    Raises:
        ConfigError: no installed distribution has the plugin, or the plugin needs a module that is
            not installed.
    """
    point, extra = installed_plugins(kind).get(name), extra_of(kind, name)
    if point is None and extra is not None:
        raise ConfigError(f"{name} is not installed: {how_to_install(extra)}")
    if point is None:
        names = ", ".join(installed_plugins(kind)) or "none"
        raise ConfigError(f"no plugin of the kind {kind!r} is called {name!r}; installed: {names}")
    try:
        return point.load()
    except ModuleNotFoundError as error:
        hint = how_to_install(extra) if extra else f"install {error.name}"
        raise ConfigError(f"{name} needs {error.name!r}: {hint}") from error


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that imports names on demand.

    Args:
        package: `__name__` of the package.
        modules: public name → module that defines it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: list(modules), list(modules)
