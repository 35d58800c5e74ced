"""Test every framework inside every other one, and make docs/guides/nesting.md of the results.

The outer agent `ask` calls its model, runs the inner agent `helper`, and calls its model again.
There is one attempt with one tree, and the path is `ask/helper`, in training and in production.

Each environment generates one section of the page. If the section is outdated, the last test writes
the new page and prints where it is.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from lightspan_testing.adapter_harness import Says, Stage, Turn
from lightspan_testing.adapter_suite import instructions, tree
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from tests.adapters.guide_pages import import_page
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
    attempt_of,
    client,
    instrumented,
)

pytestmark = MARKS

PAGE: Final = Path(__file__).parents[2] / "docs/guides/nesting.md"
MODES: Final = ("async", "sync")
PLACES: Final = ("training", "production")


class Form(NamedTuple):
    """A kind of agent that can be the outer or the inner one."""

    framework: str | None
    """Name of the framework; None for plain Python."""
    make: Callable[[str, str, Layer | None], Layer]
    has_tool: bool
    """Whether it runs the inner agent by a tool. Otherwise its own code runs the inner agent."""


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
    """Skip the test if a framework is not installed, and name it with the reason."""
    for name in frameworks:
        if name is None or name in FRAMEWORKS:
            continue
        if name == "crewai" and "openai_agents" in FRAMEWORKS:
            pytest.skip(f"crewai is excluded: {needs('openai-agents')}; tests_behind")
        pytest.skip(f"{name} is not installed here; tests_behind has all frameworks")


def needs(distribution: str) -> str:
    """Return which OpenAI SDK a distribution requires, which is why some frameworks exclude
    others.
    """
    [spec] = [one for one in requires(distribution) or () if one.startswith("openai")]
    return f"{distribution} {version(distribution)} needs `{spec}`"


# --- what happens ---------------------------------------------------------------------------
class Nested(NamedTuple):
    """An agent that runs another one, with the model's script and the expected tree."""

    outermost: Layer
    says: Says
    tree: list[str]


def nested(outer: str, inner: str, url: str) -> Nested:
    """Return the agent `helper` inside the agent `ask`, with the expected tree."""
    helper = FORMS[inner].make("helper", url, None)
    asking = Turn(calls=[("ask", '{"what": "help with {task}"}')])
    says = {"ask": [asking, "ask is done with {task}."], "helper": ["helper knows of {task}."]}
    inside = ["invoke_agent helper @ask/helper", "  chat @ask/helper"]
    if FORMS[outer].has_tool:
        inside = ["execute_tool ask @ask", *(f"  {line}" for line in inside)]
    around = ["  chat @ask", *(f"  {line}" for line in inside), "  chat @ask"]
    return Nested(FORMS[outer].make("ask", url, helper), says, ["invoke_agent ask @ask", *around])


def paths(app: Nested, stage: Stage, mode: str, place: str, folder: Path) -> list[str]:
    """Run the agents, check the tree, and return the paths of their model calls in order."""
    with instrumented(FRAMEWORKS):
        played = attempt_of(app.outermost, app.says, stage, mode, place, folder)
    problems, stage.brain.problems = stage.brain.problems, []
    assert problems == []
    assert tree(played.spans) == app.tree
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
    ESTABLISHED.add((outer, inner, mode, place))


def test_a_client_of_another_framework_is_asked_once(stage: Stage, tmp_path: Path) -> None:
    """Check AutoGen's model client in a LangGraph node: only the SDK's call is recorded."""
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
async def test_the_program_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("langgraph", "openai_agents")
    from agents import set_trace_processors
    from agents.models import _openai_shared

    set_trace_processors([])
    with ScriptedServer("14") as server, instrumented(FRAMEWORKS):
        page = import_page("nesting", tmp_path, monkeypatch, server.url)
        monkeypatch.setattr(_openai_shared, "_default_openai_client", client(server.url))
        monkeypatch.setattr(_openai_shared, "_use_responses_by_default", False)
        with captured() as run:
            assert await page["learning"].answer(page["train"].tasks[7]) == 1.0
    assert run.calls == ["ask/helper"]


ESTABLISHED: Final[set[tuple[str, str, str, str]]] = set()
"""(outer, inner, mode, place) of each test that has found the path `ask/helper`."""
OWN_WAYS: Final = {
    "LangGraph: a graph that is a node": ("langgraph", "ask/helper"),
    "AutoGen: a team in a team": ("autogen", "ask/helper/writer"),
    "AutoGen: `AgentTool`": ("autogen", "ask/helper"),
    "OpenAI Agents SDK: `as_tool`": ("openai_agents", "ask/helper"),
    "OpenAI Agents SDK: a handoff": ("openai_agents", "helper"),
    "CrewAI: a crew in a flow's method": ("crewai", "Ask/begin/helper"),
}
"""Way in which a framework nests its own agents → (framework, path).

The scenarios `nested`, `agent_as_tool` and `handoff` of the adapter's tests check the paths.
"""

SECTIONS: Final = {
    frozenset({"langgraph", "autogen", "openai_agents", "crewai"}): "All frameworks together",
    frozenset({"langgraph", "autogen", "openai_agents"}): "The newest OpenAI Agents SDK",
}
FORMS_HERE: Final = [one for one in FORMS if FORMS[one].framework in (None, *FRAMEWORKS)]
DISTRIBUTIONS: Final = {
    "langgraph": "langgraph",
    "autogen": "autogen-agentchat",
    "openai_agents": "openai-agents",
    "crewai": "crewai",
}


def section() -> str:
    """Return the page's section for this environment."""
    versions = [f"{DISTRIBUTIONS[one]} {version(DISTRIBUTIONS[one])}" for one in FRAMEWORKS]
    excluding = [needs("openai-agents")]
    excluding += [needs("crewai")] if "crewai" in FRAMEWORKS else ["so CrewAI is excluded"]
    rows = [[outer, *["`ask/helper`"] * len(FORMS_HERE)] for outer in FORMS_HERE]
    ways = [[way, f"`{path}`"] for way, (one, path) in OWN_WAYS.items() if one in FRAMEWORKS]
    return "\n\n".join(
        [
            f"## {SECTIONS[frozenset(FRAMEWORKS)]}",
            f"{', '.join(versions)}, openai {version('openai')}. {'; '.join(excluding)}.",
            table(["outer ↓ inner →", *FORMS_HERE], rows),
            table(["a framework inside itself, in a way of its own", "path"], ways),
        ]
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_page_says_what_was_established(tmp_path: Path) -> None:
    """Compare the page with the results of the tests above; skipped if they have not run."""
    title = SECTIONS.get(frozenset(FRAMEWORKS))
    if title is None:
        pytest.skip(f"the page has no section of {' and '.join(FRAMEWORKS) or 'no framework'}")
    if len(ESTABLISHED) < len(MODES) * len(PLACES) * len(FORMS_HERE) ** 2:
        pytest.skip("not all tests of this file ran, or passed")
    written = PAGE.read_text()
    _, heading, rest = written.partition(f"## {title}\n")
    said = (heading + rest.partition("\n## ")[0]).strip()
    if said != section():
        renewed = tmp_path / PAGE.name
        renewed.write_text(written.replace(said, section()))
        pytest.fail(f"{PAGE} does not say what was established; {renewed} does")
