"""Base of an adapter's tests: hooks for the subclass, and common helpers."""

from __future__ import annotations

import importlib
import os
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from lightspan_testing.adapter_harness import Played, Stage
from lightspan_testing.adapter_suite.checks import (
    check_attributes,
    check_bypassing,
    check_calls,
    check_names,
    check_stopped,
    check_tokens,
)
from lightspan_testing.adapter_suite.scenario_runner import inside_root, part_of, play
from lightspan_testing.adapter_suite.scenarios import (
    CONCURRENT,
    IMPOSSIBLE,
    SCENARIOS,
    App,
    Impossible,
    Model,
)
from lightspan_testing.adapter_suite.trees import ordered, without_call_status
from lightspan_testing.attempts import read_recorded, tree

NO_WAY_OUT: Final = {
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
"""Proxy settings that keep a child process from reaching other machines."""

WAYS_TO_FAIL: Final = (Impossible, AssertionError, RuntimeError)
"""Exceptions that a test may raise if its framework cannot pass it."""


class AdapterTests:
    """Hooks and helpers that every group of adapter tests inherits."""

    framework: ClassVar[str]
    """Name of the framework; its adapter is the module `lightspan_<framework>`."""

    impossible: ClassVar[Mapping[str, str]] = {}
    """Key → reason why the framework cannot pass.

    A key is a scenario, a mode, a test, `scenario/mode` or `test/scenario`.
    """

    # --- hooks ----------------------------------------------------------------------------
    def build(self, scenario: str, model: Model) -> App:
        """Return an app that runs the scenario.

        `model` has the settings of the app's model client.
        """
        raise NotImplementedError

    def patched(self) -> Mapping[str, Any]:
        """Return every attribute of the framework that `instrument` may change, by name."""
        raise NotImplementedError

    def openinference(self) -> AbstractContextManager[Any]:
        """Return a context manager that instruments the framework by OpenInference.

        Do not override this for a framework without such an instrumentation. The test is then
        skipped.
        """
        pytest.skip("no OpenInference instrumentation is named for this framework")

    notes_starts: ClassVar[tuple[Any, str]]
    """A module of the adapter, and the name of its function that stores the start of an operation.

    The adapter calls the function after it has opened an attempt for the operation.
    """

    silent_environment: ClassVar[Mapping[str, str]] = {"OTEL_SDK_DISABLED": "true"}
    """Environment variables that disable all telemetry of the framework and of OpenTelemetry."""

    loud_environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that enable the framework's own telemetry. It must not leave the
    machine.
    """

    program: ClassVar[str]
    """A Python script without lightspan that plays the scenario `single`.

    Its arguments are the endpoint's URL and the text of the task.
    """

    program_root: ClassVar[str]
    """First line of the span tree of the attempt that `program` leaves in the store."""

    # --- helpers --------------------------------------------------------------------------
    @property
    def adapter(self) -> Any:
        """Return the adapter's module."""
        return importlib.import_module(f"lightspan_{self.framework}")

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[Stage]:
        with Stage() as stage:
            yield stage

    @pytest.fixture(autouse=True)
    def _impossible(self, request: pytest.FixtureRequest) -> None:
        """Mark the test as expected to fail if the framework does not support what it tests.

        The tests, scenarios and modes that are not supported are listed in `IMPOSSIBLE` and
        `impossible`.
        """
        callspec = getattr(request.node, "callspec", None)
        cell = callspec.params if callspec is not None else {}
        scenario, mode, route = (cell.get(name) for name in ("scenario", "mode", "route"))
        name = request.function.__name__.removeprefix("test_")
        keys = [name, f"{name}/{scenario}", scenario, mode]
        keys += [f"{scenario}/{mode}", f"{scenario}/{mode}/{route}"]
        reasons = {**IMPOSSIBLE.get(self.framework, {}), **self.impossible}
        for key in keys:
            if key in reasons:
                mark = pytest.mark.xfail(reason=reasons[key], strict=True, raises=WAYS_TO_FAIL)
                request.applymarker(mark)
        if mode is not None and scenario is not None and mode not in SCENARIOS[scenario].modes:
            pytest.skip(f"{scenario} has no {mode} form")

    @pytest.fixture(autouse=True)
    def _problems(self, stage: Stage) -> Iterator[None]:
        yield
        problems, stage.brain.problems = stage.brain.problems, []
        assert problems == []

    @pytest.fixture
    def production(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """Set the environment variable that makes apps record in a store; return its URL."""
        url = f"sqlite:{tmp_path / 'production.db'}"
        monkeypatch.setenv("LIGHTSPAN_STORE", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "support")
        return url

    def app(self, stage: Stage, scenario: str, mode: str = "async") -> App:
        """Build the scenario's app with the model client settings for the scenario and the mode."""
        row = SCENARIOS[scenario]
        model = Model(
            base_url=stage.url,
            stream=mode == "stream",
            max_retries=row.max_retries,
            timeout_s=row.timeout_s,
        )
        return self.build(scenario, model)

    def check(self, played: Played, scenario: str, app: App, stage: Stage) -> None:
        """Check the spans, token records and calls of an attempt in which the app has run.

        Args:
            played: the attempt, after its end.
            scenario: name of the scenario.
            app: the app, with the span tree that is expected.
            stage: endpoint and gateway with which the attempt ran.
        """
        self.check_tree(played, scenario, app)
        check_names(played, app)
        check_attributes(played)
        if SCENARIOS[scenario].stopped:
            check_stopped(played)
        elif SCENARIOS[scenario].bypassing:
            check_bypassing(played, stage)
        else:
            check_calls(played, stage)
            if played.through_gateway:
                check_tokens(played, stage)

    def check_tree(self, played: Played, scenario: str, app: App) -> None:
        """Check the whole span tree of an attempt."""
        expected = textwrap.dedent(app.tree).strip("\n").splitlines()
        lines = tree(played.spans, ordered=SCENARIOS[scenario].ordered)
        # the gateway records a cancelled call as cancelled, not as failed
        if played.through_gateway:
            expected, lines = without_call_status(expected), without_call_status(lines)
        expected = ordered(expected, SCENARIOS[scenario].ordered)
        assert lines == expected, "\n".join(["recorded:", *lines, "expected:", *expected])

    def check_program(
        self,
        stage: Stage,
        production: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
    ) -> None:
        """Run a program, and check its answer and the attempt that it has stored.

        Args:
            stage: the scripted endpoint and gateway.
            production: URL of the store.
            command: command line of the program. The endpoint's URL and the task's text are
                appended.
            environment: additional environment variables.
        """
        app = self.app(stage, "single")
        played = stage.open(part_of(app, "single"), through_gateway=False)
        done = subprocess.run(
            [*command, stage.url, played.text],
            env={**os.environ, **environment, **NO_WAY_OUT},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert f"A draft of {played.tag}." in done.stdout
        [recorded] = read_recorded(production)
        assert (recorded.attempt.status, recorded.attempt.capture_errors) == ("succeeded", [])
        self.check(inside_root(recorded, played), "single", app, stage)
        assert recorded.tree().splitlines()[0] == self.program_root, recorded.tree()

    def apps_of(self, stage: Stage, scenario: str, mode: str) -> list[App]:
        """Return an app per concurrent attempt.

        It is the same app for all of them if the app is `concurrent`. Otherwise each attempt gets
        its own app.
        """
        app = self.app(stage, scenario, mode)
        if app.concurrent:
            return [app] * CONCURRENT
        return [app, *(self.app(stage, scenario, mode) for _ in range(CONCURRENT - 1))]

    def play_and_check(self, stage: Stage, scenario: str) -> None:
        """Run the scenario once with the app's own endpoint, and check what is recorded."""
        app = self.app(stage, scenario)
        played = play(stage, app, scenario, "async", through_gateway=False)
        self.check(played, scenario, app, stage)
