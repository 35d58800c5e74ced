"""Checks of a store's peers: presence and protocol version."""

from __future__ import annotations

from typing import Final

from lightspan.runners.foreign_python import mismatch
from lightspan.schema.records import Peer
from lightspan.schema.semconv import PROTOCOL_VERSION

_GONE_S: Final = 20.0
"""Seconds without an announcement after which a peer counts as gone."""


def is_present(peer: Peer) -> bool:
    """Return whether the peer was announced recently."""
    return peer.silent_s < _GONE_S


def is_compatible(peer: Peer) -> bool:
    """Return whether the peer has the protocol version of this process."""
    return peer.protocol == PROTOCOL_VERSION


def incompatibility(peer: Peer) -> str:
    """Return the message about a peer with another protocol version."""
    return mismatch(peer.python, peer.lightspan, peer.protocol)
