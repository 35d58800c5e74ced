"""Texts that an app, a program or an endpoint wrote, made fit to be kept: bounded, without keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

MAX_TEXT_LENGTH: Final = 8_192
"""Characters that are kept of an error, a status or a reason: half from its start, half from its
end."""
KEY: Final = "<key>"
"""What stands in a kept text where a key stood."""
SHORTEST_KEY: Final = 8
"""Characters of a variable's value that is taken for a key: words such as `none` are not."""
SHORTEST_KEY_IN_TALK: Final = 16
"""The same for what is said to a model and by it, where a short password is a word like others."""

_SEARCHED: Final = 128 * MAX_TEXT_LENGTH
"""Characters at each end in which keys are looked for. It is more than is kept, so that a key which
the cut goes through is not kept by half, however much is replaced."""
_SECRET: Final = re.compile(
    r"(?:^|_)(?:(?:API)?KEYS?|TOKEN|SECRETS?|(?:PG)?PASSWORDS?|PASSWD|PASS|PAT)$|_PWD$",
    re.IGNORECASE,
)
_OF_KEYS: Final = re.compile(r"KEYS?$", re.IGNORECASE)
_NO_KEY: Final = re.compile(r"[/~.]|[^\n]*[ ,][^\n]*\Z|\D*\Z")
"""A path, one line of words, or text without a digit: what an SSH_KEY or a SORT_KEY says."""
_PASSWORD_IN_URL: Final = re.compile(r"\w[\w+.-]*://[^/@:\s]*:([^/@\s]+)@")
_MAX_CLIENTS_KEYS: Final = 1_024
# Each begins with plain letters, which are searched for first, and looks back from there: every
# prompt that is recorded is searched. Before them one character of it that most texts lack is
# searched for, which takes a tenth of the time.
_TOKENS: Final = tuple(
    (character, pattern.partition("(")[0], re.compile(pattern))
    for character, pattern in (
        ("-", r"at-(?<=\bat-)[0-9a-f]+\.[\w-]{32}"),  # a call token
        # An unbroken run, which words with hyphens between them do not have. What is looked for
        # ahead is bounded: the time for a text of nothing but `sk-` would grow with its square.
        ("-", r"sk-(?<=\bsk-)(?=[\w-]{0,255}?\d)(?=[\w-]{0,255}?[A-Za-z0-9]{16})[\w-]{20,}"),
        ("_", r"gsk_(?<=\bgsk_)[A-Za-z0-9]{32,}"),
        ("z", r"AIza(?<=\bAIza)[\w-]{35}"),
        ("_", r"ghp_(?<=\bghp_)[A-Za-z0-9]{36}"),
        ("_", r"github_pat_(?<=\bgithub_pat_)\w{36,}"),
        ("_", r"hf_(?<=\bhf_)[A-Za-z0-9]{30,}"),
        ("K", r"AKIA(?<=\bAKIA)[0-9A-Z]{16}\b"),
        ("-", r"xox(?<=\bxox)[abprs]-(?=[\w-]{0,255}?\d)[\w-]{20,}"),
    )
)
_BEARER: Final = re.compile(r"(earer(?<=\b[Bb]earer)\s+)[\w.~+/=-]{8,}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_key_variables: Final[set[str]] = set()
_clients_keys: Final[dict[str, None]] = {}
_written: Final[list[tuple[Any, Sequence[str]]]] = []
"""What `_written_keys` said last, and of what."""


def clean_text(text: str) -> str:
    """The text without lone surrogates, which no store can hold: they become U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def is_secret(variable: str) -> bool:
    """Whether an environment variable of this name holds a key, by its name or by what was said."""
    return variable in _key_variables or _sounds_secret(variable)


@cache
def _sounds_secret(variable: str) -> bool:
    return _SECRET.search(variable) is not None


@cache
def _may_hold_key(variable: str) -> bool:
    return _sounds_secret(variable) or variable.upper().endswith(("URL", "URI", "DSN"))


def add_key_variable(name: str) -> None:
    """The environment variable of this name holds a key, whatever it is called."""
    _key_variables.add(name)


def add_clients_key(key: Any) -> None:
    """A model client has this key, which an endpoint may quote. Short ones and words are left."""
    if not isinstance(key, str) or key in _clients_keys:
        return
    if len(key) >= SHORTEST_KEY_IN_TALK and not _NO_KEY.match(key):
        while len(_clients_keys) >= _MAX_CLIENTS_KEYS:  # each customer may have their own
            _clients_keys.pop(next(iter(_clients_keys)), None)
        _clients_keys[key] = None


def without_keys(text: str) -> str:
    """The text without keys: values of environment variables that hold them, those of the model
    clients, call tokens, what follows `Bearer`, and what looks like a vendor's key."""
    for key in _longest_first({*_secret_values().values(), *_clients_keys}, SHORTEST_KEY):
        text = text.replace(key, KEY)
    return _without_tokens(_BEARER.sub(rf"\1{KEY}", text))


def values_without_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys in its texts, of which some are JSON and some a conversation.

    Others than `without_keys` finds: what a conversation says of bearers, short passwords that are
    words, and paths, fields or words in a variable called a key are left, because a conversation
    may be gone on with, or imitated.
    """
    written = _written_keys()
    return {name: _value_without(value, written) for name, value in values.items()}


def _written_keys() -> Sequence[str]:
    """The keys that no conversation may hold, in every form that one may have there."""
    # Compared for every span: a microsecond in this form, 20 by asking for each variable.
    environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    for made_of, written in _written:  # read once: another thread may put an older one there
        if made_of == (environment, _key_variables, _clients_keys):
            return written
    made_of = (dict(environment), set(_key_variables), dict(_clients_keys))
    secrets = {
        value
        for name, value in _secret_values().items()
        if not (_OF_KEYS.search(name) and _NO_KEY.match(value))
    }
    keys = _longest_first(secrets | made_of[2].keys(), SHORTEST_KEY_IN_TALK)
    written = _longest_first({form for key in keys for form in _as_json(key)}, 0)
    _written[:] = [(made_of, written)]
    return written


def _secret_values() -> dict[str, str]:
    """Environment variable → the key that it holds; the password, if it holds one in an address."""
    found = {}
    # By name: a variable that another thread takes away meanwhile would raise. Most say nothing of
    # interest, and this runs for every span.
    for name in [name for name in os.environ if _may_hold_key(name) or name in _key_variables]:
        value = os.environ.get(name, "")
        if is_secret(name):
            found[name] = value
        else:
            address = _PASSWORD_IN_URL.match(value)
            if address is not None:
                found[name] = address[1]
    return found


def _longest_first(keys: Iterable[str], shortest: int) -> list[str]:
    """One may begin with another."""
    return sorted((key for key in keys if len(key) >= shortest), key=len, reverse=True)


def _as_json(key: str) -> tuple[str, ...]:
    """The key, and as it stands in JSON and in JSON inside JSON: what is in quotes there."""
    once = json.dumps(key)[1:-1]
    return key, once, json.dumps(once)[1:-1]


def _value_without(value: Any, keys: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_value_without(item, keys) for item in value]
    if not isinstance(value, str):
        return value
    for key in keys:
        value = value.replace(key, KEY)
    return _without_tokens(value)


def _without_tokens(text: str) -> str:
    for character, start, pattern in _TOKENS:
        if character in text and start in text:
            text = pattern.sub(KEY, text)
    return text


def kept_text(text: str, longest: int = MAX_TEXT_LENGTH) -> str:
    """What is kept of a text: no lone surrogate, no key, and both ends of one that is too long."""
    start, end, left_out = text, "", len(text) - 2 * _SEARCHED
    if left_out > 0:
        start, end = text[:_SEARCHED], text[-_SEARCHED:]
    start, end = (without_keys(clean_text(part)) for part in (start, end))
    return _bounded(start + end, longest, max(0, left_out))


def _bounded(text: str, longest: int, left_out: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    left_out += len(text) - 2 * half
    return f"{text[:half]} […{left_out} characters left out…] {text[-half:]}"
