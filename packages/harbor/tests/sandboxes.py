"""A sandbox without a container, agents for it, and tiny suites, which the host process imports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

ROOTS = re.compile(r"(?<![\w./-])/(logs|tests|solution|app|skills|runtime)\b")


class Folder(BaseEnvironment):
    """A temporary folder, in which `/app`, `/logs`, `/tests` and others of a command lie."""

    @staticmethod
    def type() -> str:
        return "folder"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        pass

    def _here(self, text: str) -> str:
        return ROOTS.sub(lambda match: f"{self.root}{match[0]}", text)

    async def start(self, force_build: bool) -> None:
        broken = self.environment_dir / "broken"
        if broken.exists():
            raise RuntimeError(broken.read_text())
        parent = os.environ.get("SANDBOXES") or tempfile.gettempdir()
        self.root = Path(parent, f"sandbox-{uuid.uuid4().hex}")
        await asyncio.to_thread(self._make)

    def _make(self) -> None:
        """Make the folders, as a program that a cancellation does not end."""
        if (pause := self.environment_dir / "pause").exists():
            (self.environment_dir / "starting").touch()
            time.sleep(float(pause.read_text()))
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        await asyncio.sleep(0.05)
        shutil.rmtree(self.root, ignore_errors=True)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self._here(source.read_text()))
        target.chmod(0o755)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._copy(Path(source_path), Path(self._here(target_path)))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                self._copy(path, Path(self._here(target_dir), path.relative_to(source_dir)))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._here(command)),
            cwd=self._here(cwd or "/app"),
            env={**os.environ, **(self._merge_env(env) or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_sec)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        return ExecResult(stdout=output.decode(), return_code=process.returncode or 0)


class Agent(BaseAgent):
    """An agent that sends its instruction to the model, and writes the answer to `answer.txt`.

    Its system prompt is the option `config.system`, `AGENTS.md` and all skills. `instructions.txt`
    has what it was told.

    Other options: `side`, the name of a model that it asks first; `sub`, the name of an agent that
    it asks next, by a header; `forever`, whether it never ends.
    """

    capabilities = AgentCapabilities(skills=True)

    def __init__(self, logs_dir: Path, **options: Any) -> None:
        self._forever = options.pop("forever", False)
        self._side, self._sub = options.pop("side", ""), options.pop("sub", "")
        self._system = options.pop("config", {}).get("system", "")
        super().__init__(logs_dir, **options)

    @staticmethod
    def name() -> str:
        return "agent"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def _messages(
        self, instruction: str, environment: BaseEnvironment
    ) -> list[dict[str, str]]:
        files = ["AGENTS.md", *([f"{self.skills_dir}/*/SKILL.md"] if self.skills_dir else [])]
        read = [await environment.exec(f"cat {path} 2>/dev/null") for path in files]
        told = [self._system, *(each.stdout or "" for each in read)]
        system = "\n".join(filter(None, told))
        await self._write(environment, "instructions.txt", f"{system}\n{instruction}")
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": instruction}]

    async def _write(self, environment: BaseEnvironment, name: str, text: str) -> None:
        source = self.logs_dir / name
        source.write_text(text)
        await environment.upload_file(source, f"/app/{name}")

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        messages = await self._messages(instruction, environment)
        assert self.model_name is not None
        model = self.model_name.partition("/")[2]
        if self._side:
            await asyncio.to_thread(self._ask, self._side, messages)
        if self._sub:
            await asyncio.to_thread(self._ask, model, messages, self._sub)
        answer = await asyncio.to_thread(self._ask, model, messages)
        steps = [{"source": "user", "message": instruction}, {"source": "agent", "message": answer}]
        (self.logs_dir / "trajectory.json").write_text(json.dumps({"steps": steps}))
        await self._write(environment, "answer.txt", answer)
        while self._forever:
            await environment.exec("sleep 1000")

    def _ask(self, model: str, messages: list[dict[str, str]], agent: str = "") -> str:
        request = urllib.request.Request(
            f"{self.extra_env['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": model, "messages": messages}).encode(),
            {
                "Authorization": f"Bearer {self.extra_env['OPENAI_API_KEY']}",
                "Content-Type": "application/json",
                **({"x-lightspan-agent": agent} if agent else {}),
            },
        )
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])


class Reader(Agent):
    """An agent that only reads what it is told, and makes no model call."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        await self._messages(instruction, environment)


def write_task(
    suite: Path,
    name: str,
    *,
    instruction: str = "Write done into /app/answer.txt.",
    check: str = "grep -qs done /app/answer.txt && echo 1 || echo 0) > /logs/verifier/reward.txt",
    agent_s: float = 1800,
    dockerfile: str = "",
    memory_mb: int = 256,
) -> Path:
    """Write a task that `done` in `/app/answer.txt` solves, and return its folder."""
    folder = suite / name
    files = {
        "instruction.md": instruction,
        "task.toml": f'version = "1.0"\n[verifier]\ntimeout_sec = 1800\n[agent]\ntimeout_sec = '
        f"{agent_s}\n[environment]\nbuild_timeout_sec = 1800\ncpus = 1\nmemory_mb = {memory_mb}\n",
        "environment/Dockerfile": dockerfile or "FROM scratch\n",
        "solution/solve.sh": "#!/bin/bash\necho done > /app/answer.txt\n",
        "tests/test.sh": f"#!/bin/bash\n({check}\necho checked\n",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
