"""The dry run: a few tasks, nothing trained, and a report of what `fit` would do.

`DryRun` runs the tasks, either with the algorithm's own model in this process, so that everything
down to the token is as in training, or with any OpenAI-compatible endpoint, whose token ids are not
known: what depends on them is then estimated, and marked so. `DevReport` is what comes of it.
"""

from lightspan.dryrun.report import DevReport
from lightspan.dryrun.running import DryRun

__all__ = ["DevReport", "DryRun"]
