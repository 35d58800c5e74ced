"""Training on several machines: a store in PostgreSQL, and runners on other machines.

A *runner* is a program that executes an app's attempts.

- `postgres`: the store.
- `runner_command`: the command `lightspan runner`; `standalone` has the runner that it starts,
  `joined_runners` its processes.
- `external_runners`: `lightspan.ExternalRunners`, with which a trainer waits for such runners.
- `hosts`: `lightspan.Hosts`, for runners that reach the trainer's machine at one port. `join_token`
  reads the token that these runners are given, and `tunnel` encrypts their connections.
- `ray_runners`: `lightspan.RayRunners`. `ray_actor` has the code of one actor, and `ray_cluster`
  the connection to the cluster.
- `peers`: checks the protocol versions of runners and trainers.
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
