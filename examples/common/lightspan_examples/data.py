"""Generate data once and cache it; print how many tasks were read from published data."""

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
    """Tasks of one split of a published data set, with the entries that were left out."""

    tasks: list[Task]
    files: list[Path]
    """The files that were read."""
    skipped: list[str]
    """One line per entry that cannot be scored: where it is, and why."""


def generated(
    cache: Path, generate: Callable[[Path], object], content: str, reporter: Reporter | None
) -> Path:
    """Return the folder of generated data, and generate the data if the folder is missing.

    The data is generated again when the source code of the module of `generate` has changed. After
    an interrupted generation everything is generated anew.

    Args:
        cache: folder in which the folder `data` is made.
        generate: function that writes the data to the folder that is passed to it.
        content: name of the data for the printed line, such as `worlds`.
        reporter: destination of the printed line; None prints nothing.
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
    """Return a hash of the source code of the module in which `generate` is defined."""
    function = getattr(generate, "func", generate)  # of a partial
    module = sys.modules[function.__module__]
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]


def report_loaded(
    split: str, loaded: Loaded[Any], unit: str, reporter: Reporter, *, beside: str = ""
) -> None:
    """Print how many tasks of a split were read from which files, and how many entries were left
    out.

    Args:
        unit: plural noun for the tasks, such as `problems`.
        beside: what else was read, as text for the same line; empty for nothing else.
    """
    files = ", ".join(file.name for file in loaded.files)
    extras = f", {beside}" if beside else ""
    reporter.line(f"{split}: {len(loaded.tasks)} {unit} of {files}{extras}")
    if loaded.skipped:
        some = "; ".join(loaded.skipped[:3])
        reporter.line(f"{split}: left out {len(loaded.skipped)}: {some}")
