"""An app whose writer answers twice, with a tool call in between that fails for some answers."""

from __future__ import annotations

from typing import Any

from toy_apps import letters, say  # type: ignore[import-not-found]

import lightspan


def parse(text: str) -> str:
    """Return `text` if at least half of it are lower-case letters, else raise."""
    with lightspan.tool("parse", text):
        if letters(text) < 0.5:
            raise ValueError("not a word")
    return text


@lightspan.rollout
def parsed(task: dict[str, Any]) -> float:
    """Call the writer twice; only the second answer is rewarded."""
    with lightspan.agent("writer"):
        first = say(task["q"])
        try:
            state = parse(first)
        except ValueError:
            state = "failed"
        return letters(say(state))
