"""Parse the arguments, run a subcommand and print its output."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from lightspan import __version__
from lightspan.errors import LightspanError, how_to_install
from lightspan.plugins import extra_of, installed_plugins
from lightspan.progress import print_line
from lightspan.schema.redaction import without_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `lightspan` command and return its exit status.

    Args:
        arguments: command-line arguments without the program's name; None for those of `sys.argv`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that stdout cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    is_missing = bool(words) and words[0] not in installed_plugins("commands")
    if is_missing and (extra := extra_of("commands", words[0])):  # such as lightspan[train]
        remedy = how_to_install(extra)
        print_line(f"lightspan: the command {words[0]!r} is not installed: {remedy}", sys.stderr)
        return 1
    options = _parser().parse_args(words)
    try:
        text: str | None = options.run(options)
    except LightspanError as error:
        lines = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print_line(f"lightspan: {without_keys(lines)}", sys.stderr)
        return 1
    except ModuleNotFoundError as error:  # a module that an app needs is an `AppError`
        if error.name is None or error.name.partition(".")[0] == "lightspan":
            raise
        print_line(f"lightspan: this needs {error.name!r}: {how_to_install('train')}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    try:
        if text is not None:
            print_line(text)
    except BrokenPipeError:  # `lightspan inspect … | head`
        sys.stderr.close()  # Python would report the failed flush at exit
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightspan", description="Make the AI agents you already have learn."
    )
    parser.add_argument("--version", action="version", version=f"lightspan {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, point in installed_plugins("commands").items():
        try:
            point.load().add(commands)
        except Exception as error:  # a broken plugin must not disable the other commands
            print_line(
                f"lightspan: the command {name!r} of {point.value} is left out: {error}", sys.stderr
            )
    return parser
