"""The text in an answer of a reflection model."""

from __future__ import annotations

import re
from typing import Final

from lightspan.errors import ConfigError
from lightspan.schema.prompts import PromptTemplate


class Unusable(Exception):
    """An answer that is no other text; says why."""


_MARKED: Final = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)
_FENCED: Final = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)


def new_text(answer: str, finish_reason: str) -> str:
    """The text that an answer proposes.

    Raises:
        Unusable: it proposes none.
    """
    found = _MARKED.search(answer) or _FENCED.search(answer)
    if found is not None and found[1].strip():
        return found[1].strip()
    if finish_reason == "length":
        raise Unusable("the answer was cut off (finish_reason=length)")
    raise Unusable(f"the answer has no <prompt>…</prompt>: {answer[:80]!r}")


def other_template(template: PromptTemplate, answer: str, finish_reason: str) -> PromptTemplate:
    """The template that an answer proposes in place of this one.

    Raises:
        Unusable: it proposes none, or one that lost a placeholder.
    """
    text = new_text(answer, finish_reason)
    try:
        changed = template.rewritten(text)
    except ConfigError as error:
        raise Unusable(str(error)) from error
    if changed == template:
        raise Unusable("the prompt is what it was")
    return changed
