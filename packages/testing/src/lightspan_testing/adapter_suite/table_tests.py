"""Tests of every scenario in every mode on every route."""

from __future__ import annotations

import pytest

from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.scenario_runner import play
from lightspan_testing.adapter_suite.scenarios import MODES, ROUTES, SCENARIOS
from lightspan_testing.adapter_suite.trees import calls_of


class TableTests(AdapterTests):
    """Whole span trees and token records are compared."""

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_scenario(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, mode: str, route: str
    ) -> None:
        if mode not in SCENARIOS[scenario].modes:
            pytest.skip(f"{scenario} has no {mode} form")
        self.expects(request, scenario, f"{scenario}/{mode}", f"{scenario}/{mode}/{route}", mode)
        app = self.app(stage, scenario, mode)
        with self.adapter.instrument():
            played = play(stage, app, scenario, mode, through_gateway=route == "gateway")
        self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_agents(self, request: pytest.FixtureRequest, stage: Stage, scenario: str) -> None:
        """`agents()` lists every agent that calls a model, without running the app."""
        self.expects(request, scenario, "agents", f"agents/{scenario}")
        app = self.app(stage, scenario)
        paths, complete = self.adapter.agents(app.target)
        assert len(set(paths)) == len(paths)
        assert set(calls_of(app.tree)) <= set(paths)
        assert complete is app.complete
