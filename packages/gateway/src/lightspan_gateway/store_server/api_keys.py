"""The keys of a served store: one per role, read from the environment and stored as digests."""

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
"""Minimum characters of a key: a shorter one can be found by brute force."""


class Keys:
    """The valid keys of a server. Each key has one role.

    Args:
        keys: role → key; None accepts every client without a key, as an administrator.
    """

    def __init__(self, keys: Mapping[Role, str] | None) -> None:
        self.are_required: Final = keys is not None
        self._digests = [(_digest(key), role) for role, key in (keys or {}).items()]

    def role_of(self, key: str) -> Role | None:
        """Return the role of a key; None for a wrong key.

        The comparison takes the same time for every key, so its duration reveals nothing about the
        keys.
        """
        result = None if self.are_required else Role.ADMIN
        digest = _digest(key)
        for valid, role in self._digests:
            if hmac.compare_digest(valid, digest):
                result = role
        return result


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def take_keys(
    variables: Mapping[Role, str], environment: MutableMapping[str, str] = os.environ
) -> Keys:
    """Read keys from environment variables, and remove the variables from the environment.

    Args:
        variables: role → name of the variable with its key.
        environment: environment of this process.

    Raises:
        ConfigError: a variable is not set or its value is no key, two roles have the same key, or
            `variables` is empty.
    """
    values = {role: environment.get(name, "") for role, name in variables.items()}
    for name in variables.values():
        add_key_variable(name)
        environment.pop(name, None)
    keys: dict[Role, str] = {}
    for role, key in values.items():
        where = f"--{role}-key-env {variables[role]}"
        if not key:
            raise ConfigError(f"{where}: that variable is not set; set it to the key")
        if len(key) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"{where}: a key of {len(key)} characters can be guessed; it needs at least "
                f"{MIN_KEY_LENGTH} (`openssl rand -hex 32` creates one)"
            )
        check_key(key, variables[role])
        if key in keys.values():
            raise ConfigError(f"{where} holds the key of another role: a key has one role")
        add_client_key(key)
        keys[role] = key
    if not keys:
        raise ConfigError(
            "a served store needs keys: name the variables that hold them (--trainer-key-env NAME, "
            "--runner-key-env NAME, --admin-key-env NAME; `openssl rand -hex 32` creates a key), "
            "or accept every program of this machine with --without-key"
        )
    return Keys(keys)
