"""Fixtures of the runners' tests."""

from packages.core.tests.runners.conftest import clean, store

__all__ = ["clean", "store"]
