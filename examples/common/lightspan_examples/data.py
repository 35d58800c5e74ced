"""Data that is generated once, and what is said of data that was read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightspan.progress import Reporter


class Loaded(Protocol):
    """Published data, as an example's loaders give it."""

    @property
    def files(self) -> Sequence[Path]:
        """That were read."""
        ...

    @property
    def tasks(self) -> Sequence[Any]:
        """That can be scored."""
        ...

    @property
    def skipped(self) -> Sequence[str]:
        """What was left out, and why."""
        ...


def generated(
    cache: Path, generate: Callable[[Path], object], what: str, reporter: Reporter | None
) -> Path:
    """The folder of generated data; made on the first call, whole or not at all.

    Args:
        generate: writes the data to the folder that it is given.
        what: it is, for people.
    """
    folder = cache / "data"
    if not (folder / "complete").exists():
        if reporter is not None:
            reporter.line(f"generating {what} (first time only)")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generate(folder)
        (folder / "complete").touch()
    return folder


def report_loaded(
    split: str, loaded: Loaded, what: str, reporter: Reporter, *, beside: str = ""
) -> None:
    """Say what was read, and what was left out.

    Args:
        what: the tasks are, for people.
        beside: what was read beside the tasks.
    """
    files = ", ".join(file.name for file in loaded.files)
    more = f", {beside}" if beside else ""
    reporter.line(f"{split}: {len(loaded.tasks)} {what} of {files}{more}")
    if loaded.skipped:
        some = "; ".join(loaded.skipped[:3])
        reporter.line(f"{split}: left out {len(loaded.skipped)}: {some}")
