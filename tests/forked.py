"""Fork runner processes from a process that has imported what each of them needs.

Starting a runner takes a second of CPU, mostly to import the OpenAI SDK, and hundreds of tests are
not about how a process starts. Forking takes a tenth of that. A forked runner gets its working
folder, module path and app like a spawned one, and imports the app itself. Runners are still
spawned in `packages/core/tests/runners`, except for `test_misbehaviour`, and by programs that
train.
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
"""Folders and files of tests that do not test the start of runner processes."""


def is_forked(path: Path) -> bool:
    """Return whether the runners of a test file are forked."""
    return bool(FORKED & {*path.relative_to(ROOT).parts, path.stem})


class Forked(ForkServerProcess):
    """A forked process with the environment and the outputs of the process that starts it."""

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
    """Replacement of `multiprocessing.get_context("spawn")` that forks processes."""

    Process = Forked


@contextmanager
def forked_runners() -> Iterator[None]:
    """Let `LocalRunners` of this interpreter fork their processes in a block."""
    with patch("lightspan.runners.local._PROCESSES", Forking()):
        yield


def prepare() -> None:
    """Set the imports of the process to fork from, which starts when it is needed."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))


def end() -> None:
    """End the process to fork from, if it has started, and wait for its end."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
