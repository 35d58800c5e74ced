"""The interface of apps that are programs, such as `lightspan_programs.Command`.

The core runs no program itself. A distribution adds a kind of program by a subclass of `Program`,
and by an entry point of the group `lightspan.apps` that reads the references of this kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from lightspan.errors import AppError, ConfigError
from lightspan.plugins import load_plugin
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Outcome
from lightspan.schema.routing import Routing


class ProgramError(AppError):
    """Error of a program that could not start, failed, or ended without a reward."""

    def __init__(self, message: str, outcome: Outcome = Outcome.APP_ERROR) -> None:
        super().__init__(message)
        self.outcome = outcome
        """The outcome of the attempt in which the program ran."""


class Program(ABC):
    """An app whose reference contains its configuration, instead of the name of a function."""

    __slots__ = ()

    @abstractmethod
    async def __call__(self, task: Json, llm: LLM | None = None) -> Any:
        """Run the program on one task, and return the reward.

        Args:
            task: the task.
            llm: the endpoint of its model calls; None without a gateway.

        Raises:
            ProgramError: the program could not start, failed, or ended without a reward.
        """

    @property
    @abstractmethod
    def reference(self) -> str:
        """The program as text: `KIND:` and a JSON object. KIND is the name of the entry point."""

    def agent_paths(self) -> Sequence[str]:
        """Return the paths of all agents of the program; empty if they are unknown."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Raise `AppError` unless this machine can run the program."""

    @abstractmethod
    def check_routing(self, routing: Routing) -> None:
        """Raise `ConfigError` if a run with this routing refuses calls of the program."""

    def opened(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager for what all attempts in this process share."""
        return nullcontext()


def is_program(reference: str) -> bool:
    """Return whether a reference is that of a `Program`, not `module:name`."""
    return reference.partition(":")[2].startswith("{")


def load_program(reference: str) -> Program:
    """Make a program from its reference.

    Raises:
        AppError: no installed distribution has this kind of program, the reference is invalid, or
            this machine cannot run the program.
    """
    try:
        program: Program = load_plugin("apps", reference.partition(":")[0])(reference)
    except ConfigError as error:
        raise AppError(f"the app {reference!r} cannot be loaded: {error}") from error
    program.check()
    return program
