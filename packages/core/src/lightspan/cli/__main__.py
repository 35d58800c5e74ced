"""Run the `lightspan` command, for `python -m lightspan.cli`."""

import sys

from lightspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
