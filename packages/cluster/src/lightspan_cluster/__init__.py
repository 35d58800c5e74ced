"""Training on several machines: a store in PostgreSQL (`postgres`), and runners elsewhere.

`runner_command` is `lightspan runner`, whose work `standalone` does: it joins the trainings of an
app. `external_runners` has `lightspan.ExternalRunners`, which stands for such runners in a trainer,
and `peers` compares the two sides' versions.

`ray_runners` has `lightspan.RayRunners`, `ray_actor` the code of one actor, `ray_cluster` the
connection to the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_cluster.external_runners import ExternalRunners as ExternalRunners
    from lightspan_cluster.ray_runners import RayRunners as RayRunners

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ExternalRunners": "lightspan_cluster.external_runners",
        "RayRunners": "lightspan_cluster.ray_runners",
    },
)
