"""A web page for runs, rollouts, calls, prompts and production: `lightspan ui`.

- `command`, `main` start the server; `sink` starts it with a training (`Trainer(ui=True)`).
- `server` has the routes, `guard` decides which requests are answered, `api` answers them, `live`
  sends open pages what has changed, `static_files` serves the page itself.
- `sources` finds the runs and stores that were named, and opens their stores.
- `run_files` reads a run's files as they grow; `runs`, `run_page`, `coverage`, `comparison` and
  `searches` show runs.
- `catalogue` keeps the rollouts of a store in memory as `entries`; `filters`, `groups` and `facts`
  filter, group and describe them; `rollouts` and `tokens` show one; `export` trains on them;
  `links` leads to other programs.
- `views` defines the answers of the API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_ui.main import UiOptions as UiOptions, serve as serve
    from lightspan_ui.sink import UiSink as UiSink

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "UiOptions": "lightspan_ui.main",
        "UiSink": "lightspan_ui.sink",
        "serve": "lightspan_ui.main",
    },
)
