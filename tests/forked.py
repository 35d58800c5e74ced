"""Fork runner processes from one that has imported what each of them imports.

Starting a runner takes a second of CPU, most of it to import the OpenAI SDK, and hundreds of
trainings and dry runs in tests are not about how a process starts. A forked one takes a tenth. It
gets the rest as a spawned one does: working folder, module path and app, which it imports itself.
`packages/core/tests/runners` except `test_misbehaviour`, and programs that train, spawn their
runners as users do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest.mock import patch

IMPORTED = (
    *(
        "lightspan.runners.process_main",
        "lightspan.stores.sqlite.store",
        "lightspan.capture.sdk_instrumentation",
    ),
    *("openai", "openai.resources.chat", "openai.resources.responses"),
    "tests.forked",
)
ROOT = Path(__file__).parents[1]
FORKED = {
    *(
        "agl",
        "algorithms",
        "cli",
        "lightning",
        "prompts",
        "reports",
        "tools",
        "trainer",
        "training",
    ),
    *("test_command_training", "test_misbehaviour"),
    *("test_learning_benchmark", "test_credit_benchmark"),
    *("test_math_structured", "test_rag_structured", "test_rag_crew"),
    *("test_sql_train", "test_sql_signals", "test_sql_spider"),
}
"""Folders and files of tests that are not about how a runner process is started."""


def is_forked(path: Path) -> bool:
    """Whether a file's tests fork their runners."""
    return bool(FORKED & {*path.relative_to(ROOT).parts, path.stem})


class Forked(ForkServerProcess):
    """One of them, with the environment and the outputs of the process that starts it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_outputs": {number: DupFd(number) for number in (1, 2)}}

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        for number, output in self._outputs.items():
            given = output.detach()
            os.dup2(given, number)
            os.close(given)
        super().run()


class Forking(ForkServerContext):
    """What starts them, in place of `multiprocessing.get_context("spawn")`."""

    Process = Forked


@contextmanager
def forked_runners() -> Iterator[None]:
    """`LocalRunners` of this interpreter start theirs so, from now to the end."""
    with patch("lightspan.runners.local._PROCESSES", Forking()):
        yield


def prepare() -> None:
    """Say what the process imports that they are forked from; it starts when it is needed."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))


def end() -> None:
    """End that process, if it has been started, and wait for it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
