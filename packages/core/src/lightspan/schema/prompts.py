"""Prompt templates with named placeholders, and prompts that a training has changed.

A template has the syntax of `str.format`: `{question}` is a placeholder, `{{` and `}}` are braces.
A text such as `Answer as {"answer": 1}` does not have this syntax. In such a text only `{name}` is
a placeholder, and all other braces are literal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from string import Formatter
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, UnsupportedError

_NAME: Final = re.compile(r"[^\W\d]\w*")
"""The name at the start of a placeholder, such as `customer` in `{customer.name}`."""
_OPENED: Final = re.compile(rf"\{{({_NAME.pattern})")
_FIELD: Final = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern}|\[[^\[\]{{}}]+\])*")
"""A name, followed by any attributes and items of its value, as in `{customer.name}` and
`{rows[0]}`."""
_CONVERSIONS: Final = (None, "", "r", "s", "a")
_PLAIN: Final = re.compile(rf"\{{{_NAME.pattern}\}}")


class PromptPlace(StrEnum):
    """The way in which a prompt reaches an app."""

    ARGUMENT = "argument"
    """The app takes the prompt as an argument."""
    AGENT = "agent"
    """The prompt replaces the instructions in an agent's requests, without a change of the app."""
    CODE = "code"
    """The app calls `lightspan.prompt(name, text)`."""


class _Piece(NamedTuple):
    """A placeholder or a literal text of a template."""

    text: str
    """A placeholder with its braces, or a literal text with single braces."""
    is_placeholder: bool


class PromptTemplate(msgspec.Struct, frozen=True, omit_defaults=True, tag="prompt"):
    """A prompt with `{named}` placeholders (see the module).

    Raises:
        UnsupportedError: `engine` is not `"f-string"`.
    """

    template: str
    engine: str = "f-string"

    def __post_init__(self) -> None:
        if self.engine != "f-string":
            raise UnsupportedError(
                f"PromptTemplate(engine={self.engine!r}): only 'f-string' is supported; "
                "render `template` in the app itself, and learn a template of that kind"
            )

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the values that `format` needs, in the order of the placeholders, each once."""
        # A placeholder may contain others: {price:{width}}.
        return tuple(dict.fromkeys(n for field in self.fields for n in _OPENED.findall(field)))

    @property
    def fields(self) -> tuple[str, ...]:
        """Placeholders as they are written, such as `{price:.2f}`, each once."""
        return tuple(dict.fromkeys(p.text for p in _pieces(self.template) if p.is_placeholder))

    @property
    def text(self) -> str:
        """The template with single literal braces, not doubled as in `{{`. Placeholders stay.

        The template itself if it needs its doubled braces, as `{{user}}` next to `{user}` does.
        """
        text = _single_braces(self.template)
        return text if _split(text, self.fields) == _pieces(self.template) else self.template

    @property
    def has_doubled_braces(self) -> bool:
        """Whether `{{` or `}}` in the template is a literal brace."""
        return self.template != _single_braces(self.template)

    def format(self, **values: Any) -> str:
        """Return the text with the placeholders filled by `values`.

        Raises:
            ConfigError: a placeholder has no value, or cannot format its value.
        """
        pieces = _pieces(self.template)
        try:
            return "".join(p.text.format(**values) if p.is_placeholder else p.text for p in pieces)
        except KeyError as error:
            raise ConfigError(f"the prompt template needs a value for {error}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the prompt template {self.template!r:.200} cannot be filled: {error}"
            ) from error

    def match(self, text: str) -> dict[str, str] | None:
        """Return the values with which `format` returns `text` (the inverse of `format`).

        The result is None if no values or several different values give `text`. It is always None
        for a template in which

        - a placeholder is more than a name (`{price:.2f}`),
        - a name occurs twice, or
        - two placeholders are adjacent.
        """
        names, literals = list[str](), [""]
        for piece in _pieces(self.template):
            if piece.is_placeholder:
                names.append(piece.text[1:-1])
                literals.append("")
            else:
                literals[-1] = piece.text
        is_plain = all(map(_NAME.fullmatch, names)) and "" not in literals[1:-1]
        if len(set(names)) < len(names) or not is_plain:
            return None
        first = _shortest_values(literals, text)
        last = _shortest_values([literal[::-1] for literal in reversed(literals)], text[::-1])
        values = dict(zip(names, first, strict=True))
        is_unique = first == [value[::-1] for value in reversed(last)]
        return values if is_unique and self.format(**values) == text else None

    def rewritten(self, text: str) -> PromptTemplate:
        """Return a template with the same placeholders and the new text `text`.

        Args:
            text: the new template, with single or doubled literal braces as in the property
                `text`. A brace that does not belong to a placeholder of this template is literal.

        Raises:
            ConfigError: the text lacks a placeholder of this template, or single braces where the
                property `text` has doubled ones.
        """
        pieces, is_doubled = _split(text, self.fields), self.has_doubled_braces
        if is_doubled and self.text == self.template:
            parsed = _parsed(text) or ()  # none if a literal brace is not doubled
            pieces = _joined([p._replace(is_placeholder=p.text in self.fields) for p in parsed])
        missing = [field for field in self.fields if _Piece(field, True) not in pieces]
        if missing:
            suffix = " that str.format can fill" if is_doubled else ""
            raise ConfigError(f"the text has no {' and no '.join(missing)}{suffix}")
        # else without doubled braces where possible: an app may use the text without filling it
        is_kept = not is_doubled and _pieces(text) == pieces
        return PromptTemplate(text if is_kept else _escaped(pieces))


@lru_cache(maxsize=1024)
def _pieces(template: str) -> tuple[_Piece, ...]:
    """Split a template into placeholders and the literal texts between them."""
    pieces = _parsed(template)
    if pieces is None:
        return _split(template, dict.fromkeys(_PLAIN.findall(template)))
    return _joined(pieces)


def _single_braces(template: str) -> str:
    return "".join(piece.text for piece in _pieces(template))


def _parsed(template: str) -> list[_Piece] | None:
    """Parse a template as `str.format` does; return None if `str.format` could not fill it."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        return None
    pieces = []
    for literal, field, spec, conversion in parsed:
        pieces.append(_Piece(literal, False))
        if field is not None:
            if not _can_be_filled(field, spec or "", conversion):
                return None
            suffix = f"!{conversion}" * bool(conversion) + f":{spec}" * bool(spec)
            pieces.append(_Piece(f"{{{field}{suffix}}}", True))
    return pieces


def _escaped(pieces: Iterable[_Piece]) -> str:
    """Return the template that consists of `pieces`, with literal braces doubled."""
    doubled = str.maketrans({"{": "{{", "}": "}}"})
    return "".join(p.text if p.is_placeholder else p.text.translate(doubled) for p in pieces)


def _can_be_filled(field: str, spec: str, conversion: str | None) -> bool:
    """Return whether `str.format` can fill a parsed placeholder.

    It cannot fill `{a.}` or `{a!x}`, for example.
    """
    if not _FIELD.fullmatch(field) or conversion not in _CONVERSIONS:
        return False
    try:
        nested = [part for part in Formatter().parse(spec) if part[1] is not None]
        if conversion and not nested:
            format("", spec)  # a converted value is a text
    except ValueError:
        return False
    return all(
        not nested_spec and _can_be_filled(name or "", "", nested_conversion)
        for _, name, nested_spec, nested_conversion in nested
    )


def _split(text: str, fields: Iterable[str]) -> tuple[_Piece, ...]:
    """Split a text into the placeholders in it and the literal texts between them.

    Args:
        text: the text.
        fields: the placeholders to find, as they are written, such as `{name}`.
    """
    pattern = "|".join(map(re.escape, fields)) or "(?!)"  # which matches nowhere
    parts = re.split(f"({pattern})", text)
    return _joined([_Piece(part, number % 2 == 1) for number, part in enumerate(parts)])


def _joined(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
    """Join adjacent literal texts and drop empty pieces."""
    joined: list[_Piece] = []
    for piece in pieces:
        if joined and not (piece.is_placeholder or joined[-1].is_placeholder):
            piece = _Piece(joined.pop().text + piece.text, False)
        if piece.text:
            joined.append(piece)
    return tuple(joined)


def _shortest_values(literals: Sequence[str], text: str) -> list[str]:
    """Return the parts of a text between the given literals.

    The first part is as short as possible, then the second, and so on. If the text does not contain
    the literals in this order, the result is meaningless.
    """
    values, rest = [], text.removeprefix(literals[0])
    for literal in literals[1:-1]:
        value, _, rest = rest.partition(literal)
        values.append(value)
    return [*values, rest.removesuffix(literals[-1])] if literals[1:] else []


def filled_as(original: str, learned: str) -> str:
    """Return `learned`, with literal braces as the app needs them.

    An app may call `str.format` on its prompt itself. If `str.format` can fill `original` but not
    `learned`, the braces are doubled so that it can fill the result. If it cannot fill `original`,
    the app does not call it, so the braces are single.
    """
    if _parsed(original) is None:
        return _single_braces(learned)
    return learned if _parsed(learned) is not None else _escaped(_pieces(learned))


class LearnedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt before and after its training."""

    before: PromptTemplate
    after: PromptTemplate
    place: PromptPlace = PromptPlace.ARGUMENT
    agent: str = ""
    """Path of the agent if `place` is AGENT; else empty."""

    @property
    def template(self) -> str:
        """The text of the learned prompt, with its placeholders."""
        return self.after.template

    @property
    def is_changed(self) -> bool:
        return self.after != self.before

    def apply(self, text: str) -> str | None:
        """Return the learned prompt, filled with the values that the app filled into `text`.

        If the training did not change the prompt, `text` is returned. The result is None if `text`
        does not match the template `before`.

        Args:
            text: the app's prompt with its placeholders filled.
        """
        values = self.before.match(text)
        if values is None or not self.is_changed:
            return None if values is None else text
        return self.after.format(**values)

    def diff(self) -> str:
        """Return the unified diff from `before` to `after`; empty if they are equal."""
        before, after = self.before.text.splitlines(), self.after.text.splitlines()
        return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm=""))
