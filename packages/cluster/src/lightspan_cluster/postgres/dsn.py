"""The URL of a PostgreSQL store, and its secrets.

The password of a URL is known only to this process and the runners that it starts. `Address.url`
has no password, so no message, file or log contains it. Other processes that open the store by
`Address.url` need PGPASSWORD, ~/.pgpass or a service file. This module needs no PostgreSQL client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote

from lightspan.errors import ConfigError
from lightspan.stores.credentials import keep_secrets, secrets_of

SCHEME: Final = "postgresql://"
_SECRET: Final[tuple[str, ...]] = (
    *("password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"),
)
_SCHEMA: Final = "schema"
_DEFAULT_SCHEMA: Final = "lightspan"
_MAX_NAME_LENGTH: Final = 63
_FORM: Final = "write postgresql://USER@HOST:PORT/DATABASE?sslmode=…&schema=…"


class Address(NamedTuple):
    """The parsed URL of a store."""

    url: str
    """The URL without its secrets."""
    parameters: Mapping[str, str]
    """libpq's connection parameters, without secrets."""
    schema: str

    @property
    def secrets(self) -> dict[str, str]:
        """libpq's secret connection parameters, such as the password."""
        return secrets_of(self.url)


def read_address(url: str) -> Address:
    """Parse the URL of a store.

    The password and other secrets are not part of the result. They are kept in this process.

    Raises:
        ConfigError: the URL is invalid. The error message contains no secrets.
    """
    rest = url.removeprefix(SCHEME)
    rest, _, query = rest.partition("?")
    authority, _, database = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    if "@" in database or "@" in query or "#" in rest:
        raise _invalid(
            url,
            "the part after the user is no host: write special characters of a password as %40 "
            "and the like, or use PGPASSWORD",
        )
    user, _, password = user.partition(":")
    parts = {"user": user, "password": password, "dbname": database, **_hosts(url, hosts)}
    parameters = {name: unquote(value) for name, value in parts.items() if value}
    options = []
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name in parameters:
            raise _invalid(url, f"{name} is given twice")
        parameters[name] = unquote(value)
        if name not in _SECRET:
            options.append(part)
    public = f"{SCHEME}{user}{at if user else ''}{hosts}/{database}"
    public += f"?{'&'.join(options)}" if options else ""
    secrets = {name: parameters.pop(name) for name in _SECRET if name in parameters}
    keep_secrets(public, secrets)
    schema = parameters.pop(_SCHEMA, _DEFAULT_SCHEMA)
    if (
        not 0 < len(schema.encode()) <= _MAX_NAME_LENGTH
        or schema.startswith("pg_")
        or "\0" in schema
    ):
        raise _invalid(
            public,
            f"schema={schema!r} is no name of a schema: at most {_MAX_NAME_LENGTH} bytes, and not "
            "beginning with pg_",
        )
    return Address(public, parameters, schema)


def _hosts(url: str, text: str) -> dict[str, str]:
    """Parse the hosts and ports of a URL into the parameters `host` and `port` of libpq.

    Args:
        url: the whole URL, for the error message.
        text: the hosts, as `HOST:PORT,HOST:PORT`.
    """
    hosts, ports = [], []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]*)(?::(\d*))?", part)
        if match is None:
            raise _invalid(url, "a host or its port cannot be read")
        hosts.append(match[1].strip("[]"))
        ports.append(match[2] or "")
    return {"host": ",".join(hosts), "port": ",".join(ports) if any(ports) else ""}


def _invalid(url: str, reason: str) -> ConfigError:
    return ConfigError(f"store {without_secrets(url)!r}: {reason}; {_FORM}")


def without_secrets(url: str) -> str:
    """Return a URL with its secrets replaced by "…", so that it can be printed.

    The URL may be invalid.
    """
    _, at, tail = url.removeprefix(SCHEME).rpartition("@")
    tail = re.sub(r"(\w*password)=[^&]*", r"\1=…", tail)
    if not at:  # a host and port may be a user and a password
        tail = re.sub(r"^([^/?]*?):[^/?]*", r"\1:…", tail)
    return f"{SCHEME}{'…@' if at else ''}{tail}"
