"""Losses of KTO and DPO, and their gradients, as functions of the answers' log-probabilities.

x is a prompt, y an answer. log p(y|x) is the sum of the log-probabilities of the answer's tokens,
with the token that ends it, under the current weights; log p₀ is that under the starting weights.
The implicit reward of an answer is β·r with r = log p(y|x) - log p₀(y|x). σ is the logistic
function.

    DPO   L = mean of -log σ(β·(r_chosen - r_rejected))
    KTO   L = mean of λ_D·(1 - σ(β·(r - z)))  over desirable answers
                  and λ_U·(1 - σ(β·(z - r)))  over undesirable answers
          z = max(0, mean of r of answers to other prompts), without a gradient

DPO is equation 7 of Rafailov et al. (arXiv 2305.18290). KTO is equation 7 of Ethayarajh et al.
(arXiv 2402.01306), in which z estimates the KL divergence of the current weights from the starting
weights. As in TRL, the answers of z are those of other examples, paired with the prompts of the
batch.

Both losses depend on the weights only by the log-probabilities of whole answers. So their gradient
is Σ c_i ∇log p(y_i|x_i) with c_i = ∂L/∂log p(y_i|x_i). This is the gradient of a weighted negative
log-likelihood, in which each token of answer i has the weight -c_i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

TIE: Final = 1e-4
"""Largest difference of two r that counts as none. The log-probability of an answer is a sum of
float32 numbers, whose last digits depend on how sequences are batched."""


def kl_reference(ratios: Tensor) -> Tensor:
    """Return KTO's reference point z, a number.

    Args:
        ratios: [m] r = log p - log p₀ of answers to other prompts. If there are none, z is 0.
    """
    mean = ratios.detach().mean() if len(ratios) else ratios.new_zeros(())
    return mean.clamp(min=0.0)


def kto_losses(
    ratios: Tensor,
    desirable: Tensor,
    reference: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return KTO's loss of each answer, [n].

    Args:
        ratios: [n] r = log p - log p₀ of the answers.
        desirable: [n] whether each answer is desirable.
        reference: the reference point z (`kl_reference`).
        beta: β; the higher, the closer the weights stay to the start.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    signs = torch.where(desirable, 1.0, -1.0).to(ratios)
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(ratios)
    return weights * (1 - torch.sigmoid(beta * signs * (ratios - reference)))


def dpo_losses(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return DPO's loss of each pair, [n].

    Args:
        chosen: [n] r = log p - log p₀ of the better answers.
        rejected: [n] r of the worse answers.
        beta: β; the higher, the closer the weights stay to the start.
    """
    return -logsigmoid(beta * (chosen - rejected))


def mean_and_gradient(
    losses: Callable[[Tensor], Tensor], ratios: Tensor
) -> tuple[float, list[float]]:
    """Return the mean of losses, and its derivative by each r, which is that by each log p.

    Args:
        losses: function from r to the losses.
        ratios: [n] r = log p - log p₀ of all answers.
    """
    leaf = ratios.detach().requires_grad_(True)
    mean = losses(leaf).mean()
    (gradient,) = torch.autograd.grad(mean, leaf)
    return float(mean.detach()), gradient.tolist()


def ranking_accuracy(better: Tensor, worse: Tensor) -> float | None:
    """Return the share of all combinations in which the better answer has the higher r.

    It is the area under the ROC curve. None if one side is empty.

    Args:
        better: [n] r of desirable answers.
        worse: [m] r of undesirable answers.
    """
    if not len(better) or not len(worse):
        return None
    return share_above(better[:, None] - worse[None, :])


def share_above(differences: Tensor) -> float:
    """Return the share of differences above 0. Those within `TIE` of 0 count as half."""
    wins = (differences > TIE).double() + (differences.abs() <= TIE).double() / 2
    return float(wins.mean())
