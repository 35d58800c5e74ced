"""URLs of served stores, and the environment variables with their keys.

The key is read once and kept in this process and the runner processes that it starts
(`stores.credentials`); no URL, message, file or log contains it.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from lightspan.errors import ConfigError
from lightspan.schema.redaction import add_client_key, add_key_variable
from lightspan.stores.credentials import keep_secrets, secrets_of

KEY_VARIABLE: Final = "LIGHTSPAN_STORE_KEY"
RELAY_PATH: Final = "/gateway"
"""Path at which a server forwards model calls to the gateway of their training."""
_OPTION: Final = "api_key_env"
_FORM: Final = f"write https://HOST:PORT, or https://HOST:PORT?{_OPTION}=NAME"
_KEY: Final = "api_key"
_TUNNEL: Final = "tunnel"


class RemoteAddress(NamedTuple):
    """The address of a served store."""

    url: str
    """URL that opens the store, without a key."""
    base: str
    """URL to which paths are appended."""
    key_variable: str
    is_named: bool
    """Whether the URL names the variable; if not, the key is optional."""
    is_joined: bool = False
    """Whether the server is reached by a tunnel of this machine, with a key that no variable has
    (`lightspan runner --join`)."""

    def key(self) -> str:
        """Read the store's key from `key_variable`, or from an earlier call of this method.

        The process keeps the key, because the variable is removed from its environment later. If
        the URL names no variable, the key is optional: the result is empty if there is none.

        Raises:
            ConfigError: the variable that the URL names is not set, or its value is not a key.
        """
        kept = secrets_of(self.url)
        given = "" if self.is_joined else os.environ.get(self.key_variable, "")
        key = given or kept.get(_KEY, "")
        add_key_variable(self.key_variable)
        if not key and self.is_named:
            raise ConfigError(
                f"store {self.url}: {_OPTION}={self.key_variable}: that variable is not set"
            )
        check_key(key, self.key_variable)
        add_client_key(key)
        keep_secrets(self.url, {**kept, _KEY: key} if key else {})
        return key


def check_key(key: str, variable: str) -> None:
    """Raise `ConfigError` for a key that an HTTP header cannot contain."""
    if not re.fullmatch(r"[!-~]*", key):
        raise ConfigError(
            f"${variable} is no key: it contains a space, a line end or a non-ASCII letter; "
            "`openssl rand -hex 32` creates one"
        )


def read_address(url: str) -> RemoteAddress:
    """Parse a URL.

    Raises:
        ConfigError: the URL is invalid; the message contains no secret.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"store {_redact(url)!r} is invalid ({error}): {_FORM}") from None
    if "@" in url:
        raise ConfigError(
            f"store {_redact(url)!r}: a key does not belong in a URL; set {KEY_VARIABLE} to it, or "
            f"name another variable with ?{_OPTION}=NAME"
        )
    if not host or parts.fragment:
        raise ConfigError(f"store {url!r} names no server: {_FORM}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    variable = options.pop(_OPTION, "")
    if options or (parts.query and not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII)):
        raise ConfigError(
            f"store {_redact(url)!r}: the only option is {_OPTION}, the name of a variable: {_FORM}"
        )
    name = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme.lower()}://{name}{'' if port is None else f':{port}'}"
    base += parts.path.rstrip("/")
    option = f"?{_OPTION}={variable}" if variable else ""
    tunnel = secrets_of(base + option).get(_TUNNEL, "")
    return RemoteAddress(
        base + option, tunnel or base, variable or KEY_VARIABLE, bool(variable), bool(tunnel)
    )


def keep_tunnel(url: str, tunnel: str, key: str) -> None:
    """Register a tunnel through which this process reaches the server of a store.

    Runner processes that this process starts use the tunnel too.

    Args:
        url: URL of the store, which messages name.
        tunnel: address of this machine at which the tunnel begins; requests are sent to it.
        key: key of the store.
    """
    keep_secrets(read_address(url).url, {_KEY: key, _TUNNEL: tunnel})


def take_key(url: str) -> None:
    """Read the key of a served store, and remove it from the environment.

    Code that is loaded and processes that are started later must not have access to it.

    Raises:
        ConfigError: see `RemoteAddress.key`.
    """
    address = read_address(url)
    address.key()
    os.environ.pop(address.key_variable, None)


def _redact(url: str) -> str:
    """Return the URL without any key."""
    return re.sub(r"=[^&]*", "=…", re.sub(r"//.*@", "//…@", url))
