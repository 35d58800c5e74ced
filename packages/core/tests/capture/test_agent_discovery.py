"""Test the search for agents in an app, which every adapter's `agents()` uses."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from lightspan.capture import agent_discovery
from lightspan.capture.agent_discovery import AgentSearch, Location
from lightspan.capture.static_analysis import is_user_code
from lightspan.schema.routing import AgentPaths


class Agent:
    def __init__(self, name: str, *tools: Any) -> None:
        self.name = name
        self.tools = tools


class Search(AgentSearch[Location]):
    makers = frozenset({"make_agent"})

    def visit(self, thing: Any, where: Location) -> None:
        if isinstance(thing, Agent):
            self.add(where.within(thing.name))
            self.look_at_all(thing.tools, where.within(thing.name))
        else:
            super().visit(thing, where)


WRITER = Agent("writer")


def asks_the_writer() -> Any:
    return WRITER


class Desk:
    def __init__(self, held: Any) -> None:
        self.held = held

    def ask(self) -> Any:
        return WRITER


def found_in(app: Any) -> AgentPaths:
    return Search().search(app, Location())


@pytest.mark.parametrize(
    "app",
    [
        WRITER,
        [WRITER],
        {"a": (WRITER,)},
        {1: frozenset({WRITER})},
        functools.partial(print, WRITER),
        Desk(WRITER),
    ],
)
def test_things_that_hold_agents(app: Any) -> None:
    assert "writer" in found_in(app).paths
    assert found_in(app).complete


def test_what_functions_and_methods_refer_to() -> None:
    assert found_in(Agent("team", asks_the_writer)) == (("team", "team/writer"), True)
    assert found_in(Agent("team", Desk(None).ask)) == (("team", "team/writer"), True)
    assert found_in(asks_the_writer) == (("app", "writer"), True)


def test_a_function_that_makes_agents_leaves_the_list_incomplete() -> None:
    def makes() -> Any:
        return make_agent()  # type: ignore[name-defined]  # noqa: F821

    assert found_in(Agent("team", makes)) == (("team",), False)


def test_things_that_hold_each_other_are_looked_at_once() -> None:
    first: list[Any] = [WRITER]
    first.append(first)
    assert found_in(first) == (("writer",), True)


def test_an_agent_that_contains_itself_leaves_the_list_incomplete() -> None:
    team = Agent("team", WRITER)
    team.tools = (lambda: team, WRITER)
    assert found_in(team) == (("team", "team/writer"), False)
    desk = Desk(None)
    desk.held = Agent("desk", desk.ask, desk)
    assert found_in(desk) == (("app", "writer", "desk", "desk/writer"), False)


def test_an_app_without_end_leaves_the_list_incomplete() -> None:
    assert found_in([WRITER, *range(2_000), Agent("last")]) == (("writer",), False)


@pytest.fixture
def sibling(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register an adapter in addition to the tested one, and return its framework's name."""
    point = EntryPoint("crews", "lightspan_crews", "lightspan.frameworks")
    monkeypatch.setattr(agent_discovery, "installed_plugins", lambda kind: {"crews": point})
    return "crews"


def test_another_framework_leaves_the_list_incomplete(
    sibling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("crews")
    module.Crew = type("Crew", (), {"__module__": "crews.crew"})
    monkeypatch.setitem(sys.modules, "crews", module)

    def imports() -> Any:
        import crews  # type: ignore[import-not-found]

        return crews

    assert found_in(Agent("team", module.Crew())) == (("team",), False)
    assert found_in(Agent("team", imports)) == (("team",), False)


def test_an_adapters_own_framework_is_no_other(sibling: str) -> None:
    class Own(Search):
        installed = ("crews",)

    def mentions() -> Any:
        return crews  # type: ignore[name-defined]  # noqa: F821

    assert Own().search(Agent("team", mentions), Location()) == (("team",), True)


def test_what_functions_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that defaults, closures and the module's globals that a function mentions are found."""
    module: Any = ModuleType("my_agents")
    module.editor = Agent("editor")
    monkeypatch.setitem(sys.modules, "my_agents", module)
    monkeypatch.setitem(globals(), "my_agents", module)
    closed = Agent("closed")

    def app(first: Any = Agent("first"), *, second: Any = Agent("second")) -> Any:  # noqa: B008
        return first, second, closed, later, my_agents.editor  # type: ignore[name-defined]  # noqa: F821

    assert {*found_in(app).paths} == {"app", "first", "second", "closed", "editor"}
    later = None  # was no cell's value yet


def test_what_is_installed_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_user_code(found_in)
    assert not is_user_code(found_in, installed=[__name__.partition(".")[0]])
    assert not is_user_code(functools)
    assert not is_user_code(pytest)
    main = ModuleType("__main__")  # a script or a notebook
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert is_user_code(main)
