"""What the package offers, and what installing it changes and gives back."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite.base import AdapterTests
from lightspan_testing.adapter_suite.checks import assert_unchanged, changed, check_calls
from lightspan_testing.adapter_suite.scenario_runner import part_of, play, run_sync
from lightspan_testing.adapter_suite.trees import calls_of
from lightspan_testing.attempts import tree


def _version_of(found: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


def _imported_again(module: ModuleType) -> ModuleType:
    """The module's code run anew, beside the one that is imported."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


class InstallTests(AdapterTests):
    """Installed, the adapter changes what it must; uninstalled, nothing."""

    def test_public_names(self) -> None:
        names = list(self.adapter.__all__)
        assert names[-3:] == ["agents", "instrument", "uninstrument"]
        assert len(names) == 4
        assert names[0].startswith("Lightspan")
        assert all(hasattr(self.adapter, name) for name in names)

    def test_a_framework_that_is_absent_too_old_or_too_new(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each is said at the import, with what to do; the floor is that of the package."""
        versions = importlib.import_module(f"{self.adapter.__name__}._versions")
        framework, floor = versions.FRAMEWORK, versions.FLOOR
        distribution = self.adapter.__name__.replace("_", "-")
        assert f"{framework}>={floor}" in (importlib.metadata.requires(distribution) or [])
        for found, complaint in (
            (None, f"^{framework} is not installed in this environment: pip install"),
            ("0.0.1", f"^{framework} 0.0.1 is too old: {distribution} needs {floor} or newer: pip"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr("lightspan.capture.adapter.version", _version_of(found))
                with pytest.raises(ConfigError, match=complaint):
                    _imported_again(self.adapter)
        complaint = (
            f"this {distribution} does not support {framework} .*: upgrade {distribution}, or"
        )
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, f"{self.adapter.__name__}._hook", None)
            with pytest.raises(ImportError, match=complaint):
                _imported_again(self.adapter)
        assert _imported_again(self.adapter).__all__ == self.adapter.__all__

    def test_installed_twice(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """Twice is once, and the inner block's end leaves the outer one installed."""
        self.expects(request, "team")
        before = dict(self.patched())
        with self.adapter.instrument():
            once = dict(self.patched())
            with self.adapter.instrument():
                assert_unchanged(once, self.patched())
                self.play_and_check(stage, "team")
            assert_unchanged(once, self.patched())
            self.play_and_check(stage, "team")
        assert_unchanged(before, self.patched())

    def test_uninstalled(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """The framework's attributes are what they were; calls are recorded without names."""
        self.expects(request, "team")
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

    def test_outside_a_scope(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """Nothing is recorded, and the app gets what it would get without an adapter."""
        self.expects(request, "team")
        app = self.app(stage, "team")
        played = stage.open(part_of(app, "team"), through_gateway=False)
        with self.adapter.instrument():
            run_sync(replace(app, run_sync=None), played)
        assert len(stage.brain.of(played.tag)) == len(calls_of(app.tree))
        stage.close(played)
        assert played.spans == []

    def test_the_entry_point(self, request: pytest.FixtureRequest, stage: Stage) -> None:
        """What `opentelemetry-instrument` loads, and calls as it does."""
        self.expects(request, "team")
        found = [
            point
            for point in importlib.metadata.entry_points(group="opentelemetry_instrumentor")
            if point.value.partition(":")[0].partition(".")[0] == self.adapter.__name__
        ]
        assert len(found) == 1
        before = dict(self.patched())
        instrumentor = found[0].load()()
        instrumentor.instrument(skip_dep_check=True)
        try:
            assert changed(before, self.patched())
            self.play_and_check(stage, "team")
        finally:
            instrumentor.uninstrument()
        assert_unchanged(before, self.patched())

    def test_started_by_opentelemetry(
        self, request: pytest.FixtureRequest, stage: Stage, production: str, tmp_path: Path
    ) -> None:
        """`opentelemetry-instrument python app.py` records an app without a line of ours."""
        pytest.importorskip("opentelemetry.distro")
        self.expects(request, "single")
        assert "lightspan" not in self.program
        script = tmp_path / "app.py"
        script.write_text(textwrap.dedent(self.program))
        command = Path(sys.executable).with_name("opentelemetry-instrument")
        exporters = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
        self.check_program(stage, production, [command, sys.executable, script], exporters)

    def test_opentelemetrys_provider_is_the_apps(
        self, request: pytest.FixtureRequest, stage: Stage
    ) -> None:
        """None is set or asked for: an app may set its own at any time."""
        from opentelemetry import trace

        self.expects(request, "team")
        before = trace.get_tracer_provider()
        with self.adapter.instrument():
            self.play_and_check(stage, "team")
            assert trace.get_tracer_provider() is before
