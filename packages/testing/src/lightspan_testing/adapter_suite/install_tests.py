"""Tests of an adapter's public names and its installation, also with other instrumentations."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightspan
from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.checks import assert_unchanged, changed, check_calls
from lightspan_testing.adapter_suite.scenario_runner import part_of, play, run_sync
from lightspan_testing.adapter_suite.trees import calls_of, inside
from lightspan_testing.attempts import tree


def _version_of(installed: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    return version


def _reimported(module: ModuleType) -> ModuleType:
    """Load the code of `module` a second time; return the new module object."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    return second


class InstallTests(AdapterTests):
    """Test that installing the adapter changes the framework, and that uninstalling restores it."""

    def test_public_names(self) -> None:
        names = list(self.adapter.__all__)
        assert names[-3:] == ["agents", "instrument", "uninstrument"]
        assert len(names) == 4
        assert names[0].startswith("Lightspan")
        assert all(hasattr(self.adapter, name) for name in names)

    def test_a_framework_that_is_absent_too_old_or_too_new(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the framework is missing or unsupported, importing the adapter raises an error.

        Unsupported versions are those that are too old or too new. The error has a hint. The oldest
        supported version is the same as in the requirements of the adapter's package.
        """
        versions = importlib.import_module(f"{self.adapter.__name__}._versions")
        framework, floor = versions.FRAMEWORK, versions.FLOOR
        distribution = self.adapter.__name__.replace("_", "-")
        assert f"{framework}>={floor}" in (importlib.metadata.requires(distribution) or [])
        for installed, complaint in (
            (None, f"^{framework} is not installed in this environment: pip install"),
            ("0.0.1", f"^{framework} 0.0.1 is too old: {distribution} needs {floor} or newer: pip"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr("lightspan.capture.adapter.version", _version_of(installed))
                with pytest.raises(ConfigError, match=complaint):
                    _reimported(self.adapter)
        complaint = (
            f"this {distribution} does not support {framework} .*: upgrade {distribution}, or"
        )
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, f"{self.adapter.__name__}._hook", None)
            with pytest.raises(ImportError, match=complaint):
                _reimported(self.adapter)
        assert _reimported(self.adapter).__all__ == self.adapter.__all__

    def test_installed_twice(self, stage: Stage) -> None:
        """Installing the adapter twice has no further effect.

        After the inner `with` block ends, the adapter stays installed until the outer block ends.
        """
        before = dict(self.patched())
        with self.adapter.instrument():
            once = dict(self.patched())
            with self.adapter.instrument():
                assert_unchanged(once, self.patched())
                self.play_and_check(stage, "team")
            assert_unchanged(once, self.patched())
            self.play_and_check(stage, "team")
        assert_unchanged(before, self.patched())

    def test_uninstalled(self, stage: Stage) -> None:
        """Uninstalling restores the framework; later calls are recorded without agent names."""
        before = dict(self.patched())
        self.adapter.instrument()
        assert changed(before, self.patched()), "`patched` must show what `instrument` changes"
        self.adapter.uninstrument()
        self.adapter.uninstrument()
        assert_unchanged(before, self.patched())
        app = self.app(stage, "team")
        played = play(stage, app, "team", "async", through_gateway=True)
        names = {line.split(" @")[1] for line in tree(played.spans)}
        assert names == {c.UNNAMED_AGENT}
        check_calls(played, stage)

    def test_outside_a_scope(self, stage: Stage) -> None:
        """Outside of an attempt, nothing is recorded and the app is not disturbed."""
        app = self.app(stage, "team")
        played = stage.open(part_of(app, "team"), through_gateway=False)
        with self.adapter.instrument():
            run_sync(replace(app, run_sync=None), played)
        assert len(stage.brain.calls_in(played.tag)) == len(calls_of(app.tree))
        stage.close(played)
        assert played.spans == []

    def test_started_by_opentelemetry(self, stage: Stage, production: str, tmp_path: Path) -> None:
        """`opentelemetry-instrument python app.py` records an app that does not name lightspan."""
        pytest.importorskip("opentelemetry.distro")
        assert "lightspan" not in self.program
        script = tmp_path / "app.py"
        script.write_text(textwrap.dedent(self.program))
        command = Path(sys.executable).with_name("opentelemetry-instrument")
        exporters = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
        self.check_program(stage, production, [command, sys.executable, script], exporters)

    def test_opentelemetrys_provider_is_the_apps(self, stage: Stage) -> None:
        """The adapter does not touch OpenTelemetry's global provider, which belongs to the app.

        An app may set its own provider at any time.
        """
        from opentelemetry import trace

        before = trace.get_tracer_provider()
        with self.adapter.instrument():
            self.play_and_check(stage, "team")
            assert trace.get_tracer_provider() is before

    # --- frames around the framework, and other instrumentations --------------------------
    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_inside_another_frame(self, stage: Stage, scenario: str) -> None:
        """An agent that the app enters by `lightspan.agent` comes first in the agent paths."""
        app = self.app(stage, scenario)

        async def run(text: str) -> Any:
            with lightspan.agent("outer"):
                return await app.run(text)

        nested = replace(app, run=run, run_sync=None, tree=inside("outer", app.tree))
        with self.adapter.instrument():
            played = play(stage, nested, scenario, "async", through_gateway=True)
        self.check(played, scenario, nested, stage)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_openinference_beside_it(self, stage: Stage, scenario: str) -> None:
        """The adapter works with OpenInference's instrumentation, whichever is installed first."""
        self.check_beside(stage, scenario, self.openinference)

    def check_beside(
        self, stage: Stage, scenario: str, other: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Run the scenario with another instrumentation, installed before and after the adapter.

        Each order is one run.

        Args:
            stage: the scripted endpoint and gateway.
            scenario: name of the scenario.
            other: function that returns a context manager, which installs the other
                instrumentation.
        """
        for first, second in (
            (other, self.adapter.instrument),
            (self.adapter.instrument, other),
        ):
            app = self.app(stage, scenario)
            with first(), second():
                played = play(stage, app, scenario, "async", through_gateway=True)
            self.check(played, scenario, app, stage)
