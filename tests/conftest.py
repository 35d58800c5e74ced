"""Test processes reach nothing but this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] not in LOOPBACK:
            raise AssertionError(f"a test wants to reach {address[0]}: only loopback is allowed")
        return original(self, address)

    return connect


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to any other machine fails the test."""
    monkeypatch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))
