"""Learners update weights: rows of exact tokens go in, a new policy version comes out.

`protocol` says what a learner is, with its losses, optimisers and adapters as settings; `torch` is
the embedded one. Its parts: `inputs` (which rows it takes), `models` (weights, adapters, optimiser
steps), `trees` (rows that begin alike) and `passes` (those through the model; `_attention` within
them), `budgets` (how large those are), `heads` (log-probabilities and gradients of what a pass
gave), `critic` (values of calls), `masks` (what tokens under a grammar were chosen from), `calls`
(which call sampled a token), `losses` (the formulas), `objective` (which of them a token has),
`metrics` (what they add up to) and `saved` (checkpoints). `description` is how a user asks for it.
`verl` is the learner of several devices.
"""

from lightspan.learners.protocol import (
    FORM_DEFAULTS,
    Critic,
    ImportanceLevel,
    KLEstimator,
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    LossForm,
    Optimizer,
    PolicyLoss,
    SFTLoss,
    Which,
    check_lora,
)

__all__ = [
    "FORM_DEFAULTS",
    "Critic",
    "ImportanceLevel",
    "KLEstimator",
    "Learner",
    "LearnerCapabilities",
    "LoRA",
    "Loss",
    "LossForm",
    "Optimizer",
    "PolicyLoss",
    "SFTLoss",
    "Which",
    "check_lora",
]
