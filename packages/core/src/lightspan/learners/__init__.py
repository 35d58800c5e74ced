"""Learners update weights: rows of exact tokens go in, a new policy version comes out.

`protocol` says what a learner is, with its losses, optimisers and adapters as settings; `torch` is
the embedded one. Its parts: `models` (weights, adapters, optimiser steps), `trees` (rows that begin
alike) and `passes` (those through the model; `_attention` within them), `heads` (log-probabilities
and gradients of what a pass gave), `critic` (values of calls), `masks` (what tokens under a grammar
were chosen from), `losses` (the formulas, per token).
"""

from lightspan.learners.protocol import (
    Critic,
    KLEstimator,
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    Optimizer,
    PolicyLoss,
    SFTLoss,
    Which,
    check_lora,
)

__all__ = [
    "Critic",
    "KLEstimator",
    "Learner",
    "LearnerCapabilities",
    "LoRA",
    "Loss",
    "Optimizer",
    "PolicyLoss",
    "SFTLoss",
    "Which",
    "check_lora",
]
