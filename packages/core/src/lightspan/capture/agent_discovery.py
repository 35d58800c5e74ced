"""Looking for an app's agents without running it: what the searches of all adapters share.

A search walks over what the app consists of: objects, and what functions refer to. An adapter says
what its framework's own things are and where they keep their agents. The list is *complete* if
nothing was found that could bring another agent at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from lightspan.capture.static_analysis import (
    enclosed,
    is_users,
    module_of,
    names_in,
    referred,
    root_of,
)
from lightspan.plugins import installed_plugins
from lightspan.schema.routing import AgentPaths, join_path

_LOOKED_AT_MOST: Final = 2_000


def frameworks() -> frozenset[str]:
    """The modules that name agents of their own: the frameworks of the adapters that are installed
    here, and lightspan's."""
    return frozenset(("lightspan", *installed_plugins("frameworks")))


def _is_ours(thing: Any) -> bool:
    """Return whether it is of a distribution of lightspan's, be it in a checkout."""
    root = root_of(thing)
    return root == "lightspan" or root.startswith("lightspan_")


@dataclass(frozen=True, slots=True)
class Location:
    """The agents around something."""

    names: tuple[str, ...] = ()

    def within(self, name: str) -> Self:
        """Inside one more."""
        return replace(self, names=(*self.names, name))


W = TypeVar("W", bound=Location)


class AgentSearch(Generic[W]):
    """A walk over what an app consists of; an adapter's says what its framework's things hold."""

    makers: ClassVar[frozenset[str]] = frozenset()
    """Names which in a function's code mean that it may bring agents of its own."""
    installed: ClassVar[tuple[str, ...]] = ()
    """Packages whose code brings no agents, wherever they lie; the adapter's framework too."""
    reads_texts: ClassVar[bool] = True
    """Whether a text in a function's code may name what the function uses."""

    def __init__(self) -> None:
        self.complete = True
        self.paths: dict[str, None] = {}
        """What was found so far, in order."""
        self._seen: dict[tuple[int, W], Any] = {}
        """What was looked at, kept alive so that ids stay unique."""
        self._others = frameworks().difference(self.installed)

    def search(self, app: Any, where: W) -> AgentPaths:
        """The paths of the agents in an app."""
        self.look(app, where)
        return AgentPaths(tuple(self.paths), self.complete)

    def look(self, thing: Any, where: W) -> None:
        """Look at anything that an app consists of, once."""
        if (id(thing), where) in self._seen:
            return
        self._seen[id(thing), where] = thing
        if len(self._seen) > _LOOKED_AT_MOST:
            self.complete = False
        else:
            self.visit(thing, where)

    def look_at_all(self, things: Iterable[Any], where: W) -> None:
        """Look at each of them."""
        for thing in list(things):
            self.look(thing, where)

    def add(self, where: W) -> None:
        """A model is asked there."""
        self.paths[join_path(where.names)] = None

    # --- for adapters -----------------------------------------------------------------------
    def visit(self, thing: Any, where: W) -> None:
        """Look into a thing; an adapter's begins with those of its framework."""
        if isinstance(thing, functools.partial):
            self.look_at_all((thing.func, *thing.args, *thing.keywords.values()), where)
        elif isinstance(thing, MethodType):
            self.look_at_all((thing.__func__, thing.__self__), where)
        elif isinstance(thing, Mapping):
            self.look_at_all(thing.values(), where)
        elif isinstance(thing, list | tuple | set | frozenset):
            self.look_at_all(thing, where)
        elif self.is_others(thing):
            self.complete = False
        elif is_users(thing, self.installed) and not _is_ours(thing):
            self._users(thing, where)

    def mentions(self, names: set[str], where: W) -> None:
        """A function at `where` mentions these names; the whole app may be one that asks."""
        if not where.names and not self.paths:
            self.add(where)

    def refers(self, thing: Any, names: set[str], where: W) -> None:
        """A function that mentions these names refers to a thing."""
        self.look(thing, where)

    def is_others(self, thing: Any) -> bool:
        """Return whether it is of another framework, which may name agents.

        Of lightspan's own modules only the names that an app calls do (`lightspan.agent`).
        """
        root = root_of(thing)
        if root == "lightspan":
            module = thing.__name__ if isinstance(thing, ModuleType) else module_of(thing)
            return module == "lightspan" or module.startswith("lightspan.capture.")
        return root in self._others

    def references(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function refers to: closure, defaults, globals that it mentions."""
        names = set(names_in(function.__code__, texts=self.reads_texts))
        yield from referred(function, names, installed=self.installed)

    @staticmethod
    def closure(function: FunctionType) -> Iterator[Any]:
        """Yield what a function's closure holds."""
        yield from enclosed(function)

    @staticmethod
    def package(thing: Any) -> str:
        """Return the top-level package of a module, function, class or object."""
        return root_of(thing)

    def _users(self, thing: Any, where: W) -> None:
        if isinstance(thing, FunctionType):
            self._function(thing, where)
        elif isinstance(thing, type):
            functions = (v for v in vars(thing).values() if isinstance(v, FunctionType))
            self.look_at_all(functions, where)
        elif not isinstance(thing, ModuleType):
            self.look_at_all((type(thing), *getattr(thing, "__dict__", {}).values()), where)

    def _function(self, function: FunctionType, where: W) -> None:
        names = set(names_in(function.__code__, texts=self.reads_texts))
        self.mentions(names, where)
        if names & (self.makers | self._others):
            self.complete = False
        for thing in list(referred(function, names, installed=self.installed)):
            self.refers(thing, names, where)
