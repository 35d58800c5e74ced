"""Frameworks × scenarios: which of them are tested, and why the others are not.

The test files take their scenarios from here. Run this file to print the table of
docs/reference/versions.md. No framework is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
ALWAYS: Final = ("single", "parallel_tools", "agent_as_tool")
"""Scenarios that every framework plays."""
RESPONSES: Final = ALWAYS
"""Scenarios that are also played with the Responses API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tests of a framework."""

    scenarios: Sequence[str] = ()
    """Scenarios in addition to `ALWAYS`."""
    modes: Sequence[str] = ("async", "sync", "stream")
    outside: Sequence[str] = ()
    """Scenarios, in addition to `ALWAYS`, that are one run of the framework.

    In production such a run is one attempt.
    """
    responses: bool = False
    gaps: Mapping[str, str] = field(default_factory=dict)
    """Column of the table → reason why the framework has no test for it."""

    @property
    def played(self) -> tuple[str, ...]:
        """All scenarios of the framework."""
        return (*ALWAYS, *self.scenarios)

    @property
    def whole(self) -> tuple[str, ...]:
        """All scenarios that are one run of the framework."""
        return (*ALWAYS, *self.outside)


NO_HANDOFF: Final = "it has none: an agent is asked by another, and answers it"
PAST_THE_SDK: Final = "LiteLLM asks it past the OpenAI SDK; `dev` names such calls"
NO_ASYNC: Final = "its agents run synchronously only"

MATRIX: Final[Mapping[str, Row]] = {
    "pydantic-ai": Row(
        scenarios=("team", "parallel", "same_name", "unicode", "tool_error", "model_error"),
        outside=("tool_error", "model_error"),
        responses=True,
        gaps={"handoff": NO_HANDOFF},
    ),
    "smolagents": Row(
        scenarios=("parallel", "unicode", "tool_error", "model_error"),
        modes=("sync", "stream"),
        outside=("parallel", "model_error"),
        gaps={
            "handoff": NO_HANDOFF,
            "Responses": "it has no model for them",
            "async": NO_ASYNC,
        },
    ),
    "strands-agents": Row(
        scenarios=("parallel", "handoff", "unicode", "tool_error", "model_error"),
        outside=("handoff", "model_error"),
        responses=True,
    ),
    "agent-framework": Row(
        scenarios=("parallel", "handoff", "unicode", "tool_error", "model_error"),
        outside=("handoff", "model_error"),
        responses=True,
    ),
    "google-adk": Row(
        scenarios=("parallel", "handoff"),
        outside=("parallel", "handoff"),
        gaps={"Responses": PAST_THE_SDK},
    ),
    "agno": Row(
        scenarios=("parallel", "handoff", "unicode"),
        outside=("handoff",),
        responses=True,
    ),
    "llama-index": Row(
        scenarios=("parallel", "handoff", "unicode", "tool_error", "model_error"),
        outside=("handoff", "model_error"),
        responses=True,
    ),
    "dspy": Row(
        scenarios=("team", "parallel", "model_error"),
        outside=("team", "model_error"),
        gaps={
            "handoff": "it has none: a program calls its predictors",
            "Responses": PAST_THE_SDK,
        },
    ),
}
"""Name in `otel.instrument` → tests of the framework."""


# --- the table ------------------------------------------------------------------------------
def covers(row: Row) -> Mapping[str, bool]:
    """Return column of the table → whether the framework has tests for it."""
    return {
        "alone": "single" in row.played,
        "in a tool": "agent_as_tool" in row.played,
        "handoff": "handoff" in row.played,
        "at once": "parallel" in row.played,
        "threads": True,  # every test file has the suite's
        "streamed": "stream" in row.modes,
        "Responses": row.responses,
        "sync": "sync" in row.modes,
        "async": "async" in row.modes,
        "32 at once": True,  # gathered where there is an asynchronous way, in threads everywhere
    }


def pins(name: str, age: str) -> Mapping[str, str]:
    """Return distribution → version in the constraints of a framework.

    Args:
        name: name in `otel.instrument`.
        age: `oldest` or `latest`.
    """
    path = ROOT / "constraints" / f"{name.replace('-', '_')}-{age}.txt"
    return dict(re.findall(r"^([\w.-]+)==(.+)$", path.read_text(), re.MULTILINE))


def versions(name: str) -> str:
    """Return the oldest and the latest tested version."""
    tested = [pins(name, age) for age in ("oldest", "latest")]
    return ", ".join(f"{each[DISTRIBUTIONS[name]]} (openai {each['openai']})" for each in tested)


DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "pydantic-ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "strands-agents": "strands-agents",
    "agent-framework": "agent-framework-core",
    "google-adk": "google-adk",
    "agno": "agno",
    "llama-index": "llama-index-core",
    "dspy": "dspy",
}


COMPANIONS: Final[Mapping[str, Sequence[str]]] = {
    "smolagents": ["openinference-instrumentation-smolagents"],
    "agent-framework": ["agent-framework-openai", "agent-framework-orchestrations"],
    "google-adk": ["litellm"],
    "agno": ["openinference-instrumentation-agno"],
    "llama-index": ["llama-index-llms-openai"],
    "dspy": ["litellm"],
}
"""Further distributions that the app needs, whose versions its page names."""


def page_table(name: str) -> str:
    """Return the table of versions on a framework's own page."""
    oldest, latest = (pins(name, age) for age in ("oldest", "latest"))
    shown = [DISTRIBUTIONS[name], *COMPANIONS.get(name, ()), "openai"]
    rows = [f"| `{each}` | {oldest.get(each, '')} | {latest[each]} |" for each in shown]
    lines = ["| package | oldest tested | newest tested |", "|---|---|---|", *rows]
    return "\n".join(lines).replace("|  |", "| |")


def table() -> str:
    """Return the table of the page: a row per framework, then a line per gap."""
    names = [*covers(Row())]
    lines = [f"| | {' | '.join(names)} | versions |", "|---" * (len(names) + 2) + "|"]
    for name, row in MATRIX.items():
        cells = ["yes" if played else "**no**" for played in covers(row).values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {versions(name)} |")
    lines += ["", "| not played | why |", "|---|---|"]
    for name, row in MATRIX.items():
        lines += [f"| `{name}`, {column} | {why} |" for column, why in row.gaps.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
