"""Training on several machines: a store in PostgreSQL (`postgres`), and runners elsewhere.

A *runner* executes an app's attempts. `runner_command` is the command `lightspan runner`;
`standalone` is the runner that it starts, which works for the trainings of its app.
`external_runners` has `lightspan.ExternalRunners`, by which a trainer uses such runners. `peers`
checks the protocol versions of runners and trainers. `ray_runners` has `lightspan.RayRunners`,
`ray_actor` the code of one actor, `ray_cluster` the connection to the cluster. `hosts` has
`lightspan.Hosts`, runners of other machines that need no server of their own; `join_token` reads
what they are given, `tunnel` encrypts their connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_cluster.external_runners import ExternalRunners as ExternalRunners
    from lightspan_cluster.hosts import Hosts as Hosts
    from lightspan_cluster.ray_runners import RayRunners as RayRunners

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ExternalRunners": "lightspan_cluster.external_runners",
        "Hosts": "lightspan_cluster.hosts",
        "RayRunners": "lightspan_cluster.ray_runners",
    },
)
