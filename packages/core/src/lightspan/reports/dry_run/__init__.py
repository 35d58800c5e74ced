"""The dry run: run a few tasks, train nothing, and report what `fit` would do.

`run` runs the tasks, with the algorithm's own model in this process or with an OpenAI-compatible
endpoint in its place (`endpoints`). `analysis` reads the episodes, `measurements` times and sizes
the models, and both fill the `report`, which `text` renders.
"""

from lightspan.reports.dry_run.report import DevReport
from lightspan.reports.dry_run.run import DryRun

__all__ = ["DevReport", "DryRun"]
