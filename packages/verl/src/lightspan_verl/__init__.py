"""A learner over verl's `TrainingWorker`, in verl's own environment and processes.

A *rank* is one of verl's processes. In the trainer's process: `config` is `lightspan.Verl`,
`environment` checks verl's interpreter, `learner` is the `Learner`, `workers` starts the ranks. In
the ranks: `rank_main` is the main module, `policy` one policy on one rank, `shards` its part of a
checkpoint. Only `verl_adapter` uses verl's private API. `rpc` has the messages between trainer and
ranks, `framing` their length prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_verl.config import Verl as Verl

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"Verl": "lightspan_verl.config"})
