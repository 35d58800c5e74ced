"""Test which files of an app are hashed, and how two versions are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from lightspan.runners.protocol import RunnerPlan
from lightspan_cluster import app_sources, ray_actor
from lightspan_cluster.app_sources import difference, differing, source_hashes

FILES = {
    "press.py": "import json\nimport grading\nfrom openai import OpenAI\n",
    "grading.py": "def grade(text):\n    import words.lists\n",
    "words/__init__.py": "",
    "words/lists.py": "from . import more\n",
    "words/more.py": "import press\n",
    "words/unused.py": "",
    "train.py": "import press\n",
}


def write(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_what_a_module_imports_from_its_folder(tmp_path: Path) -> None:
    hashes = source_hashes("press:answer", [str(write(tmp_path))])
    assert list(hashes) == ["grading", "press", "words", "words.lists", "words.more"]


def test_a_module_in_a_package(tmp_path: Path) -> None:
    """Check that packages beside an installed package are no part of the app."""
    installed = tmp_path / "site-packages"
    write(
        installed, {"agents/__init__.py": "", "agents/desk.py": "from agents.deep import tools\n"}
    )
    write(installed, {"agents/deep/__init__.py": "import other\n", "agents/deep/tools.py": "="})
    write(installed, {"other.py": "", "agents/rest.py": ""})
    hashes = source_hashes("agents.desk:answer", [str(installed)])
    assert list(hashes) == ["agents", "agents.deep", "agents.deep.tools", "agents.desk"]


def test_what_differs_between_two_machines(tmp_path: Path) -> None:
    one = source_hashes("press:answer", [str(write(tmp_path / "one"))])
    changed = {**FILES, "grading.py": "def grade(text):\n    return 100\n", "train.py": "x = 1\n"}
    other = source_hashes("press:answer", [str(write(tmp_path / "other", changed))])
    assert differing(one, other) == differing(other, one) == "grading"
    windows = {name: text.replace("\n", "\r\n") for name, text in FILES.items()}
    assert source_hashes("press:answer", [str(write(tmp_path / "windows", windows))]) == one
    assert differing({}, one) == differing(one, {}) == differing(one, one) == ""
    many = {str(number): "1" for number in range(5)}
    assert differing(many, dict.fromkeys(many, "2")) == "0, 1, 2, 2 more"


def test_a_machine_with_another_version_is_named() -> None:
    own, other = {"press": "1", "grading": "2"}, {"press": "1", "grading": "3"}
    assert difference("the node", own, {"this machine": own, "runner a": {}}) == ""
    assert difference("the node", other, {"runner a": {}, "this machine": own}).startswith(
        "the node has another version of the app than this machine (grading): its rewards"
    )


async def test_a_ray_actor_hashes_the_app_of_its_node(tmp_path: Path) -> None:
    """Check what an actor sends, without a cluster."""
    folder = str(write(tmp_path, {"press.py": "import grading\ndef answer(task):\n    pass\n"}))
    write(tmp_path, {"grading.py": ""})
    config = ray_actor.ActorConfig(slots=1, python=sys.executable, app_dirs=[folder])
    actor = ray_actor.RunnerActor(msgspec.json.encode(config))
    plan = RunnerPlan(store_url=f"sqlite:{tmp_path / 'store.db'}", app="press:answer")
    try:
        answer = await actor.start(msgspec.json.encode(plan))
    finally:
        await actor.stop()
    status = msgspec.json.decode(answer, type=ray_actor.ActorStatus)
    assert status.failure is None
    assert status.sources == source_hashes("press:answer", [folder])
    assert list(status.sources) == ["grading", "press"]


@pytest.mark.parametrize(
    "app", ["no_such_module:answer", "__main__:answer", 'command:{"arguments":["sh","app.sh"]}']
)
def test_apps_without_source(tmp_path: Path, app: str) -> None:
    assert source_hashes(app, [str(tmp_path)]) == {}


def test_an_app_of_many_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_sources, "MAX_MODULES", 4)
    hashes = source_hashes("press:answer", [str(write(tmp_path))])
    assert list(hashes) == ["5 modules of press", "press"]
    write(tmp_path, {"words/more.py": "changed = 1\n"})
    other = source_hashes("press:answer", [str(tmp_path)])
    assert differing(hashes, other) == "5 modules of press"
