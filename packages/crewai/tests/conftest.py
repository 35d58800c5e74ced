"""Fixtures of the adapters' tests."""

import pytest

from tests.adapters.fixtures import *  # noqa: F403


@pytest.fixture
def script() -> str:
    """What the model says, unless a test has its own server."""
    return "fine"
