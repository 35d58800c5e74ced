"""`python -m lightspan_ui PLACE …` is `lightspan ui PLACE …`.

With `--parent PID` it ends when its parent process ends, as `Trainer(ui=True)` wants it.
"""

from __future__ import annotations

import argparse
import sys

from lightspan.errors import LightspanError
from lightspan.progress import print_line
from lightspan_ui import command
from lightspan_ui.runs import error_text


def main() -> int:
    """Serve the page and return the exit status."""
    parser = argparse.ArgumentParser(prog="lightspan")
    commands = parser.add_subparsers()
    command.add(commands)
    commands.choices["ui"].add_argument("--parent", type=int)
    options = parser.parse_args(["ui", *sys.argv[1:]])
    try:
        options.run(options)
    except LightspanError as error:
        print_line(f"lightspan ui: {error_text(error)}", sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
