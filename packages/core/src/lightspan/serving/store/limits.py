"""What is left of an operation for who has a runner's key: what runners do, and no more.

A runner looks for attempts under way, to report those of its processes that died
(`runners.deaths`), whose claims it can show (`proofs.ClaimIds`). What others did is none of its
business: no finished attempt, no production, no call token, no path of another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.gateway.api_errors import ApiError
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Peer,
    PeerRole,
    RolloutState,
    RolloutStatus,
)
from lightspan.stores._arguments import check_lease
from lightspan.stores.protocol import Store
from lightspan.stores.remote.operations import Arguments, Operation
from lightspan.stores.remote.proofs import proves

_DOES: Final = {
    "heartbeat": "extend",
    "report": "end",
    "finish": "end",
    "add_spans": "record anything for",
}
"""By operation, what it does to attempts."""
LONGEST_LEASE_S: Final = 86_400.0
"""Of a runner: one that is gone must not keep others from its rollouts for ever."""
_MOST: Final = {
    "attempts": ("rollout_ids", 10_000),
    "await_work": ("run_ids", 1_000),
    "heartbeat": ("attempts", 10_000),
    "report": ("reports", 10_000),
}
"""By operation, what it may name so many of: each is looked up, however short the request."""
_LONGEST_NAME: Final = 1_000
"""Of a runner's name, in bytes: it is written with each of its attempts."""
_LARGEST_PEER: Final = 2**14
"""Bytes of what a runner says of itself: each that comes has those of all others looked through."""
_MOST_PEERS: Final = 10_000
"""Whose words are looked through for each that comes."""
_LARGEST_REPORT: Final = 2**20
"""Bytes. Ours keep `texts.LONGEST_TEXT` of what an app raised."""


async def check_runner(
    store: Store, operation: Operation, arguments: Arguments, proofs: Sequence[str]
) -> None:
    """Raise `ApiError` for arguments that are no runner's.

    Args:
        proofs: that it has claimed the attempts that it writes to.
    """
    name = operation.name
    _check_size(name, arguments)
    if operation.written is not None:
        written = operation.written(arguments)
        if len(proofs) != len(written) or not all(map(proves, proofs, written)):
            raise _forbidden(f"{_DOES[name]} an attempt that it has not claimed")
    if name == "announce" and arguments["peer"].role is not PeerRole.RUNNER:
        raise _forbidden("announce itself as another kind of peer than a runner")
    if name == "announce":
        await _check_peer(store, arguments["peer"].peer_id)
    if "lease_s" in arguments:
        check_lease(arguments["lease_s"], LONGEST_LEASE_S)
    if name == "withdraw":
        known = await _roles(store)
        if known.get(arguments["peer_id"], PeerRole.RUNNER) is not PeerRole.RUNNER:
            raise _forbidden("withdraw another kind of peer than a runner")
    if name == "rollouts" and arguments["status"] != [RolloutStatus.RUNNING]:
        raise _forbidden("ask for other rollouts than those that are running")


def _check_size(name: str, arguments: Arguments) -> None:
    """Raise `ApiError` for little that asks for much, and for much that is kept."""
    if name in _MOST:
        _check_number(name, arguments)
    if name in ("claim", "announce"):
        own = arguments["runner_id"] if name == "claim" else arguments["peer"].peer_id
        _check_bytes(f"{name}: a runner's name has", len(own.encode()), _LONGEST_NAME)
    if name == "announce":
        size = len(msgspec.msgpack.encode(arguments["peer"]))
        _check_bytes(f"{name}: a runner says of itself", size, _LARGEST_PEER)
    if name in ("report", "finish"):
        for report in arguments["reports"] if name == "report" else [arguments["report"]]:
            size = len(msgspec.msgpack.encode(report))
            _check_bytes(f"{name}: a report has", size, _LARGEST_REPORT)


def _check_number(name: str, arguments: Arguments) -> None:
    argument, most = _MOST[name]
    named = arguments[argument] or ()
    if len(named) > most:
        text = f"{name}: {argument} has {len(named):,} items, and a runner may name {most:,}"
        raise ApiError(413, text)
    if name == "attempts" and len(set(named)) < len(named):
        raise ApiError(400, f"{name}: {argument} names a rollout twice")


def _check_bytes(what: str, size: int, most: int) -> None:
    if size > most:
        raise ApiError(413, f"{what} at most {most:,} bytes, not {size:,}")


def shown_to_runner(name: str, answer: Any) -> Any:
    """The answer without what is not for a runner."""
    show = _SHOWN.get(name)
    return answer if show is None else show(answer)


def _trained(states: list[RolloutState]) -> list[RolloutState]:
    return [state for state in states if state.rollout.mode is not Mode.PRODUCTION]


def _under_way(attempts: list[Attempt]) -> list[Attempt]:
    return [
        msgspec.structs.replace(attempt, call_token="")
        for attempt in attempts
        if attempt.status is AttemptStatus.RUNNING
    ]


def _without_paths(peers: list[Peer]) -> list[Peer]:
    """Where the others have their Python is of their machines."""
    return [msgspec.structs.replace(peer, python="") for peer in peers]


_SHOWN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "rollouts": _trained,
    "attempts": _under_way,
    "peers": _without_paths,
}


async def _check_peer(store: Store, peer_id: str) -> None:
    known = await _roles(store)
    if known.get(peer_id, PeerRole.RUNNER) is not PeerRole.RUNNER:
        raise _forbidden("announce itself under the id of another kind of peer than a runner")
    if peer_id not in known and len(known) >= _MOST_PEERS:
        raise ApiError(429, f"{len(known):,} processes were here within a day: no more are noted")


async def _roles(store: Store) -> dict[str, PeerRole]:
    return {peer.peer_id: peer.role for peer in await store.peers()}


def _forbidden(what: str) -> ApiError:
    return ApiError(403, f"the key is a runner's, who may not {what}")
