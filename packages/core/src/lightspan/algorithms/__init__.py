"""Algorithms decide what to run and what to learn from it.

`protocol` defines an algorithm and the World that a trainer offers it, `lightning_rl` learns from
rewards (`async_rollouts`: while rollouts go on). `grammar_check` rejects calls that do not follow
their grammar, `task_sampler` orders tasks, `recorded_attempts` reads what production recorded,
`jsonl` files, `learning_rate` has the default, `critic_warmup` says when a critic is used,
`metrics` describes an iteration.
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
