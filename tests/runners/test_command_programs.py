"""Test programs in several languages as apps, with a real runner and gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightspan import Command
from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.runners.app import as_app
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_testing.gateway_suite import shared_tokenizer
from lightspan_testing.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[1] / "apps" / "programs"
POLICY = Target(route=Route.POLICY, policy="policy")
BASE = Target(route=Route.BASE, policy="base")
EVERYONE = Routing(rules=[Rule("*", POLICY)])


def needs(program: str) -> Any:
    """Return a mark that skips a test if `program` is not installed.

    Other languages test the same.
    """
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"{program} is not on this machine"
    )


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "the-users-own")
    yield
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


class World:
    """A runner and a gateway whose engine repeats the prompt."""

    def __init__(self, store: Store, gateway: Gateway, engine: ScriptedEngine) -> None:
        self.store = store
        self.engine = engine
        self.gateway = gateway

    async def enqueue(
        self, routing: Routing, tasks: list[Any], stem: str = "ro", **fields: Any
    ) -> list[str]:
        routed = Routing(rules=routing.rules, default=routing.default, gateway_url=self.gateway.url)
        resources = await self.store.put_resources({"routing": routed})
        names = [f"{stem}-{number}" for number in range(len(tasks))]
        options = {"resources_id": resources, "mode": Mode.VAL, **fields}
        await self.store.enqueue(
            [
                Rollout(rollout_id=name, task=task, task_id=name, **options)
                for name, task in zip(names, tasks, strict=True)
            ]
        )
        return names

    @asynccontextmanager
    async def running(self, command: Command, slots: int = 4) -> AsyncIterator[Runner]:
        runner = Runner(self.store, as_app(command), RunnerConfig(slots=slots))
        task = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            runner.stop()
            await task

    async def run(
        self, command: Command, tasks: list[Any], routing: Routing = EVERYONE, **fields: Any
    ) -> list[Attempt]:
        """Run the tasks, and return their attempts."""
        names = await self.enqueue(routing, tasks, **fields)
        async with self.running(command):
            await self.ended(names)
        return await self.store.attempts(names)

    async def ended(self, names: list[str]) -> None:
        cursor = 0
        while not all(state.status.final for state in await self.store.rollouts(names)):
            cursor = (await self.store.watch(cursor, timeout_s=5)).cursor

    async def spans(self, attempt: Attempt) -> list[Span]:
        return (await self.store.spans([attempt.attempt_id]))[attempt.attempt_id]


@pytest.fixture
async def world(store: Store) -> AsyncIterator[World]:
    def repeat(request: Any) -> str:
        prompt = shared_tokenizer().decode(request.prompt_ids).partition("user\n")[2]
        return prompt.split("\n")[0]

    engine = ScriptedEngine(shared_tokenizer(), repeat, policies={"policy": 1, "base": 0})
    async with Gateway(store, engine) as gateway:
        yield World(store, gateway, engine)


def python(code: str, **options: Any) -> Command:
    return Command([sys.executable, "-c", code], **options)


ASK = """
import json, os, sys, urllib.request

def ask(text, url=None, **headers):
    url = url or os.environ["OPENAI_BASE_URL"]
    body = {"model": os.environ["LIGHTSPAN_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers}
    asked = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit("error: " + error.read().decode())
"""


# --- the same program with five clients -----------------------------------------------------------
LANGUAGES = [
    pytest.param(["sh", "ask.sh"], "file", marks=needs("curl"), id="shell-with-curl"),
    pytest.param(["sh", "ask_plain.sh"], "environment", id="shell-without-curl"),
    pytest.param([sys.executable, "ask.py"], "file", id="python-with-openai"),
    pytest.param([sys.executable, "ask_anthropic.py"], "file", id="python-with-anthropic"),
    pytest.param(["node", "ask.mjs"], "file", marks=needs("node"), id="node"),
]


@pytest.mark.parametrize(("arguments", "task"), LANGUAGES)
async def test_a_program_in_any_language(world: World, arguments: list[str], task: Any) -> None:
    """Check four agents: named by URL, by path, by the model, and without a name."""
    command = Command(arguments, task=task, cwd=PROGRAMS, env={"PYTHON": sys.executable})
    routing = Routing(
        rules=[Rule("planner", BASE), Rule("team/*", POLICY), Rule("edit*", POLICY)], default=POLICY
    )
    attempts = await world.run(command, [{"number": number} for number in range(2)], routing)
    rewards = [attempt.reward for attempt in attempts]
    assert rewards == [Reward(float(n)) for n in range(2)], {each.message for each in attempts}
    records = await world.store.token_records([attempt.attempt_id for attempt in attempts])
    for number, attempt in enumerate(attempts):
        assert (attempt.status, attempt.capture_errors) == (AttemptStatus.SUCCEEDED, [])
        spans = await world.spans(attempt)
        calls = sorted(
            (span for span in spans if span.kind is SpanKind.LLM),
            key=lambda span: span.sequence_start or 0,
        )
        expected = [
            ("planner", "base", f"plan {number}"),
            ("team/writer", "policy", f"write {number}"),
            ("editor", "policy", f"edit {number}"),
            ("app", "policy", f"{number}"),
        ]
        call_records = {record.call_id: record for record in records[attempt.attempt_id]}
        got = [
            (
                span.attributes[c.AGENT_PATH],
                call_records[str(span.attributes[c.CALL_ID])].policy,
                shared_tokenizer().decode(
                    call_records[str(span.attributes[c.CALL_ID])].response_ids
                ),
            )
            for span in calls
        ]
        assert got == expected
        [program] = [span for span in spans if c.COMMAND_STATUS in span.attributes]
        assert program.attributes[c.COMMAND_STATUS] == 0
        assert program.attributes[c.COMMAND_STDOUT] == f"{number}\n"
        stderr = f"plan {number}\nwrite {number}\nedit {number}\n"
        assert program.attributes[c.COMMAND_STDERR] == stderr


# --- what it finds, and what it does not --------------------------------------------------------
async def test_its_environment_opens_its_own_model_calls_only(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE", "sqlite:///secret.db")
    monkeypatch.setenv("LIGHTSPAN_CALL_TOKEN", "of-another")
    monkeypatch.setenv("USERS_OWN", "stays")
    code = ASK + "ask('1')\njson.dump(dict(os.environ), open('env.json', 'w'))\nprint(1)"
    command = python(code, cwd=tmp_path)
    [attempt] = await world.run(command, [{}])
    assert attempt.reward == Reward(1.0), attempt.message
    env = json.loads((tmp_path / "env.json").read_text())
    names = [name for name in env if name.startswith("LIGHTSPAN_")]
    assert sorted(names) == [
        "LIGHTSPAN_ATTEMPT_ID",
        "LIGHTSPAN_GATEWAY_URL",
        "LIGHTSPAN_MODE",
        "LIGHTSPAN_MODEL",
        "LIGHTSPAN_ROLLOUT_ID",
        "LIGHTSPAN_TASK_FILE",
    ]
    assert (env["USERS_OWN"], env["OPENAI_API_KEY"]) == ("stays", attempt.call_token)
    assert (env["LIGHTSPAN_MODEL"], env["LIGHTSPAN_MODE"]) == ("policy", "val")
    assert env["LIGHTSPAN_ATTEMPT_ID"] == attempt.attempt_id
    assert not Path(env["LIGHTSPAN_TASK_FILE"]).exists()
    # the key is invalid once the attempt has ended
    url = f"{env['OPENAI_BASE_URL']}/models"
    key = {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
    await asyncio.to_thread(_until_refused, url, key)


def _until_refused(url: str, headers: Mapping[str, str]) -> None:
    """Repeat a call until the gateway refuses it.

    The gateway checks once a second whether the attempt is running.
    """
    while _status(url, headers) != 403:
        time.sleep(0.1)


def _status(url: str, headers: Mapping[str, str]) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers))) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_the_token_is_not_in_what_is_kept(world: World) -> None:
    code = "import os, sys\nkey = os.environ['OPENAI_API_KEY']\nprint(key)\nsys.exit(key)"
    [attempt] = await world.run(python(code), [{}])
    assert attempt.message == "the program ended with exit status 1: <call token>"
    [program] = [s for s in await world.spans(attempt) if c.COMMAND_STATUS in s.attributes]
    assert program.attributes[c.COMMAND_STDOUT] == "<call token>\n"
    assert attempt.call_token not in repr(program)
    code = "import os\nprint(os.environ['OPENAI_API_KEY'])"
    [attempt] = await world.run(python(code), [{}], stem="line")
    assert attempt.message.startswith("the program's last line '<call token>': ")


# --- agents that nobody answers -----------------------------------------------------------------


# --- endings ------------------------------------------------------------------------------------
async def test_endings_are_outcomes(world: World) -> None:
    code = (
        "import json, os, time\n"
        "task = json.loads(os.environ['LIGHTSPAN_TASK'])\n"
        "time.sleep(task.get('sleep', 0))\n"
        "print(task['print'])\n"
        "os._exit(task.get('status', 0))\n"
    )
    tasks = [
        {"print": "0.25"},
        {"print": "well"},
        {"print": "1", "status": 7},
    ]
    command = python(code, task="environment")
    attempts = await world.run(command, tasks)
    late = {"print": "1", "sleep": 600}
    attempts += await world.run(command, [late], stem="late", timeout_s=1)
    assert [(a.status, a.outcome) for a in attempts] == [
        (AttemptStatus.SUCCEEDED, Outcome.OK),
        (AttemptStatus.FAILED, Outcome.BAD_REWARD),
        (AttemptStatus.FAILED, Outcome.APP_ERROR),
        (AttemptStatus.TIMEOUT, Outcome.TIMEOUT),
    ]
    assert [attempt.reward for attempt in attempts] == [Reward(0.25), None, None, None]
    assert attempts[1].message.startswith("the program's last line 'well': that is no reward")
    assert attempts[2].message == "the program ended with exit status 7"
    assert attempts[3].message == "the app ran longer than 1 s"
