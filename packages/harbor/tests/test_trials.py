"""Test trials that Harbor runs in folders instead of containers, by a real runner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="Harbor needs Python 3.12")

from kills import outlive_kills
from sandboxes import write_task

from lightspan.runners.app import as_app
from lightspan.runners.local import LocalRunners
from lightspan.runners.program import ProgramError
from lightspan.runners.protocol import FOLDER_VARIABLE, RunnerConfig, RunnerPlan
from lightspan.runners.runner import Runner
from lightspan.schema import semconv as c
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_harbor import HarborTasks, HarborTrial, trial
from lightspan_harbor.host import SKILL, Memory
from lightspan_harbor.trial_host import hosting
from lightspan_testing.wait import until

SANDBOX = "sandboxes:Folder"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put sandboxes and the run into the test's folder."""
    (tmp_path / "boxes").mkdir()
    monkeypatch.setenv("SANDBOXES", str(tmp_path / "boxes"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "run"))


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Any]:
    """Keep one host for all trials of a test: Harbor needs seconds to be imported."""
    async with hosting(tmp_path / "run" / "trials") as host:
        yield host


def app(agent: str, **options: Any) -> HarborTrial:
    return trial(agent=agent, environment=SANDBOX, **options)


def left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "boxes").iterdir())


async def run_all(store: Store, program: HarborTrial, suite: Path, **fields: Any) -> list[Attempt]:
    """Run each task of a suite, and return all attempts."""
    tasks = list(HarborTasks(suite))
    names = [f"ro-{task['id']}" for task in tasks]
    await store.enqueue(
        [
            Rollout(rollout_id=name, task=task, task_id=name, mode=Mode.VAL, **fields)
            for name, task in zip(names, tasks, strict=True)
        ]
    )
    runner = Runner(store, as_app(program), RunnerConfig(slots=4))
    running = asyncio.create_task(runner.run())
    cursor = 0
    while not all(state.status.final for state in await store.rollouts(names)):
        cursor = (await store.watch(cursor, timeout_s=5)).cursor
    runner.stop()
    await running
    return await store.attempts(names)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


async def span_of(store: Store, attempt: Attempt) -> Span:
    spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
    [span] = [span for span in spans if span.name.startswith("harbor ")]
    return span


# --- rewards ----------------------------------------------------------------------------------
async def test_the_verifier_gives_the_reward(host: Any, store: Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / "suite", name)
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        async with open_store("memory:") as own:
            attempts = await run_all(own, app(agent), tmp_path / "suite")
            assert [each.reward for each in attempts] == [Reward(reward)] * 2
            assert {each.status for each in attempts} == {AttemptStatus.SUCCEEDED}
            span = await span_of(own, attempts[0])
    folder = tmp_path / "run/trials" / attempts[0].attempt_id
    assert span.attributes[c.COMMAND_STDOUT] == f"files: {folder}\nverifier: checked\n"
    assert (folder / "verifier/reward.txt").read_text() == "0\n"
    assert json.loads((folder / "result.json").read_text())["trial_name"] == folder.name
    assert left(tmp_path) == []


async def test_named_rewards_are_dimensions(host: Any, store: Store, tmp_path: Path) -> None:
    rewards = '{"reward": 0.5, "tests": 1, "style": 0}'
    write_task(tmp_path, "a", check=f"echo '{rewards}') > /logs/verifier/reward.json")
    [attempt] = await run_all(store, app("nop"), tmp_path)
    assert attempt.reward == Reward(0.5, {"reward": 0.5, "tests": 1.0, "style": 0.0})


async def test_the_agents_own_time_limit_is_scored(host: Any, store: Store, tmp_path: Path) -> None:
    """Check that the verifier scores what an agent did before its time was over."""
    task = write_task(tmp_path, "a", agent_s=1)
    (task / "solution/solve.sh").write_text(
        "#!/bin/bash\necho done > /app/answer.txt\nsleep 1000\n"
    )
    [attempt] = await run_all(store, app("oracle"), tmp_path)
    assert (attempt.outcome, attempt.reward) == (Outcome.OK, Reward(1.0))
    span = await span_of(store, attempt)
    assert "timed out after 1" in str(span.attributes[c.COMMAND_STDERR])
    assert left(tmp_path) == []


async def test_a_verifier_without_a_reward(host: Any, store: Store, tmp_path: Path) -> None:
    write_task(tmp_path, "a", check="true)")
    [attempt] = await run_all(store, app("nop"), tmp_path)
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert attempt.message.startswith("RewardFileNotFoundError: ")
    assert attempt.reward is None


async def test_a_sandbox_that_does_not_start_is_retried(
    host: Any, store: Store, tmp_path: Path
) -> None:
    task = write_task(tmp_path, "a")
    (task / "environment/broken").write_text("no room")
    attempts = await run_all(store, app("oracle"), tmp_path, max_infrastructure_tries=3)
    assert [(each.status, each.outcome) for each in attempts] == [
        (AttemptStatus.LOST, Outcome.INFRASTRUCTURE)
    ] * 3
    text = "the sandbox or its agent did not start: RuntimeError: no room"
    assert {each.message for each in attempts} == {text}
    assert {each.reward for each in attempts} == {None}


async def test_a_kind_of_sandbox_that_is_missing(host: Any, tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    [task] = HarborTasks(tmp_path)
    with pytest.raises(ProgramError, match="no sandbox can be started: ") as caught:
        await trial(agent="oracle", environment="apple-container")(task)
    assert caught.value.outcome is Outcome.INFRASTRUCTURE


async def test_an_option_that_harbor_does_not_know(host: Any, tmp_path: Path) -> None:
    write_task(tmp_path, "a")
    [task] = HarborTasks(tmp_path)
    with pytest.raises(ProgramError, match="ValidationError: 1 validation error") as caught:
        await trial(agent="oracle", environment="nowhere")(task)
    assert caught.value.outcome is Outcome.APP_ERROR


# --- prompts ----------------------------------------------------------------------------------
PLACES = {
    "first": "AGENTS.md",
    "second": "/app/deep/rules.md",
    "third": "instruction",
    "fourth": "skill",
    "fifth": "skill",
    "sixth": "option:config.system",
}


async def test_prompts_reach_the_agent(host: Any, tmp_path: Path) -> None:
    """Check each place: files, an addition to the task, skills, and an option of the agent."""
    keep = "cp /app/instructions.txt /app/deep/rules.md /logs/verifier; echo 1"
    write_task(tmp_path, "a", instruction="Do it.", check=f"{keep}) > /logs/verifier/reward.txt")
    [task] = HarborTasks(tmp_path)
    texts = {name: f"the {name}\n" for name in PLACES}
    texts["fifth"] = "---\nname: own\ndescription: Mine.\n---\nthe fifth\n"
    resources: Any = {name: PromptTemplate(text) for name, text in texts.items()}
    assert await app("sandboxes:Reader", prompts=PLACES)(task, None, resources) == 1.0
    [folder] = (tmp_path / "run/trials").glob("*/verifier")
    assert (folder / "instructions.txt").read_text().splitlines() == [
        *("the sixth", "", "the first", ""),
        *("---", "name: own", "description: Mine.", "---", "the fifth"),
        *("---", "name: fourth", f"description: {SKILL}", "---", "", "the fourth", ""),
        *("Do it.", "", "the third"),
    ]
    assert (folder / "rules.md").read_text() == "the second\n"


async def test_prompts_of_one_attempt_are_not_of_the_next(host: Any, tmp_path: Path) -> None:
    check = "[ -e AGENTS.md ] && echo 1 || echo 0"
    write_task(tmp_path, "a", check=f"{check}) > /logs/verifier/reward.txt")
    [task] = HarborTasks(tmp_path)
    program = app("nop", prompts={"rules": "AGENTS.md"})
    assert await program(task, None, {"rules": PromptTemplate("Be brief.")}) == 1.0
    assert await program(task) == 0.0


# --- how many at once -------------------------------------------------------------------------
async def test_sandboxes_share_the_memory(host: Any, tmp_path: Path) -> None:
    memory, order = Memory(1000), list[str]()

    async def use(name: str, needed_mb: int, until: asyncio.Event) -> None:
        async with memory.reserved(needed_mb):
            order.append(name)
            await until.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(use("first", 600, first))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(use(f"{mb}", mb, rest)) for mb in (600, 400)]
    await asyncio.sleep(0.05)
    assert order == ["first", "400"]
    first.set()
    await tasks[0]
    await asyncio.sleep(0.05)
    assert order == ["first", "400", "600"]
    rest.set()
    await asyncio.gather(*tasks)
    rest.clear()
    large = asyncio.create_task(use("large", 5000, rest))  # more than there is: alone
    small = asyncio.create_task(use("small", 1, rest))
    await asyncio.sleep(0.05)
    assert order[3:] == ["large"]
    rest.set()
    await asyncio.gather(large, small)


async def test_sandboxes_start_ahead_of_their_agents_turn(host: Any, tmp_path: Path) -> None:
    """Check that with `running=1` a second sandbox is there while the first agent works."""
    task = write_task(tmp_path / "suite", "a")
    solution = f"until [ -e {tmp_path}/go ]; do sleep .05; done; echo done > /app/answer.txt\n"
    began = f"#!/bin/bash\necho $$ >> {tmp_path}/began\n"
    (task / "solution/solve.sh").write_text(began + solution)
    [one] = HarborTasks(tmp_path / "suite")
    program = app("oracle", running=1)
    trials = [asyncio.create_task(program(one)) for _ in range(2)]
    async with asyncio.timeout(60):
        await until(lambda: (tmp_path / "began").exists() and len(left(tmp_path)) == 2)
    await asyncio.sleep(0.2)
    assert len((tmp_path / "began").read_text().splitlines()) == 1
    (tmp_path / "go").touch()
    assert await asyncio.gather(*trials) == [1.0, 1.0]
    assert len((tmp_path / "began").read_text().splitlines()) == 2


# --- ends -------------------------------------------------------------------------------------
@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    """Return a suite whose solution waits until the test has ended."""
    task = write_task(tmp_path / "suite", "a")
    wait = f"until [ -e {tmp_path}/go ]; do sleep .05; done\n"
    (task / "solution/solve.sh").write_text(f"#!/bin/bash\ntouch {tmp_path}/began\n{wait}")
    yield tmp_path / "suite"
    (tmp_path / "go").touch()


async def until_there(path: Path) -> None:
    async with asyncio.timeout(60):
        await until(path.exists)


async def until_none_left(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        await until(lambda: left(tmp_path) == [])


async def test_a_cancelled_attempt_leaves_no_sandbox(
    host: Any, endless: Path, tmp_path: Path
) -> None:
    [task] = HarborTasks(endless)
    running = asyncio.create_task(app("oracle")(task))
    await until_there(tmp_path / "began")
    assert len(left(tmp_path)) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_none_left(tmp_path)
    assert host.is_alive


async def test_a_stop_while_a_sandbox_starts_leaves_none(endless: Path, tmp_path: Path) -> None:
    """Check a runner that cancels its attempt and ends, as at Ctrl-C.

    The host is told both. The sandbox is there when it has been told.
    """
    [task] = HarborTasks(endless)
    environment = Path(task["path"], "environment")
    (environment / "pause").write_text("1")
    async with hosting(tmp_path / "run/trials") as host:
        running = asyncio.create_task(app("oracle")(task))
        await until_there(environment / "starting")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    async with asyncio.timeout(60):
        await until(lambda: not host.is_alive)
    assert left(tmp_path) == []
    assert not (tmp_path / "began").exists()


async def test_a_lost_lease_leaves_no_sandbox(host: Any, endless: Path, tmp_path: Path) -> None:
    """Check an attempt whose rollout another process has cancelled, as when its lease is over."""
    async with open_store("memory:") as store:
        [task] = HarborTasks(endless)
        await store.enqueue([Rollout(rollout_id="ro", task=task, task_id="a", mode=Mode.VAL)])
        runner = Runner(store, as_app(app("oracle")), RunnerConfig(slots=1, lease_s=1))
        running = asyncio.create_task(runner.run())
        await until_there(tmp_path / "began")
        await store.cancel(["ro"])
        await until_none_left(tmp_path)
        runner.stop()
        await running


async def test_a_host_that_dies_is_infrastructure_and_is_replaced(
    endless: Path, tmp_path: Path
) -> None:
    [task] = HarborTasks(endless)
    async with hosting(tmp_path / "run/trials") as host:
        running = asyncio.create_task(app("oracle")(task))
        await until_there(tmp_path / "began")
        os.kill(host.pid, signal.SIGKILL)
        with pytest.raises(
            ProgramError, match=r"trials has ended .*host\.log may say why"
        ) as caught:
            await running
    assert caught.value.outcome is Outcome.INFRASTRUCTURE
    (tmp_path / "go").touch()
    assert await app("oracle")(task) == 0.0


@pytest.mark.faults
@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_a_runner_that_fails_leaves_no_sandbox(
    endless: Path, tmp_path: Path, how: str
) -> None:
    """Check `kill -9`, and a pause after which the lease is over.

    The sandbox is removed, and a second attempt succeeds.
    """
    [task] = HarborTasks(endless)
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        await store.enqueue([Rollout(rollout_id="ro", task=task, task_id="a", mode=Mode.VAL)])
        runners = LocalRunners(1)
        plan = RunnerPlan(
            store_url=store.url,
            app=app("oracle").reference,
            lease_s=5,
            folder=str(tmp_path / "run"),
            sys_path=list(sys.path),
        )
        await runners.start(plan)
        try:
            await until_there(tmp_path / "began")
            [before] = left(tmp_path)
            [pid] = runners.pids
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                while not await store.expire():  # noqa: ASYNC110 - a lease ends by the clock
                    await asyncio.sleep(0.1)
                assert before.exists()
                os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                await until(lambda: not before.exists())
            (tmp_path / "go").touch()
            async with asyncio.timeout(60):
                while (await store.count()) != {RolloutStatus.SUCCEEDED: 1}:
                    runners.check()
                    await asyncio.sleep(0.05)
        finally:
            await runners.stop()
        statuses = [each.status for each in await store.attempts(["ro"])]
    assert statuses == [AttemptStatus.LOST, AttemptStatus.SUCCEEDED]
    await until_none_left(tmp_path)


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_runners_killed_at_random_lose_nothing(tmp_path: Path) -> None:
    """Check 200 trials, or `LIGHTSPAN_TRIALS`: all succeed, and no sandbox is left."""
    write_task(tmp_path / "suite", "a")
    trials = int(os.environ.get("LIGHTSPAN_TRIALS", "200"))
    await outlive_kills(app("oracle"), tmp_path / "suite", tmp_path, trials=trials, max_pause_s=3)
    await until_none_left(tmp_path)
