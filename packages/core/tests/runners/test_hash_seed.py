"""Test that runner processes have one order of sets, so that rollouts can be repeated."""

from __future__ import annotations

import os

import pytest

from lightspan.runners.local import _hash_seed


def test_processes_get_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with _hash_seed():
        assert os.environ["PYTHONHASHSEED"] == "0"
    assert "PYTHONHASHSEED" not in os.environ


def test_a_seed_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with _hash_seed():
        assert os.environ["PYTHONHASHSEED"] == "random"
    assert os.environ["PYTHONHASHSEED"] == "random"
