"""The writer answers twice, with a tool in between that fails for some answers."""

from __future__ import annotations

from typing import Any

from toy_apps import letters, say  # type: ignore[import-not-found]

import lightspan


def parse(text: str) -> str:
    """A tool that takes text with as many lower-case letters as others at least."""
    with lightspan.tool("parse", text):
        if letters(text) < 0.5:
            raise ValueError("not a word")
    return text


@lightspan.rollout
def parsed(task: dict[str, Any]) -> float:
    """What the second answer is worth; the tool is of no account."""
    with lightspan.agent("writer"):
        first = say(task["q"])
        try:
            state = parse(first)
        except ValueError:
            state = "failed"
        return letters(say(state))
