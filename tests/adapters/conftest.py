"""Fixtures of the adapters' tests."""

from tests.adapters.fixtures import *  # noqa: F403
