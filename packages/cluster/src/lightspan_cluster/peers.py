"""Check whether the runners and trainers that use a store are present and compatible.

A `Peer` is the announcement of one runner or trainer in the store.
"""

from __future__ import annotations

from lightspan.runners.discovery import GONE_S
from lightspan.runners.foreign_python import mismatch
from lightspan.schema.records import Peer
from lightspan.schema.semconv import PROTOCOL_VERSION


def is_present(peer: Peer, within_s: float = GONE_S) -> bool:
    """Return whether a runner or trainer announced itself in the store in the last `within_s` s."""
    return peer.silent_s < within_s


def is_compatible(peer: Peer) -> bool:
    """Return whether a runner or trainer has the protocol version of this process."""
    return peer.protocol == PROTOCOL_VERSION


def incompatibility(peer: Peer) -> str:
    """Return the error message for a runner or trainer of another protocol version."""
    return mismatch(peer.python, peer.lightspan, peer.protocol)


def problem_of(peer: Peer) -> str:
    """Return why a runner or trainer cannot work with this process; empty if it can."""
    return peer.problem if is_compatible(peer) else incompatibility(peer)
