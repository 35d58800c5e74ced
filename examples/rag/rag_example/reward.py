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
    """Return the reward of the app's answer, from 0.0 to 1.0.

    Args:
        said: the model's last message; the answer in it is the text after "Answer:", or all of it.
        answers: the gold answer and its aliases.

    Raises:
        ValueError: `answers` is empty.
    """
    if not answers:
        raise ValueError("a question without a gold answer cannot be scored")
    answered = parse_answer(said)
    best = max(f1(answered, answer) for answer in answers)
    return F1_WEIGHT * best + FORMAT_WEIGHT * is_well_formed(said)


def f1(answered: str, gold: str) -> float:
    """Return the F1 score of the normalised words; 1.0 if neither text has a word."""
    left, right = Counter(normalised(answered)), Counter(normalised(gold))
    if not left or not right:
        return float(left == right)
    shared = (left & right).total()
    return 2 * shared / (left.total() + right.total())


def normalised(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def constant_answer_scores(
    candidates: Iterable[str], golds: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return candidate → mean score for giving this answer to every question.

    Args:
        golds: the gold answers of each question.
    """
    return {
        candidate: sum(score(f"{MARK} {candidate}", gold) for gold in golds) / len(golds)
        for candidate in dict.fromkeys(candidates)
    }
