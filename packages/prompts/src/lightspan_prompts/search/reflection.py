"""Parsing of a reflection model's answer."""

from __future__ import annotations

import re
from typing import Final

from lightspan.errors import ConfigError
from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.endpoint_client import CUT_OFF
from lightspan_prompts.search.search_log import REFUSED
from lightspan_prompts.thoughts import without_thoughts


class Unusable(Exception):
    """Raised if an answer has no usable new text; the message is the reason."""


class Repeated(Unusable):
    """Raised if the proposed text is known: that of the prompt, or an earlier proposal."""


class Refused(Unusable):
    """Raised if there is no answer, because the endpoint refused the question."""


_MARKED: Final = re.compile(r"^[ \t]*<prompt>(.*)</prompt>", re.DOTALL | re.MULTILINE)
_INLINE: Final = re.compile(r"<prompt>(.*)</prompt>\W*\Z", re.DOTALL)
"""A text that begins within a line must end the answer: else the tags are only mentioned."""
_FENCED: Final = re.compile(r"```[^\n`]*\n(.*)```", re.DOTALL)

_FENCE: Final = re.compile(r"```[^\n`]*\n((?:(?!```).)*)```", re.DOTALL)
"""A text that is one fenced block as a whole."""

_RULES: Final = """\
It has placeholders that the application fills: {fields}. {new} must have each of them, \
written in exactly this way; other text in braces is not filled.{doubled}
"""
_DOUBLED: Final = " A brace that is not filled is doubled, {{ or }}, and is sent as a single one."


def rules_of(template: PromptTemplate, new: str) -> str:
    """Return what a new text in place of `template` must have; empty without placeholders.

    Args:
        template: the template.
        new: what the rules call the new text.
    """
    fields = ", ".join(template.fields)
    is_doubled = template.has_doubled_braces and template.text == template.template
    doubled = _DOUBLED if is_doubled else ""
    return _RULES.format(fields=fields, new=new, doubled=doubled) if fields else ""


def proposed_text(answer: str, finish_reason: str) -> str:
    """Return the new text that an answer of a reflection model proposes.

    The model's thoughts in the answer are ignored.

    Raises:
        Unusable: the answer proposes no text, or was cut off.
        Refused: there is no answer.
    """
    if finish_reason == REFUSED:
        raise Refused("the question was refused, so there is no answer")
    if finish_reason in CUT_OFF:
        raise Unusable(f"the answer was cut off (finish_reason={finish_reason})")
    answer = without_thoughts(answer)
    match = _MARKED.search(answer) or _INLINE.search(answer) or _FENCED.search(answer)
    if match is not None and match[1].strip():
        return match[1].strip()
    raise Unusable(f"the answer has no <prompt>…</prompt>: {answer[:80]!r}")


def proposed_template(template: PromptTemplate, answer: str, finish_reason: str) -> PromptTemplate:
    """Return the template that an answer proposes in place of `template`.

    Raises:
        Unusable: the answer proposes no text, or the text lacks a placeholder.
        Repeated: the text is unchanged.
        Refused: there is no answer.
    """
    text = proposed_text(answer, finish_reason)
    fence = _FENCE.fullmatch(text)
    if fence is not None and not _FENCE.fullmatch(template.text.strip()):
        text = fence[1].strip()
    try:
        changed = template.rewritten(text)
    except ConfigError as error:
        raise Unusable(str(error)) from error
    if changed == template:
        raise Repeated("the prompt is unchanged")
    return changed
