"""Algorithms: the decisions which tasks to run and how to learn from them.

`protocol` defines an algorithm and the `TrainerContext` that a trainer offers it, `lightning_rl`
learns from rewards (`async_rollouts`: concurrently with rollouts). `grammar_check` rejects calls
that do not follow their grammar, `task_sampler` orders tasks, `recorded_attempts` reads attempts of
production, `jsonl` files, `learning_rate` has the default, `critic_warmup` decides when a critic is
used, `metrics` describes an iteration.
"""

from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    Policy,
    PolicySpec,
    TrainerContext,
    local_model,
)

__all__ = ["Algorithm", "Metrics", "Policy", "PolicySpec", "TrainerContext", "local_model"]
