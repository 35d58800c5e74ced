"""Output of a report: text to the terminal, JSON to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from lightspan.errors import DataError
from lightspan.progress import say
from lightspan.reports.dry_run.report import DevReport

STDOUT: Final = Path("-")
"""The path that means the standard output: the JSON is printed there, and the text is not."""


def check_writable(path: Path | None) -> None:
    """Raise `DataError` where the JSON cannot be written: better before the tasks run, which takes
    minutes."""
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not path.parent.is_dir():
        raise _unwritable(path, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(path, "permission denied")


def shown(report: DevReport, to: Path | None) -> str:
    """What to print of the report; the JSON is written if it goes to a file.

    Args:
        to: where the JSON goes, if anywhere; `STDOUT` is in place of the text.

    Raises:
        DataError: it cannot be written. The text was printed then: it took minutes.
    """
    if to is None:
        return report.text()
    if to == STDOUT:
        # ASCII: a terminal may know no more. DEL is ASCII too, and would be written out.
        return json.dumps(report.json(), indent=2).replace("\x7f", "\\u007f")
    text = json.dumps(report.json(), indent=2, ensure_ascii=False)
    try:
        to.write_text(f"{text}\n", encoding="utf-8")
    except (OSError, UnicodeError) as error:
        say(report.text())
        raise _unwritable(to, getattr(error, "strerror", None) or str(error)) from error
    return report.text()


def _unwritable(path: Path, reason: str) -> DataError:
    return DataError(f"--json {path} cannot be written: {reason}; give another path")
