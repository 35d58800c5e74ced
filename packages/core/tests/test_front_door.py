"""Test the names of `lightspan` that other packages provide."""

from __future__ import annotations

import pytest

import lightspan
from lightspan import plugins


def test_a_plugin_that_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(vars(lightspan), "GEPA", raising=False)
    monkeypatch.setattr(plugins, "installed_plugins", lambda kind: {})
    with pytest.raises(ModuleNotFoundError) as raised:
        from lightspan import GEPA  # noqa: F401
    assert str(raised.value) == (
        "lightspan.GEPA is not installed: `pip install './packages/core[prompts]' "
        "./packages/gateway ./packages/prompts ./packages/tools`, from a checkout of lightspan"
    )


def test_a_name_that_nobody_provides() -> None:
    with pytest.raises(AttributeError, match="module 'lightspan' has no attribute 'Trainers'"):
        lightspan.Trainers  # noqa: B018


def test_a_star_import_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "installed_plugins", lambda kind: {})
    names: dict[str, object] = {}
    exec("from lightspan import *", names)
    assert {"LightningRL", "Trainer", "record", "rollout"} <= names.keys()
    assert "SFT" not in names
    assert "SFT" not in dir(lightspan)
