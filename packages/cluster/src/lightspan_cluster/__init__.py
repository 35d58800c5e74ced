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
    from lightspan_cluster.external_runners import ExternalRunners
    from lightspan_cluster.ray_runners import RayRunners

__all__ = ["ExternalRunners", "RayRunners"]

__getattr__ = lazy_exports(
    __name__,
    {
        "ExternalRunners": "lightspan_cluster.external_runners",
        "RayRunners": "lightspan_cluster.ray_runners",
    },
)


def __dir__() -> list[str]:
    return __all__
