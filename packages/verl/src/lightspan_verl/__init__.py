"""A learner that trains with verl's `TrainingWorker`, in verl's own environment and processes.

A *rank* is one of verl's processes.

| module | runs in | purpose |
|---|---|---|
| `config` | trainer | settings (`lightspan.Verl`) |
| `environment` | trainer | checks verl's interpreter |
| `learner` | trainer | the `Learner` |
| `workers` | trainer | starts the ranks |
| `rank_main` | ranks | main module |
| `policy` | ranks | one policy on one rank |
| `shards` | ranks | one rank's part of a checkpoint |
| `verl_adapter` | ranks | the only module that uses verl's private API |
| `rpc`, `framing` | both | messages between trainer and ranks; their length prefix |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_verl.config import Verl as Verl

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"Verl": "lightspan_verl.config"})
