"""Test a dry run's text about model requests that bypass the SDKs, word for word."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightspan import DevReport, Trainer
from lightspan.progress import SilentReporter
from lightspan_testing.scripted import ScriptedServer
from tests.reports.dry_runs import scripted


@pytest.fixture(scope="module")
def apps(dry_apps: Any) -> Any:
    """Return the module `framework_apps`."""
    return importlib.import_module("framework_apps")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("said") as running:
        yield running


def dev(rl: Callable[..., Any], app: Any, url: str = "", **options: Any) -> DevReport:
    """Run a dry run of one task with two rollouts."""
    engine = scripted({"": ["1", "2"]})
    trainer = Trainer(rl(**options), engine=engine, steps=1, reporter=SilentReporter())
    return trainer.dev(app, [{"q": "how?", "url": url, "id": "0"}], group_size=2)


def section(report: DevReport, heading: str) -> list[str]:
    """Return the lines of a section of the report; empty if there is no such section."""
    found = [part for part in report.text().split("\n\n") if part.startswith(f"{heading}\n")]
    return [line for part in found for line in part.splitlines()[1:]]


PAST = "PAST THE OPENAI AND ANTHROPIC SDKS"


def test_requests_past_the_sdks(rl: Callable[..., Any], apps: Any, server: ScriptedServer) -> None:
    report = dev(rl, apps.past, server.url)
    host = server.origin.removeprefix("http://")
    asked = f"mine at {host} by framework_apps"
    fix = f'use the OpenAI SDK in its place, with base_url="{server.url}"'
    assert section(report, PAST) == [
        f"  reviewer: 2 requests to {asked}: it is not selected, so nothing has to change; "
        "max_frozen_calls counts none",
        f"  writer: 2 requests to {asked}: {fix}",
    ]
    assert report.json()["uncaptured"][1] == {
        "agent": "writer",
        "request": asked,
        "requests": 2,
        "selected": True,
        "fix": fix,
    }
    assert (
        "2 requests of agents that would be trained (writer) went past the OpenAI and Anthropic "
        "SDKs, and cannot be trained: see below for what to change"
    ) in report.warnings
