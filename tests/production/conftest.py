"""Fixtures of the recording's tests."""

from packages.core.tests.production.conftest import server, url

__all__ = ["server", "url"]
