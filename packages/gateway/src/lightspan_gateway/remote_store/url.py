"""Where a served store is: its URL, and the variable with its key.

The key is read once, and stays in this process and the runner processes that it starts
(`known_secrets`): no URL, message, file or log has it.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from lightspan.errors import ConfigError
from lightspan.schema.redaction import add_client_key, add_key_variable
from lightspan.stores.credentials import keep_secrets, secrets_of

SCHEMES: Final = ("http://", "https://")
KEY_VARIABLE: Final = "LIGHTSPAN_STORE_KEY"
RELAY_PATH: Final = "/gateway"
"""Where a server hands model calls on to the gateway of their attempt's training."""
_OPTION: Final = "api_key_env"
_FORM: Final = f"write https://HOST:PORT, or https://HOST:PORT?{_OPTION}=NAME"
_KEY: Final = "api_key"


class RemoteAddress(NamedTuple):
    """Of a served store."""

    url: str
    """As it opens the same store elsewhere; never with a key."""
    base: str
    """What paths are added to."""
    key_variable: str
    is_named: bool
    """Whether the URL names the variable; if not, there may be no key at all."""

    def key(self) -> str:
        """What the server wants to see; empty if there is none.

        Raises:
            ConfigError: the variable that the URL names is not set, or holds no key.
        """
        key = os.environ.get(self.key_variable) or secrets_of(self.url).get(_KEY, "")
        add_key_variable(self.key_variable)
        if not key and self.is_named:
            raise ConfigError(
                f"store {self.url}: {_OPTION}={self.key_variable}: that variable is not set"
            )
        check_key(key, self.key_variable)
        add_client_key(key)
        keep_secrets(self.url, {_KEY: key} if key else {})
        return key


def check_key(key: str, variable: str) -> None:
    """Raise `ConfigError` for what no HTTP header can carry; an empty one is no key."""
    if not re.fullmatch(r"[!-~]*", key):
        raise ConfigError(
            f"${variable} is no key: it holds a space, a line end or a letter that is not ASCII; "
            "`openssl rand -hex 32` makes one"
        )


def names_server(text: str) -> bool:
    """Whether the text is the URL of a server, whatever its case."""
    return text.lower().startswith(SCHEMES)


def read_address(url: str) -> RemoteAddress:
    """The address that a URL says.

    Raises:
        ConfigError: it cannot be read; the message has no secret of it.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"store {_shown(url)!r} cannot be read ({error}): {_FORM}") from None
    if "@" in url:
        raise ConfigError(
            f"store {_shown(url)!r}: a key does not belong into a URL; put it into {KEY_VARIABLE}, "
            f"or name another variable with ?{_OPTION}=NAME"
        )
    if not host or parts.fragment:
        raise ConfigError(f"store {url!r} names no server: {_FORM}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    variable = options.pop(_OPTION, "")
    if options or (parts.query and not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII)):
        raise ConfigError(
            f"store {_shown(url)!r}: the only option is {_OPTION}, the name of a variable: {_FORM}"
        )
    name = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme.lower()}://{name}{'' if port is None else f':{port}'}"
    base += parts.path.rstrip("/")
    option = f"?{_OPTION}={variable}" if variable else ""
    return RemoteAddress(base + option, base, variable or KEY_VARIABLE, bool(variable))


def take_key(url: str) -> None:
    """Read the key of a served store now, and take it out of the environment: what is loaded or
    started from here on must not find it there.

    Raises:
        ConfigError: as `RemoteAddress.key`.
    """
    address = read_address(url)
    address.key()
    os.environ.pop(address.key_variable, None)


def _shown(url: str) -> str:
    """A URL that may hold a key, for a message."""
    return re.sub(r"=[^&]*", "=…", re.sub(r"//.*@", "//…@", url))
