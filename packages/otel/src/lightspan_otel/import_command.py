"""`lightspan import`: store traces from files as production attempts.

A production attempt is a recorded run of an app outside of a training.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural

if TYPE_CHECKING:
    from lightspan.progress import Reporter
    from lightspan_otel.import_traces import Imported

_MAX_PRINTED: Final = 20
"""Maximum number of errors printed per file."""


def add(commands: Any) -> None:
    """Add the subcommand `import`."""
    parser = commands.add_parser(
        "import",
        help="keep traces of files (OTLP, Phoenix, Langfuse) as attempts of production",
        description="Keep the traces of files as attempts of production, to be inspected, rated, "
        "exported, fine-tuned on and replayed: OTLP as JSON lines or protobuf, as a collector's "
        "file exporter writes it, and what Phoenix and Langfuse export as JSON; packed by gzip "
        "too. They have no tokens. To import a file again adds nothing twice. Exit status 1 if "
        "anything was left out.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="with traces; - for standard input"
    )
    parser.add_argument("--store", metavar="URL", help="LIGHTSPAN_STORE if absent")
    parser.add_argument("--service", metavar="NAME", help="service name of traces that have none")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from lightspan.production.options import STORE_VARIABLE
    from lightspan.progress import PlainReporter
    from lightspan.stores.aio import run_sync
    from lightspan_otel.import_traces import STDIN

    url = options.store or os.environ.get(STORE_VARIABLE)
    if not url:
        raise ConfigError(f"import needs a store: give --store, or set {STORE_VARIABLE}")
    for path in options.files:
        if str(path) != STDIN and not path.exists():
            raise DataError(f"there is no file {path}")
        if path.is_dir():
            raise DataError(f"{path} is a folder: name the files in it")
    rejected, stored = run_sync(
        _import(url, options.files, options.service, PlainReporter(sys.stderr))
    )
    if rejected:
        raise DataError(
            f"{rejected:,} items of the files could not be imported (see above); "
            f"{f'{stored:,} spans are stored' if stored else 'nothing is stored'}"
        )


async def _import(
    url: str, files: list[Path], service: str | None, reporter: Reporter
) -> tuple[int, int]:
    """Import files into a store; return how many items were rejected, and how many spans stored.

    Args:
        url: URL of the store.
        files: the files.
        service: service name of traces that have none; None for a default.
        reporter: output for progress and errors.
    """
    from lightspan.progress import print_line
    from lightspan.stores import open_store, public_url
    from lightspan_otel.import_traces import import_file, name_of

    rejected = stored = 0
    opened = open_store(url)
    if not opened.capabilities.multi_process:
        raise ConfigError(f"store {url!r} ends with this process: give the URL of a lasting store")
    async with opened as store:
        for path in files:
            errors = _Errors(name_of(path), reporter)
            if path.is_file():  # the size of a pipe is unknown
                reporter.start(f"importing {path}, bytes", path.stat().st_size)
            else:
                reporter.line(f"reading {name_of(path)} to its end")
            try:
                done = await import_file(
                    store, path, service=service, refuse=errors.add, advance=reporter.advance
                )
            except DataError as error:
                if len(files) == 1:
                    raise
                errors.add(str(error))
                rejected += 1
                continue
            finally:
                reporter.finish()
            errors.finish()
            rejected += done.errors
            stored += done.spans
            print_line(f"{name_of(path)}: {_summary(done, public_url(url))}")
    return rejected, stored


class _Errors:
    """Print the first errors of a file, and at the end the number of further errors."""

    def __init__(self, file: str, reporter: Reporter) -> None:
        self._file = file
        self._reporter = reporter
        self._count = 0

    def add(self, text: str) -> None:
        self._count += 1
        if self._count <= _MAX_PRINTED:
            self._reporter.line(f"{self._file}: {text}")

    def finish(self) -> None:
        if self._count > _MAX_PRINTED:
            self._reporter.line(f"{self._file}: and {self._count - _MAX_PRINTED:,} more errors")


def _summary(done: Imported, place: str) -> str:
    parts = [f"{plural(done.spans, 'span')} of {plural(done.attempts, 'attempt')} in {place}"]
    if done.earlier:
        parts.append(
            f"{done.earlier:,} of {plural(done.attempts, 'attempt')} had been there before"
        )
    if done.unfinished:
        parts.append(f"{plural(done.unfinished, 'attempt')} without its entry span: still running")
    if done.refused:
        parts.append(f"{plural(done.refused, 'span')} refused")
    if done.scores:
        parts.append(f"{plural(done.scores, 'score')} left out: add them by lightspan feedback")
    return "; ".join(parts)
