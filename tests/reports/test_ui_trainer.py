"""Tests of `Trainer(ui=…)`: the page of a run never harms the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan import Trainer
from lightspan.errors import ConfigError
from lightspan.training import settings
from lightspan_ui.sink import UiSink


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *, is_installed: bool) -> None:
    """Make `settings` see lightspan-ui, whether or not it is installed."""
    installed, load = settings.installed_plugins, settings.load_plugin

    def names(kind: str) -> Mapping[str, Any]:
        others = {name: point for name, point in installed(kind).items() if name != "ui"}
        return {**others, "ui": None} if is_installed and kind == "sinks" else others

    def loaded(kind: str, name: str) -> Any:
        return UiSink if (kind, name) == ("sinks", "ui") else load(kind, name)

    monkeypatch.setattr(settings, "installed_plugins", names)
    monkeypatch.setattr(settings, "load_plugin", loaded)


@pytest.mark.slow
def test_without_the_package_it_says_how_to_install_it_and_trains(
    apps: Any, rl: Any, ask: Any, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, is_installed=False)
    trainer = Trainer(rl(), steps=1, folder=tmp_path / "run", reporter=lines, ui=True)
    [line] = lines.texts
    assert line.startswith("ui=True: no page is shown without `pip install './packages/core[ui]'")
    assert trainer.settings.sinks == ()
    assert trainer.fit(apps.spell, ask(2)).steps == 1


@pytest.mark.slow
def test_the_page_may_die_and_ends_with_the_run(
    apps: Any, rl: Any, ask: Any, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, is_installed=True)
    pids: list[int] = []

    class Killed(UiSink):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            assert self._process is not None
            pids.append(self._process.pid)
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr("tests.reports.test_ui_trainer.UiSink", Killed)
    folder = tmp_path / "run"
    trainer = Trainer(rl(), steps=2, folder=folder, reporter=lines, ui=0)
    assert trainer.fit(apps.spell, ask(2)).steps == 2
    [address] = [line for line in lines.texts if line.startswith("watch: ")]
    assert address.startswith("watch: http://127.0.0.1:")
    assert "/runs/run?token=" in address
    assert len(pids) == 2
    for pid in set(pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_invalid_port_is_an_error_before_the_run(
    rl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, is_installed=True)
    with pytest.raises(ConfigError, match="ui=70000"):
        Trainer(rl(), ui=70_000)
