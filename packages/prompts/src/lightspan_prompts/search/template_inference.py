"""What the texts of one agent have in common: a template, and placeholders where they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import combinations, pairwise
from typing import Final, NamedTuple

from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.search.template_variables import variable_parts

SHORTEST: Final = 8
"""Characters, blanks apart, of a text between two placeholders: a shorter one, such as a word that
all happen to have, belongs to them."""
SHORTEST_EDGE: Final = 4
"""The same of the text before the first and behind the last one."""
CHANCE: Final = 48
"""So many characters, over the number of texts, are common by chance: few texts must have more in
common."""
LEAST: Final = 12
"""Characters that texts which differ must have in common at all."""
COMPARED: Final = 12
"""Texts that are compared with each other."""

_TOKEN: Final = re.compile(r"\w+|\s+|[^\w\s]")


class SeveralPrompts(Exception):
    """The texts are not of one prompt; says why."""


class _Hole(NamedTuple):
    """A placeholder among tokens."""

    kind: str


_Token = str | _Hole
_PART: Final = _Hole("part")


def template_of(texts: Sequence[str]) -> PromptTemplate:
    """The template of which every one of these texts is, each in one way.

    Args:
        texts: at least one; those that are equal count as often as they come.

    Raises:
        SeveralPrompts: they have too little in common.
    """
    distinct = list(dict.fromkeys(texts))
    needed = max(SHORTEST, CHANCE // len(distinct)) if len(distinct) > 1 else SHORTEST
    tokens = _tokens(distinct[0])
    for text in distinct[1:]:
        tokens = _common(tokens, _tokens(text))
    tokens = _without_short(tokens, needed)
    _check(tokens, texts)
    # what stands twice in a text does not say which of them is meant
    while True:
        template = _template(tokens)
        if all(template.match(text) is not None for text in distinct):
            return template
        inner = _inner_texts(tokens)
        if not inner:
            raise SeveralPrompts("nothing but their beginning and end is the same")
        shortest = min(inner, key=lambda place: len(_said(tokens[place[0] : place[1]])))
        tokens = _merged([*tokens[: shortest[0]], _PART, *tokens[shortest[1] :]])


def _check(tokens: Sequence[_Token], texts: Sequence[str]) -> None:
    distinct = set(texts)
    common = len(_said(tokens))
    if common == 0 or (len(distinct) > 1 and common < LEAST):
        raise SeveralPrompts(f"its {len(distinct)} texts have nothing in common")
    if len(distinct) == 1:
        return
    some = [_tokens(text) for text in texts[:COMPARED]]
    both = (_without_short(_common(one, two), CHANCE // 2) for one, two in combinations(some, 2))
    pairs = sorted(len(_said(tokens)) for tokens in both)
    usual = pairs[len(pairs) * 3 // 4]
    if 2 * common < usual:
        raise SeveralPrompts(
            f"it has several prompts: many of its texts have {usual} characters in common, and all "
            f"of them only {common}"
        )


def _said(tokens: Sequence[_Token]) -> str:
    """What is written there, blanks apart."""
    return "".join(token.strip() for token in tokens if isinstance(token, str))


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    end = 0
    for part in variable_parts(text):
        tokens += [*_TOKEN.findall(text[end : part.begin]), _Hole(part.kind)]
        end = part.end
    return _merged([*tokens, *_TOKEN.findall(text[end:])])


def _merged(tokens: Sequence[_Token]) -> list[_Token]:
    """The same with one placeholder where several stand side by side, or blanks alone between."""
    merged: list[_Token] = []
    for token in tokens:
        if isinstance(token, _Hole):
            at = len(merged)
            while at and isinstance(merged[at - 1], str) and not str(merged[at - 1]).strip():
                at -= 1
            if at and isinstance(merged[at - 1], _Hole):
                del merged[at - 1 :]
                token = _PART
        merged.append(token)
    return merged


def _common(one: Sequence[_Token], two: Sequence[_Token]) -> list[_Token]:
    """The tokens that both have, in order, and placeholders where one has others."""
    begin = 0
    while begin < min(len(one), len(two)) and one[begin] == two[begin]:
        begin += 1
    end = 0
    while end < min(len(one), len(two)) - begin and one[-1 - end] == two[-1 - end]:
        end += 1
    middle, other = one[begin : len(one) - end], two[begin : len(two) - end]
    common: list[_Token] = []
    at_one = at_two = 0
    # words that stand everywhere are no place to begin at, in a long text
    for block in SequenceMatcher(None, middle, other).get_matching_blocks():
        if (block.a, block.b) != (at_one, at_two):
            common.append(_PART)
        common += middle[block.a : block.a + block.size]
        at_one, at_two = block.a + block.size, block.b + block.size
    return _merged([*one[:begin], *common, *one[len(one) - end :]])


def _without_short(tokens: Sequence[_Token], needed: int) -> list[_Token]:
    """The same without the texts that are too short to say where a placeholder ends."""
    kept: list[_Token] = list(tokens)
    holes = [place for place, token in enumerate(tokens) if isinstance(token, _Hole)]
    if not holes:
        return kept
    for begin, end in reversed(_inner_texts(tokens)):
        if len(_said(tokens[begin:end])) < needed:
            kept[begin - 1 : end + 1] = [_PART]
    first = next(place for place, token in enumerate(kept) if isinstance(token, _Hole))
    if len(_said(kept[:first])) < SHORTEST_EDGE:
        kept[: first + 1] = [_PART] if first else [kept[0]]
    last = max(place for place, token in enumerate(kept) if isinstance(token, _Hole))
    if len(_said(kept[last + 1 :])) < SHORTEST_EDGE and last + 1 < len(kept):
        kept[last:] = [_PART]
    return kept


def _inner_texts(tokens: Sequence[_Token]) -> list[tuple[int, int]]:
    """Begin and end of each text between two placeholders."""
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
        while f"{{{name}}}" in literal:  # the text's own, which nobody fills
            name += "_"
        parts.append(f"{{{name}}}")
    return PromptTemplate("".join(parts))
