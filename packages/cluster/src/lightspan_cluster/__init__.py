"""Training on several machines: a store in PostgreSQL (`postgres`), and runners in a Ray cluster.

`ray_runners` has `lightspan.RayRunners`, `ray_actor` the code of one actor, `ray_cluster` the
connection to the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_cluster.ray_runners import RayRunners

__all__ = ["RayRunners"]

__getattr__ = lazy_exports(__name__, {"RayRunners": "lightspan_cluster.ray_runners"})


def __dir__() -> list[str]:
    return __all__
