"""Who asks: by the key that is sent. Who has none is nobody, unless all of this machine are let in.

Keys are read by the names of their variables and taken out of the environment at once, or from
files, which can be read again. What is kept of one is its digest. No message or log has a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Final

from lightspan.errors import ConfigError
from lightspan.schema.texts import SHORTEST_KEY_IN_TALK, add_clients_key, add_key_variable
from lightspan.stores.remote.address import check_key
from lightspan.stores.remote.roles import Role

log = logging.getLogger(__name__)

SHORTEST: Final = SHORTEST_KEY_IN_TALK
"""Characters of a key: who may guess as often as he likes finds a shorter one."""


class Keys:
    """The keys of a server, each with its role.

    Args:
        keys: by role; any number of each, so that a new one can be handed out before the old one
            is taken away.
        files: by role, each with a key a line; read by `read_files`.
    """

    def __init__(
        self,
        keys: Mapping[Role, Sequence[str]],
        files: Mapping[Role, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._given = [(_digest(key), role) for role, some in keys.items() for key in some]
        self._files = [(role, name) for role, some in files.items() for name in dict.fromkeys(some)]
        self._digests = self._given
        self._everyone: Role | None = None

    def read_files(self) -> int:
        """Read the files, again too: from now on what they hold opens the store, beside what is in
        no file, and what they held before does not. Returns how many keys there are in them.

        Raises:
            ConfigError: one cannot be read, holds no key, or one that has another role. All stays
                as it was then.
        """
        found = list(self._given)
        for role, name in self._files:
            for key in _keys_in(role, name):
                digest = _digest(key)
                other = next((known for same, known in found if same == digest), role)
                if other is not role:
                    raise ConfigError(
                        f"--{role}-key-file {name} holds a key that is a {other}'s too: a key has "
                        "one role"
                    )
                found.append((digest, role))
        self._digests = found
        return len(found) - len(self._given)

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


def _keys_in(role: Role, name: str) -> list[str]:
    """Those of a file: one a line; empty lines, and those that begin with #, are passed over."""
    where = f"--{role}-key-file {name}"
    try:
        with open(name, encoding="utf-8") as file:
            is_open = os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH)
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{where} cannot be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{where} holds no key: put one into it, a line for each")
    if is_open:
        log.warning("%s can be read by other users of this machine: chmod 600 %s", where, name)
    for key in keys:
        _check_length(key, where)
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(f"{where}: a key holds a space or a letter that is not ASCII")
        add_clients_key(key)
    return keys


def take_keys(
    names: Mapping[Role, Sequence[str]],
    environment: MutableMapping[str, str] = os.environ,
    files: Mapping[Role, Sequence[str]] = MappingProxyType({}),
) -> Keys:
    """The keys in these variables, which are taken out of the environment, and in these files.

    Args:
        names: variables by role.
        environment: of this process.
        files: by role.

    Raises:
        ConfigError: a variable is not set or holds no key, two hold the same one, a file cannot be
            read or holds none, or there is no key.
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
        where = f"--{role}-key-env {name}"
        if not key:
            raise ConfigError(f"{where}: that variable is not set; put the key into it")
        _check_length(key, where)
        check_key(key, name)
        if key in seen:
            raise ConfigError(
                f"--{role}-key-env {name} holds the same key as {seen[key]}: a key has one role"
            )
        seen[key] = name
        add_clients_key(key)
        keys.setdefault(role, []).append(key)
    if not keys and not any(files.values()):
        raise ConfigError(
            "a store is served to who has a key, and there is none: name the variables that hold "
            "them (--trainer-key-env NAME, --runner-key-env NAME, --admin-key-env NAME; `openssl "
            "rand -hex 32` makes a key) or the files (--trainer-key-file PATH, …), or let in every "
            "program of this machine with --without-key"
        )
    made = Keys(keys, files)
    made.read_files()
    return made


def _check_length(key: str, where: str) -> None:
    if len(key) < SHORTEST:
        raise ConfigError(
            f"{where}: a key of {len(key)} characters can be guessed; it needs "
            f"{SHORTEST} at least (`openssl rand -hex 32` makes one)"
        )
