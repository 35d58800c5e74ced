"""Data that is generated once, and what is said of data that was read."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from lightspan.progress import Reporter

Task = TypeVar("Task")


class Loaded(NamedTuple, Generic[Task]):
    """The tasks of a split of published data, and what was left out."""

    tasks: list[Task]
    files: list[Path]
    """The files that were read."""
    skipped: list[str]
    """Entries that cannot be scored: which, and why."""


def generated(
    cache: Path, generate: Callable[[Path], object], content: str, reporter: Reporter | None
) -> Path:
    """The folder of generated data; made on the first call, whole or not at all, and again when the
    module that makes it has changed.

    Args:
        generate: writes the data to the folder that it is given.
        content: what is generated, for people.
    """
    folder = cache / "data"
    complete = folder / "complete"
    source = _digest(generate)
    if not complete.exists() or complete.read_text() != source:
        if reporter is not None:
            reporter.line(f"generating {content} (first time only)")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generate(folder)
        complete.write_text(source)
    return folder


def _digest(generate: Callable[[Path], object]) -> str:
    """What tells the data of one version of its module from those of another."""
    function = getattr(generate, "func", generate)  # of a partial
    module = sys.modules[function.__module__]
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]


def report_loaded(
    split: str, loaded: Loaded[Any], unit: str, reporter: Reporter, *, beside: str = ""
) -> None:
    """Say what was read, and what was left out.

    Args:
        unit: what the tasks are called, for people.
        beside: what was read beside the tasks.
    """
    files = ", ".join(file.name for file in loaded.files)
    extras = f", {beside}" if beside else ""
    reporter.line(f"{split}: {len(loaded.tasks)} {unit} of {files}{extras}")
    if loaded.skipped:
        some = "; ".join(loaded.skipped[:3])
        reporter.line(f"{split}: left out {len(loaded.skipped)}: {some}")
