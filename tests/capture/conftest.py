"""Fixtures of the SDK instrumentation's tests."""

from packages.core.tests.capture.conftest import elsewhere, gateway, unwrapped

__all__ = ["elsewhere", "gateway", "unwrapped"]
