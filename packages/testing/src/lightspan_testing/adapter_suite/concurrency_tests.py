"""Tests of threads, event loops and concurrent attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Played, Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.scenario_runner import close_clients, part_of, play, run_sync
from lightspan_testing.adapter_suite.scenarios import CONCURRENT, ROUTES, App


class ConcurrencyTests(AdapterTests):
    """No call is lost, doubled, misnamed or in another attempt."""

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_in_a_thread_of_the_app(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """The app starts its framework in a thread inside a runner."""
        self.expects(request, scenario, f"{scenario}/sync", "sync", "thread")
        app = self.app(stage, scenario, "sync")
        part = part_of(app, scenario)
        played = stage.open(part, through_gateway=True)
        context_propagation.carry()
        try:
            with (
                self.adapter.instrument(),
                open_scope(played.scope),
                ThreadPoolExecutor(1) as pool,
            ):
                pool.submit(run_sync, app, played).result()
        finally:
            context_propagation.stop_carrying()
        stage.close(played)
        self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("scenario", ["team", "parallel_tools", "agent_as_tool"])
    def test_32_at_once(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str, route: str
    ) -> None:
        """32 attempts in one event loop."""
        self.expects(request, scenario, f"{scenario}/async", "async", "32_at_once")
        apps = self.apps_of(stage, scenario, "async")
        part = part_of(apps[0], scenario)
        played = [stage.open(part, through_gateway=route == "gateway") for _ in apps]

        async def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                await app.run(attempt.text)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for app, attempt in zip(apps, played, strict=True):
                    group.create_task(one(app, attempt))
            await close_clients(apps, played[0])

        with self.adapter.instrument():
            asyncio.run(all_of_them())
        self._check_all(stage, scenario, apps, played)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_32_threads(self, request: pytest.FixtureRequest, stage: Stage, scenario: str) -> None:
        """32 attempts, each in a worker thread, as a runner runs synchronous apps."""
        self.expects(request, scenario, f"{scenario}/sync", "sync", "32_threads")
        apps = self.apps_of(stage, scenario, "sync")
        part = part_of(apps[0], scenario)
        played = [stage.open(part, through_gateway=True) for _ in apps]

        def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                run_sync(app, attempt)

        with self.adapter.instrument(), ThreadPoolExecutor(CONCURRENT) as pool:
            for future in [pool.submit(one, *pair) for pair in zip(apps, played, strict=True)]:
                future.result()
        sdk_instrumentation.close()
        self._check_all(stage, scenario, apps, played)

    def _check_all(
        self, stage: Stage, scenario: str, apps: Sequence[App], played: Sequence[Played]
    ) -> None:
        for app, attempt in zip(apps, played, strict=True):
            stage.close(attempt)
            self.check(attempt, scenario, app, stage)
        span_ids = [span.span_id for attempt in played for span in attempt.spans]
        assert len(set(span_ids)) == len(span_ids)

    @pytest.mark.parametrize("scenario", ["single", "team", "agent_as_tool"])
    def test_two_event_loops(
        self, request: pytest.FixtureRequest, stage: Stage, scenario: str
    ) -> None:
        """One app, built once, in two consecutive loops."""
        self.expects(request, scenario, f"two_event_loops/{scenario}")
        app = self.app(stage, scenario)
        with self.adapter.instrument():
            for _ in range(2):
                played = play(stage, app, scenario, "async", through_gateway=True)
                self.check(played, scenario, app, stage)
