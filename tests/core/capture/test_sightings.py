"""Which framework a span's instrumentation scope is of, and how much is kept."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest

from lightspan.capture import sightings
from lightspan.capture.sightings import Sightings, adapted, framework_of
from lightspan.schema import conventions as c
from lightspan.schema.origins import Framework, Request

INSTALLED = {
    "agent-framework-core": "1.23.0",
    "agno": "3.1.10",
    "google-adk": "2.13.0",
    "langgraph": "1.2.22",
    "llama-index-core": "0.14.25",
    "openai-agents": "0.24.0",
    "pydantic-ai-slim": "2.68.0",
    "smolagents": "1.26.0",
    "strands-agents": "1.62.0",
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name not in INSTALLED:
            raise PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(sightings, "version", found)
    framework_of.cache_clear()
    adapted.cache_clear()


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("agent_framework", "agent-framework-core"),
        ("gcp.vertex.agent", "google-adk"),
        ("openinference.instrumentation.agno", "agno"),
        ("openinference.instrumentation.google_adk", "google-adk"),
        ("openinference.instrumentation.langchain", "langgraph"),
        ("openinference.instrumentation.openai_agents", "openai-agents"),
        ("openinference.instrumentation.smolagents", "smolagents"),
        ("opentelemetry.instrumentation.agno", "agno"),
        ("pydantic-ai", "pydantic-ai-slim"),
        ("strands.telemetry.tracer", "strands-agents"),
    ],
)
def test_scopes(library: str, name: str) -> None:
    assert framework_of(library) == Framework(name, INSTALLED[name], f"spans of {library}")


def test_what_is_not_installed_has_the_scopes_name_and_no_version() -> None:
    assert framework_of("some.framework") == Framework(
        "some.framework", "", "spans of some.framework"
    )
    assert framework_of("") == Framework("", "", "spans of ")


def test_spans_of_our_hooks_are_told_by_the_line_that_made_them() -> None:
    assert framework_of("llama_index") == Framework(
        "llama-index-core", "0.14.25", 'otel.instrument("llama-index")'
    )


def test_adapters() -> None:
    assert adapted("langgraph", "lightspan_langgraph") == Framework(
        "langgraph", "1.2.22", "lightspan_langgraph"
    )


def test_names_without_end_are_not_kept() -> None:
    seen = Sightings()
    request = Request("a", "httpx.Client", "m", "", "mine", "http://host/v1/chat/completions")
    for number in range(sightings.MOST + 5):
        seen.agent(Framework("f", "", "spans of f"), str(number))
        seen.request(request._replace(agent=str(number)))
    seen.request(request._replace(agent="0"))
    said = {key: json.loads(str(value)) for key, value in seen.attributes().items()}
    assert {key: len(value) for key, value in said.items()} == {
        c.FRAMEWORKS: sightings.MOST,
        c.REQUESTS_PAST: sightings.MOST,
    }
    assert said[c.REQUESTS_PAST][0][-1] == 2
