"""Cost of the web page on a large store in PostgreSQL, as `web_page.py` measures it on a file.

    python benchmarks/web_page_postgres.py [--rollouts 100000] [--json PATH]

Starts the PostgreSQL server that is installed here, with its default settings, and fills a store
through the public API. "server" is the CPU time of the page and of PostgreSQL together. When the
store is filled, the process prints a line, so that its priority can be raised on a busy machine.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from _report import finish, options_of
from inspect_store import fill
from web_page import large_store


def main() -> int:
    """Measure, print the figures, and return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=100_000)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.postgres.cluster import Cluster, programs

    found = programs()
    if found is None:
        sys.exit("no PostgreSQL server here: apt-get install postgresql")
    with Cluster(found, place="/var/tmp") as cluster:
        url = cluster.url("page")
        asyncio.run(fill(url, options.rollouts))
        database = int((cluster.folder / "data" / "postmaster.pid").read_text().split()[0])
        print(f"filled, PostgreSQL is process {database}", flush=True)
        figures = large_store(url, "stores", database)
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
