"""Thoughts in the answers of reasoning models."""

from __future__ import annotations


def without_thoughts(answer: str) -> str:
    """Return an answer without the thoughts at its start, which end with `</think>`.

    `<think>` may be missing, because it may be in the model's prompt. An answer that was cut off in
    its thoughts is empty. Tags after the thoughts stay, because an answer may be about them.
    """
    thoughts, end, rest = answer.partition("</think>")
    if thoughts.lstrip().startswith("<think>") or (end and "<think>" not in thoughts):
        return rest.strip()
    return answer.strip()
