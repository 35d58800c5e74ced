"""Tests of every scenario in every mode, with and without the gateway, and of concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.lightning import classify_calls
from lightspan.lightning.forks import fork_points
from lightspan_testing.adapter_harness import POLICY, Played, Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.scenario_runner import (
    close_clients,
    part_of,
    play,
    play_opened,
    run_sync,
)
from lightspan_testing.adapter_suite.scenarios import (
    CONCURRENT,
    MODES,
    REPEATED,
    ROUTES,
    SCENARIOS,
    App,
)
from lightspan_testing.adapter_suite.trees import calls_of


class TableTests(AdapterTests):
    """Test the whole span tree and the token records of each scenario.

    Every call has to be recorded once, for its own agent and in its own attempt.
    """

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_scenario(self, stage: Stage, scenario: str, mode: str, route: str) -> None:
        app = self.app(stage, scenario, mode)
        with self.adapter.instrument():
            played = play(stage, app, scenario, mode, through_gateway=route == "gateway")
        self.check(played, scenario, app, stage)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", REPEATED)
    def test_replay(self, stage: Stage, scenario: str, mode: str) -> None:
        """The app repeats its requests to the byte, so that it can be forked at any call.

        The span tree of a fork is whole, the calls before the fork are references to the attempt
        that it repeats, and only the other calls are sampled and trained.
        """
        app = self.app(stage, scenario, mode)
        with self.adapter.instrument():
            played = play(stage, app, scenario, mode, through_gateway=True)
        for point in reversed(fork_points(stage.episode(played))):
            sampled = len(stage.engine.requests)
            repeated = stage.repeat(played, point.fork)
            app = self.app(stage, scenario, mode)
            with self.adapter.instrument():
                repeated = play_opened(stage, app, repeated, scenario, mode)
            self.check_tree(repeated, scenario, app)
            episode = stage.episode(repeated)
            assert (point.refusal, episode.departed) == ("", "")
            replayed = {call.call_id for call in episode.calls if call.record is None}
            assert replayed == {*point.prefix}
            calls = len(fork_points(episode)) - 1
            assert len(stage.engine.requests) - sampled == calls - len(replayed)
            counts = classify_calls(episode, POLICY).counts()
            assert counts.get("rejected:replayed", 0) == len(replayed)
            assert sum(counts.values()) == calls

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_agents(self, stage: Stage, scenario: str) -> None:
        """`agents()` lists every agent that calls a model, without running the app."""
        app = self.app(stage, scenario)
        paths, complete = self.adapter.agents(app.target)
        assert len(set(paths)) == len(paths)
        assert set(calls_of(app.tree)) <= set(paths)
        assert complete is app.complete

    # --- threads, event loops and concurrent attempts -------------------------------------
    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_in_a_thread_of_the_app(self, stage: Stage, scenario: str) -> None:
        """An app may run its framework in a thread that it starts inside an attempt."""
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
    def test_32_at_once(self, stage: Stage, scenario: str, route: str) -> None:
        """32 attempts run concurrently in one event loop."""
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
    def test_32_threads(self, stage: Stage, scenario: str) -> None:
        """32 attempts run concurrently, each in its own thread, as runners run synchronous apps."""
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
    def test_two_event_loops(self, stage: Stage, scenario: str) -> None:
        """An app that was built once works in two event loops, one after the other."""
        app = self.app(stage, scenario)
        with self.adapter.instrument():
            for _ in range(2):
                played = play(stage, app, scenario, "async", through_gateway=True)
                self.check(played, scenario, app, stage)
