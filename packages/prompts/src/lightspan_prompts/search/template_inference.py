"""Inference of a prompt template from several rendered prompts of one agent."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import date
from difflib import SequenceMatcher
from itertools import combinations, pairwise
from typing import Final, NamedTuple

from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.search.template_variables import variable_parts

MIN_LITERAL_LENGTH: Final = 8
"""Minimum characters, without whitespace, of a literal between two placeholders. A shorter literal,
such as a word that all texts share by chance, becomes part of the placeholders."""
MIN_EDGE_LENGTH: Final = 4
"""Minimum characters of a literal before the first or after the last placeholder."""
CHANCE_OVERLAP: Final = 48
"""Divided by the number of texts, the minimum characters of a literal that is no coincidence.

Fewer texts share longer literals by chance."""
MIN_OVERLAP: Final = 12
"""Minimum characters that different texts must have in common."""
MAX_COMPARED: Final = 12
"""Maximum number of texts compared pairwise."""

_TOKEN: Final = re.compile(r"\w+|\s+|[^\w\s]")


class SeveralPrompts(Exception):
    """Raised if texts seem to come from several prompts; the message is the reason."""


class _Hole(NamedTuple):
    """A placeholder in a list of tokens."""

    kind: str


_Token = str | _Hole
_PLACEHOLDER: Final = _Hole("part")


def infer_template(texts: Sequence[str], days: Collection[date] = ()) -> PromptTemplate:
    """Infer a template that matches every text unambiguously.

    Args:
        texts: at least one text; duplicates count as often as they occur.
        days: days on which the app may have sent the texts. What is true of them, such as a
            weekday, becomes a placeholder.

    Raises:
        SeveralPrompts: the texts have too little in common.
    """
    distinct = list(dict.fromkeys(texts))
    needed = (
        max(MIN_LITERAL_LENGTH, CHANCE_OVERLAP // len(distinct))
        if len(distinct) > 1
        else MIN_LITERAL_LENGTH
    )
    tokens_of = {text: _tokens(text, days) for text in distinct}
    tokens = tokens_of[distinct[0]]
    for text in distinct[1:]:
        tokens = _common(tokens, tokens_of[text])
    tokens = _without_short(tokens, needed)
    _check(tokens, [tokens_of[text] for text in texts[:MAX_COMPARED]], len(distinct))
    # A literal that occurs twice in a text makes the match ambiguous: drop the shortest until all
    # texts match.
    while True:
        template = _template(tokens)
        if all(template.match(text) is not None for text in distinct):
            return template
        inner = _inner_texts(tokens)
        if not inner:
            raise SeveralPrompts("the texts have only their beginning and end in common")
        shortest = min(inner, key=lambda place: len(_literal(tokens[place[0] : place[1]])))
        tokens = _merged([*tokens[: shortest[0]], _PLACEHOLDER, *tokens[shortest[1] :]])


def _check(tokens: Sequence[_Token], some: Sequence[Sequence[_Token]], count: int) -> None:
    """Raise `SeveralPrompts` if texts have too little in common to come from one prompt.

    Args:
        tokens: what all texts have in common.
        some: tokens of some of the texts.
        count: number of different texts.
    """
    common = len(_literal(tokens))
    if common == 0 or (count > 1 and common < MIN_OVERLAP):
        raise SeveralPrompts(f"its {count} texts have nothing in common")
    if count == 1:
        return
    both = (
        _without_short(_common(one, two), CHANCE_OVERLAP // 2) for one, two in combinations(some, 2)
    )
    pairs = sorted(len(_literal(tokens)) for tokens in both)
    usual = pairs[len(pairs) * 3 // 4]
    if 2 * common < usual:
        raise SeveralPrompts(
            f"it has several prompts: many of its texts have {usual} characters in common, and all "
            f"of them only {common}"
        )


def _literal(tokens: Sequence[_Token]) -> str:
    """Join the literal tokens, each without whitespace at its ends; leave out placeholders."""
    return "".join(token.strip() for token in tokens if isinstance(token, str))


def _tokens(text: str, days: Collection[date]) -> list[_Token]:
    tokens: list[_Token] = []
    end = 0
    for part in variable_parts(text, days):
        tokens += [*_TOKEN.findall(text[end : part.begin]), _Hole(part.kind)]
        end = part.end
    return _merged([*tokens, *_TOKEN.findall(text[end:])])


def _merged(tokens: Sequence[_Token]) -> list[_Token]:
    """Merge placeholders that are adjacent, or have only whitespace between them."""
    merged: list[_Token] = []
    for token in tokens:
        if isinstance(token, _Hole):
            at = len(merged)
            while at and isinstance(merged[at - 1], str) and not str(merged[at - 1]).strip():
                at -= 1
            if at and isinstance(merged[at - 1], _Hole):
                del merged[at - 1 :]
                token = _PLACEHOLDER
        merged.append(token)
    return merged


def _common(one: Sequence[_Token], two: Sequence[_Token]) -> list[_Token]:
    """Return the tokens that two texts have in common, with a placeholder where they differ."""
    begin = 0
    while begin < min(len(one), len(two)) and one[begin] == two[begin]:
        begin += 1
    end = 0
    while end < min(len(one), len(two)) - begin and one[-1 - end] == two[-1 - end]:
        end += 1
    middle, other = one[begin : len(one) - end], two[begin : len(two) - end]
    common: list[_Token] = []
    at_one = at_two = 0
    # In a long text, SequenceMatcher ignores words that occur everywhere.
    for block in SequenceMatcher(None, middle, other).get_matching_blocks():
        if (block.a, block.b) != (at_one, at_two):
            common.append(_PLACEHOLDER)
        common += middle[block.a : block.a + block.size]
        at_one, at_two = block.a + block.size, block.b + block.size
    return _merged([*one[:begin], *common, *one[len(one) - end :]])


def _without_short(tokens: Sequence[_Token], needed: int) -> list[_Token]:
    """Replace literals that are too short by placeholders.

    Args:
        tokens: tokens of a template.
        needed: minimum length of a literal between two placeholders. For a literal at the begin or
            end of the text, the minimum is `MIN_EDGE_LENGTH`.
    """
    result: list[_Token] = list(tokens)
    holes = [place for place, token in enumerate(tokens) if isinstance(token, _Hole)]
    if not holes:
        return result
    for begin, end in reversed(_inner_texts(tokens)):
        if len(_literal(tokens[begin:end])) < needed:
            result[begin - 1 : end + 1] = [_PLACEHOLDER]
    first = next(place for place, token in enumerate(result) if isinstance(token, _Hole))
    if len(_literal(result[:first])) < MIN_EDGE_LENGTH:
        result[: first + 1] = [_PLACEHOLDER] if first else [result[0]]
    last = max(place for place, token in enumerate(result) if isinstance(token, _Hole))
    if len(_literal(result[last + 1 :])) < MIN_EDGE_LENGTH and last + 1 < len(result):
        result[last:] = [_PLACEHOLDER]
    return result


def _inner_texts(tokens: Sequence[_Token]) -> list[tuple[int, int]]:
    """Return the begin and end (in `tokens`) of each literal between two placeholders."""
    holes = [place for place, token in enumerate(tokens) if isinstance(token, _Hole)]
    return [(one + 1, two) for one, two in pairwise(holes) if one + 1 < two]


def _template(tokens: Sequence[_Token]) -> PromptTemplate:
    literal = "".join(token for token in tokens if isinstance(token, str))
    parts, number = [], 0
    for token in tokens:
        if isinstance(token, str):
            parts.append(token.replace("{", "{{").replace("}", "}}"))
            continue
        number += 1
        name = f"{token.kind}_{number}"
        while f"{{{name}}}" in literal:  # the text has this placeholder itself, which nothing fills
            name += "_"
        parts.append(f"{{{name}}}")
    return PromptTemplate("".join(parts))
