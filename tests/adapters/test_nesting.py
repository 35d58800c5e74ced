"""Frameworks inside frameworks: one attempt, one tree, the path `ask/helper`, in training and in
production; and docs/nesting.md, whose tables are what these tests establish.

The outer agent `ask` asks its model, runs the inner agent `helper`, and asks again.

A section of the page is what one environment establishes. When it is no longer so, the last test
writes the page as it has to be, and says where.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import lightspan
from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Part, Played, Says, Stage, Turn
from lightspan_testing.adapter_suite import instructions, tree
from lightspan_testing.adapter_suite.checks import check_calls, check_tokens
from lightspan_testing.adapter_suite.scenario_runner import inside_root
from lightspan_testing.attempts import read_recorded
from tests.adapters.layers import (
    FRAMEWORKS,
    MARKS,
    AutoGenAgent,
    CrewAI,
    LangGraph,
    LangGraphNode,
    Layer,
    OpenAIAgents,
    PlainPython,
    in_this_loop,
    instrumented,
)
from tests.adapters.own_ways import OWN_WAYS

pytestmark = MARKS

PAGE: Final = Path(__file__).parents[2] / "docs" / "nesting.md"
MODES: Final = ("async", "sync")
PLACES: Final = ("training", "production")
WAYS: Final = list(itertools.product(MODES, PLACES))


class Form(NamedTuple):
    """A kind of agent, outer or inner."""

    framework: str | None
    """None: plain Python."""
    make: Callable[[str, str, Layer | None], Layer]
    has_tool: bool
    """Whether it runs another agent as a tool, or in its own code."""


FORMS: Final[Mapping[str, Form]] = {
    "plain Python": Form(None, PlainPython, has_tool=False),
    "LangGraph node": Form("langgraph", LangGraphNode, has_tool=False),
    "LangGraph agent": Form("langgraph", LangGraph, has_tool=True),
    "AutoGen": Form("autogen", AutoGenAgent, has_tool=True),
    "OpenAI Agents SDK": Form("openai_agents", OpenAIAgents, has_tool=True),
    "CrewAI": Form("crewai", CrewAI, has_tool=True),
}
PAIRS = list(itertools.product(FORMS, FORMS))


def require(*frameworks: str | None) -> None:
    """Skip, by name and with the reason, what cannot be installed here."""
    for name in frameworks:
        if name is None or name in FRAMEWORKS:
            continue
        if name == "crewai" and "openai_agents" in FRAMEWORKS:
            pytest.skip(f"crewai is excluded: {needs('openai-agents')}; tests_behind")
        pytest.skip(f"{name} is not installed here; tests_behind has all frameworks")


def needs(distribution: str) -> str:
    """Which OpenAI SDK it needs: what excludes some frameworks from an environment."""
    [spec] = [one for one in requires(distribution) or () if one.startswith("openai")]
    return f"{distribution} {version(distribution)} needs `{spec}`"


# --- what happens ---------------------------------------------------------------------------
class Nested(NamedTuple):
    """An agent that runs another one."""

    outermost: Layer
    says: Says
    tree: list[str]


def nested(outer: str, inner: str, url: str) -> Nested:
    """`helper` inside `ask`, and the tree that is to be recorded."""
    helper = FORMS[inner].make("helper", url, None)
    asking = Turn(calls=[("ask", '{"what": "help with {task}"}')])
    says = {"ask": [asking, "ask is done with {task}."], "helper": ["helper knows of {task}."]}
    inside = ["invoke_agent helper @ask/helper", "  chat @ask/helper"]
    if FORMS[outer].has_tool:
        inside = ["execute_tool ask @ask", *(f"  {line}" for line in inside)]
    around = ["  chat @ask", *(f"  {line}" for line in inside), "  chat @ask"]
    return Nested(FORMS[outer].make("ask", url, helper), says, ["invoke_agent ask @ask", *around])


def in_own_way(way: str, url: str) -> Nested:
    """A framework inside itself."""
    _, make, expected, says = OWN_WAYS[way]
    return Nested(make(url), says, textwrap.dedent(expected).strip().splitlines())


def run(app: Layer, text: str, mode: str) -> None:
    if mode == "sync":
        app.run_sync(text)
    else:
        asyncio.run(in_this_loop(app.run(text)))
    sdk_instrumentation.close()


def trained(app: Nested, stage: Stage, mode: str) -> Played:
    """What an attempt that is trained records, its calls by the gateway."""
    played = stage.open(Part(app.says), through_gateway=True)
    context_propagation.carry()  # as a runner does
    try:
        with instrumented(FRAMEWORKS), open_scope(played.scope):
            run(app.outermost, played.text, mode)
    finally:
        context_propagation.stop_carrying()
    stage.close(played)
    check_tokens(played, stage)
    return played


def in_production(app: Nested, stage: Stage, mode: str, folder: Path) -> Played:
    """What is recorded of it in production: one attempt, whole."""
    store = f"sqlite:{folder / 'traces.db'}"
    played = stage.open(Part(app.says), through_gateway=False)
    with instrumented(FRAMEWORKS), lightspan.record(store):
        run(app.outermost, played.text, mode)
    recorded = read_recorded(store)
    assert len(recorded) == 1, "\n".join(one.tree() for one in recorded)
    assert (recorded[0].attempt.status, recorded[0].attempt.capture_errors) == ("succeeded", [])
    return inside_root(recorded[0], played)


def paths(app: Nested, stage: Stage, mode: str, place: str, folder: Path) -> list[str]:
    """Run it; the paths of its model calls, in order."""
    if place == "training":
        played = trained(app, stage, mode)
    else:
        played = in_production(app, stage, mode, folder)
    problems, stage.brain.problems = stage.brain.problems, []
    assert problems == []
    assert tree(played.spans) == app.tree
    check_calls(played, stage)
    return played.calls


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running
    gc.collect()  # what CrewAI left unclosed is found here, where it is known


# --- tests ----------------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_every_framework_inside_every_other(
    stage: Stage, tmp_path: Path, outer: str, inner: str, mode: str, place: str
) -> None:
    require(FORMS[outer].framework, FORMS[inner].framework)
    found = paths(nested(outer, inner, stage.url), stage, mode, place, tmp_path)
    assert found == ["ask", "ask/helper", "ask"]
    ESTABLISHED[(outer, inner), mode, place] = found[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_framework_inside_itself_in_its_own_way(
    stage: Stage, tmp_path: Path, way: str, mode: str, place: str
) -> None:
    require(OWN_WAYS[way].framework)
    found = paths(in_own_way(way, stage.url), stage, mode, place, tmp_path)
    ESTABLISHED[(way,), mode, place] = next(path for path in found if path != "ask")


def test_a_client_of_another_framework_is_asked_once(stage: Stage, tmp_path: Path) -> None:
    """AutoGen's model client in a LangGraph node: the SDK's call is recorded, nothing beside it."""
    require("langgraph", "autogen")

    class Node(LangGraphNode):
        async def _node_async(self, state: dict[str, str]) -> dict[str, str]:
            from autogen_core.models import SystemMessage, UserMessage

            model = AutoGenAgent("helper", self.url, None).agent._model_client
            told = SystemMessage(content=instructions("ask"))
            said = await model.create([told, UserMessage(content=state["text"], source="user")])
            return {"said": str(said.content)}

    says = {"ask": ["ask knows of {task}."]}
    app = Nested(Node("ask", stage.url, None), says, ["invoke_agent ask @ask", "  chat @ask"])
    for place in PLACES:
        assert paths(app, stage, "async", place, tmp_path) == ["ask"]


# --- the page -------------------------------------------------------------------------------
ESTABLISHED: Final[dict[tuple[tuple[str, ...], str, str], str]] = {}
"""Outer and inner (or the own way), mode, place → the path of the innermost agent's call."""

SECTIONS: Final = {
    frozenset({"langgraph", "autogen", "openai_agents", "crewai"}): "All frameworks together",
    frozenset({"langgraph", "autogen", "openai_agents"}): "The newest OpenAI Agents SDK",
}
FORMS_HERE: Final = [one for one in FORMS if FORMS[one].framework in (None, *FRAMEWORKS)]
WAYS_HERE: Final = [one for one in OWN_WAYS if OWN_WAYS[one].framework in FRAMEWORKS]
DISTRIBUTIONS: Final = {
    "langgraph": "langgraph",
    "autogen": "autogen-agentchat",
    "openai_agents": "openai-agents",
    "crewai": "crewai",
}


def section() -> str:
    """What this environment established, as a section of the page."""
    versions = [f"{DISTRIBUTIONS[one]} {version(DISTRIBUTIONS[one])}" for one in FRAMEWORKS]
    excluding = [needs("openai-agents")]
    excluding += [needs("crewai")] if "crewai" in FRAMEWORKS else ["so CrewAI is excluded"]
    rows = [[outer, *(cell(outer, inner) for inner in FORMS_HERE)] for outer in FORMS_HERE]
    ways = [[way, cell(way)] for way in WAYS_HERE]
    return "\n\n".join(
        [
            f"## {SECTIONS[frozenset(FRAMEWORKS)]}",
            f"{', '.join(versions)}, openai {version('openai')}. {'; '.join(excluding)}.",
            table(["outer ↓ inner →", *FORMS_HERE], rows),
            table(["a framework inside itself, in a way of its own", "path"], ways),
        ]
    )


def cell(*what: str) -> str:
    """The path; several, with where they were found, if it is not the same everywhere."""
    found = {way: ESTABLISHED[(what, *way)] for way in WAYS}
    if len(set(found.values())) == 1:
        return f"`{found[WAYS[0]]}`"
    return ", ".join(f"{' '.join(way)}: `{path}`" for way, path in found.items())


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_page_says_what_was_established(tmp_path: Path) -> None:
    """By the tests above, which run first: alone it can say nothing."""
    title = SECTIONS.get(frozenset(FRAMEWORKS))
    if title is None:
        pytest.skip(f"the page has no section of {' and '.join(FRAMEWORKS) or 'no framework'}")
    if len(ESTABLISHED) < len(WAYS) * (len(FORMS_HERE) ** 2 + len(WAYS_HERE)):
        pytest.skip("not all tests of this file ran, or passed")
    written = PAGE.read_text()
    _, heading, rest = written.partition(f"## {title}\n")
    said = (heading + rest.partition("\n## ")[0]).strip()
    if said != section():
        renewed = tmp_path / PAGE.name
        renewed.write_text(written.replace(said, section()))
        pytest.fail(f"{PAGE} does not say what was established; {renewed} does")
