"""Expected results of a learner, computed by simple code."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightspan.errors import NotFoundError
from lightspan.lightning.rows import Row
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    TokenChunk,
    TokenEngine,
)
from lightspan.protocols.learner import Learner, Loss, Optimizer, PolicyLoss, SFTLoss
from lightspan_testing.tiny_vision import image_logits


def reference_loss(
    model: Any,
    rows: Sequence[Row],
    loss: Loss,
    *,
    base: Any = None,
    old: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """Return Σ weight · loss over all trained tokens, computed by simple code.

    The formulas are those of `lightspan_torch.learner.losses`.

    Args:
        model: the trained model.
        rows: rows of the update.
        loss: the loss.
        base: model from which the KL is computed; None for no KL.
        old: log-probabilities before the update, by row and position. None to use the recorded
            ones; then there are no importance weights.
    """
    total = torch.zeros(())
    for number, row in enumerate(rows):
        logits = row_logits(model, row)
        base_logits = row_logits(base, row).detach() if base is not None else None
        distributions = {
            place: (logits[place - 1] / row.temperatures[place]).log_softmax(-1)
            for place, trained in enumerate(row.mask)
            if trained
        }
        logprobs = {
            place: distribution[row.ids[place]] for place, distribution in distributions.items()
        }
        before = row.logprobs if old is None else old[number]
        for place, distribution in distributions.items():
            logprob = logprobs[place]
            if isinstance(loss, SFTLoss):
                total = total - row.weights[place] * logprob
                continue
            value = _of_form(row, place, logprobs, before, loss)
            if old is not None and loss.importance_cap is not None:
                places = [place] if loss.importance_level == "token" else _call(row, place)
                weight = math.exp(sum(before[at] - row.logprobs[at] for at in places))
                value = value * min(weight, loss.importance_cap)
            if old is not None and loss.importance_mask is not None:
                log = sum(before[at] - row.logprobs[at] for at in _call(row, place))
                value = value * (math.exp(log) <= loss.importance_mask)
            if base_logits is not None:
                temperature = row.temperatures[place]
                reference = (base_logits[place - 1] / temperature).log_softmax(-1)[row.ids[place]]
                value = value + loss.kl * _kl(logprob - reference, loss.kl_estimator)
            entropy = -(distribution.exp() * distribution).sum()
            total = total + row.weights[place] * (value - loss.entropy * entropy)
    return total


def row_logits(model: Any, row: Row) -> Tensor:
    """Return the logits of a plain forward pass over a row, [tokens, vocabulary]."""
    if row.images:
        seen: Tensor = image_logits(model, row.ids, row.images)
        return seen
    logits: Tensor = model(torch.tensor([row.ids])).logits[0]
    return logits


def _call(row: Row, place: int) -> list[int]:
    """Return all positions of the call that the position `place` of `row` belongs to."""
    for start, length in row.responses:
        if start <= place < start + length:
            return list(range(start, start + length))
    raise AssertionError(place)


def _of_form(
    row: Row,
    place: int,
    logprobs: Mapping[int, Tensor],
    before: Sequence[float],
    loss: PolicyLoss,
) -> Tensor:
    advantage = row.advantages[place]
    if loss.form == "gspo":
        places = _call(row, place)
        mean = sum((logprobs[at] - before[at] for at in places), torch.zeros(())) / len(places)
        if loss.importance_cap is not None and loss.importance_level == "token":
            # tokens of a call have different weights: use the paper's definition of GSPO-token
            mean = mean.detach() + logprobs[place] - logprobs[place].detach()
        return _clipped(mean.exp(), advantage, loss)
    ratio = (logprobs[place] - before[place]).exp()
    if loss.form == "cispo":
        weight = min(max(float(ratio.detach()), 1 - loss.clip_low), 1 + loss.clip_high)
        return -weight * advantage * logprobs[place]
    return _clipped(ratio, advantage, loss)


def _clipped(ratio: Tensor, advantage: float, loss: PolicyLoss) -> Tensor:
    value = -advantage * ratio
    if advantage > 0 and ratio > 1 + loss.clip_high:
        value = torch.tensor(-advantage * (1 + loss.clip_high))
    if advantage < 0 and ratio < 1 - loss.clip_low:
        value = torch.tensor(-advantage * (1 - loss.clip_low))
    if advantage < 0 and loss.dual_clip is not None:
        ceiling = torch.tensor(-loss.dual_clip * advantage)
        value = ceiling if value > ceiling else value
    return value


def _kl(x: Tensor, estimator: str) -> Tensor:
    return {"k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimator]


def reference_optimizer(model: Any, settings: Optimizer) -> torch.optim.Optimizer:
    """Return torch's AdamW with the learning rate and betas of `settings`, without weight decay."""
    return torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )


def take_step(
    optimizer: torch.optim.Optimizer, model: Any, total: Tensor, limit: float | None = None
) -> float:
    """Take a step, after scaling the gradient down to a norm of at most `limit`.

    Return the norm before scaling. If `limit` is None, the gradient is not scaled.
    """
    optimizer.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    if limit is not None and norm > limit:
        for parameter in model.parameters():
            parameter.grad.mul_(limit / norm)
    optimizer.step()
    return norm


class WeightSink(TokenEngine):
    """An engine that only stores the weights that a learner publishes to it."""

    def __init__(self) -> None:
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.versions: dict[str, int] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(exact_tokens=True)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def policies(self) -> dict[str, int]:
        return self.versions

    def tokenizer(self, policy: str) -> ChatTokenizer:
        raise NotFoundError(policy)

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        for _ in range(0):
            yield TokenChunk(ids=[], logprobs=[], version=0)
        raise NotFoundError(request.policy)

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        assert not isinstance(weights, LoRAWeights), "its capabilities name no policy with LoRA"
        self.weights[policy] = dict(weights)
        self.versions[policy] = version

    def usage(self) -> dict[str, float]:
        return {}


async def published(learner: Learner, policy: str = "writer") -> dict[str, Tensor]:
    """Publish the learner's weights of `policy`; return them as the engine received them."""
    sink = WeightSink()
    await learner.publish(sink, {policy: 1})
    return sink.weights[policy]


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the model's weights without copying them.

    They change when an optimizer changes the model.
    """
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance between two sets of weights."""
    assert set(first) == set(second)
    return math.sqrt(sum(float((first[n] - second[n]).square().sum()) for n in first))


def moved_scores(
    scores: Sequence[Sequence[float]], rows: Sequence[Row], rng: random.Random
) -> list[list[float]]:
    """Return `scores` (log-probabilities) with random changes.

    If several rows contain the same call, its tokens get the same changes in all of them.
    """
    changes: dict[tuple[int, ...], list[float]] = {}
    moved = [list(row) for row in scores]
    for row, values in zip(rows, moved, strict=True):
        for start, length in row.responses:
            key = *row.ids[: start + length], round(1e9 * row.advantages[start])
            if key not in changes:
                common = rng.uniform(-0.2, 0.2)
                changes[key] = [common + rng.uniform(-0.2, 0.2) for _ in range(length)]
            for place, change in enumerate(changes[key], start):
                values[place] += change
    return moved
