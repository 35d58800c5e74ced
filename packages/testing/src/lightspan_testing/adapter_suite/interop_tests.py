"""Tests with frames around the framework, other instrumentations, and apps built before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightspan.schema.spans import Span
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.process import CHILD, NO_WAY_OUT, scope_as_json
from lightspan_testing.adapter_suite.scenario_runner import part_of, play
from lightspan_testing.adapter_suite.scenarios import Model
from lightspan_testing.adapter_suite.trees import inside


class InteropTests(AdapterTests):
    """No call is doubled or lost."""

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_inside_another_frame(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """Paths concatenate: frames pushed around the framework come first."""
        from lightspan import agent

        self.expects(request, scenario, "inside_another_frame")
        app = self.app(stage, scenario)

        async def run(text: str) -> Any:
            with agent("outer"):
                return await app.run(text)

        nested = replace(app, run=run, run_sync=None, tree=inside("outer", app.tree))
        with self.adapter.instrument():
            played = play(stage, nested, scenario, "async", through_gateway=True)
        self.check(played, scenario, nested, stage)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_openinference_beside_it(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """Another instrumentation, installed before or after ours."""
        self.expects(request, scenario, "openinference")
        self.check_beside(stage, scenario, self.openinference)

    def check_beside(
        self, stage: Stage, scenario: str, other: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Play the scenario with another instrumentation, installed first and installed last."""
        for first, second in (
            (other, self.adapter.instrument),
            (self.adapter.instrument, other),
        ):
            app = self.app(stage, scenario)
            with first(), second():
                played = play(stage, app, scenario, "async", through_gateway=True)
            self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("telemetry", ["on", "off"])
    def test_built_at_import(
        self, request: pytest.FixtureRequest, stage: Stage, telemetry: str
    ) -> None:
        """Apps and clients are built at import, before `instrument()`; telemetry on and off."""
        scenarios = ["team", "agent_as_tool"]
        self.expects(request, *scenarios, "built_at_import", f"telemetry_{telemetry}")
        apps = {name: self.build(name, Model(base_url=stage.url)) for name in scenarios}
        # twice each: an app must survive its first attempt
        played = [
            (name, stage.open(part_of(apps[name], name), through_gateway=True))
            for name in [*scenarios, *scenarios]
        ]
        message = {
            "file": sys.modules[type(self).__module__].__file__,
            "suite": type(self).__qualname__,
            "url": stage.url,
            "attempts": [(name, scope_as_json(attempt)) for name, attempt in played],
            "telemetry": telemetry == "on",
        }
        environment = self.loud_environment if telemetry == "on" else self.silent_environment
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD],
            input=json.dumps(message),
            env={**os.environ, **environment, **NO_WAY_OUT},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("spans:")]
        for (name, attempt), line in zip(played, lines, strict=True):
            data = bytes.fromhex(line.removeprefix("spans:"))
            attempt.spans += msgspec.msgpack.decode(data, type=list[Span])
            stage.close(attempt)
            self.check(attempt, name, apps[name], stage)
