"""Whether this user trained a run here: a mark that only a key outside of its folder can make.

A run's folder says which of its agents' calls go to which endpoint, with the key of which variable.
One that comes from elsewhere could so have any key sent anywhere, and who owns its files, or what
is in them, proves nothing. So training signs what it writes with a key that lies in the user's own
state directory. What was moved is still signed; what was changed is not.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError

KEY_FILE: Final = "run-key"
_KEY_BYTES: Final = 32
_PURPOSE: Final = b"lightspan: how a run is served\0"


def state_folder() -> Path:
    """Where this user's programs keep what is no setting and no cache.

    Raises:
        RuntimeError: the user has no home.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # a relative one is to be ignored, says the XDG specification
        return Path(given, "lightspan")
    inside = "Library/Application Support" if sys.platform == "darwin" else ".local/state"
    return Path.home() / inside / "lightspan"


def sign(document: Mapping[str, Any]) -> str:
    """The mark of what this user's training wrote. Makes the key if there is none.

    Args:
        document: as JSON has it.

    Raises:
        ConfigError: the key cannot be kept, or others could know it.
    """
    try:
        path = state_folder() / KEY_FILE
        if not os.path.lexists(path):
            _make_key(path)
        return _mark(document, _read_key(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no key can be kept in your state directory: {error}") from error


def is_signed(document: Mapping[str, Any], mark: object) -> bool:
    """Whether `sign` of this user made that mark, of this document."""
    if not isinstance(mark, str):
        return False
    try:
        key = _read_key(state_folder() / KEY_FILE)
    except (OSError, RuntimeError, ConfigError):  # who has no key has signed nothing
        return False
    return hmac.compare_digest(_mark(document, key).encode(), mark.encode(errors="replace"))


def _mark(document: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(document, sort_keys=True)
    return hmac.digest(key, _PURPOSE + text.encode(), "sha256").hex()


def _make_key(path: Path) -> None:
    """Of several that make one at once, the first has made it."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    whole = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(whole, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def _read_key(path: Path) -> bytes:
    """Raises `ConfigError` if somebody else may have made it or may know it."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"{path} is not yours alone (owner {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):04o}): delete it, a new one is made"
            )
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} is damaged: delete it, a new one is made")
    return key
