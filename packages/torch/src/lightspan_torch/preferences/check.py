"""Check verdicts and pairs before the training: few, unbalanced, contradictory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from lightspan_torch.preferences.examples import Pair, Verdict, contradictions, reversed_pairs

FEW: Final = 100
"""Number of verdicts or pairs below which they are few. The standard error of a share of 100 is up
to five percentage points, and a tenth of them is what is held out by default."""
UNBALANCED: Final = 0.1
"""Share of the rarer verdict below which verdicts are unbalanced."""

THRESHOLD: Final = 0.5
"""Lowest score of a desirable answer, unless another is given. It suits thumbs and scores from 0 to
1."""

LossName = Literal["kto", "dpo"]


class PreferenceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What `Preferences` would learn from, before anything is trained."""

    loss: LossName
    """The loss."""
    desirable: int
    """Number of desirable answers; with DPO, of pairs."""
    undesirable: int
    """Number of undesirable answers; with DPO, of pairs."""
    contradictory: int
    """Number of answers that were called desirable and undesirable, for the same prompt; with DPO,
    of two answers of which each is the better one of a pair."""
    desirable_weight: float
    """Weight of a desirable answer in KTO's loss."""
    undesirable_weight: float
    """Weight of an undesirable answer in KTO's loss."""
    left_out: dict[str, int]
    """Reason → number of calls, answers or pairs that are not used."""
    notes: list[str]
    """What is unusual: few, unbalanced or contradictory verdicts; empty if nothing is."""

    def __str__(self) -> str:
        """Return the check as lines of text."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the check as lines of text: the counts, and a line for each note."""
        reasons = sorted(self.left_out.items(), key=lambda item: (-item[1], item[0]))
        left_out = ", ".join(f"{count} {reason}" for reason, count in reasons)
        first = f"{self.desirable} pairs for DPO"
        if self.loss == "kto":
            first = (
                f"{self.desirable} desirable and {self.undesirable} undesirable answers for KTO, "
                f"with weights {self.desirable_weight:.3g} and {self.undesirable_weight:.3g}"
            )
        return [f"{first}; left out: {left_out or 'nothing'}", *self.notes]


def check_examples(
    loss: LossName,
    verdicts: Sequence[Verdict],
    pairs: Sequence[Pair],
    weights: tuple[float | None, float | None],
    left_out: Mapping[str, int],
    train: Sequence[int] | None = None,
) -> PreferenceCheck:
    """Return counts, KTO's weights and notes.

    Args:
        loss: the loss.
        verdicts: all verdicts, also if the loss is DPO.
        pairs: the pairs; only used with DPO.
        weights: KTO's weights of desirable and of undesirable answers; None for balanced ones.
        left_out: reason → number of answers that are not used.
        train: indices of the verdicts that are not held out, which the weights balance; None for
            all.
    """
    good = sum(verdict.desirable for verdict in verdicts)
    bad = len(verdicts) - good
    trained = verdicts if train is None else [verdicts[index] for index in train]
    trained_good = sum(verdict.desirable for verdict in trained)
    contradictory = contradictions(verdicts) if loss == "kto" else reversed_pairs(pairs)
    balanced = balanced_weights(trained_good, len(trained) - trained_good)
    is_balanced = weights == (None, None)
    return PreferenceCheck(
        loss=loss,
        desirable=good if loss == "kto" else len(pairs),
        undesirable=bad if loss == "kto" else len(pairs),
        contradictory=contradictory,
        desirable_weight=balanced[0] if weights[0] is None else weights[0],
        undesirable_weight=balanced[1] if weights[1] is None else weights[1],
        left_out={reason: count for reason, count in left_out.items() if count},
        notes=_notes(loss, good, bad, len(pairs), contradictory, is_balanced=is_balanced),
    )


def balanced_weights(desirable: int, undesirable: int) -> tuple[float, float]:
    """Return KTO's weights λ_D and λ_U for which both sides count the same, as λ_D·n_D = λ_U·n_U.

    The rarer side gets the weight above 1. Equation 8 of the paper (arXiv 2402.01306) recommends a
    ratio of the two products from 1 to 4/3. Both are 1 if a side is empty.

    Args:
        desirable: n_D, the number of desirable answers.
        undesirable: n_U, the number of undesirable answers.
    """
    if not desirable or not undesirable:
        return 1.0, 1.0
    return max(1.0, undesirable / desirable), max(1.0, desirable / undesirable)


def _notes(
    loss: LossName, good: int, bad: int, pairs: int, contradictory: int, *, is_balanced: bool
) -> list[str]:
    notes = []
    count, what = (good + bad, "verdicts") if loss == "kto" else (pairs, "pairs")
    if count < FEW:
        notes.append(
            f"few: {count} {what}, fewer than {FEW}. Chance may decide what is learned: collect "
            "more, or compare several seeds"
        )
    rare, rarer = min((good, "desirable"), (bad, "undesirable"))
    if loss == "kto" and rare < UNBALANCED * count:
        effect = (
            f"What the {rare} {rarer} answers have in common by chance counts as much as all "
            "others together"
            if is_balanced
            else f"Only {rare} answers are {rarer}"
        )
        notes.append(
            f"unbalanced: {1 - rare / count:.0%} of the verdicts are alike. {effect}: collect more "
            "of them"
        )
    if contradictory:
        which = f"{contradictory} answers have both verdicts for the same prompt. All verdicts"
        if loss == "dpo":
            which = f"{contradictory} pairs were also given the other way round. All pairs"
        notes.append(f"contradictory: {which} are used; where they cancel out, nothing is learned")
    return notes
