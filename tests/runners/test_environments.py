"""Test apps with an environment of their own, whose interpreter runs the runner processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightspan import ExternalRunners, LocalRunners, Trainer, __version__
from lightspan.errors import AppError, ConfigError
from lightspan.runners import foreign_python
from lightspan.runners.foreign_python import foreign_environment
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.stored_episodes import stored_episodes

APART = Path(__file__).parents[1] / "apps" / "apart"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


# --- it trains ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_app_that_the_trainer_cannot_import(
    app_python: Path, rl: Callable[..., Any], tmp_path: Path, ask: Callable[..., Any]
) -> None:
    """Train an app by its name, in an environment without torch."""
    assert find_spec("apart_app") is None
    assert find_spec("only_here") is None
    runners = LocalRunners(4, processes=2, python=app_python, app_dirs=[APART])
    trainer = Trainer(rl(), runners=runners, steps=2, folder=tmp_path / "run")
    result = trainer.fit("apart_app:answer", ask(4), ask(2, held=1))
    assert result.steps == 2
    episodes = stored_episodes(trainer.folder.store_url)
    assert len(episodes) == 2 * 2 * 4 + 2 * 2
    assert trainer.folder.read_config()["app"] == "apart_app:answer"
    assert "apart_app" not in sys.modules
    trained = sum(len(trainer.folder.explanations(step)) for step in (1, 2))
    assert trained > 0
    for episode in episodes:
        assert [call.agent_path for call in episode.calls] == ["writer"]
        assert episode.calls[0].record is not None
        assert episode.dimensions == {
            "reward": episode.reward,
            "heavy": 0.0,
            "apart": 1.0,
            "foreign_paths": 0.0,
        }


# --- interpreters that will not do --------------------------------------------------------------
CHECKOUT = "./packages/core`, from a checkout of lightspan"


def _fake(folder: Path, version: str, protocol: int) -> Path:
    """Create an environment with another version of lightspan; return its interpreter."""
    from app_environment import app_environment  # type: ignore[import-not-found]

    python: Path = app_environment(folder, core=False)
    [packages] = (folder / "lib").glob("python*/site-packages")
    (packages / "lightspan" / "schema").mkdir(parents=True)
    (packages / "lightspan" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    semconv = packages / "lightspan" / "schema" / "semconv.py"
    semconv.write_text(f"PROTOCOL_VERSION = {protocol}\n")
    return python


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("bare", ["has no lightspan", f"-m pip install {CHECKOUT} {__version__}"]),
        (
            "newer",
            [
                "has lightspan 9.9.9 (protocol 99)",
                f"{sys.executable} has {__version__} (protocol {PROTOCOL_VERSION})",
                "install the same version on both sides",
                f"-m pip install {CHECKOUT} {__version__}",
                f"{sys.executable} -m pip install {CHECKOUT} 9.9.9",
            ],
        ),
    ],
)
async def test_environments_that_do_not_fit(
    store: Store, tmp_path: Path, app_python: Path, environment: str, words: list[str]
) -> None:
    """Check that the runners refuse to start, and that nothing is claimed."""
    from app_environment import app_environment

    factories = {
        "bare": lambda: app_environment(tmp_path / "v", core=False),
        "newer": lambda: _fake(tmp_path / "v", "9.9.9", 99),
    }
    python = factories[environment]()
    await store.enqueue([Rollout(rollout_id="ro-0", task={}, task_id="t", mode=Mode.VAL)])
    plan = RunnerPlan(store_url=store.url, app="apart_app:answer")
    with pytest.raises(ConfigError) as caught:
        await LocalRunners(2, python=python, app_dirs=[APART]).start(plan)
    for word in [str(python), *words]:
        assert word in str(caught.value)
    assert await store.count() == {RolloutStatus.QUEUED: 1}
    assert await store.attempts(["ro-0"]) == []


@pytest.fixture
def other_version(tmp_path: Path, app_python: Path) -> Callable[[str, int], Path]:
    """Return a function that creates environments with other versions of lightspan."""
    from app_environment import app_environment, of_another_version

    def make(version: str, protocol: int) -> Path:
        python: Path = app_environment(tmp_path / "environment", "openai")
        [packages] = (tmp_path / "environment" / "lib").glob("python*/site-packages")
        (packages / "only_here.py").write_text('VALUE = "installed"\n')
        of_another_version(python, version, protocol)
        return python

    return make


async def test_another_version_that_is_understood(
    store: Store, other_version: Callable[[str, int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the runner works, with a warning."""
    python = other_version("0.1.77", PROTOCOL_VERSION)
    await store.enqueue([Rollout(rollout_id="ro-0", task={}, task_id="t", mode=Mode.VAL)])
    runners = LocalRunners(1, python=python, app_dirs=[APART])
    await runners.start(RunnerPlan(store_url=store.url, app="apart_app:naps"))
    try:
        while await store.count() != {RolloutStatus.SUCCEEDED: 1}:
            runners.check()
            await asyncio.sleep(0.05)
    finally:
        await runners.stop()
    [warning] = caplog.messages
    assert f"{python} has lightspan 0.1.77, {sys.executable} has {__version__}" in warning


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("no_such_app:answer", ["No module named 'no_such_app'", "app_dirs="]),
        ("lacking:answer", ["No module named 'a_framework'", "install there what is missing"]),
        ("lacking_nothing:answer", ["has no 'answer'"]),
    ],
)
async def test_an_environment_that_lacks_the_app(
    store: Store, tmp_path: Path, app_python: Path, app: str, words: list[str]
) -> None:
    (tmp_path / "lacking.py").write_text("import a_framework\n")
    (tmp_path / "lacking_nothing.py").write_text("")
    plan = RunnerPlan(store_url=store.url, app=app)
    with pytest.raises(AppError) as caught:
        await LocalRunners(1, python=app_python, app_dirs=[tmp_path]).start(plan)
    for word in [str(app_python), *words]:
        assert word in str(caught.value)


def test_programs_that_are_no_interpreter(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("")
    for path, hint in (
        (tmp_path / "absent" / "python", r"there is no such program; create .* environment first"),
        (plain, "it cannot be executed"),
        (tmp_path / "venv", f"did you mean {tmp_path}/venv/bin/python"),
    ):
        with pytest.raises(ConfigError, match=f"python='{path}' is no interpreter: .*{hint}"):
            LocalRunners(1, python=path)


async def test_a_program_that_is_no_python(store: Store) -> None:
    python = shutil.which("cat")
    assert python is not None
    plan = RunnerPlan(store_url=store.url, app="apart_app:answer")
    with pytest.raises(ConfigError, match=rf"python='{python}' ended \(exit code \d\) before"):
        await LocalRunners(1, python=python).start(plan)


def test_options_that_make_no_sense(app_python: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="app_dirs= needs python="):
        LocalRunners(1, app_dirs=[tmp_path])
    with pytest.raises(ConfigError, match=f"app_dirs: there is no folder {tmp_path}/absent"):
        LocalRunners(1, python=app_python, app_dirs=[tmp_path / "absent"])
    with pytest.raises(ConfigError, match="slots=0 must be at least 1"):
        ExternalRunners(0)
    with pytest.raises(ConfigError, match="timeout_s=0 must be a finite number"):
        ExternalRunners(timeout_s=0)


@pytest.mark.parametrize("runners", ["python", "external"])
async def test_an_app_of_the_script_cannot_leave_it(app_python: Path, runners: str) -> None:
    factories = {"python": lambda: LocalRunners(1, python=app_python), "external": ExternalRunners}
    with pytest.raises(AppError, match=r'put it into a module.*fit\("my_app:answer", …\)'):
        await factories[runners]().start(RunnerPlan(store_url="x.db", app="__main__:answer"))


# --- what goes there, and what does not ---------------------------------------------------------
def test_what_is_installed_here_stays_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [packages] = [path for path in sys.path if path.endswith("site-packages")][:1]
    python_path = os.pathsep.join([packages, str(tmp_path), "", f"{sys.prefix}/lib"])
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("PYTHONHOME", "/usr")
    monkeypatch.setenv("MY_KEY", "kept")
    variables = foreign_environment()
    assert variables["PYTHONPATH"] == str(tmp_path)
    assert "PYTHONHOME" not in variables
    assert variables["MY_KEY"] == "kept"
    monkeypatch.setenv("PYTHONPATH", packages)
    assert "PYTHONPATH" not in foreign_environment()


def test_the_app_is_looked_for_beside_the_script_and_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(tmp_path / "a" / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    assert foreign_python.app_folders(None) == [str(tmp_path / "a"), str(tmp_path)]
    monkeypatch.setattr(sys.modules["__main__"], "__file__", f"{sys.prefix}/bin/lightspan")
    assert foreign_python.app_folders(None) == [str(tmp_path)]


async def test_command_lines_show_nothing(store: Store, app_python: Path) -> None:
    """Check that command lines, which `ps` shows to every user, contain neither store nor app."""
    runners = LocalRunners(2, processes=2, python=app_python, app_dirs=[APART])
    await runners.start(RunnerPlan(store_url=store.url, app="apart_app:naps"))
    try:
        for pid in runners.pids:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert line.startswith(f"{app_python}\0-c\0")
            assert "run.db" not in line
            assert "apart_app" not in line
    finally:
        await runners.stop()
