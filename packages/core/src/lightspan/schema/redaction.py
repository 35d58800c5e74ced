"""Sanitise recorded texts: replace API keys and lone surrogates, and limit the length."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

MAX_TEXT_LENGTH: Final = 8_192
"""Maximum number of characters of a recorded error, status or reason. Half of a longer text is kept
from its start, and half from its end."""
KEY: Final = "<key>"
"""Replacement of a key."""
MIN_KEY_LENGTH: Final = 8
"""Minimum number of characters of an environment variable's value that counts as a key. Shorter
words, such as `none`, do not count."""
MIN_MESSAGE_KEY_LENGTH: Final = 16
"""Minimum characters of a key in a model's messages, where a short password may be a plain word."""

_SEARCHED_LENGTH: Final = 128 * MAX_TEXT_LENGTH
"""Number of characters at each end of a text that are searched for keys. It is far larger than
`MAX_TEXT_LENGTH`, so that a key cut off at this limit is not recorded, even if replacing other keys
shortens the text."""
_SECRET: Final = re.compile(
    r"(?:^|_)(?:(?:API)?KEYS?|TOKEN|SECRETS?|(?:PG)?PASSWORDS?|PASSWD|PASS|PAT)$|_PWD$",
    re.IGNORECASE,
)
_OF_KEYS: Final = re.compile(r"KEYS?$", re.IGNORECASE)
_NO_KEY: Final = re.compile(r"[/~.]|[^\n]*[ ,][^\n]*\Z|\D*\Z")
"""Matches a path, a line of words, and a text without a digit. A variable whose name ends with
`KEY` may have such a value, as SSH_KEY and SORT_KEY do, and it is no secret then."""
_PASSWORD_IN_URL: Final = re.compile(r"\w[\w+.-]*://[^/@:\s]*:([^/@\s]+)@")
_MAX_CLIENT_KEYS: Final = 1_024
# Every recorded prompt is searched. A regex is applied only if the text contains its literal start,
# and that is searched for only if the text contains a character of it that most texts lack, which
# takes a tenth of the time. The start comes first in each regex, with a look-behind after it.
_TOKENS: Final = tuple(
    (character, pattern.partition("(")[0], re.compile(pattern))
    for character, pattern in (
        ("-", r"at-(?<=\bat-)[0-9a-f]+\.[\w-]{32}"),  # a call token
        # 16 letters or digits in a row, which words joined by hyphens lack. The look-ahead is
        # bounded: else the time for a text of many `sk-` would grow with its square.
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
_client_keys: Final[dict[str, None]] = {}
_message_keys_cache: Final[list[tuple[Any, Sequence[str]]]] = []
"""The last inputs and result of `_message_keys`."""


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no store can hold, by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def is_secret(variable: str) -> bool:
    """Return whether an environment variable holds a key.

    It does if its name is like `OPENAI_API_KEY` or `DB_PASSWORD`, or if it was passed to
    `add_key_variable`.
    """
    return variable in _key_variables or _has_secret_name(variable)


@cache
def _has_secret_name(variable: str) -> bool:
    return _SECRET.search(variable) is not None


@cache
def _may_hold_key(variable: str) -> bool:
    return _has_secret_name(variable) or variable.upper().endswith(("URL", "URI", "DSN"))


def add_key_variable(name: str) -> None:
    """Register an environment variable that holds a key, whatever its name."""
    _key_variables.add(name)


def add_client_key(key: Any) -> None:
    """Register the key of a model client, so that it is replaced in recorded texts.

    Short keys and words are ignored: they may occur in texts by chance.
    """
    if not isinstance(key, str) or key in _client_keys:
        return
    if len(key) >= MIN_MESSAGE_KEY_LENGTH and not _NO_KEY.match(key):
        while len(_client_keys) >= _MAX_CLIENT_KEYS:  # an app may have one per customer
            _client_keys.pop(next(iter(_client_keys)), None)
        _client_keys[key] = None


def without_keys(text: str) -> str:
    """Return a text with each API key replaced by `KEY`.

    These are replaced:

    - the values of environment variables that hold keys, and passwords of URLs in variables,
    - keys of model clients (`add_client_key`),
    - call tokens of the gateway,
    - the token after `Bearer`, and
    - texts in the format of a vendor's key.
    """
    for key in _longest_first({*_secret_values().values(), *_client_keys}, MIN_KEY_LENGTH):
        text = text.replace(key, KEY)
    return _without_tokens(_BEARER.sub(rf"\1{KEY}", text))


def values_without_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the API keys in its texts replaced. A text may be JSON.

    The texts may be messages that a model continues or is trained on, so less is replaced than by
    `without_keys`. These are kept:

    - the text after `Bearer`,
    - short passwords, and
    - a path or words as the value of an environment variable with a name like `OPENAI_API_KEY`.
    """
    keys = _message_keys()
    return {name: _value_without(value, keys) for name, value in values.items()}


def _message_keys() -> Sequence[str]:
    """Return the texts to replace in messages: each key as it is, and escaped for JSON."""
    # This comparison, done for every span, takes 1 µs; looking up each variable would take 20 µs.
    environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    for inputs, result in _message_keys_cache:  # another thread may replace the entry
        if inputs == (environment, _key_variables, _client_keys):
            return result
    inputs = (dict(environment), set(_key_variables), dict(_client_keys))
    secrets = {
        value
        for name, value in _secret_values().items()
        if not (_OF_KEYS.search(name) and _NO_KEY.match(value))
    }
    keys = _longest_first(secrets | inputs[2].keys(), MIN_MESSAGE_KEY_LENGTH)
    once = {json.dumps(key)[1:-1] for key in keys}  # escaped for a JSON string
    twice = {json.dumps(key)[1:-1] for key in once}
    result = _longest_first({*keys, *once, *twice}, 0)
    _message_keys_cache[:] = [(inputs, result)]
    return result


def _secret_values() -> dict[str, str]:
    """Return the secrets in environment variables, by the name of the variable.

    A secret is the whole value of a variable that holds a key, or the password of a URL in another
    variable.
    """
    keys = {}
    # Iterating over the items raises if another thread removes a variable meanwhile, so the values
    # are read by name. The names are filtered first, because this runs for every span.
    for name in [name for name in os.environ if _may_hold_key(name) or name in _key_variables]:
        value = os.environ.get(name, "")
        if is_secret(name):
            keys[name] = value
        elif (match := _PASSWORD_IN_URL.match(value)) is not None:
            keys[name] = match[1]
    return keys


def _longest_first(keys: Iterable[str], min_length: int) -> list[str]:
    """Return the keys of at least `min_length` characters, longest first.

    A key that contains another key is then replaced before the shorter key.
    """
    return sorted((key for key in keys if len(key) >= min_length), key=len, reverse=True)


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


def bounded_text(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return a text with lone surrogates and keys replaced.

    Of a text longer than `max_length` characters, only the start and the end are kept.
    """
    start, end, omitted = text, "", len(text) - 2 * _SEARCHED_LENGTH
    if omitted > 0:
        start, end = text[:_SEARCHED_LENGTH], text[-_SEARCHED_LENGTH:]
    text = "".join(without_keys(clean_text(part)) for part in (start, end))
    if len(text) <= max_length:
        return text
    half = max_length // 2
    omitted = max(0, omitted) + len(text) - 2 * half
    return f"{text[:half]} […{omitted} characters left out…] {text[-half:]}"
