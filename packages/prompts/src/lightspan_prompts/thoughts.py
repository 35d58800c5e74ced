"""Thoughts in the answers of reasoning models."""

from __future__ import annotations


def without_thoughts(answer: str) -> str:
    """Return an answer without the model's thoughts at its start, which end with `</think>`.

    The tag `<think>` need not be there, because it may be a part of the prompt. If the answer was
    cut off in the thoughts, return an empty text. Tags after the thoughts are kept, because the
    answer may be about them.
    """
    thoughts, end, rest = answer.partition("</think>")
    if thoughts.lstrip().startswith("<think>") or (end and "<think>" not in thoughts):
        return rest.strip()
    return answer.strip()
