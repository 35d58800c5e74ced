"""Compute loss, gradient and held-out metrics of KTO and DPO with a learner.

The gradient is exact with two passes over a batch (see `losses`): the first, without gradients,
gives the log-probabilities of the answers and from them a coefficient for each. The second is an
update of weighted negative log-likelihood, the loss that `SFT` has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Learner, SFTLoss
from lightspan.schema.images import PromptImage
from lightspan_torch.preferences.examples import Pair, Verdict
from lightspan_torch.preferences.losses import (
    dpo_losses,
    kl_reference,
    kto_losses,
    mean_and_gradient,
    ranking_accuracy,
    share_above,
)
from lightspan_torch.sft.updates import training_row

CHUNK: Final = 64
"""Number of sequences whose log-probabilities are computed at once."""


class Answer(NamedTuple):
    """A prompt and an answer to it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, with their bytes."""

    @property
    def order(self) -> tuple[Any, ...]:
        """What answers are sorted by: equal prompts are neighbours."""
        return self.prompt, [image.key for image in self.images], self.response


class Answers:
    """Log-probabilities of answers under a learner's weights, compared with the starting weights.

    Args:
        learner: the learner, with the starting weights.
        answers: all answers that are compared later; their log-probabilities under the starting
            weights are computed here.
    """

    def __init__(self, learner: Learner, answers: Sequence[Answer]) -> None:
        self._learner = learner
        distinct = sorted(set(answers), key=lambda answer: answer.order)
        self._start = dict(zip(distinct, self._logprobs(distinct), strict=True))

    def ratios(self, answers: Sequence[Answer]) -> Tensor:
        """Return r = log p - log p₀ of each answer, [n] float64, without gradients."""
        current = self._logprobs(answers)
        start = [self._start[answer] for answer in answers]
        return torch.tensor(current, dtype=torch.float64) - torch.tensor(start, dtype=torch.float64)

    def update(self, answers: Sequence[Answer], gradient: Sequence[float]) -> dict[str, float]:
        """Make an update with the gradient Σ c_i ∇log p of answers, and return its metrics.

        Args:
            answers: the answers.
            gradient: c_i = ∂L/∂log p, for each answer.
        """
        rows = [
            _row(answer, number, weight=-coefficient)
            for number, (answer, coefficient) in enumerate(zip(answers, gradient, strict=True))
        ]
        return self._learner.update(rows, SFTLoss())

    def _logprobs(self, answers: Sequence[Answer]) -> list[float]:
        sums: list[float] = []
        for start in range(0, len(answers), CHUNK):
            chunk = answers[start : start + CHUNK]
            scores = self._learner.score([_row(answer, n) for n, answer in enumerate(chunk)])
            pairs = zip(chunk, scores, strict=True)
            sums += [math.fsum(logprobs[len(answer.prompt) :]) for answer, logprobs in pairs]
        return sums


def _row(answer: Answer, number: int, weight: float = 0.0) -> Row:
    prompt, response, images = answer
    mask = [False] * len(prompt) + [True] * len(response)
    weights = [0.0] * len(prompt) + [weight] * len(response)
    return training_row([*prompt, *response], mask, weights, f"answer-{number}", images)


class KTO:
    """KTO's loss on verdicts.

    Args:
        verdicts: the verdicts.
        others: for each verdict, an answer to another prompt, or None (`examples.mismatched`).
        beta: β.
        weights: λ_D and λ_U.
    """

    def __init__(
        self,
        verdicts: Sequence[Verdict],
        others: Sequence[Sequence[int] | None],
        beta: float,
        weights: tuple[float, float],
    ) -> None:
        self._answers = [
            Answer(tuple(v.prompt_ids), tuple(v.response_ids), v.images) for v in verdicts
        ]
        self._others = [
            None if other is None else answer._replace(response=tuple(other))
            for answer, other in zip(self._answers, others, strict=True)
        ]
        self._desirable = torch.tensor([verdict.desirable for verdict in verdicts])
        self._beta, self._weights = beta, weights

    def answers(self) -> list[Answer]:
        """Return all answers whose log-probabilities the loss needs."""
        return [*self._answers, *(other for other in self._others if other is not None)]

    def update(self, answers: Answers, batch: Sequence[int]) -> dict[str, float]:
        """Make an update on the examples with some indices, and return metrics of it."""
        ratios, reference = self._ratios(answers, batch)
        loss, gradient = mean_and_gradient(
            lambda values: self._losses(values, batch, reference), ratios
        )
        metrics = answers.update([self._answers[index] for index in batch], gradient)
        return {"loss": loss, "kl": float(reference), "grad_norm": metrics["grad_norm"]}

    def evaluate(self, answers: Answers, examples: Sequence[int]) -> dict[str, float]:
        """Return loss, margin and accuracy of the examples with some indices (see `HeldOut`)."""
        ratios, reference = self._ratios(answers, examples)
        is_good = self._desirable[list(examples)]
        good, bad = ratios[is_good], ratios[~is_good]
        metrics = {"loss": float(self._losses(ratios, examples, reference).mean())}
        accuracy = ranking_accuracy(good, bad)
        if accuracy is not None:
            margin = self._beta * float(good.mean() - bad.mean())
            metrics |= {"margin": margin, "accuracy": accuracy}
        return metrics

    def _ratios(self, answers: Answers, examples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return r of the examples, and the reference point."""
        others = [other for i in examples if (other := self._others[i]) is not None]
        ratios = answers.ratios([*(self._answers[index] for index in examples), *others])
        return ratios[: len(examples)], kl_reference(ratios[len(examples) :])

    def _losses(self, ratios: Tensor, examples: Sequence[int], reference: Tensor) -> Tensor:
        return kto_losses(
            ratios,
            self._desirable[list(examples)],
            reference,
            beta=self._beta,
            desirable_weight=self._weights[0],
            undesirable_weight=self._weights[1],
        )


class DPO:
    """DPO's loss on pairs.

    Args:
        pairs: the pairs.
        beta: β.
    """

    def __init__(self, pairs: Sequence[Pair], beta: float) -> None:
        self._chosen = [
            Answer(tuple(pair.prompt_ids), tuple(pair.chosen_ids), pair.images) for pair in pairs
        ]
        self._rejected = [
            chosen._replace(response=tuple(pair.rejected_ids))
            for chosen, pair in zip(self._chosen, pairs, strict=True)
        ]
        self._beta = beta

    def answers(self) -> list[Answer]:
        """Return all answers whose log-probabilities the loss needs."""
        return [*self._chosen, *self._rejected]

    def update(self, answers: Answers, batch: Sequence[int]) -> dict[str, float]:
        """Make an update on the examples with some indices, and return metrics of it."""
        both = self._both(batch)
        ratios = answers.ratios(both)
        # a mean over pairs, although `mean_and_gradient` has both answers of each
        loss, gradient = mean_and_gradient(self._losses, ratios)
        return {"loss": loss, "grad_norm": answers.update(both, gradient)["grad_norm"]}

    def evaluate(self, answers: Answers, examples: Sequence[int]) -> dict[str, float]:
        """Return loss, margin and accuracy of the examples with some indices (see `HeldOut`)."""
        ratios = answers.ratios(self._both(examples))
        chosen, rejected = ratios.chunk(2)
        differences = chosen - rejected
        return {
            "loss": float(self._losses(ratios).mean()),
            "margin": self._beta * float(differences.mean()),
            "accuracy": share_above(differences),
        }

    def _both(self, examples: Sequence[int]) -> list[Answer]:
        """Return the better answers of pairs, and then the worse ones."""
        return [side[index] for side in (self._chosen, self._rejected) for index in examples]

    def _losses(self, ratios: Tensor) -> Tensor:
        chosen, rejected = ratios.chunk(2)
        return dpo_losses(chosen, rejected, beta=self._beta)


def evaluation_points(updates: int, points: int) -> list[int]:
    """Return the numbers of updates after which held-out examples are evaluated, evenly spaced.

    0 and `updates` are among them.

    Args:
        updates: number of all updates.
        points: number of intervals, if there are as many updates.
    """
    return sorted({round(updates * n / points) for n in range(points + 1)})
