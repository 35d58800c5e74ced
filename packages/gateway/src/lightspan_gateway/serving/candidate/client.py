"""Read and decide a comparison, in the file of its state or at a running server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib import error as http_errors, request

import msgspec

from lightspan.errors import ConfigError
from lightspan_gateway.serving.candidate.gateway import (
    ACTIONS,
    CANDIDATE_PATH,
    DecisionRequest,
    Status,
)
from lightspan_gateway.serving.candidate.state import STATE_FILE, CandidateState

_TIMEOUT_S: Final = 10.0


def is_url(target: str) -> bool:
    """Return whether the target is a server, not a file or folder."""
    return target.startswith(("http://", "https://"))


def status_of(target: str, key: str = "") -> Status:
    """Return the latest comparison.

    Args:
        target: URL of the server, folder that it serves, or file of the state.
        key: key of the server; empty for none.

    Raises:
        ConfigError: there is no comparison, or the server refuses or does not answer.
    """
    if is_url(target):
        return _fetch(target, key)
    with _state(target) as state:
        return Status.of(state)


def decide(target: str, action: str, decision: DecisionRequest, key: str = "") -> Status:
    """Promote the candidate, or roll it back; return the comparison.

    Args:
        target: URL of the server, folder that it serves, or file of the state.
        action: `promote` or `roll-back`.
        decision: the comparison, and what is known about it.
        key: the administrator's key of the server; empty for none.

    Raises:
        ConfigError: the candidate is worse and `decision.anyway` is False, there is no comparison,
            or the server refuses or does not answer.
    """
    if is_url(target):
        return _fetch(target, key, action, decision)
    if refusal := decision.refusal(ACTIONS[action]):
        raise ConfigError(refusal)
    with _state(target) as state:
        state.decide(ACTIONS[action], decision.reason)
        return Status.of(state)


@contextmanager
def _state(target: str) -> Iterator[CandidateState]:
    path = Path(target)
    state = CandidateState(path / STATE_FILE if path.is_dir() else path, create=False)
    try:
        yield state
    except sqlite3.Error as error:
        raise ConfigError(f"{state.path} cannot be read or written: {error}") from error
    finally:
        state.close()


def _fetch(
    origin: str, key: str, action: str | None = None, decision: DecisionRequest | None = None
) -> Status:
    class NoRedirect(request.HTTPRedirectHandler):
        """A handler that refuses redirects, which could leak the key to another server."""

        def redirect_request(self, *args: Any) -> None:
            return None

    url = origin.rstrip("/").removesuffix("/v1") + CANDIDATE_PATH
    call = request.Request(
        url if action is None else f"{url}/{action}",
        data=None if decision is None else msgspec.json.encode(decision),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    opener = request.build_opener(request.ProxyHandler({}), NoRedirect())
    try:
        with opener.open(call, timeout=_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=Status)
    except http_errors.HTTPError as error:
        with error:
            raise ConfigError(f"{origin} refuses: {_message(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{origin} is no `lightspan serve --candidate`: {reason}") from None


def _message(error: http_errors.HTTPError) -> str:
    try:
        return str(msgspec.json.decode(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
