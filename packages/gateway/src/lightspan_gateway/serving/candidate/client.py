"""Read and decide a comparison, in the file of its state or at a running server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
import msgspec

from lightspan.errors import ConfigError
from lightspan.stores.aio import run_sync
from lightspan_gateway.serving.candidate.gateway import (
    ACTIONS,
    ATTEMPTS,
    CANDIDATE_PATH,
    AttemptsRequest,
    DecisionRequest,
    Status,
)
from lightspan_gateway.serving.candidate.state import STATE_FILE, CandidateState

_TIMEOUT_S: Final = 10.0
_T = TypeVar("_T")


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
        return _fetch(target, key, Status)
    with _state(target) as state:
        return Status.of(state)


def assigned(target: str, comparison_id: str, keys: Sequence[str], key: str = "") -> dict[str, str]:
    """Return the attempts that count in a comparison: key → digest of the weights.

    Args:
        target: URL of the server, folder that it serves, or file of the state.
        comparison_id: the comparison.
        keys: what identifies each attempt (`sides.attempt_key`).
        key: key of the server; empty for none.

    Raises:
        ConfigError: the server refuses or does not answer, or the file cannot be read.
    """
    if not is_url(target):
        with _state(target) as state:
            return state.assigned(comparison_id, keys)
    attempts = AttemptsRequest(comparison_id=comparison_id, keys=[*keys])
    return _fetch(target, key, dict[str, str], ATTEMPTS, attempts)


def decide(target: str, action: str, decision: DecisionRequest, key: str = "") -> Status:
    """Promote the candidate, or roll it back; return the comparison.

    Args:
        target: URL of the server, folder that it serves, or file of the state.
        action: `promote` or `roll-back`.
        decision: the comparison, and its result for people.
        key: the administrator's key of the server; empty for none.

    Raises:
        ConfigError: the comparison is not the latest, or the server refuses or does not answer.
    """
    if is_url(target):
        return _fetch(target, key, Status, f"/{action}", decision)
    with _state(target) as state:
        state.decide(ACTIONS[action], decision.reason, decision.comparison_id)
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
    origin: str, key: str, answer: type[_T], path: str = "", body: msgspec.Struct | None = None
) -> _T:
    url = origin.rstrip("/").removesuffix("/v1") + CANDIDATE_PATH + path
    try:
        status, content = run_sync(_request(url, key, body))
        if status == 200:
            return msgspec.json.decode(content, type=answer)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ConfigError(f"{origin} is no `lightspan serve --candidate`: {error}") from None
    if status == 404:
        raise ConfigError(f"{origin} is no `lightspan serve --candidate`: it serves no candidate")
    raise ConfigError(f"{origin} refuses: {_message(status, content)}")


async def _request(url: str, key: str, body: msgspec.Struct | None) -> tuple[int, bytes]:
    """Send `body`, or GET if it is None; return the status and body of the answer.

    Redirects are not followed, because they could leak the key to another server.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    data = None if body is None else msgspec.json.encode(body)
    method = "GET" if data is None else "POST"
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.request(method, url, data=data, allow_redirects=False) as response,
    ):
        return response.status, await response.read()


def _message(status: int, content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}"
