"""The dry run: a few tasks are run, nothing is trained, and a report says what `fit` would do.

`DryRun` runs the tasks, either with the algorithm's own model in this process, so that everything
down to the token is as in training, or with any OpenAI-compatible endpoint, whose token ids are not
known: what depends on them is then estimated, and marked so. A `DevReport` comes of it.

`run` drives it. `endpoints` says who answers, `estimates` makes token ids for an endpoint's
answers, `findings` judges the episodes, `provenance` says of which frameworks they are and what
went past the SDKs, `measurements` times and weighs the models. Of these come the `sections` of the
`report`, its `warnings` and its `text`; `output` prints and writes it.
"""

from lightspan.reports.dry_run.report import DevReport
from lightspan.reports.dry_run.run import DryRun

__all__ = ["DevReport", "DryRun"]
