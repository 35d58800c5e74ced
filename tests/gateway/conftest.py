"""Fixtures of the gateway's tests."""

from packages.gateway.tests.conftest import store

__all__ = ["store"]
