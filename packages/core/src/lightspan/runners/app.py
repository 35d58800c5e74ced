"""The app: the callable that a runner calls with tasks and resources."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, overload

from lightspan.capture import context
from lightspan.capture.prompt_overrides import prompt_argument
from lightspan.errors import AppError
from lightspan.runners.program import Program, is_program, load_program
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Rollout
from lightspan.schema.resources import INSTRUCTIONS, ROUTING, NamedResources
from lightspan.schema.spans import text_of

INJECTED: Final = ("task", "llm", "prompt", "resources", "rollout")
"""Names of arguments that every app may have, in addition to the names of resources."""
_INTERNAL: Final = (ROUTING, INSTRUCTIONS)
"""Names of resources that the app does not get."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values that one attempt can pass to the app."""

    rollout: Rollout
    resources: NamedResources
    llm: LLM | None = None

    def named(self) -> dict[str, Any]:
        """Return argument name → value for all arguments that the app may have."""
        prompts = [r for r in self.resources.values() if isinstance(r, PromptTemplate)]
        return {
            "prompt": prompts[0] if prompts else None,
            **{name: x for name, x in self.resources.items() if name not in _INTERNAL},
            "task": self.rollout.task,
            "llm": self.llm,
            "resources": self.resources,
            "rollout": self.rollout,
        }


def attempt_llm(scope: context.AttemptContext) -> LLM | None:
    """Return the app's argument `llm`: the gateway, with the attempt's call token as key.

    None if there is no gateway, or if it serves no agent.
    """
    if scope.gateway_url is None or not scope.routing.serves:
        return None
    policies = [rule.target.policy for rule in scope.routing.rules if rule.target.selected]
    name = policies[0] if policies else "policy"
    url, token = f"{scope.gateway_url}/v1", _Hidden(scope.call_token)
    return AttemptLLM(base_url=url, model=name, token=token)


class _Hidden:
    """A text that does not appear in reprs, log lines, spans and JSON."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<hidden>"


class AttemptLLM(LLM, frozen=True, kw_only=True, tag="attempt-llm"):
    """The endpoint of one attempt: the gateway, with the attempt's call token as key.

    It is never stored, because the token is secret.
    """

    token: _Hidden

    @property
    def api_key(self) -> str:
        """The attempt's call token, with which the gateway recognises the attempt."""
        return self.token.value


class App:
    """A callable that runners import by its reference `module:name`.

    Args:
        function: sync or async function. Each argument gets a value by its name: one of
            `INJECTED`, or the name of a resource of the algorithm, such as a prompt. If no
            argument is called `task`, a required first argument of any other name gets the task.

    Raises:
        AppError: `function` is a method without an object, or has no signature.
    """

    follows_urls = False
    """Value for `AttemptContext.follows_urls`: False redirects the calls of all clients."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not inspect.ismethod(function):  # `reference` rejects bound methods
            _check_no_method(function)
        functools.update_wrapper(self, function)
        self.__qualname__ = str(getattr(function, "__qualname__", type(function).__name__))
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        self.is_async = is_async(function)
        self._arguments = _arguments(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as usual. While `lightspan.record` is on, the call is an attempt.

        After `lightspan.apply_prompts`, a prompt argument that the caller does not pass gets the
        learned prompt.
        """
        task = kwargs.get("task", args[0] if args else None)
        for argument in self._arguments[len(args) :]:
            learned = None if argument.name in kwargs else prompt_argument(argument.source)
            if learned is not None and not argument.is_positional:
                kwargs[argument.name] = learned
        current = context.current_context()
        root = None if current is None else context.start_attempt(current, self.__name__, task)[1]
        if root is None:
            return self.function(*args, **kwargs)
        if self.is_async:
            return self._await_in(root, args, kwargs)
        with context.attempt_scope(root):
            return self.function(*args, **kwargs)

    async def _await_in(self, root: context.AttemptHandle, args: Any, kwargs: Any) -> Any:
        with context.attempt_scope(root):
            return await self.function(*args, **kwargs)

    def call(self, inputs: Inputs) -> Any | Awaitable[Any]:
        """Call the function with arguments from `inputs`.

        Raises:
            AppError: a required argument is not in `inputs`.
        """
        values = inputs.named()
        self.check_arguments(values)
        injected = [argument for argument in self._arguments if argument.source in values]
        positional = [values[x.source] for x in injected if x.is_positional]
        named = {x.name: values[x.source] for x in injected if not x.is_positional}
        return self.function(*positional, **named)

    def check_arguments(self, resources: Iterable[str]) -> None:
        """Raise an error unless all required arguments can be injected.

        Args:
            resources: the names of the resources.

        Raises:
            AppError: an argument cannot be injected.
        """
        others = (*INJECTED, *_INTERNAL)
        offered = [*INJECTED, *(name for name in resources if name not in others)]
        for argument in self._arguments:
            if argument.is_required and argument.source not in offered:
                raise AppError(
                    f"the app {self.__qualname__!r} asks for {argument.name!r}, which nothing "
                    f"provides; it can ask for {', '.join(offered)}"
                )

    def needs(self, name: str) -> bool:
        """Return whether a required argument gets the value `name`, such as `llm`."""
        return any(x.source == name and x.is_required for x in self._arguments)

    def takes(self, name: str, *, alone: bool) -> bool:
        """Return whether the app has an argument that gets the prompt `name`.

        Args:
            name: the prompt's name.
            alone: whether the run has no other prompt. Then an argument called `prompt` gets it
                too.
        """
        sources = (name, "resources", *(["prompt"] if alone else []))
        return any(argument.source in sources for argument in self._arguments)

    @property
    def reference(self) -> str:
        """`module:name`, by which runners import the app.

        Raises:
            AppError: runners cannot import the app, because it is defined in a function or a
                notebook, for example.
        """
        return reference(self.function)

    @property
    def program(self) -> Program | None:
        """The program that the app is, such as a `Command`; None for a function."""
        return self.function if isinstance(self.function, Program) else None

    @property
    def agents(self) -> Sequence[str] | None:
        """The paths of all agents, if the app is a program that names them; else None."""
        return None if self.program is None else self.program.agent_paths() or None


def _check_no_method(function: Callable[..., Any]) -> None:
    """Raise `AppError` for a method. Called without an object, it would get the task as `self`."""
    owner = getattr(function, "__self__", None)
    is_bound = inspect.ismethod(function) and not isinstance(owner, type)
    name = str(getattr(function, "__qualname__", ""))
    first = getattr(getattr(function, "__code__", None), "co_varnames", ())[:1]
    if is_bound or (first == ("self",) and "." in name):
        raise AppError(
            f"the app {name!r} is a method: runners import it by name, without an object, so write "
            "a function at the top level of a module that calls it"
        )


class NamedApp(App):
    """An app of which only the name is known in this process. Its module may be missing here.

    Runners import it.

    Args:
        name: reference of the app, `module:name`.

    Raises:
        AppError: `name` does not have this form.
    """

    def __init__(self, name: str) -> None:
        check_name(name, "app")
        super().__init__(functools.partial(_fail_here, name))
        self._name = name

    @property
    def reference(self) -> str:
        """The reference of the app, `module:name`, as it was passed."""
        return self._name

    def takes(self, name: str, *, alone: bool) -> bool:
        """Return True, because the arguments of the app are unknown in this process."""
        return True


def _fail_here(name: str, task: Any) -> None:
    raise AppError(f"the app {name!r} is known by name only, and can be called by runners only")


@overload
def rollout(function: F) -> F: ...
@overload
def rollout() -> Callable[[F], F]: ...
def rollout(function: F | None = None) -> F | Callable[[F], F]:
    """Decorate a function as an app. The function can still be called directly.

    Args:
        function: function to decorate; None for the form with parentheses, `@rollout()`.
    """
    if function is None:
        return rollout
    return App(function)


def as_app(app: App | Callable[..., Any] | str) -> App:
    """Return `app` as an `App`.

    Args:
        app: an `App`, a function, or the reference `module:name`, which is not imported.

    Raises:
        AppError: `app` is not callable, has no valid signature, or its reference is malformed.
    """
    if isinstance(app, str):
        return NamedApp(app)
    if isinstance(app, App):
        return app
    if not callable(app):
        raise AppError(f"an app must be callable, not {type(app).__name__}: {app!r}")
    return App(app)


def reference(function: Callable[..., Any]) -> str:
    """Return the reference of a function (`module:name`) or of a program.

    Raises:
        AppError: runners cannot import the function (`App.reference`).
    """
    if isinstance(function, Program):
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
            "to the top level of a module; a decorator needs functools.wraps"
        )
    main = sys.modules["__main__"]
    is_script = (
        getattr(main, "__spec__", None) or Path(getattr(main, "__file__", None) or "").is_file()
    )
    if module == "__main__" and not is_script:
        raise AppError(
            f"the app {name!r} is defined in a notebook or an interactive session, which runners "
            "cannot import: put it into a file, such as my_app.py, and import it from there"
        )
    return f"{module}:{name}"


def load_app(reference: str) -> App:
    """Import an app by its reference.

    Args:
        reference: `module:name`, or the reference of a program.

    Raises:
        AppError: the app cannot be imported or is not callable, or this machine cannot run the
            program.
    """
    value = load_program(reference) if is_program(reference) else find(reference, "app")
    if isinstance(value, str):  # `as_app` would take it for a reference
        raise AppError(f"an app must be callable, not str: {value!r:.100}")
    return as_app(value)


def find(reference: str, kind: str) -> Any:
    """Import an object by name.

    Args:
        reference: `module:name`.
        kind: what the object is, for error messages, such as "app".

    Raises:
        AppError: the object cannot be imported, or `reference` is malformed.
    """
    check_name(reference, kind)
    module_name, _, name = reference.partition(":")
    if module_name == "__main__" and "__mp_main__" in sys.modules:
        module_name = "__mp_main__"  # the parent's script in a spawned process
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise AppError(
            f"the {kind} {reference!r} cannot be imported: {type(error).__name__}: {text_of(error)}"
        ) from error
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise AppError(f"the {kind} {reference!r} cannot be found: {module_name!r} has no {name!r}")
    return value


def check_name(reference: str, kind: str) -> None:
    """Raise `AppError` unless `reference` has the form `module:name`.

    Args:
        reference: text to check.
        kind: what the reference names, for the error, such as "app".
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise AppError(f"an {kind} is named module:name, not {reference!r}")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is an async function, or an object with an async `__call__`."""
    method = getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


class _Argument(NamedTuple):
    """An argument of an app."""

    name: str
    source: str
    """Name of the value that the argument gets (`Inputs.named`)."""
    is_positional: bool
    is_required: bool


def _arguments(function: Callable[..., Any]) -> list[_Argument]:
    """Return the arguments of an app, without `*args` and `**kwargs`.

    Raises:
        AppError: `function` has no signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise AppError(f"the app {function!r} has no signature: {error}") from error
    is_task_named = any(parameter.name == "task" for parameter in parameters)
    arguments = []
    for number, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_required = parameter.default is parameter.empty
        is_task = number == 0 and is_required and not is_task_named
        source = "task" if is_task and parameter.name not in INJECTED else parameter.name
        is_positional = parameter.kind is parameter.POSITIONAL_ONLY
        arguments.append(_Argument(parameter.name, source, is_positional, is_required))
    return arguments
