"""Find an app's agents without running the app, for all adapters.

The search visits the objects of an app and the objects that its functions refer to. An adapter's
subclass handles the framework's own classes. The list of agents is *complete* unless something was
visited that could add another agent at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from lightspan.capture import static_analysis
from lightspan.plugins import installed_plugins
from lightspan.schema.routing import AgentPaths, join_path

_MAX_VISITS: Final = 2_000


def frameworks() -> frozenset[str]:
    """Return the names of the top-level modules that define agents.

    They are `lightspan`, and the frameworks whose adapters are installed.
    """
    return frozenset(("lightspan", *installed_plugins("frameworks")))


@dataclass(frozen=True, slots=True)
class Location:
    """A place in an app, given by the names of the agents around it, the outermost first."""

    names: tuple[str, ...] = ()

    def within(self, name: str) -> Self:
        """Return the location inside one more agent."""
        return replace(self, names=(*self.names, name))


W = TypeVar("W", bound=Location)


class AgentSearch(Generic[W]):
    """A search for an app's agents. An adapter's subclass handles the classes of its framework."""

    makers: ClassVar[frozenset[str]] = frozenset()
    """Names of functions that create agents. A function that mentions such a name may create
    agents."""
    installed: ClassVar[tuple[str, ...]] = ()
    """Packages that never count as the user's code. The adapter's framework is among them."""
    reads_texts: ClassVar[bool] = True
    """Whether string constants in a function count as names of objects that the function uses."""

    def __init__(self) -> None:
        self.complete = True
        self.paths: dict[str, None] = {}
        """Agent paths so far, in order."""
        self._visited: dict[tuple[int, W], Any] = {}
        """Visited objects, kept alive so that their ids stay unique."""
        self._open: set[int] = set()
        """Ids of the objects whose visit has not ended."""
        self._other_frameworks = frameworks().difference(self.installed)

    def search(self, app: Any, where: W) -> AgentPaths:
        """Return the paths of the agents in an app, starting at the location `where`."""
        self.look(app, where)
        return AgentPaths(tuple(self.paths), self.complete)

    def look(self, thing: Any, where: W) -> None:
        """Visit an object of the app. Do nothing if it was visited at this location before.

        The list of agents is marked incomplete, and the object is not visited, after `_MAX_VISITS`
        objects, and if the object contains itself in a further agent, because the paths of such
        agents are endless.
        """
        if (id(thing), where) in self._visited:
            return
        self._visited[id(thing), where] = thing
        if len(self._visited) > _MAX_VISITS or id(thing) in self._open:
            self.complete = False
        else:
            self._open.add(id(thing))
            self.visit(thing, where)
            self._open.discard(id(thing))

    def look_at_all(self, things: Iterable[Any], where: W) -> None:
        """Visit several objects."""
        for thing in list(things):
            self.look(thing, where)

    def add(self, where: W) -> None:
        """Add the agent at the location `where` to the result. It must call a model."""
        self.paths[join_path(where.names)] = None

    # --- for adapters -----------------------------------------------------------------------
    def visit(self, thing: Any, where: W) -> None:
        """Visit the parts of an object. Subclasses override this for their framework's classes."""
        if isinstance(thing, functools.partial):
            self.look_at_all((thing.func, *thing.args, *thing.keywords.values()), where)
        elif isinstance(thing, MethodType):
            self.look_at_all((thing.__func__, thing.__self__), where)
        elif isinstance(thing, Mapping | list | tuple | set | frozenset):
            self.look_at_all(thing.values() if isinstance(thing, Mapping) else thing, where)
        elif self.is_others(thing):
            self.complete = False
        elif static_analysis.is_user_code(thing, self.installed) and (
            static_analysis.package_of(thing).partition("_")[0] != "lightspan"  # in a checkout
        ):
            self._user_code(thing, where)

    def mentions(self, names: set[str], where: W) -> None:
        """Handle the names that a function's code uses; subclasses may override this.

        By default, if no agent contains the function and none was found before, the whole app
        counts as one agent.

        Args:
            names: the variables, attributes and texts in the function's code.
            where: location of the function.
        """
        if not where.names and not self.paths:
            self.add(where)

    def refers(self, thing: Any, names: set[str], where: W) -> None:
        """Visit an object to which a function refers.

        Args:
            thing: the object.
            names: all names in the function's code; subclasses may use them.
            where: location of the function.
        """
        self.look(thing, where)

    def is_others(self, thing: Any) -> bool:
        """Return whether an object belongs to another framework, and may therefore add agents.

        Of lightspan's objects, only those in `lightspan` and `lightspan.capture` count. They have
        the functions that an app calls, such as `lightspan.agent`.
        """
        root = static_analysis.package_of(thing)
        if root == "lightspan":
            module = static_analysis.module_of(thing)
            return module == "lightspan" or module.startswith("lightspan.capture.")
        return root in self._other_frameworks

    def references(self, function: FunctionType, *, texts: bool = True) -> Iterator[Any]:
        """Yield the values that a function refers to: its closure, defaults and named globals."""
        names = {*static_analysis.names_in(function.__code__, texts=texts and self.reads_texts)}
        yield from static_analysis.references(function, names, installed=self.installed)

    @staticmethod
    def closure(function: FunctionType) -> Iterator[Any]:
        """Yield the values of a function's closure."""
        yield from static_analysis.closure_values(function)

    @staticmethod
    def package(thing: Any) -> str:
        """Return the top-level package of a module, function, class or object."""
        return static_analysis.package_of(thing)

    def _user_code(self, thing: Any, where: W) -> None:
        if isinstance(thing, FunctionType):
            self._function(thing, where)
        elif isinstance(thing, type):
            functions = (v for v in vars(thing).values() if isinstance(v, FunctionType))
            self.look_at_all(functions, where)
        elif not isinstance(thing, ModuleType):
            self.look_at_all((type(thing), *getattr(thing, "__dict__", {}).values()), where)

    def _function(self, function: FunctionType, where: W) -> None:
        names = set(static_analysis.names_in(function.__code__, texts=self.reads_texts))
        self.mentions(names, where)
        self.complete = self.complete and not names & (self.makers | self._other_frameworks)
        for thing in list(self.references(function)):
            self.refers(thing, names, where)
