"""Test that plugins of any package are found by their entry points."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightspan import plugins
from lightspan.errors import ConfigError
from lightspan.training.listeners import Listeners, RunEvent
from tests.plugin_environment import plugin_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EVENT = RunEvent(
    kind="step", step=1, folder=Path("run"), algorithm="a", metric="reward", trains_weights=True
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of a virtualenv that also has `tests/plugins/acme`."""
    return plugin_environment(tmp_path_factory.mktemp("acme"), "acme")


def run(python: str, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT / "tests/apps"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_a_training_with_the_plugins_of_a_third_party(
    environment: str, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    output = run(environment, str(ROOT / "tests/apps/train_acme.py"), str(folder), str(tiny))
    assert "the acme engine logs to run" in output
    assert "the acme learner is on cpu" in output
    assert "the acme learner is closed" in output
    assert (folder / "acme.db").is_file()
    assert not (folder / "store.db").exists()
    events = (folder / "acme-events.txt").read_text().splitlines()
    assert events == ["evaluation 0", "step 1", "step 2", "evaluation 2", "end 2"]
    assert len((folder / "acme-sink.jsonl").read_text().splitlines()) == 4
    inspected = run(environment, "-m", "lightspan.cli", "inspect", str(folder))
    assert "writer" in inspected
    store = f"acme://{folder}/acme.db"
    inspected = run(environment, "-m", "lightspan.cli", "inspect", store)
    assert inspected.startswith(f"{store}: recorded in production\n0 attempts")


def test_a_command_of_a_third_party(environment: str) -> None:
    assert run(environment, "-m", "lightspan.cli", "acme", "world") == "hello world\n"
    assert "acme" in run(environment, "-m", "lightspan.cli", "--help")


def test_a_name_of_a_third_party(environment: str) -> None:
    shown = run(environment, "-c", "import lightspan; print(lightspan.acme_names)")
    assert shown == "['engine', 'learner']\n"


def entry_point(name: str, value: Any) -> Any:
    def load() -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return SimpleNamespace(name=name, value=f"made_up:{name}", load=load)


def test_a_plugin_that_is_not_installed_is_named_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'engines' is called 'nope'; installed: transformers, "):
        plugins.load_plugin("engines", "nope")


def test_what_a_plugin_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = entry_point("vllm", ModuleNotFoundError("No module named 'x'", name="x"))
    monkeypatch.setattr(plugins, "installed_plugins", lambda kind: {"vllm": missing})
    with pytest.raises(ConfigError, match=r"vllm needs 'x': `pip install .*\[vllm\]"):
        plugins.load_plugin("engines", "vllm")


def test_a_listener_that_fails_is_noted_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[RunEvent] = []
    notes: list[str] = []

    def fails(event: RunEvent) -> None:
        raise OSError("the disk is full")

    found = {
        "broken": entry_point("broken", ImportError("no module")),
        "fails": entry_point("fails", fails),
        "works": entry_point("works", events.append),
    }
    monkeypatch.setattr("lightspan.training.listeners.installed_plugins", lambda kind: found)
    listeners = Listeners(notes.append)
    listeners.notify(EVENT)
    listeners.notify(EVENT)
    assert notes == [
        "the listener 'broken' of made_up:broken is left out: no module",
        "the listener 'fails' failed and is left out from now on: the disk is full",
    ]
    assert events == [EVENT, EVENT]
