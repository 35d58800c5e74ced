"""What the code of an app refers to, found without running it."""

from __future__ import annotations

import json as installed_json
import sys
from types import ModuleType
from typing import Any

import pytest

from lightspan.capture.static_analysis import (
    is_user_code,
    names_in,
    references,
)

AGENT = object()
OTHER = object()


def uses_globals() -> Any:
    def inside() -> Any:
        return AGENT

    return inside, "looked up by text", ("also", 7, "in a tuple")


def test_what_a_function_refers_to() -> None:
    held = object()

    def works(first: Any = OTHER, *, second: Any = held) -> Any:
        return first, second, AGENT, closed

    closed = object()
    found = list(references(works, set(names_in(works.__code__))))
    for thing in (OTHER, held, AGENT, closed):
        assert any(one is thing for one in found)
    assert not any(one is uses_globals for one in found)


def test_what_a_users_module_holds_is_found_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("my_agents")
    module.writer = AGENT
    monkeypatch.setitem(sys.modules, "my_agents", module)
    monkeypatch.setitem(globals(), "my_agents", module)

    def works() -> Any:
        return my_agents.writer  # type: ignore[name-defined]  # noqa: F821

    names = set(names_in(works.__code__))
    assert any(one is AGENT for one in references(works, names))
    assert not any(one is AGENT for one in references(works, names, installed=["my_agents"]))


def test_what_is_installed_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_user_code(uses_globals)
    assert not is_user_code(uses_globals, installed=[__name__.partition(".")[0]])
    assert not is_user_code(installed_json)
    assert not is_user_code(pytest)
    main = ModuleType("__main__")  # a script or a notebook
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert is_user_code(main)
