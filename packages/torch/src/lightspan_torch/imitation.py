"""Explain to `lightspan inspect` why a call is imitated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lightspan.lightning.advantages import Explanation
from lightspan.lightning.transitions import Transition, TransitionKey


def explain_imitation(
    transitions: Sequence[Transition], rewards: Mapping[str, float], weight: float, *, size: int
) -> dict[TransitionKey, Explanation]:
    """Return an explanation for each imitated call: its advantage is 1, whatever its reward.

    Args:
        transitions: the imitated calls.
        rewards: attempt id → reward.
        weight: weight of each token in the loss.
        size: number of rollouts in a group.
    """
    tokens = Counter[str]()
    for transition in transitions:
        tokens[transition.attempt_id] += transition.tokens
    return {
        transition.key: Explanation(
            rollout_id=transition.rollout_id,
            group_id=transition.group_id,
            agent_path=transition.agent_path,
            estimator="best of n",
            unit="rollout",
            credit_rule="imitated",
            weighting="token",
            credit=1.0,
            value=rewards[transition.attempt_id],
            baseline=0.0,
            scale=1.0,
            size=size,
            zero_reason=None,
            turn=transition.turn,
            tokens=transition.tokens,
            token_weight=weight,
            share=transition.tokens / max(1, tokens[transition.attempt_id]),
        )
        for transition in transitions
    }
