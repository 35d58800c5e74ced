"""Who asks: by the key that is sent. Who has none is nobody, unless all of this machine are let in.

Keys are read by the names of their variables and taken out of the environment at once, and what is
kept of one is its digest. No message or log has a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from lightspan.errors import ConfigError
from lightspan.schema.texts import SHORTEST_KEY_IN_TALK, add_clients_key, add_key_variable
from lightspan.stores.remote.address import check_key
from lightspan.stores.remote.roles import Role

SHORTEST: Final = SHORTEST_KEY_IN_TALK
"""Characters of a key: who may guess as often as he likes finds a shorter one."""


class Keys:
    """The keys of a server, each with its role.

    Args:
        keys: by role; any number of each, so that a new one can be handed out before the old one
            is taken away.
    """

    def __init__(self, keys: Mapping[Role, Sequence[str]]) -> None:
        self._digests = [(_digest(key), role) for role, some in keys.items() for key in some]
        self._everyone: Role | None = None

    @classmethod
    def of_this_machine(cls) -> Keys:
        """No keys: whoever reaches the server may do everything. Only for a loopback address."""
        keys = cls({})
        keys._everyone = Role.ADMIN
        return keys

    @property
    def are_needed(self) -> bool:
        """Whether nobody is let in without a key."""
        return self._everyone is None

    def role_of(self, key: str) -> Role | None:
        """What a key opens; None for a wrong one, or none. It takes as long for every key."""
        given, role = _digest(key), self._everyone
        for digest, opens in self._digests:
            if hmac.compare_digest(digest, given):
                role = opens
        return role


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def take_keys(
    names: Mapping[Role, Sequence[str]], environment: MutableMapping[str, str] = os.environ
) -> Keys:
    """The keys in these variables, which are taken out of the environment.

    Args:
        names: variables by role.
        environment: of this process.

    Raises:
        ConfigError: a variable is not set or holds no key, two hold the same one, or there is none.
    """
    variables = [(role, name) for role, some in names.items() for name in dict.fromkeys(some)]
    roles: dict[str, Role] = {}
    for role, name in variables:
        add_key_variable(name)
        if name in roles:
            environment.pop(name, None)
            raise ConfigError(
                f"--{role}-key-env {name}: --{roles[name]}-key-env names that variable too; a key "
                "has one role, so put another one into a variable of its own"
            )
        roles[name] = role
    taken = {name: environment.pop(name, "") for _, name in variables}
    keys: dict[Role, list[str]] = {}
    seen: dict[str, str] = {}
    for role, name in variables:
        key = taken[name]
        _check_length(key, role, name)
        check_key(key, name)
        if key in seen:
            raise ConfigError(
                f"--{role}-key-env {name} holds the same key as {seen[key]}: a key has one role"
            )
        seen[key] = name
        add_clients_key(key)
        keys.setdefault(role, []).append(key)
    if not keys:
        raise ConfigError(
            "a store is served to who has a key, and there is none: name the variables that hold "
            "them (--trainer-key-env NAME, --runner-key-env NAME, --admin-key-env NAME; `openssl "
            "rand -hex 32` makes a key), or let in every program of this machine with --without-key"
        )
    return Keys(keys)


def _check_length(key: str, role: Role, name: str) -> None:
    if not key:
        raise ConfigError(f"--{role}-key-env {name}: that variable is not set; put the key into it")
    if len(key) < SHORTEST:
        raise ConfigError(
            f"--{role}-key-env {name}: a key of {len(key)} characters can be guessed; it needs "
            f"{SHORTEST} at least (`openssl rand -hex 32` makes one)"
        )
