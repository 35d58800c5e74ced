"""Where a PostgreSQL store is: its URL, and what of that is secret.

A password in a URL goes no further than this process and the runners that it starts: `url` is
without it, so no message, file or log has it. Whoever opens the store by that `url` elsewhere gives
it by libpq's own means: PGPASSWORD, ~/.pgpass or a service file.

Needs no PostgreSQL client.
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
    """Of a store."""

    url: str
    """Without what is secret."""
    parameters: Mapping[str, str]
    """Of libpq, without what is secret."""
    schema: str

    @property
    def secrets(self) -> dict[str, str]:
        """Parameters of libpq that nobody may see."""
        return secrets_of(self.url)


def read_address(url: str) -> Address:
    """The address that a URL says. What is secret in it is kept for this process.

    Raises:
        ConfigError: it cannot be read; the message has no secret of it.
    """
    rest = url.removeprefix(SCHEME)
    rest, _, query = rest.partition("?")
    authority, _, database = rest.partition("/")
    user, at, hosts = authority.rpartition("@")
    if "@" in database or "@" in query or "#" in rest:
        raise _refused(
            url,
            "what follows the user is no host: write special characters of a "
            "password as %40 and the like, or leave it to PGPASSWORD",
        )
    user, _, password = user.partition(":")
    given = {"user": user, "password": password, "dbname": database, **_hosts(url, hosts)}
    found = {name: unquote(value) for name, value in given.items() if value}
    kept = []
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name in found:
            raise _refused(url, f"{name} is given twice")
        found[name] = unquote(value)
        if name not in _SECRET:
            kept.append(part)
    public = f"{SCHEME}{user}{at if user else ''}{hosts}/{database}"
    public += f"?{'&'.join(kept)}" if kept else ""
    secrets = {name: found.pop(name) for name in _SECRET if name in found}
    keep_secrets(public, secrets)
    schema = found.pop(_SCHEMA, _DEFAULT_SCHEMA)
    if (
        not 0 < len(schema.encode()) <= _MAX_NAME_LENGTH
        or schema.startswith("pg_")
        or "\0" in schema
    ):
        raise _refused(
            public,
            f"schema={schema!r} is no name of a schema: at most {_MAX_NAME_LENGTH} bytes, and not "
            "beginning with pg_",
        )
    return Address(public, found, schema)


def _hosts(url: str, text: str) -> dict[str, str]:
    """Hosts and ports as libpq takes them: lists of equal length."""
    hosts, ports = [], []
    for each in text.split(",") if text else []:
        found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]*)(?::(\d*))?", each)
        if found is None:
            raise _refused(url, "a host or its port cannot be read")
        hosts.append(found[1].strip("[]"))
        ports.append(found[2] or "")
    return {"host": ",".join(hosts), "port": ",".join(ports) if any(ports) else ""}


def _refused(url: str, why: str) -> ConfigError:
    return ConfigError(f"store {without_secrets(url)!r}: {why}; {_FORM}")


def without_secrets(url: str) -> str:
    """The URL for a message, also one that cannot be read."""
    _, at, tail = url.removeprefix(SCHEME).rpartition("@")
    tail = re.sub(r"(\w*password)=[^&]*", r"\1=…", tail)
    if not at:  # what looks like a host may be a user and a password
        tail = re.sub(r"^([^/?]*?):[^/?]*", r"\1:…", tail)
    return f"{SCHEME}{'…@' if at else ''}{tail}"
