"""The reverse KL divergence per token, as advantages of sampled tokens.

A teacher in this process and a learner with the method `taught` need no estimate: the divergence
over the whole vocabulary is added to the loss (`lightspan_torch.learner.losses.reverse_kl`), and
the sampled tokens only explain it. Otherwise, with p the student and q the teacher, both at the
sampling temperature, and y_t the token that the student sampled after the prefix s_t:

    advantage_t = log q(y_t | s_t) - log p(y_t | s_t) - b  +  reward weight · advantage of the call

The baseline b is the mean of log q - log p over the tokens of the step's other rollouts of the same
policy. It is independent of y_t, so it changes no expectation, and takes away noise. The
expectation over y_t ~ p of advantage_t · ∇log p(y_t | s_t) is, for the first part,
-∇KL(p(·|s_t) ‖ q(·|s_t)): in Σ_y p ∇log p · (log q - log p) the term Σ_y p ∇log p that the product
rule adds is zero. So gradient ascent on it minimises the divergence at the prefixes that were
visited. That the student chose the prefix too is not differentiated: the divergences of later
tokens do not flow back to earlier ones (a discount of 0), so it is not the gradient of the
divergence of whole answers. This is on-policy distillation as in GKD (arXiv 2306.13649, with
lambda 1 and the reverse KL, whose gradient through sampling is left out there too).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Final, NamedTuple

import msgspec

from lightspan.lightning.advantages import CreditTerm, Explanation, ZeroReason
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import TransitionKey

LOG_RATIO_LIMIT: Final = 20.0
"""Differences of log-probabilities are clamped to ± this number, as in the policy loss."""
IMPROBABLE: Final = 0.01
"""Tokens to which the teacher gives a lower probability are counted as improbable."""


class DistilledRows(NamedTuple):
    """Rows with the advantages of distillation, and what explains them."""

    rows: list[Row]
    explanations: dict[TransitionKey, Explanation]
    metrics: dict[str, float]


def log_ratio(teacher: float, student: float) -> float:
    """Return log q - log p, clamped to ±`LOG_RATIO_LIMIT`.

    Args:
        teacher: log q; it may be minus infinity.
        student: log p.
    """
    return max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, teacher - student))


def baselines(rows: Sequence[Row], ratios: Sequence[Sequence[float]]) -> list[float]:
    """Return for each row the mean ratio over the tokens of other rollouts of its policy.

    It is 0 for the only rollout of a policy. A row's own rollout is left out, because later tokens
    of a rollout depend on its earlier ones.

    Args:
        rows: the rows.
        ratios: per row, log q - log p of its trained tokens.
    """
    totals: defaultdict[tuple[str, ...], float] = defaultdict(float)
    counts: Counter[tuple[str, ...]] = Counter()
    for row, values in zip(rows, ratios, strict=True):
        for key in ((row.policy,), (row.policy, row.rollout_id)):
            totals[key] += math.fsum(values)
            counts[key] += len(values)
    means = []
    for row in rows:
        every, own = (row.policy,), (row.policy, row.rollout_id)
        others = counts[every] - counts[own]
        means.append((totals[every] - totals[own]) / others if others else 0.0)
    return means


def distil(
    rows: Sequence[Row],
    teacher: Sequence[Sequence[float]],
    student: Sequence[Sequence[float]],
    explanations: Mapping[TransitionKey, Explanation],
    *,
    is_sampled: bool = True,
) -> DistilledRows:
    """Add log q - log p - b to the advantage of every trained token.

    Args:
        rows: rows whose advantages are those of the reward, times its weight.
        teacher: per row, log q of each token; entries of tokens that are not trained are unused.
        student: per row, log p of each token, likewise.
        explanations: (attempt id, call id, choice) → explanation of the reward's part.
        is_sampled: whether the advantages change; False if the loss has the divergence over the
            whole vocabulary, so that the sampled tokens' parts only explain it.
    """
    attempts = _attempts(explanations)
    ratios = [
        [log_ratio(q, p) for q, p in compress(zip(scores, own, strict=True), row.mask)]
        for row, scores, own in zip(rows, teacher, student, strict=True)
    ]
    means = baselines(rows, ratios) if is_sampled else [0.0] * len(rows)
    results, terms = [], dict[TransitionKey, Explanation]()
    for place, row in enumerate(rows):
        values = list(row.advantages)
        trained = compress(range(len(values)), row.mask)
        for token, ratio in zip(trained, ratios[place], strict=True):
            values[token] += ratio - means[place] if is_sampled else 0.0
        results.append(replace(row, advantages=values))
        for (call_id, choice), (start, length) in zip(row.call_ids, row.responses, strict=True):
            key, call = (attempts[row.rollout_id], call_id, choice), slice(start, start + length)
            why, scores, own = explanations[key], teacher[place][call], student[place][call]
            name = "teacher" if is_sampled else "teacher, of the sampled tokens"
            terms[key] = _explained(why, name, scores, own, means[place])
    flat = [*chain.from_iterable(ratios)]
    scores = [
        score
        for row, values in zip(rows, teacher, strict=True)
        for score in compress(values, row.mask)
    ]
    count = max(1, len(flat))
    metrics = {
        "reverse_kl": -math.fsum(flat) / count,
        "improbable": sum(score < math.log(IMPROBABLE) for score in scores) / count,
        "tokens": float(len(flat)),
    }
    return DistilledRows(results, {**explanations, **terms}, metrics)


def _explained(
    why: Explanation, name: str, teacher: Sequence[float], student: Sequence[float], mean: float
) -> Explanation:
    """Return the explanation with the mean advantage that the teacher gave to the call's tokens.

    Args:
        why: explanation of the reward's part.
        name: name of the term.
        teacher: log q of each token of the call.
        student: log p of each token of the call.
        mean: the baseline b.
    """
    limited = [p + log_ratio(q, p) for q, p in zip(teacher, student, strict=True)]
    credit, baseline = (math.fsum(each) / max(1, len(each)) for each in (limited, student))
    terms = [CreditTerm(name, credit, baseline, 1.0)]
    if mean:
        terms.append(CreditTerm("teacher, other rollouts", 0.0, mean, 1.0))
    return msgspec.structs.replace(why, terms=(*why.terms, *terms))


def weighted(why: Explanation, weight: float) -> Explanation:
    """Return the explanation with all parts of its advantage multiplied by `weight`, above 0."""
    terms = tuple(msgspec.structs.replace(t, weight=t.weight * weight) for t in why.terms)
    return msgspec.structs.replace(why, scale=why.scale / weight, terms=terms)


def without_reward(why: Explanation) -> Explanation:
    """Return the explanation of a call whose reward has no part in the advantage."""
    return msgspec.structs.replace(why, zero_reason=ZeroReason.UNSCORED, terms=())


def with_advantages(
    rows: Sequence[Row], explanations: Mapping[TransitionKey, Explanation]
) -> Iterator[Row]:
    """Yield the rows with the advantages of their calls' explanations.

    Args:
        rows: the rows.
        explanations: (attempt id, call id, choice) → explanation.
    """
    attempts = _attempts(explanations)
    for row in rows:
        values = [0.0] * len(row.ids)
        for (call_id, choice), (start, length) in zip(row.call_ids, row.responses, strict=True):
            advantage = explanations[attempts[row.rollout_id], call_id, choice].advantage
            values[start : start + length] = [advantage] * length
        yield replace(row, advantages=values)


def _attempts(explanations: Mapping[TransitionKey, Explanation]) -> dict[str, str]:
    """Return rollout id → id of its attempt, of which a batch has one."""
    return {why.rollout_id: attempt_id for (attempt_id, _, _), why in explanations.items()}
