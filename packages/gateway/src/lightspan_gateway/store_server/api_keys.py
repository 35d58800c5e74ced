"""The keys of a served store: one for each role, read from the environment and kept as a digest."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, MutableMapping
from typing import Final

from lightspan.errors import ConfigError
from lightspan.schema.redaction import MIN_MESSAGE_KEY_LENGTH, add_client_key, add_key_variable
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.url import check_key

MIN_KEY_LENGTH: Final = MIN_MESSAGE_KEY_LENGTH
"""Characters: a shorter key can be found by trying."""


class Keys:
    """The keys of a server.

    Args:
        keys: by role; None lets every program of this machine in, for a loopback address only.
    """

    def __init__(self, keys: Mapping[Role, str] | None) -> None:
        self.are_needed: Final = keys is not None
        self._digests = [(_digest(key), role) for role, key in (keys or {}).items()]

    def role_of(self, key: str) -> Role | None:
        """Return the role of a key; None for a wrong one. It takes as long for every key."""
        role = None if self.are_needed else Role.ADMIN
        digest = _digest(key)
        for known, opens in self._digests:
            if hmac.compare_digest(known, digest):
                role = opens
        return role


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def take_keys(
    variables: Mapping[Role, str], environment: MutableMapping[str, str] = os.environ
) -> Keys:
    """Return the keys in these variables, and take them out of the environment.

    Args:
        variables: by role.
        environment: of this process.

    Raises:
        ConfigError: a variable is not set or holds no key, two hold the same one, or none is named.
    """
    values = {role: environment.get(name, "") for role, name in variables.items()}
    for name in variables.values():
        add_key_variable(name)
        environment.pop(name, None)
    keys: dict[Role, str] = {}
    for role, key in values.items():
        where = f"--{role}-key-env {variables[role]}"
        if not key:
            raise ConfigError(f"{where}: that variable is not set; put the key into it")
        if len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"{where}: a key of {len(key)} characters can be guessed; it needs "
                f"{MIN_KEY_LENGTH} at least (`openssl rand -hex 32` makes one)"
            )
        check_key(key, variables[role])
        if key in keys.values():
            raise ConfigError(f"{where} holds the key of another role: a key has one role")
        add_client_key(key)
        keys[role] = key
    if not keys:
        raise ConfigError(
            "a store is served to who has a key, and there is none: name the variables that hold "
            "them (--trainer-key-env NAME, --runner-key-env NAME, --admin-key-env NAME; `openssl "
            "rand -hex 32` makes a key), or let in every program of this machine with --without-key"
        )
    return Keys(keys)
