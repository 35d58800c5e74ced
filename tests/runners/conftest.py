"""Fixtures for tests of runners."""

from packages.core.tests.runners.conftest import clean, store

__all__ = ["clean", "store"]
