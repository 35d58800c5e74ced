"""Test that apps and runners load only light packages; every check runs in a fresh interpreter.

Where torch and the frameworks are installed, these tests show that they are not loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import how_to_install

CORE = Path(__file__).parents[2] / "packages/core/src/lightspan"
HEAVY = frozenset(
    {
        *("torch", "transformers", "peft", "numpy", "safetensors", "psutil", "matplotlib", "rich"),
        *("aiohttp", "jinja2", "fastapi", "uvicorn"),
        *("langchain", "langchain_core", "langchain_openai", "langgraph", "lightspan_langgraph"),
        *("autogen_agentchat", "autogen_core", "agents", "crewai", "litellm"),
        *("pytest", "hypothesis"),
    }
)

CAPTURE = [
    *("LLM", "LocalRunners", "PromptTemplate", "agent", "emit_annotation", "emit_exception"),
    *("emit_message", "emit_object", "emit_reward", "open_store", "operation", "rollout", "tool"),
    *("Command", "ExternalRunners"),
]
"""Names that an app and a runner may use."""

_REPORT = """
import json, sys
print(json.dumps({"modules": sorted({name.partition(".")[0] for name in sys.modules}), **result}))
"""

_WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(code: str, folder: Path, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Run `code`; return its variable `result`, and the top-level modules that it loaded."""
    script = folder / "script.py"
    script.write_text(_WITHOUT % (set(without),) + "result = {}\n" + code + _REPORT)
    command = [sys.executable, "-I", "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("code", "unloaded"),
    [
        ("import lightspan", {"openai", "opentelemetry", "sqlite3", "asyncio"}),
        (f"import lightspan\nfor name in {CAPTURE}:\n    getattr(lightspan, name)\n", set()),
        ("import lightspan_agl as agl; agl.InMemoryLightningStore()", {"openai", "pydantic"}),
    ],
    ids=["lightspan", "every name of the capture plane", "the original's names"],
)
def test_imports_load_nothing_heavy(tmp_path: Path, code: str, unloaded: set[str]) -> None:
    assert (HEAVY | unloaded).isdisjoint(run(code + "\n", tmp_path)["modules"])


def modules_of(folder: str) -> list[str]:
    """Return the modules of a folder of the core, or of a module, without the prefix
    `lightspan.`.
    """
    path = CORE / folder
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    names = [".".join(file.relative_to(CORE).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def light_modules() -> list[str]:
    """Return the modules that apps and runners load, as import-linter's contract lists them."""
    settings = tomllib.loads((CORE.parents[3] / "pyproject.toml").read_text())
    [contract] = (c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "capture")
    folders = [
        name.removeprefix("lightspan.")
        for name in contract["source_modules"]
        if name.startswith("lightspan.")
    ]
    modules = [module for folder in folders for module in modules_of(folder)]
    return [*modules, "cli", "lightning"]


_IMPORTER = """
import importlib
for name in {modules}:
    try:
        importlib.import_module("lightspan." + name)
    except ModuleNotFoundError as error:
        result[name] = error.name
"""


def test_modules_load_without_the_learning_plane(tmp_path: Path) -> None:
    found = run(_IMPORTER.format(modules=light_modules()), tmp_path, without=HEAVY)
    assert "openai" not in found.pop("modules")
    assert found == {}


def test_importing_patches_nothing(tmp_path: Path) -> None:
    code = """
import openai
before = (openai.OpenAI.request, openai.AsyncOpenAI.request)
import lightspan, lightspan.capture.emit, lightspan.capture.sdk_instrumentation
import lightspan.runners.runner, lightspan.runners.local
result["patched"] = before != (openai.OpenAI.request, openai.AsyncOpenAI.request)
"""
    pytest.importorskip("openai")
    assert run(code, tmp_path)["patched"] is False


_RUNNER = """
import asyncio
from pathlib import Path

import openai

import lightspan
from lightspan.runners.app import as_app
from lightspan.schema.records import Rollout
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan_testing.scripted import ScriptedServer


async def main(server, url):
    client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)

    @lightspan.rollout
    def answer(task):
        with lightspan.agent("writer"):
            message = {"role": "user", "content": task["question"]}
            reply = client.chat.completions.create(model="m", messages=[message])
        lightspan.emit_annotation({"seen": True})
        return 1.0 if reply.choices[0].message.content == "four" else 0.0

    async with lightspan.open_store(url) as store:
        resources_id = await store.put_resources({})
        rollout = Rollout(
            rollout_id="r", task={"question": "2+2"}, task_id="t", resources_id=resources_id
        )
        await store.enqueue([rollout])
        runner = Runner(store, as_app(answer), RunnerConfig(slots=1))
        running = asyncio.create_task(runner.run())
        while not (await store.rollouts(["r"]))[0].status.final:
            await asyncio.sleep(0.02)
        runner.stop()
        await running
        (attempt,) = await store.attempts(["r"])
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        result["status"] = attempt.status
        result["calls"] = [
            span.attributes["lightspan.agent.path"] for span in spans if span.kind == "llm"
        ]


with ScriptedServer("four") as server:
    asyncio.run(main(server, "sqlite:///" + str(Path(__file__).with_name("store.db"))))
"""


def test_a_runner_captures_an_app_without_the_learning_plane(tmp_path: Path) -> None:
    """Check claim, scope, SDK patch, a real client and HTTP call, emission, report and SQLite."""
    pytest.importorskip("openai")
    found = run(_RUNNER, tmp_path, without=HEAVY)
    assert found["calls"] == ["writer"]
    assert found["status"] == "succeeded"


def test_what_is_not_installed_is_named_with_its_remedy(tmp_path: Path) -> None:
    """Check the name `SFT`, which is in lightspan-torch."""
    code = """
import lightspan
try:
    lightspan.SFT
except ModuleNotFoundError as error:
    result["error"] = str(error)
"""
    error = run(code, tmp_path, without=HEAVY | {"lightspan_torch"})["error"]
    assert error.startswith("lightspan.SFT needs")
    assert error.endswith(how_to_install("train"))


@pytest.mark.parametrize("command", ["dev json:dumps {tasks} --model nowhere/model", "serve run"])
def test_commands_of_the_learning_plane_name_the_remedy(tmp_path: Path, command: str) -> None:
    """Check that the error in an app's environment is one line without a traceback."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n")
    command = command.format(tasks=tasks)
    code = f"""
import contextlib, io
from lightspan.cli import main
said = io.StringIO()
with contextlib.redirect_stderr(said):
    result["status"] = main({command!r}.split())
result["error"] = said.getvalue()
"""
    found = run(code, tmp_path, without=HEAVY)
    assert found["status"] == 1
    assert found["error"].startswith("lightspan: this needs '"), found["error"]
    assert found["error"].endswith(" from a checkout of lightspan\n")
