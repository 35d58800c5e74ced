"""Fixtures of the recording's tests."""

from packages.core.tests.production.conftest import client, server, url

__all__ = ["client", "server", "url"]
