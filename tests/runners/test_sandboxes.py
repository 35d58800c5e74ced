"""Test the lines of docs/guides/sandbox.md with a real bubblewrap, with podman and with docker.

The tests of podman and docker need an image with `sh` and `grep`, whose name is in
LIGHTSPAN_TEST_IMAGE. DOCKER_HOST may name the daemon of docker.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan import CodingAgent, Command
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.runners.program import ProgramError
from lightspan.schema.records import Outcome
from lightspan_programs import ProgramSpec
from lightspan_testing.wait import until

pytestmark = pytest.mark.slow

IMAGE = os.environ.get("LIGHTSPAN_TEST_IMAGE", "")
BWRAP = shutil.which("bwrap")
has_bubblewrap = pytest.mark.skipif(
    BWRAP is None
    or bool(subprocess.run([BWRAP, "--ro-bind", "/", "/", "true"], check=False).returncode),
    reason="bubblewrap does not run on this machine",
)
has_podman = pytest.mark.skipif(
    not IMAGE or shutil.which("podman") is None, reason="LIGHTSPAN_TEST_IMAGE names no image"
)
has_docker = pytest.mark.skipif(
    not IMAGE
    or shutil.which("docker") is None
    or bool(subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode),
    reason="docker does not run, or does not have the image in LIGHTSPAN_TEST_IMAGE",
)
FIX = 'pwd; test -s calc && echo fixed > calc; touch "$HOME/mine"; test -z "$SEARCH_KEY"'
CHECK = 'grep -q fixed calc && test -s "$LIGHTSPAN_TASK_FILE" && test ! -e "$HOME/mine"'


def page() -> dict[str, Any]:
    """Run the Python files of the page; return the names that they define."""
    names: dict[str, Any] = {}
    sources = {name: text for _, name, text in blocks("guides/sandbox.md") if name.endswith(".py")}
    assert list(sources) == ["sandboxed.py", "own_app.py", "contained.py", "in_docker.py"]
    for name, text in sources.items():
        image = text.replace("my-image", IMAGE or "my-image")
        exec(compile(image.replace("from sandboxed import BUBBLEWRAP", ""), name, "exec"), names)
    return names


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("SEARCH_KEY", "the-users-key")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/calc").write_text("bug\n")
    return {"instruction": "Fix it.", "workspace": str(tmp_path / "repository")}


def agent(script: str, sandbox: list[str], check: str = CHECK, **options: Any) -> CodingAgent:
    spec = ProgramSpec(arguments=("sh", "-c", script.replace("$", "$$")))
    return CodingAgent(spec, verify=["sh", "-c", check], sandbox=sandbox, **options)


# --- bubblewrap -----------------------------------------------------------------------------
@has_bubblewrap
async def test_a_coding_agent_in_bubblewrap(task: dict[str, str]) -> None:
    sandbox = page()["BUBBLEWRAP"] + page()["FOLDERS"]
    assert await agent(FIX, sandbox)(task) == 1.0
    assert await agent("pwd", sandbox)(task) == 0.0
    assert await agent("test $PWD = /mnt && echo fixed > calc", sandbox)(task) == 1.0
    assert Path(task["workspace"], "calc").read_text() == "bug\n"


@has_bubblewrap
async def test_what_bubblewrap_hides(task: dict[str, str], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    sandbox = page()["BUBBLEWRAP"] + page()["FOLDERS"]
    for attack in (
        f"cat {secret}",
        f"ls {tmp_path}",
        "echo > /etc/lightspan-test",
        "ls ~root/.*rc",
    ):
        script = f"{attack} || echo fixed > calc"
        assert await agent(script, sandbox)(task) == 1.0, attack


@has_bubblewrap
async def test_an_app_in_bubblewrap() -> None:
    names = page()
    assert names["program"].task == "environment"
    words = names["BUBBLEWRAP"]
    app = Command(
        [*words, "sh", "-c", 'test "$LIGHTSPAN_TASK" = 0.25; echo $?'], task="environment"
    )
    assert await app(0.25) == 0.0


@has_bubblewrap
async def test_sandboxes_end_with_a_killed_runner(task: dict[str, str]) -> None:
    sandbox = page()["BUBBLEWRAP"] + page()["FOLDERS"]
    app = agent("exec sleep 7531", sandbox)
    script = (
        "import asyncio, sys\nfrom lightspan import CodingAgent\n"
        f"asyncio.run(CodingAgent.from_reference(sys.argv[1])({task!r}))\n"
    )
    command = [sys.executable, "-c", script, app.reference]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment) as runner:  # noqa: ASYNC220 - until() waits
        await until(lambda: sleeping("7531"))
        runner.send_signal(signal.SIGKILL)
    await until(lambda: not sleeping("7531"))


def sleeping(seconds: str) -> bool:
    """Return whether a process `sleep SECONDS` runs on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\0%s\0" % seconds.encode():
                return True
        except OSError:  # it has ended
            continue
    return False


# --- podman ---------------------------------------------------------------------------------
@has_podman
async def test_programs_in_podman(task: dict[str, str]) -> None:
    names = page()
    sandbox = list(names["coding_agent"].sandbox)
    if conf := os.environ.get("CONTAINERS_CONF"):  # how containers start on this machine
        sandbox.insert(1, f"CONTAINERS_CONF={conf}")
    assert await agent(FIX, sandbox)(task) == 1.0
    assert await agent("true", sandbox)(task) == 0.0
    with pytest.raises(ProgramError, match="exit status 125") as raised:
        await agent("true", [*sandbox[:-1], "localhost/lightspan-no-such-image"])(task)
    assert raised.value.outcome == Outcome.INFRASTRUCTURE
    assert names["own_app"].task == "environment"
    scope = AttemptContext(
        rollout_id="r", attempt_id="a", gateway_url="http://127.0.0.1:9", call_token="the-token"
    )
    seen = (
        'test "$OPENAI_API_KEY $LIGHTSPAN_TASK" = "the-token 5" && test -z "$SEARCH_KEY"; echo $?'
    )
    words = names["own_app"].arguments[:-2]
    with open_scope(scope):
        assert await Command([*words, "sh", "-c", seen], task="environment")(5) == 0.0


@has_podman
async def test_a_container_ends_with_its_attempt(task: dict[str, str]) -> None:
    words = page()["own_app"].arguments[:-2]
    app = Command([*words, "sleep", "8642"], timeout_s=5)
    with pytest.raises(ProgramError, match="ran longer than 5 s"):
        await app(1)
    await until(lambda: not sleeping("8642"))


# --- docker ---------------------------------------------------------------------------------
@has_docker
async def test_a_coding_agent_in_docker(task: dict[str, str]) -> None:
    host = [f"DOCKER_HOST={os.environ['DOCKER_HOST']}"] if "DOCKER_HOST" in os.environ else []
    sandbox = ["env", *host, *page()["docker_agent"].sandbox]
    assert await agent(FIX, sandbox)(task) == 1.0
    assert await agent("true", sandbox)(task) == 0.0
    with pytest.raises(ProgramError, match="exit status 125") as raised:
        await agent("true", [*sandbox[:-1], "localhost/lightspan-no-such-image"])(task)
    assert raised.value.outcome == Outcome.INFRASTRUCTURE


@has_docker
async def test_a_container_of_docker_ends_with_its_attempt() -> None:
    words = ["docker", "run", "--rm", "--init", "--network=host", IMAGE]
    app = Command([*words, "sleep", "8643"], task="environment", timeout_s=5)
    with pytest.raises(ProgramError, match="ran longer than 5 s"):
        await app(1)
    await until(lambda: not sleeping("8643"))
