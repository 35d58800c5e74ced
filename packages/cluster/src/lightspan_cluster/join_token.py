"""The argument of `lightspan runner --join HOST:PORT/TOKEN`: an address, a key, a fingerprint."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import sys
from typing import Final, NamedTuple, Self

from lightspan.errors import ConfigError

_HALF: Final = 32
"""Characters of the key, and characters of the fingerprint."""
_BYTES: Final = 24
"""Bytes that `_HALF` characters of base64 encode."""
_DESCRIPTOR: Final = re.compile(r"fd:(\d+)")


class JoinToken(NamedTuple):
    """The parts of the argument of `--join`: an address, a key and a fingerprint.

    Runners send the key to the server at the address. The fingerprint is that of its certificate.
    """

    host: str
    port: int
    key: str
    fingerprint: str

    @property
    def place(self) -> str:
        """The address `HOST:PORT`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """The whole argument of `--join`, `HOST:PORT/TOKEN`, which `parse` reads."""
        return f"{self.place}/{self.key}{self.fingerprint}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `HOST:PORT/TOKEN`.

        Raises:
            ConfigError: the text has another form. The message does not contain the token.
        """
        place, _, token = text.strip().partition("/")
        host, _, port = place.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        problem = ""
        if token == "TOKEN":
            problem = "TOKEN stands for the token itself"
        elif not host or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65_535:
            problem = "it does not begin with HOST:PORT/"
        elif not re.fullmatch(r"[\w-]*", token, re.ASCII) or len(token) != 2 * _HALF:
            problem = f"the token after {place}/ is no text of {2 * _HALF} letters and digits"
        if problem:
            raise ConfigError(
                f"--join is incomplete or damaged, {problem}: copy the whole HOST:PORT/TOKEN from "
                "the line that the trainer printed when it started"
            )
        return cls(host, int(port), token[:_HALF], token[_HALF:])


def new_key() -> str:
    """Return a new random key, which runners have to send to the server."""
    return secrets.token_urlsafe(_BYTES)


def fingerprint(certificate: bytes) -> str:
    """Return the fingerprint of a certificate (DER): the beginning of its SHA-256, in base64."""
    return base64.urlsafe_b64encode(hashlib.sha256(certificate).digest()[:_BYTES]).decode()


def take_token(text: str) -> JoinToken:
    """Read the argument of `--join`, and remove the token from this program's command line.

    Every user of the machine can read command lines, and so can the app, which must not have the
    key: with it, a policy that runs code could write its own reward. So the program is started
    anew in the same process, with the number of a pipe in place of the token.

    Raises:
        ConfigError: the text has another form than `HOST:PORT/TOKEN`.
    """
    place, _, token = text.partition("/")
    if pipe := _DESCRIPTOR.fullmatch(token):
        with os.fdopen(int(pipe[1])) as reader:
            return JoinToken.parse(f"{place}/{reader.read()}")
    join = JoinToken.parse(text)
    if any(token in word for word in sys.orig_argv):  # else another program called `main`
        read_end, write_end = os.pipe()
        os.set_inheritable(read_end, True)
        os.write(write_end, token.encode())
        os.close(write_end)
        words = [word.replace(token, f"fd:{read_end}") for word in sys.orig_argv]
        os.execv(sys.executable, [sys.executable, *words[1:]])
    return join
