"""Reports before and after a training.

`dry_run` reports what `fit` would do. `inspect` describes a run, a rollout or a call. `export`
writes recordings and models to files. `rescore` scores a run's rollouts with another reward.
`plots` draws learning curves. `alerts` warns when a training goes wrong. `sinks` send metrics to
TensorBoard, W&B, MLflow and Trackio. `rollout_view` collects what is known of a rollout, with which
of its calls are trained. `pagination` prints tables of rollouts. `commands` are the subcommands of
`lightspan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_tools.dry_run.report_model import DevReport as DevReport
    from lightspan_tools.dry_run.run import DryRun as DryRun

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {"DevReport": "lightspan_tools.dry_run.report_model", "DryRun": "lightspan_tools.dry_run.run"},
)
