"""Dry run: run a few tasks without training and report what `fit` would do.

`run` runs the tasks, with the algorithm's own model in this process. `analysis` reads the recorded
rollouts, and `endpoints` names the destination of each model call. `memory` estimates memory. All
of them fill in the data of `report_model`, which `rendering` prints.
"""

from lightspan_tools.dry_run.report_model import DevReport
from lightspan_tools.dry_run.run import DryRun

__all__ = ["DevReport", "DryRun"]
