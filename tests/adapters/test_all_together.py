"""Test all adapters that can be installed together, in one process and nested in one another.

Each framework is a *layer*: an agent that calls its model, calls a tool, and calls its model again.
The tool runs the next layer, in another framework. So the whole tree is known beforehand, in any
order.
"""

from __future__ import annotations

import asyncio
import gc
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Part, Played, Stage, Turn
from lightspan_testing.adapter_suite import App, tree
from lightspan_testing.adapter_suite.checks import (
    check_attributes,
    check_calls,
    check_names,
    check_tokens,
)
from tests.adapters.layers import (
    FRAMEWORKS,
    LAYERS,
    MARKS,
    MODULES,
    Layer,
    in_this_loop,
    instrumented,
)

if len(FRAMEWORKS) < 2 and not os.environ.get("LIGHTSPAN_EXPECTED"):
    pytest.skip("fewer than two frameworks are installed", allow_module_level=True)

pytestmark = MARKS

AGENTS = {"langgraph": "planner", "autogen": "analyst", "openai_agents": "expert", "crewai": "poet"}
CONCURRENT = 32
CYCLES = [FRAMEWORKS[n:] + FRAMEWORKS[:n] for n in range(len(FRAMEWORKS))]


# --- an app of several layers ---------------------------------------------------------------
@dataclass
class Nested:
    """Nested agents of several frameworks, with the expected tree and the script of their model."""

    outermost: Layer
    expected: str
    part: Part

    @property
    def as_app(self) -> App:
        """The `App` that the suite's checks need."""

        async def run(text: str) -> Any:
            return await self.outermost.run(text)

        return App(run=run, tree=self.expected)


def build(frameworks: Sequence[str], url: str) -> Nested:
    """Build nested agents of `frameworks`, outermost first."""
    layer: Layer | None = None
    for framework in reversed(frameworks):
        layer = LAYERS[framework](AGENTS[framework], url, layer)
    assert layer is not None
    names = [AGENTS[framework] for framework in frameworks]
    asking: list[Turn | str] = [Turn(calls=[("ask", '{"what": "help with {task}"}')])]
    says = {name: [*asking, f"{name} is done with {{task}}."] for name in names[:-1]}
    part = Part({**says, names[-1]: [f"{names[-1]} knows of {{task}}."]})
    return Nested(layer, "\n".join(expected_of(frameworks)), part)


def expected_of(frameworks: Sequence[str], around: str = "") -> list[str]:
    """Return the lines of the expected tree of `frameworks` inside the path `around`."""
    lines, path = [], around
    name = AGENTS[frameworks[0]]
    for depth, one in enumerate([f"{name}_team", name] if frameworks[0] == "autogen" else [name]):
        path = f"{path}/{one}".lstrip("/")
        lines.append(f"{'  ' * depth}invoke_agent {one} @{path}")
    inside = [f"chat @{path}"]
    if len(frameworks) > 1:
        inner = [f"  {line}" for line in expected_of(frameworks[1:], path)]
        inside += [f"execute_tool ask @{path}", *inner, f"chat @{path}"]
    return lines + [textwrap.indent(line, "  " * len(lines)) for line in inside]


# --- playing --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running
    gc.collect()  # what CrewAI left unclosed is found here, where it is known


@pytest.fixture(autouse=True)
def _in_a_runner() -> Iterator[None]:
    """Carry the attempt's scope into threads that the app starts, as a runner does."""
    context_propagation.carry()
    try:
        yield
    finally:
        context_propagation.stop_carrying()


def check(nested: Nested, played: Played, stage: Stage) -> None:
    """Check the span tree, the agent and attempt of every call, and every token."""
    stage.close(played)
    assert stage.brain.problems == []
    lines = tree(played.spans)
    assert lines == nested.expected.splitlines(), "\n".join(lines)
    check_names(played, nested.as_app)
    check_attributes(played)
    check_calls(played, stage)
    if played.through_gateway:
        check_tokens(played, stage)


def play(nested: Nested, stage: Stage, mode: str, *, through_gateway: bool) -> None:
    """Run one attempt and check everything that is recorded."""
    played = stage.open(nested.part, through_gateway=through_gateway)
    with open_scope(played.scope):
        if mode == "sync":
            nested.outermost.run_sync(played.text)
        else:
            asyncio.run(in_this_loop(nested.outermost.run(played.text)))
    sdk_instrumentation.close()
    check(nested, played, stage)


def named(frameworks: Sequence[str]) -> str:
    return "-".join(frameworks)


# --- tests ----------------------------------------------------------------------------------
def test_which_frameworks_take_part() -> None:
    """Check that exactly the frameworks that the nox session names are tested."""
    expected = os.environ.get("LIGHTSPAN_EXPECTED")
    if not expected:
        pytest.skip("no nox session says which")
    modules = expected.split(",")
    assert [name for name in MODULES if f"lightspan_{name}" in modules] == FRAMEWORKS


@pytest.mark.parametrize("route", ["app", "gateway"])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("cycle", CYCLES, ids=named)
def test_all_inside_one_another(stage: Stage, cycle: Sequence[str], mode: str, route: str) -> None:
    """Check that each framework can be the outermost one, in two orders of installing."""
    for order in (FRAMEWORKS, FRAMEWORKS[::-1]):
        with instrumented(order):
            play(build(cycle, stage.url), stage, mode, through_gateway=route == "gateway")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cycle", [FRAMEWORKS, FRAMEWORKS[::-1]], ids=named)
def test_32_attempts_at_once(stage: Stage, cycle: Sequence[str]) -> None:
    apps = [build(cycle, stage.url) for _ in range(CONCURRENT)]
    played = [stage.open(app.part, through_gateway=True) for app in apps]

    async def one(app: Nested, attempt: Played) -> None:
        with open_scope(attempt.scope):
            await app.outermost.run(attempt.text)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for app, attempt in zip(apps, played, strict=True):
                group.create_task(one(app, attempt))

    with instrumented(FRAMEWORKS):
        asyncio.run(in_this_loop(all_of_them()))
    sdk_instrumentation.close()
    for app, attempt in zip(apps, played, strict=True):
        check(app, attempt, stage)
    span_ids = [span.span_id for attempt in played for span in attempt.spans]
    assert len(set(span_ids)) == len(span_ids)


def test_all_of_them_at_once(stage: Stage) -> None:
    """Check one attempt that runs every framework concurrently, so that all are siblings."""
    apps = [build([framework], stage.url) for framework in FRAMEWORKS]
    says = {name: turns for app in apps for name, turns in app.part.says.items()}
    played = stage.open(Part(says), through_gateway=True)

    async def main() -> None:
        await asyncio.gather(*(app.outermost.run(played.text) for app in apps))

    with instrumented(FRAMEWORKS), open_scope(played.scope):
        asyncio.run(in_this_loop(main()))
    sdk_instrumentation.close()
    stage.close(played)
    expected = sorted(app.expected.splitlines() for app in apps)
    assert tree(played.spans, ordered=False) == [line for lines in expected for line in lines]
    check_names(played, apps[0].as_app)
    check_calls(played, stage)
    check_tokens(played, stage)
