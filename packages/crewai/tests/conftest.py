"""Fixtures of the adapters' tests."""

import pytest

from tests.adapters.fixtures import *  # noqa: F403


@pytest.fixture
def script() -> str:
    """Return the model's answer; a test with its own server does not use it."""
    return "fine"
