"""Inference of a prompt template from several rendered prompts of one agent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import combinations, pairwise
from typing import Final, NamedTuple

from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.template_variables import variable_parts

_MIN_LENGTH: Final = 8
"""Minimum non-blank characters of a literal between two placeholders. A shorter one, such as a word
that all texts happen to contain, becomes a part of the placeholders."""
_MIN_EDGE_LENGTH: Final = 4
"""Minimum non-blank characters of the literal before the first and after the last placeholder."""
_CHANCE_LENGTH: Final = 48
"""Characters, divided by the number of texts, that a literal may have by chance: the fewer texts,
the longer their literals must be."""
_MIN_COMMON_LENGTH: Final = 12
"""Minimum characters that different texts must have in common."""
_MAX_COMPARED: Final = 12
"""Maximum number of texts that are compared pairwise."""

_TOKEN: Final = re.compile(r"\w+|\s+|[^\w\s]")


class SeveralPrompts(Exception):
    """The texts are not rendered from one template; the message says why."""


class _Placeholder(NamedTuple):
    """A placeholder in a sequence of tokens."""

    kind: str


_Token = str | _Placeholder
_PART: Final = _Placeholder("part")


def template_of(texts: Sequence[str]) -> PromptTemplate:
    """Infer a template that matches every text unambiguously.

    Args:
        texts: at least one; equal texts are weighted by their number.

    Raises:
        SeveralPrompts: they have too little in common.
    """
    distinct = list(dict.fromkeys(texts))
    chance = _CHANCE_LENGTH // len(distinct) if len(distinct) > 1 else 0
    tokens = _tokens(distinct[0])
    for text in distinct[1:]:
        tokens = _common(tokens, _tokens(text))
    tokens = _without_short(tokens, max(_MIN_LENGTH, chance))
    _check(tokens, texts)
    # A literal that occurs twice in a text makes the match ambiguous: drop the shortest literals.
    while True:
        template = _template(tokens)
        if all(template.match(text) is not None for text in distinct):
            return template
        literals = _inner_literals(tokens)
        if not literals:
            raise SeveralPrompts("nothing but their beginning and end is the same")
        begin, end = min(literals, key=lambda place: _length(tokens[place[0] : place[1]]))
        tokens = _merged([*tokens[:begin], _PART, *tokens[end:]])


def _check(tokens: Sequence[_Token], texts: Sequence[str]) -> None:
    distinct = set(texts)
    common = _length(tokens)
    if common == 0 or (len(distinct) > 1 and common < _MIN_COMMON_LENGTH):
        raise SeveralPrompts(f"its {len(distinct)} texts have nothing in common")
    if len(distinct) == 1:
        return
    sample = [_tokens(text) for text in texts[:_MAX_COMPARED]]
    pairs = combinations(sample, 2)
    shared = (_without_short(_common(one, two), _CHANCE_LENGTH // 2) for one, two in pairs)
    lengths = sorted(map(_length, shared))
    usual = lengths[len(lengths) * 3 // 4]
    if 2 * common < usual:
        raise SeveralPrompts(
            f"it has several prompts: many of its texts have {usual} characters in common, and all "
            f"of them only {common}"
        )


def _length(tokens: Sequence[_Token]) -> int:
    """Return the number of characters in the literals of tokens, without blanks at their ends."""
    return sum(len(token.strip()) for token in tokens if isinstance(token, str))


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    end = 0
    for part in variable_parts(text):
        tokens += [*_TOKEN.findall(text[end : part.begin]), _Placeholder(part.kind)]
        end = part.end
    return _merged([*tokens, *_TOKEN.findall(text[end:])])


def _merged(tokens: Sequence[_Token]) -> list[_Token]:
    """Merge placeholders that are adjacent or separated by blanks only."""
    merged: list[_Token] = []
    for token in tokens:
        if isinstance(token, _Placeholder):
            at = len(merged)
            while at and isinstance(merged[at - 1], str) and not str(merged[at - 1]).strip():
                at -= 1
            if at and isinstance(merged[at - 1], _Placeholder):
                del merged[at - 1 :]
                token = _PART
        merged.append(token)
    return merged


def _common(one: Sequence[_Token], two: Sequence[_Token]) -> list[_Token]:
    """Return the tokens that both sequences have, in order, with placeholders for the others."""
    begin = 0
    while begin < min(len(one), len(two)) and one[begin] == two[begin]:
        begin += 1
    end = 0
    while end < min(len(one), len(two)) - begin and one[-1 - end] == two[-1 - end]:
        end += 1
    middle, other = one[begin : len(one) - end], two[begin : len(two) - end]
    common: list[_Token] = []
    at_one = at_two = 0
    # SequenceMatcher does not start a match at a token that is frequent in a long text.
    for block in SequenceMatcher(None, middle, other).get_matching_blocks():
        if (block.a, block.b) != (at_one, at_two):
            common.append(_PART)
        common += middle[block.a : block.a + block.size]
        at_one, at_two = block.a + block.size, block.b + block.size
    return _merged([*one[:begin], *common, *one[len(one) - end :]])


def _without_short(tokens: Sequence[_Token], min_length: int) -> list[_Token]:
    """Drop literals that are too short to mark the end of a placeholder."""
    result: list[_Token] = list(tokens)
    if not _placeholders(tokens):
        return result
    for begin, end in reversed(_inner_literals(tokens)):
        if _length(tokens[begin:end]) < min_length:
            result[begin - 1 : end + 1] = [_PART]
    first = _placeholders(result)[0]
    if _length(result[:first]) < _MIN_EDGE_LENGTH:
        result[: first + 1] = [_PART] if first else [result[0]]
    last = _placeholders(result)[-1]
    if _length(result[last + 1 :]) < _MIN_EDGE_LENGTH and last + 1 < len(result):
        result[last:] = [_PART]
    return result


def _placeholders(tokens: Sequence[_Token]) -> list[int]:
    return [place for place, token in enumerate(tokens) if isinstance(token, _Placeholder)]


def _inner_literals(tokens: Sequence[_Token]) -> list[tuple[int, int]]:
    """Return begin and end of each literal between two placeholders."""
    return [(one + 1, two) for one, two in pairwise(_placeholders(tokens)) if one + 1 < two]


def _template(tokens: Sequence[_Token]) -> PromptTemplate:
    literal = "".join(token for token in tokens if isinstance(token, str))
    parts, number = [], 0
    for token in tokens:
        if isinstance(token, str):
            parts.append(token.replace("{", "{{").replace("}", "}}"))
            continue
        number += 1
        name = f"{token.kind}_{number}"
        while f"{{{name}}}" in literal:  # a literal of the text has this form
            name += "_"
        parts.append(f"{{{name}}}")
    return PromptTemplate("".join(parts))
