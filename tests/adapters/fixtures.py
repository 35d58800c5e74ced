"""Fixtures of the adapters' tests: a scripted model, a `Stage`, and each adapter around a test.

A framework is imported only by the fixture that needs it, because not all can be installed
together.
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
    """Return the model's script, which repeats the last message. A test file may define its own."""

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


@pytest.fixture(scope="module")
def image_stage() -> Iterator[Stage]:
    with Stage(takes_images=True) as running:
        yield running
        assert running.brain.problems == []


@pytest.fixture
def installed_autogen(stage: Stage) -> Iterator[None]:
    """Install the adapter during a test; check afterwards that it is removed without a trace."""
    from packages.autogen.tests.autogen_apps import installed

    with installed():
        yield
    problems, stage.brain.problems = stage.brain.problems, []
    assert problems == []


@pytest.fixture
def rig(stage: Stage) -> Any:
    """Return a `Rig`, which creates AutoGen agents and records one attempt."""
    from packages.autogen.tests.autogen_apps import Rig

    return Rig(stage)


@pytest.fixture(scope="module")
def collected_crewai() -> Iterator[None]:
    """Collect garbage after the module, so that warnings of CrewAI's unclosed resources appear
    here.
    """
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
    """Run OpenInference's instrumentors, each named as `module.Class`, around a block."""
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
    "image_stage",
    "installed_autogen",
    "installed_crewai",
    "installed_langgraph",
    "installed_openai_agents",
    "rig",
    "script",
    "server",
    "stage",
]
