"""The reward: 0.9 of the token F1 against the gold answer, and 0.1 for the right form.

F1 is SQuAD's (https://arxiv.org/abs/1606.05250): both sides lower-cased, without punctuation and
articles, compared as bags of words; against several gold answers the best counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from rag_example.prompts import MARK, is_well_formed, parse_answer

F1_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(said: str, answers: Sequence[str]) -> float:
    """What the app's last words are worth, from 0.0 to 1.0.

    Args:
        said: all that the model said last; the answer is what follows "Answer:", or all of it.
        answers: the gold answer and its aliases.

    Raises:
        ValueError: there is no gold answer.
    """
    if not answers:
        raise ValueError("a question without a gold answer cannot be scored")
    answered = parse_answer(said)
    best = max(f1(answered, answer) for answer in answers)
    return F1_WEIGHT * best + FORMAT_WEIGHT * is_well_formed(said)


def f1(answered: str, gold: str) -> float:
    """The harmonic mean of precision and recall of normalised words; 1.0 if neither has any."""
    left, right = Counter(normalised(answered)), Counter(normalised(gold))
    if not left or not right:
        return float(left == right)
    shared = (left & right).total()
    return 2 * shared / (left.total() + right.total())


def normalised(text: str) -> list[str]:
    """The words of a text: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def constant_answer_scores(
    candidates: Iterable[str], golds: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The mean score over questions of answering each of them with the same words.

    Args:
        golds: the gold answers of each question.
    """
    return {
        candidate: sum(score(f"{MARK} {candidate}", gold) for gold in golds) / len(golds)
        for candidate in dict.fromkeys(candidates)
    }
