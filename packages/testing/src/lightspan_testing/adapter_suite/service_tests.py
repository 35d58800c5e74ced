"""Tests of apps outside of attempts: recording in production, and a server of trained policies."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture.emit import operation
from lightspan.capture.recorder import Recorder
from lightspan.production import record
from lightspan.schema.routing import agent_name
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.scenario_runner import (
    awaited,
    close_clients,
    inside_root,
    part_of,
    play,
    play_outside,
)
from lightspan_testing.adapter_suite.scenarios import (
    CONNECTED,
    IN_PRODUCTION,
    MODES,
    SCENARIOS,
    SEVERAL_RUNS,
    App,
)
from lightspan_testing.adapter_suite.trees import calls_of
from lightspan_testing.attempts import read_recorded


def _recorders() -> int:
    """Return the number of recorders, one per attempt, that are in memory."""
    gc.collect()
    return sum(isinstance(one, Recorder) for one in gc.get_objects())


class ServiceTests(AdapterTests):
    """Test apps outside of rollouts.

    Such an app is recorded if a store is configured. After `lightspan.connect`, its calls go to
    trained policies.
    """

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", IN_PRODUCTION)
    def test_production(
        self,
        stage: Stage,
        production: str,
        scenario: str,
        mode: str,
    ) -> None:
        """A run of the app outside of any attempt is recorded as one attempt with its span tree."""
        app = self.together(self.app(stage, scenario, mode), scenario)
        with self.adapter.instrument():
            played = play_outside(stage, app, scenario, mode)
        [stored] = read_recorded(production)
        self.check(inside_root(stored, played), scenario, app, stage)
        ended = SCENARIOS[scenario].cancelled or app.raises is not None
        assert stored.attempt.status == ("failed" if ended else "succeeded")
        assert (stored.attempt.capture_errors, stored.rollout.run_id) == ([], "support")
        assert played.tag in json.dumps(stored.rollout.task)
        assert all(span.resource == {"service.name": "support"} for span in stored.spans)

    def test_production_at_once(self, stage: Stage, production: str) -> None:
        """Runs of an app that are concurrent in one event loop are recorded as one attempt each."""
        apps = [self.together(app, "team") for app in self.apps_of(stage, "team", "async")]
        played = [stage.open(part_of(app, "team"), through_gateway=False) for app in apps]

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for app, attempt in zip(apps, played, strict=True):
                    group.create_task(awaited(app.run(attempt.text)))
            await close_clients(apps, played[0])

        with self.adapter.instrument():
            asyncio.run(all_of_them())
        by_tag = {attempt.tag: attempt for attempt in played}
        for stored in read_recorded(production):
            [tag] = set(re.findall(r"task-\d+", json.dumps(stored.rollout.task)))
            self.check(inside_root(stored, by_tag.pop(tag)), "team", apps[0], stage)
        assert by_tag == {}

    def test_an_error_of_ours_leaves_no_attempt_open(
        self, stage: Stage, production: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the adapter has a bug and fails after opening an attempt, the attempt is closed.

        It has a capture error, which means that something could not be recorded.
        """

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("a bug of ours")

        owner, name = self.notes_starts
        monkeypatch.setattr(owner, name, fail)
        with self.adapter.instrument():
            play_outside(stage, self.app(stage, "single"), "single", "async")
            for _ in range(1_000):  # the store writer is asynchronous
                attempts = read_recorded(production)
                if attempts and all(one.attempt.status.final for one in attempts):
                    break
                time.sleep(0.01)
        assert all(one.attempt.status.final for one in attempts)
        assert any(
            "a bug of ours" in line for one in attempts for line in one.attempt.capture_errors
        )

    @pytest.mark.parametrize("mode", ["async", "stream"])
    @pytest.mark.parametrize("scenario", ["model_error", "cancelled"])
    def test_nothing_stays(
        self,
        stage: Stage,
        production: str,
        scenario: str,
        mode: str,
    ) -> None:
        """Attempts that have ended do not stay in memory, in rollouts and in production.

        This also holds for attempts that failed or were cancelled.
        """

        def attempts() -> None:
            for _ in range(2):
                play(stage, self.app(stage, scenario, mode), scenario, mode, through_gateway=False)
                play_outside(stage, self.app(stage, scenario, mode), scenario, mode)
            assert record.flush()

        logging.disable()  # pytest keeps logged exceptions
        try:
            with self.adapter.instrument():
                attempts()
                before = _recorders()  # a loop or thread of the framework may keep the first one
                attempts()
                for _ in range(1_000):  # the store writer releases its last batch asynchronously
                    if (after := _recorders()) <= before:
                        break
                    time.sleep(0.01)
                assert after <= before
        finally:
            logging.disable(logging.NOTSET)

    @pytest.mark.parametrize("telemetry", ["on", "off"])
    def test_production_with_and_without_telemetry(
        self, stage: Stage, production: str, tmp_path: Path, telemetry: str
    ) -> None:
        """Agent names do not depend on telemetry.

        They are the same with the framework's own telemetry and with all telemetry disabled.
        """
        name = self.adapter.__name__
        script = tmp_path / "app.py"
        script.write_text(f"import {name}\n{name}.instrument()\n{textwrap.dedent(self.program)}")
        environment = self.loud_environment if telemetry == "on" else self.silent_environment
        self.check_program(stage, production, [sys.executable, script], environment)

    # --- a server of the trained policies -------------------------------------------------
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("scenario", CONNECTED)
    def test_connected(self, stage: Stage, scenario: str, mode: str) -> None:
        """After `lightspan.connect`, calls outside of attempts go to the policy of their agent."""
        app = self.app(stage, scenario, mode)
        before = len(stage.answered)
        paths = calls_of(app.tree)
        with (
            stage.serving(paths) as served,
            self.adapter.instrument(),
            lightspan.connect(served.url),
        ):
            play_outside(stage, app, scenario, mode)
            sdk_instrumentation.close()
        assert served.usage.failed == 0
        assert served.usage.summary() == {path: {path: n} for path, n in Counter(paths).items()}
        for agent, policy in stage.answered[before:]:
            assert app.names.get(agent, agent) == agent_name(policy)

    def together(self, app: App, scenario: str) -> App:
        """Return the app, changed so that all its runs of agents are in one production attempt.

        The app stays unchanged unless `SEVERAL_RUNS` lists the scenario for the framework.
        """
        if scenario not in SEVERAL_RUNS.get(self.framework, ()):
            return app

        async def run(text: str) -> Any:
            with operation("handle", input=text):
                return await app.run(text)

        return replace(app, run=run, run_sync=None)
