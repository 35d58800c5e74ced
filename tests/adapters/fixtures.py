"""What the adapters' tests share: a scripted model, a stage, and each adapter around a test.

A framework is imported only by the fixture that needs it: the frameworks exclude one another.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lightspan_testing.adapter_harness import Stage
from lightspan_testing.scripted import Request, Script, ScriptedServer


@pytest.fixture
def script() -> Script:
    """What the model says: the last message again. A file of tests may have its own."""

    def echo(request: Request) -> str:
        return request.last_text

    return echo


@pytest.fixture
def server(script: Script) -> Iterator[ScriptedServer]:
    with ScriptedServer(script) as running:
        yield running


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running
        assert running.brain.problems == []


@pytest.fixture
def installed_autogen(stage: Stage) -> Iterator[None]:
    """The adapter around a test, which leaves nothing behind; likewise the others."""
    from packages.autogen.tests.autogen_apps import installed

    with installed():
        yield
    problems, stage.brain.problems = stage.brain.problems, []
    assert problems == []


@pytest.fixture
def rig(stage: Stage) -> Any:
    """AutoGen agents, and what one attempt of theirs recorded."""
    from packages.autogen.tests.autogen_apps import Rig

    return Rig(stage)


@pytest.fixture(scope="module")
def collected_crewai() -> Iterator[None]:
    """What CrewAI left unclosed is found here, where it is known, and not when pytest ends."""
    yield
    gc.collect()


@pytest.fixture
def installed_crewai(collected_crewai: None) -> Iterator[None]:
    from packages.crewai.tests.crewai_apps import installed

    with installed():
        yield


@pytest.fixture
def installed_langgraph() -> Iterator[None]:
    from packages.langgraph.tests.langgraph_apps import installed

    with installed():
        yield


@pytest.fixture
def installed_openai_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from packages.openai_agents.tests.openai_agents_apps import installed

    with installed(monkeypatch):
        yield


@contextmanager
def openinference(*instrumentors: str, **options: Any) -> Iterator[None]:
    """OpenInference's instrumentors (`module.Class`) around a block."""
    with ExitStack() as stack:
        for instrumentor in instrumentors:
            module, name = instrumentor.split(".")
            beside = pytest.importorskip(f"openinference.instrumentation.{module}")
            made = getattr(beside, name)()
            made.instrument(**options)
            stack.callback(made.uninstrument)
        yield


__all__ = [
    "collected_crewai",
    "installed_autogen",
    "installed_crewai",
    "installed_langgraph",
    "installed_openai_agents",
    "rig",
    "script",
    "server",
    "stage",
]
