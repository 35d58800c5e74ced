"""The app: the callable that a runner calls, and how tasks and resources reach it."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, overload

from lightspan.capture.context import (
    AttemptContext,
    AttemptHandle,
    attempt_scope,
    current_context,
    start_attempt,
)
from lightspan.errors import AppError
from lightspan.runners.command.command import PREFIX, Command
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Rollout
from lightspan.schema.resources import INSTRUCTIONS, ROUTING, NamedResources
from lightspan.schema.spans import text_of

INJECTED: Final = ("task", "llm", "prompt", "resources", "rollout")
"""Arguments that an app may ask for by name."""
_NOT_NAMED: Final = (ROUTING, INSTRUCTIONS)
"""Resources that are not for the app."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one attempt offers to the app."""

    rollout: Rollout
    resources: NamedResources
    llm: LLM | None = None

    def named(self) -> dict[str, Any]:
        """The value of each injectable argument: what every attempt has, and each resource."""
        prompts = [r for r in self.resources.values() if isinstance(r, PromptTemplate)]
        return {
            "prompt": prompts[0] if prompts else None,
            **{name: each for name, each in self.resources.items() if name not in _NOT_NAMED},
            "task": self.rollout.task,
            "llm": self.llm,
            "resources": self.resources,
            "rollout": self.rollout,
        }


def attempt_llm(scope: AttemptContext) -> LLM | None:
    """The endpoint that an app may ask for as `llm`: the gateway, opened by the call token. None
    where every call belongs where the app points it."""
    if scope.gateway_url is None or not scope.routing.serves:
        return None
    policies = [rule.target.policy for rule in scope.routing.rules if rule.target.selected]
    name = policies[0] if policies else "policy"
    url, token = f"{scope.gateway_url}/v1", _Hidden(scope.call_token)
    return AttemptLLM(base_url=url, model=name, token=token)


class _Hidden:
    """A text that no repr, log line, span or JSON shows."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<hidden>"


class AttemptLLM(LLM, frozen=True, kw_only=True, tag="attempt-llm"):
    """The gateway as one attempt may use it; it lives in memory only."""

    token: _Hidden

    @property
    def api_key(self) -> str:
        """The attempt's call token."""
        return self.token.value


class App:
    """A callable with its import reference.

    Args:
        function: sync or async; its arguments are injected by name: `INJECTED`, and the resources
            of an algorithm, such as a prompt. A first argument of any other name gets the task,
            unless another is called so.

    Raises:
        AppError: a method, or a callable whose arguments cannot be seen.
    """

    follows_urls = False
    """See `AttemptContext`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.ismethod(function):  # whose name nobody may need
            _check_no_method(function)
        functools.update_wrapper(self, function)
        self.__qualname__ = str(getattr(function, "__qualname__", type(function).__name__))
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        self.is_async = _is_async(function)
        self._arguments = _arguments(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as it was; in production that is an attempt (`lightspan.record`)."""
        task = kwargs.get("task", args[0] if args else None)
        current = current_context()
        root = None if current is None else start_attempt(current, self.__name__, task)[1]
        if root is None:
            return self.function(*args, **kwargs)
        return (self._await_in if self.is_async else self._call_in)(root, args, kwargs)

    def _call_in(self, root: AttemptHandle, args: Any, kwargs: Any) -> Any:
        with attempt_scope(root):
            return self.function(*args, **kwargs)

    async def _await_in(self, root: AttemptHandle, args: Any, kwargs: Any) -> Any:
        with attempt_scope(root):
            return await self.function(*args, **kwargs)

    def call(self, inputs: Inputs) -> Any | Awaitable[Any]:
        """Call the app with what it asks for."""
        values = inputs.named()
        self.check_arguments(values)
        wanted = [each for each in self._arguments if each.source in values]
        positional = [values[each.source] for each in wanted if each.by_position]
        named = {each.name: values[each.source] for each in wanted if not each.by_position}
        return self.function(*positional, **named)

    def check_arguments(self, resources: Iterable[str]) -> None:
        """Check that all that the app asks for is there.

        Args:
            resources: the names of those that it is handed.

        Raises:
            AppError: something is not.
        """
        others = (*INJECTED, *_NOT_NAMED)
        offered = [*INJECTED, *(name for name in resources if name not in others)]
        for each in self._arguments:
            if each.is_required and each.source not in offered:
                raise AppError(
                    f"the app {self.__qualname__!r} asks for {each.name!r}, which nothing "
                    f"provides; it can ask for {', '.join(offered)}"
                )

    def needs(self, name: str) -> bool:
        """Whether it has an argument without a default that gets this."""
        return any(each.source == name and each.is_required for each in self._arguments)

    def takes(self, name: str, *, alone: bool) -> bool:
        """Whether it is handed this prompt.

        Args:
            alone: there is no other one, so that `prompt` is this one.
        """
        sources = (name, "resources", *(["prompt"] if alone else []))
        return any(each.source in sources for each in self._arguments)

    @property
    def reference(self) -> str:
        """`module:name`, how the app travels to runners.

        Raises:
            AppError: it cannot be imported by name, such as one defined in a function or notebook.
        """
        return reference(self.function)

    @property
    def agents(self) -> Sequence[str] | None:
        """Every agent path, where the app itself names them; None if it does not."""
        return (self.function.agents or None) if isinstance(self.function, Command) else None

    def opened(self) -> AbstractAsyncContextManager[object]:
        """What the app's attempts share is open as long as the block runs."""
        return self.function.opened() if isinstance(self.function, Command) else nullcontext()


def _check_no_method(function: Callable[..., Any]) -> None:
    """A method's name imports a function that takes any object for its own: the task, say."""
    owner = getattr(function, "__self__", None)
    is_bound = inspect.ismethod(function) and not isinstance(owner, type)
    name = str(getattr(function, "__qualname__", ""))
    first = getattr(getattr(function, "__code__", None), "co_varnames", ())[:1]
    if is_bound or (first == ("self",) and "." in name):
        raise AppError(
            f"the app {name!r} is a method: runners import it by name and have no object to call "
            "it on, so write a function at the top level of a module that does"
        )


class NamedApp(App):
    """An app that is known by name only: it is imported where runners are, nowhere else.

    Args:
        name: `module:name`.

    Raises:
        AppError: it is no such name.
    """

    def __init__(self, name: str) -> None:
        check_name(name, "app")
        super().__init__(functools.partial(_not_here, name))
        self._name = name

    @property
    def reference(self) -> str:
        """`module:name`, as given."""
        return self._name

    def takes(self, name: str, *, alone: bool) -> bool:
        """It is not known here."""
        return True


def _not_here(name: str, task: Any) -> None:
    raise AppError(f"the app {name!r} is known by name only here, and runs where runners are")


@overload
def rollout(function: F) -> F: ...
@overload
def rollout() -> Callable[[F], F]: ...
def rollout(function: F | None = None) -> F | Callable[[F], F]:
    """Mark a function as an app; it stays callable as it was."""
    if function is None:
        return rollout
    return App(function)


def as_app(app: App | Callable[..., Any] | str) -> App:
    """The app, whether it was decorated or not; `module:name` is not imported."""
    if isinstance(app, str):
        return NamedApp(app)
    if isinstance(app, App):
        return app
    if not callable(app):
        raise AppError(f"an app must be callable, not {type(app).__name__}: {app!r}")
    return App(app)


def reference(function: Callable[..., Any]) -> str:
    """See `App.reference`."""
    if isinstance(function, Command):
        return function.reference
    _check_no_method(function)
    module, name = function.__module__, getattr(function, "__qualname__", None)
    if name is None:
        raise AppError(
            f"the app is a {type(function).__name__} object: runners import it by name, so write a "
            "function at the top level of a module that calls it"
        )
    if "<" in name:
        raise AppError(
            f"the app {name!r} is defined inside a function: runners import it by name, so move it "
            "to the top level of a module"
        )
    if module == "__main__":
        _check_main(name)
    return f"{module}:{name}"


def _check_main(name: str) -> None:
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file()):
        raise AppError(
            f"the app {name!r} is defined in a notebook or an interactive session, which runners "
            "cannot import: put it into a file, such as my_app.py, and import it from there"
        )


def load_app(reference: str) -> App:
    """The app that `module:name` names, or a command's reference.

    Raises:
        AppError: it cannot be imported, is not callable, or its program is not there.
    """
    is_command = reference.startswith(PREFIX)
    named = Command.from_reference(reference) if is_command else find(reference, "app")
    if isinstance(named, str):  # which `as_app` would take for another reference
        raise AppError(f"an app must be callable, not str: {named!r:.100}")
    app = as_app(named)
    if isinstance(app.function, Command):
        app.function.check()
    return app


def find(reference: str, what: str) -> Any:
    """What `module:name` names.

    Args:
        what: it is, for people.

    Raises:
        AppError: it cannot be imported.
    """
    check_name(reference, what)
    module_name, _, name = reference.partition(":")
    try:
        value = _module(module_name)
    except Exception as error:
        raise AppError(
            f"the {what} {reference!r} cannot be imported: {type(error).__name__}: {text_of(error)}"
        ) from error
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise AppError(f"the {what} {reference!r} cannot be found: {module_name!r} has no {name!r}")
    return value


def check_name(reference: str, what: str) -> None:
    """Raise `AppError` unless it is `module:name`."""
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise AppError(f"an {what} is named module:name, not {reference!r}")


def _module(name: str) -> Any:
    if name == "__main__" and "__mp_main__" in sys.modules:
        return sys.modules["__mp_main__"]  # how a spawned process knows the parent's script
    return importlib.import_module(name)


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


class _Argument(NamedTuple):
    """An argument of an app, and what it gets."""

    name: str
    source: str
    by_position: bool
    is_required: bool


def _arguments(function: Callable[..., Any]) -> list[_Argument]:
    """The arguments that can be injected; which resources there are is not known yet."""
    parameters = _parameters(function)
    is_task_named = any(parameter.name == "task" for parameter in parameters)
    arguments = []
    for number, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_required = parameter.default is parameter.empty
        is_task = number == 0 and is_required and not is_task_named
        is_known = parameter.name in INJECTED
        source = "task" if is_task and not is_known else parameter.name
        by_position = parameter.kind is parameter.POSITIONAL_ONLY
        arguments.append(_Argument(parameter.name, source, by_position, is_required))
    return arguments


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise AppError(f"the arguments of {function!r} cannot be seen: {error}") from error
