"""Prompts: templates with named placeholders, and what became of one that was learned.

A template is Python's: `{question}` is a placeholder, `{{` and `}}` are braces. A text that Python
could not fill, because its braces are its own (`Answer as {"answer": 1}`), is taken as it is, with
`{name}` alone as a placeholder: braces never fail.
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

ENGINES: Final = ("f-string",)
"""What fills a template."""

_NAME: Final = re.compile(r"[^\W\d]\w*")
"""What a placeholder begins with: the name of the value that it shows."""
_OPENED: Final = re.compile(rf"\{{({_NAME.pattern})")
_FIELD: Final = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern}|\[[^\[\]{{}}]+\])*")
"""A name, and what is taken of its value: `{customer.name}`, `{rows[0]}`."""
_CONVERSIONS: Final = (None, "", "r", "s", "a")
_PLAIN: Final = re.compile(rf"\{{{_NAME.pattern}\}}")


class PromptPlace(StrEnum):
    """How a prompt gets into an app."""

    ARGUMENT = "argument"
    """The app takes it as an argument."""
    AGENT = "agent"
    """It is the instructions that an agent's requests carry; nothing in the app knows of it."""
    CODE = "code"
    """The app asks for it: `lightspan.prompt(name, text)`."""


class _Piece(NamedTuple):
    """A part of a template."""

    text: str
    """As it reads: of a placeholder with its braces, of other text with no brace doubled."""
    is_placeholder: bool


class PromptTemplate(msgspec.Struct, frozen=True, omit_defaults=True, tag="prompt"):
    """A prompt with `{named}` placeholders (see the module).

    Raises:
        UnsupportedError: another `engine` than `"f-string"`.
    """

    template: str
    engine: str = "f-string"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UnsupportedError(
                f"PromptTemplate(engine={self.engine!r}): only {ENGINES[0]!r} is filled here; "
                "render `template` in the app itself, and learn a template of that kind"
            )

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of the values that it shows, in order, each once."""
        written = (piece.text for piece in _pieces(self.template) if piece.is_placeholder)
        # one may show another: {price:{width}}
        return tuple(dict.fromkeys(name for text in written for name in _OPENED.findall(text)))

    @property
    def fields(self) -> tuple[str, ...]:
        """The placeholders as they are written, such as `{price:.2f}`, each once."""
        pieces = _pieces(self.template)
        return tuple(dict.fromkeys(piece.text for piece in pieces if piece.is_placeholder))

    @property
    def text(self) -> str:
        """As a person reads it: placeholders as written, and no brace doubled."""
        return "".join(piece.text for piece in _pieces(self.template))

    def format(self, **values: Any) -> str:
        """Fill the placeholders; other braces stay.

        Raises:
            ConfigError: a placeholder has no value, or cannot show the one that it has.
        """
        try:
            return "".join(
                piece.text.format(**values) if piece.is_placeholder else piece.text
                for piece in _pieces(self.template)
            )
        except KeyError as error:
            raise ConfigError(f"the prompt template needs a value for {error}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the prompt template {self.template!r:.200} cannot be filled: {error}"
            ) from error

    def match(self, text: str) -> dict[str, str] | None:
        """The inverse of `format` for placeholders that are a name alone: the values with which
        this template is that text. None: with none, or with several, and which is not known."""
        pieces = _pieces(self.template)
        names = [piece.text[1:-1] for piece in pieces if piece.is_placeholder]
        if len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
            return None
        literals = _between(pieces)
        if literals is None:
            return None
        first, last = _first_places(literals, text), _last_places(literals, text)
        if first is None or first != last:
            return None
        ends = [at + len(literal) for at, literal in zip(first, literals, strict=True)]
        values = (text[end:at] for end, at in zip(ends, first[1:], strict=False))
        return dict(zip(names, values, strict=True))

    def rewritten(self, text: str) -> PromptTemplate:
        """Another text with these placeholders: whatever else has braces there is meant as it is.

        Args:
            text: as `text` has it.

        Raises:
            ConfigError: a placeholder is missing in it.
        """
        lost = [field for field in self.fields if field not in text]
        if lost:
            raise ConfigError(f"the text has no {' and no '.join(lost)}")
        wanted = _split(text, self.fields)
        if _pieces(text) == wanted:  # such as one for an app that fills nothing
            return PromptTemplate(text, engine=self.engine)
        return PromptTemplate(_escaped(wanted), engine=self.engine)


@lru_cache(maxsize=1024)
def _pieces(template: str) -> tuple[_Piece, ...]:
    """The parts of a template, two texts never side by side."""
    pieces = _parsed(template)
    if pieces is None:  # a brace of the text's own
        return _split(template, dict.fromkeys(_PLAIN.findall(template)))
    return _joined(pieces)


def _parsed(template: str) -> list[_Piece] | None:
    """The parts as Python has them; None: its `format` could not fill them."""
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
            how = f"!{conversion}" if conversion else ""
            pieces.append(_Piece(f"{{{field}{how}{f':{spec}' if spec else ''}}}", True))
    return pieces


def _escaped(pieces: Iterable[_Piece]) -> str:
    """A template that reads so."""
    return "".join(
        piece.text if piece.is_placeholder else piece.text.replace("{", "{{").replace("}", "}}")
        for piece in pieces
    )


def _can_be_filled(field: str, spec: str, conversion: str | None) -> bool:
    """Whether it is not only parsed by Python but also filled, unlike `{a.}`, `{a!x}`."""
    if not _FIELD.fullmatch(field) or conversion not in _CONVERSIONS:
        return False
    try:
        within = [part for part in Formatter().parse(spec) if part[1] is not None]
        if conversion and not within:
            format("", spec)  # it shows a text, whatever the value is
    except ValueError:
        return False
    return all(
        not deeper and _can_be_filled(name or "", "", how) for _, name, deeper, how in within
    )


def _split(text: str, fields: Iterable[str]) -> tuple[_Piece, ...]:
    """A text in parts, where it holds these placeholders."""
    known = [re.escape(field) for field in fields]
    if not known:
        return _joined([_Piece(text, False)])
    parts = re.split(f"({'|'.join(known)})", text)
    return _joined([_Piece(part, number % 2 == 1) for number, part in enumerate(parts)])


def _joined(pieces: Sequence[_Piece]) -> tuple[_Piece, ...]:
    joined: list[_Piece] = []
    for piece in pieces:
        if joined and not (piece.is_placeholder or joined[-1].is_placeholder):
            piece = _Piece(joined.pop().text + piece.text, False)
        if piece.text:
            joined.append(piece)
    return tuple(joined)


def _between(pieces: Sequence[_Piece]) -> list[str] | None:
    """The texts before, between and after the placeholders; None where two stand side by side."""
    literals, after_placeholder = [""], False
    for piece in pieces:
        if not piece.is_placeholder:
            literals[-1] = piece.text
        elif after_placeholder:
            return None
        else:
            literals.append("")
        after_placeholder = piece.is_placeholder
    return literals


def _first_places(literals: Sequence[str], text: str) -> list[int] | None:
    """Where each of these begins, as early as possible: the first at the beginning, the last at the
    end, the others in between, in order. None: they do not stand there."""
    if not (text.startswith(literals[0]) and text.endswith(literals[-1])):
        return None
    if len(literals) == 1:
        return [0] if literals[0] == text else None
    places, end, last = [0], len(literals[0]), len(text) - len(literals[-1])
    for literal in literals[1:-1]:
        at = text.find(literal, end, last)
        if at < 0:
            return None
        places.append(at)
        end = at + len(literal)
    return [*places, last] if end <= last else None


def _last_places(literals: Sequence[str], text: str) -> list[int] | None:
    """The same, as late as possible."""
    if len(literals) == 1:
        return _first_places(literals, text)
    begin, last = len(literals[0]), len(text) - len(literals[-1])
    places, end = [last], last
    for literal in reversed(literals[1:-1]):
        end = text.rfind(literal, begin, end)
        if end < 0:
            return None
        places.insert(0, end)
    return [0, *places]


def filled_as(given: str, learned: str) -> str:
    """A learned template that `str.format` fills, where it fills the given one: an app may call it
    itself."""
    if _parsed(given) is None or _parsed(learned) is not None:
        return learned
    return _escaped(_pieces(learned))


class LearnedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that was learned."""

    before: PromptTemplate
    after: PromptTemplate
    place: PromptPlace = PromptPlace.ARGUMENT
    agent: str = ""
    """The path of the agent whose instructions it is."""

    @property
    def template(self) -> str:
        """What to use: the template that was learned."""
        return self.after.template

    @property
    def is_changed(self) -> bool:
        return self.after != self.before

    def diff(self) -> str:
        """What changed, line by line; empty where nothing did."""
        before, after = self.before.text.splitlines(), self.after.text.splitlines()
        lines = difflib.unified_diff(before, after, "before", "after", lineterm="")
        return "\n".join(lines)
