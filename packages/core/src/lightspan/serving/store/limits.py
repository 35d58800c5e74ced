"""What is left of an operation for who has a runner's key: what runners do, and no more.

A runner looks for attempts under way, to report those of its processes that died
(`runners.deaths`), whose claims it can show (`proofs.ClaimIds`). What others did is none of its
business: no finished attempt, no production, no call token, no path of another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.gateway.refusal import ApiError
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


async def check_runner(
    store: Store, operation: Operation, arguments: Arguments, proofs: Sequence[str]
) -> None:
    """Raise `ApiError` for arguments that are no runner's.

    Args:
        proofs: that it has claimed the attempts that it writes to.
    """
    name = operation.name
    if operation.written is not None:
        written = operation.written(arguments)
        if len(proofs) != len(written) or not all(map(proves, proofs, written)):
            raise _forbidden(f"{_DOES[name]} an attempt that it has not claimed")
    if name == "announce" and arguments["peer"].role is not PeerRole.RUNNER:
        raise _forbidden("announce itself as another kind of peer than a runner")
    if name == "announce" and await _is_another_kind(store, arguments["peer"].peer_id):
        raise _forbidden("announce itself under the id of another kind of peer than a runner")
    if "lease_s" in arguments:
        check_lease(arguments["lease_s"], LONGEST_LEASE_S)
    if name == "withdraw" and await _is_another_kind(store, arguments["peer_id"]):
        raise _forbidden("withdraw another kind of peer than a runner")
    if name == "rollouts" and arguments["status"] != [RolloutStatus.RUNNING]:
        raise _forbidden("ask for other rollouts than those that are running")


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


async def _is_another_kind(store: Store, peer_id: str) -> bool:
    known = {peer.peer_id: peer.role for peer in await store.peers()}
    return known.get(peer_id, PeerRole.RUNNER) is not PeerRole.RUNNER


def _forbidden(what: str) -> ApiError:
    return ApiError(403, f"the key is a runner's, who may not {what}")
