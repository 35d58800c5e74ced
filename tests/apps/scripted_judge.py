"""A script for a judge model, which scores transcripts by a function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_SHOWN = re.compile(r"\[\[rollout ([A-Z]) (\w+)\]\]\n(.*?)\n\[\[end \2\]\]", re.DOTALL)


def shown(asked: str) -> list[str]:
    """Return the transcripts in a request to the judge, in their order."""
    return [text for _, _, text in _SHOWN.findall(asked)]


def gives(score: Callable[[str, int], Any]) -> Callable[[Any], str]:
    """Return a script that scores each transcript by its text and its position."""

    def answer(request: Any) -> str:
        found = _SHOWN.findall(request.last_text)
        scores = {letter: score(text, place) for place, (letter, _, text) in enumerate(found)}
        return f"A {{rambling}} sentence.\n{json.dumps(scores)}"

    return answer
