"""A learner over verl's `TrainingWorker`, in verl's own environment and processes.

In the trainer's process: `config` is `lightspan.Verl`, `environment` checks an interpreter,
`learner` is the `Learner`, `workers` starts its ranks as processes. In verl's processes:
`rank_main` is each rank's main module, `policy` one policy on a rank, `shards` its checkpoints.
Only `verl_adapter` uses verl's private API. `rpc` has the messages, `framing` their length prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_verl.config import Verl as Verl

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"Verl": "lightspan_verl.config"})
