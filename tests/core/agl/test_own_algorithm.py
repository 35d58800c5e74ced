"""Algorithms of one's own: over a store that processes share, with runners, and what they read."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import agl_runner
import openai
import pytest

import lightspan
import lightspan.agl as agl
from lightspan.agl import _tracers
from lightspan.capture.scope import acting
from lightspan.errors import ConfigError, DataError, UnsupportedError
from lightspan.schema import clock
from lightspan.schema.records import AttemptRef, Mode, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores._lease_time import MachineClock
from lightspan.stores.sqlite import SQLiteStore
from lightspan.testing.scripted import ScriptedServer
from lightspan.testing.store_suite import make_span

PROMPT = {"prompt": agl.PromptTemplate(template="{n}.5")}


class Asks(agl.LitAgent[Any]):
    """A writer that asks a model."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        with openai.OpenAI(base_url=llm.get_base_url(), api_key="none", max_retries=0) as client:
            for name in ("write_query", "check_query"):
                with lightspan.agent(name):
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": f"{name}: {task}"}]
                    )
                agl.emit_reward(0.25)
        return 1.0


# --- stores ---------------------------------------------------------------------------------
async def test_a_runner_of_another_process_works_on_the_store(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/store.db"
    store = agl.LightningStoreClient(url)
    await store.update_resources("best", PROMPT)
    queued = await store.enqueue_many_rollouts(
        [agl.EnqueueRolloutRequest(input=n, mode="train", metadata={"n": n}) for n in (3, 5)]
    )
    command = [sys.executable, agl_runner.__file__, url, "2"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    ids = [rollout.rollout_id for rollout in queued]
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
    assert [(r.status, r.resources_id, r.metadata) for r in ended] == [
        ("succeeded", "best", {"n": 3}),
        ("succeeded", "best", {"n": 5}),
    ]
    spans = [await store.query_spans(rollout_id, "latest") for rollout_id in ids]
    assert [agl.find_final_reward(found) for found in spans] == [1.75, 2.75]
    assert [worker.worker_id for worker in await store.query_workers()] == ["Worker-7"]
    await store.close()
    async with open_store(url) as kept:  # lightspan reads the same: inspect, SFT from episodes …
        states = await kept.rollouts(mode=Mode.TRAIN)
        assert [state.status for state in states] == [RolloutStatus.SUCCEEDED] * 2
        attempts = await kept.attempts(ids)
        assert [attempt.reward and attempt.reward.value for attempt in attempts] == [1.75, 2.75]


async def test_keys_are_written_to_no_file(tmp_path: Path) -> None:
    llm = agl.LLM(endpoint="http://e", model="m", api_key="secret")
    store = agl.LightningStoreClient(f"sqlite:{tmp_path}/store.db")
    with pytest.raises(ConfigError, match="'main_llm' has an api_key, and the store is a file"):
        await store.add_resources({"main_llm": llm})
    assert (await store.query_resources()).total == 0
    await store.close()
    update = await agl.InMemoryLightningStore().add_resources({"main_llm": llm})
    assert "secret" not in repr(update)


async def test_what_a_store_cannot_change_is_refused() -> None:
    store = agl.InMemoryLightningStore()
    rollout = await store.enqueue_rollout("x", mode="train")
    for change in ({"input": 1}, {"mode": "val"}, {"metadata": {}}, {"config": None}):
        with pytest.raises(UnsupportedError, match="a rollout never changes; enqueue another"):
            await store.update_rollout(rollout.rollout_id, **change)
    with pytest.raises(UnsupportedError, match="it is queuing, and ends only by an attempt"):
        await store.update_rollout(rollout.rollout_id, status="succeeded")
    with pytest.raises(UnsupportedError, match="attempts begin when a rollout is dequeued"):
        await store.start_attempt(rollout.rollout_id)
    with pytest.raises(DataError, match="must be JSON"):
        await store.enqueue_rollout(object())
    with pytest.raises(ConfigError, match="sort_by='mood': Rollout has no such field"):
        await store.query_rollouts(sort_by="mood")
    for address in ("http://127.0.0.1:4747", "https://store"):
        with pytest.raises(ConfigError, match="use the store that the processes share"):
            agl.LightningStoreClient(address)
    with pytest.raises(UnsupportedError, match="a store that grows large is a file"):
        agl.InMemoryLightningStore(eviction_memory_threshold=0.5)


async def test_what_came_late_pays_nobody() -> None:
    """Whoever may send traces could have sent it."""
    store = agl.InMemoryLightningStore()
    rollout = await store.enqueue_rollout("task")
    await store.dequeue_rollout()
    [attempt] = await store.store.attempts([rollout.rollout_id])
    paid = {"agentlightning.reward.0.name": "r", "agentlightning.reward.0.value": 1.0}
    sent = make_span(attempt, late=True).replace(name="agentlightning.annotation", attributes=paid)
    await store.store.add_spans(AttemptRef(attempt.attempt_id, attempt.epoch), [sent])
    spans = await store.query_spans(rollout.rollout_id)
    assert agl.find_final_reward(spans) == 1.0
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    [attempt] = await store.store.attempts([rollout.rollout_id])
    assert (attempt.status, attempt.reward) == ("succeeded", None)


async def test_waiting_reads_what_changes_and_queries_what_they_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, count = agl.InMemoryLightningStore(), 60
    queued = [await store.enqueue_rollout(number) for number in range(count)]
    ids = [rollout.rollout_id for rollout in queued]
    every, read = store.store.rollouts, {"waiting": 0, "asking": 0}

    async def counted(*args: Any, **filters: Any) -> Any:
        found = await every(*args, **filters)
        read["waiting" if asyncio.current_task() is waiting else "asking"] += len(found)
        return found

    monkeypatch.setattr(store.store, "rollouts", counted)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids, timeout=60))
    while (rollout := await store.dequeue_rollout()) is not None:
        for _ in range(5):
            await asyncio.sleep(0)
        await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert [rollout.rollout_id for rollout in await waiting] == ids
    assert read["waiting"] <= 4 * count
    read["asking"] = 0
    assert not await store.query_rollouts(status_in=["queuing", "running"])
    [one] = await store.query_rollouts(rollout_ids=[ids[7], "unknown"], status_in=["succeeded"])
    assert (one.rollout_id, read["asking"]) == (ids[7], count)  # an unknown one has all looked at
    either = await store.query_rollouts(
        rollout_id_in=[ids[7]], status_in=["succeeded"], filter_logic="or"
    )
    assert either.total == count


async def test_each_version_of_the_resources_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, read = agl.InMemoryLightningStore(), []
    get = store.store.get_resources

    async def counted(resources_id: str) -> Any:
        read.append(resources_id)
        return await get(resources_id)

    monkeypatch.setattr(store.store, "get_resources", counted)
    for _ in range(5):
        await store.add_resources(PROMPT)
    latest = await store.get_latest_resources()
    assert latest is not None
    latest.resources.clear()  # theirs alone
    again = await store.get_resources_by_id(latest.resources_id)
    assert again is not None
    assert set(again.resources) == {"prompt"}
    assert len(read) == len(set(read)) == 5


async def test_another_process_hears_a_sign_of_life(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/store.db"
    runner, algorithm = agl.LightningStoreClient(url), agl.LightningStoreClient(url)
    started = await runner.start_rollout("x", config=agl.RolloutConfig(unresponsive_seconds=60))
    ids = (started.rollout_id, started.attempt.attempt_id)
    silent = await algorithm.get_latest_attempt(started.rollout_id)
    assert silent is not None
    assert (silent.status, silent.last_heartbeat_time) == ("preparing", None)
    heard = started.attempt.start_time + 50
    await runner.update_attempt(*ids, last_heartbeat_time=heard)
    alive = await algorithm.get_latest_attempt(started.rollout_id)
    assert alive is not None
    assert (alive.status, alive.last_heartbeat_time) == ("running", pytest.approx(heard, abs=0.5))
    await runner.close()
    await algorithm.close()


class Set(MachineClock):
    """A machine's clock that is set."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def __call__(self) -> float:
        return super().__call__() + self._ahead_s


@pytest.mark.parametrize("set_s", [-3600.0, 3600.0])
async def test_a_clock_that_was_set_ends_no_attempt(
    tmp_path: Path, set_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, so that the store's time is another one; and while somebody looks."""
    async with SQLiteStore(tmp_path / "store.db", clock=Set(set_s)) as kept:
        await kept.put_resources({})
        assert await kept.lease_time() == pytest.approx(clock.now() + set_s, abs=60)
    url = f"sqlite:{tmp_path}/store.db"
    runner, algorithm = agl.LightningStoreClient(url), agl.LightningStoreClient(url)
    limits = agl.RolloutConfig(unresponsive_seconds=600, timeout_seconds=600)
    started = await runner.start_rollout("x", config=limits)
    ids = (started.rollout_id, started.attempt.attempt_id)

    async def seen() -> tuple[str, float | None]:
        found = await algorithm.get_latest_attempt(started.rollout_id)
        assert found is not None
        return found.status, found.last_heartbeat_time

    assert await seen() == ("preparing", None)
    heard = started.attempt.start_time + 50
    await runner.update_attempt(*ids, last_heartbeat_time=heard)
    assert await seen() == ("running", pytest.approx(heard, abs=30))
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + set_s)
    assert await seen() == ("running", pytest.approx(heard + set_s, abs=30))
    await runner.close()
    await algorithm.close()


@pytest.mark.parametrize(
    ("limits", "ends"),
    [({"unresponsive_seconds": 0.2}, "unresponsive"), ({"timeout_seconds": 0.2}, "timeout")],
)
async def test_the_time_of_an_attempt_ends_all_the_same(
    tmp_path: Path, limits: dict[str, float], ends: str
) -> None:
    async with SQLiteStore(tmp_path / "store.db", clock=Set(3600.0)) as kept:
        await kept.put_resources({})
    store = agl.LightningStoreClient(f"sqlite:{tmp_path}/store.db")
    started = await store.start_rollout("x", config=agl.RolloutConfig(**limits))
    while True:
        found = await store.get_latest_attempt(started.rollout_id)
        assert found is not None
        if found.status not in ("preparing", "running"):
            break
        await asyncio.sleep(0.05)
    assert found.status == ends
    await store.close()


# --- what is read from it -------------------------------------------------------------------
async def test_lightspans_spans_read_as_the_originals() -> None:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    with ScriptedServer(lambda request: "answered") as server:
        llm = agl.LLM(endpoint=server.url, model="m")
        with runner.run_context(agent=Asks(), store=store):
            rollout = await runner.step("?", resources={"main_llm": llm}, mode="train")
    assert rollout.status == "succeeded"
    spans = list(await store.query_spans(rollout.rollout_id, "latest"))
    assert agl.find_final_reward(spans) == 1.0
    assert [agl.get_reward_value(span) for span in agl.find_reward_spans(spans)] == [0.25, 0.25, 1]
    told = [
        (t.metadata["agent_name"], t.prompt["raw_content"][0]["content"], t.reward)
        for t in agl.TracerTraceToTriplet()(spans)
    ]
    assert told == [
        ("write_query", "write_query: ?", 0.25),
        ("check_query", "check_query: ?", 0.25),
    ]
    [chosen] = agl.TracerTraceToTriplet(agent_match="^write")(spans)
    assert chosen.response["raw_content"][0]["content"] == "answered"
    assert agl.TraceToMessages()(spans)[0]["messages"] == [
        {"role": "user", "content": "write_query: ?"},
        {"role": "assistant", "content": "answered"},
    ]


class Damages(agl.LitAgent[Any]):
    """What it does cannot be recorded whole."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        current = acting()
        assert current is not None
        current.scope.recorder.damage("a client could not be wrapped")
        return 1.0


async def test_what_was_not_recorded_whole_is_never_trained() -> None:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    with runner.run_context(agent=Damages(), store=store):
        rollout = await runner.step(1, mode="train")
    [attempt] = await store.store.attempts([rollout.rollout_id])
    assert attempt.damage == ["a client could not be wrapped"]


class Fails(agl.LitAgent[Any]):
    """Raises what no executor, task or loop lets through."""

    ERRORS = (StopIteration(), SystemExit(3), asyncio.CancelledError())

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if task is None:
            return 1.0
        raise self.ERRORS[task]


class FailsLater(Fails):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        return self.rollout(task, resources, rollout)


@pytest.mark.parametrize("kind", [Fails, FailsLater])
async def test_whatever_an_agent_raises_fails_its_rollout_alone(kind: type[Fails]) -> None:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), 4, poll_interval=0.01)
    tasks = [0, 1, 2, None]
    queued = [await store.enqueue_rollout(task, mode="train") for task in tasks]
    async with asyncio.timeout(60):
        with runner.run_context(agent=kind(), store=store):
            await asyncio.create_task(runner.iter())
    ids = [rollout.rollout_id for rollout in queued]
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
    assert [rollout.status for rollout in ended] == ["failed", "failed", "failed", "succeeded"]


class Speaks(agl.LitAgent[Any]):
    """Says something, and goes on working."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        agl.emit_message("alive")
        assert HEARD.wait(60)


HEARD = threading.Event()


async def test_an_agent_that_says_something_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tracers, "_LIFE_S", 0.01)
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), 1, poll_interval=0.01)
    await store.enqueue_rollout("x")
    with runner.run_context(agent=Speaks(), store=store):
        work = asyncio.create_task(runner.iter())
        try:
            async with asyncio.timeout(20):
                while not await store.query_rollouts(status_in=["running"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            HEARD.set()
        await work


class Ties(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> None:
        values = {"speed": 1.0, "truth": 1.0, "length": 0.0}
        agl.emit_reward(values, primary_key="truth")
        agl.emit_annotation({"of": {"numbers": [1, 2]}})


async def test_what_is_emitted_keeps_its_order_and_its_lists(tmp_path: Path) -> None:
    store = agl.LightningStoreClient(f"sqlite:{tmp_path}/store.db")
    runner = agl.LitAgentRunner[Any](agl.OtelTracer())
    with runner.run_context(agent=Ties(), store=store):
        rollout = await runner.step(1)
    [said] = agl.find_reward_spans(list(await store.query_spans(rollout.rollout_id)))
    names = [dimension.name for dimension in agl.get_rewards_from_span(said)]
    assert names == ["truth", "speed", "length"]
    [_, annotation] = await store.query_spans(rollout.rollout_id)
    assert annotation.attributes == {"of.numbers": [1, 2]}
    await store.close()


# --- trainers -------------------------------------------------------------------------------
def test_the_algorithm_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "from-agent-lightning.md").read_text()
    [code] = re.findall(r"```python\n(@agl\.algo\n.*?)```", page, re.S)

    class Counts(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return float(len(resources["prompt"].format(**task)))

    exec(code, {"agl": agl, "agent": Counts(), "train": [{"question": "a"}, {"question": "bc"}]})
    assert capsys.readouterr().out.splitlines() == [
        "Answer: {question} [9.0, 10.0]",
        "Think, then answer: {question} [21.0, 22.0]",
    ]


def test_plain_algorithms_work_beside_their_runners(tmp_path: Path) -> None:
    @agl.algo
    def plain(*, store: agl.LightningStore, train_dataset: Any) -> None:
        async def work() -> list[str]:
            ids = [(await store.enqueue_rollout(n)).rollout_id for n in train_dataset]
            return [r.status for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=60)]

        ended.extend(asyncio.run(work()))

    class Returns(agl.LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return float(task)

    ended: list[str] = []
    for store in (None, agl.LightningStoreClient(f"sqlite:{tmp_path}/store.db")):
        trainer = agl.Trainer(algorithm=plain, n_runners=2, store=store)
        assert trainer.fit(Returns(), [1, 2, 3]) is None
        assert ended == ["succeeded"] * 3
        ended.clear()
        assert trainer.store is not None
        asyncio.run(trainer.store.close())
    assert not [t for t in threading.enumerate() if t.name.startswith("lightspan-store")]


class Meets(agl.LitAgent[Any]):
    """Works only when as many others do."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return float(MEETING.wait(20) >= 0)


MEETING = threading.Barrier(40)
"""More than the threads of an event loop, which are 32 at most."""


def test_as_many_agents_work_at_once_as_there_are_runners() -> None:
    trainer = agl.Trainer(
        algorithm=agl.Baseline(polling_interval=0.01, max_queue_length=100),
        n_runners=MEETING.parties,
    )
    trainer.dev(Meets(), list(range(MEETING.parties)))
    assert trainer.store is not None
    done = asyncio.run(trainer.store.query_rollouts(status_in=["succeeded"]))
    assert done.total == MEETING.parties


class Listens(agl.OtelTracer):
    heard: list[str] = []  # noqa: RUF012  # of every copy

    def create_span(self, name: str, *args: Any, **kwargs: Any) -> agl.SpanCoreFields:
        self.heard.append(name)
        return super().create_span(name, *args, **kwargs)


@pytest.mark.parametrize("runners", [1, 2])
def test_the_tracer_of_the_trainer_records(runners: int) -> None:
    Listens.heard.clear()
    algorithm = agl.Baseline(polling_interval=0.01)
    trainer = agl.Trainer(algorithm=algorithm, n_runners=runners, tracer=Listens())
    trainer.dev(Ties(), [1, 2])
    assert Listens.heard == ["agentlightning.annotation"] * 4


def test_an_agent_that_is_one_of_a_kind_has_one_runner(capsys: pytest.CaptureFixture[str]) -> None:
    agent = agl_runner.Halves()
    agent.kept = "set after it was made"  # type: ignore[attr-defined]
    trainer = agl.Trainer(
        algorithm=agl.Baseline(polling_interval=0.02), n_runners=3, initial_resources=PROMPT
    )
    trainer.dev(agent, [1, 2])
    assert "one runner, not 3: Halves cannot be made again" in capsys.readouterr().out
    assert trainer.store is not None
    assert asyncio.run(trainer.store.query_rollouts(status_in=["succeeded"])).total == 2


def test_an_algorithm_that_fails_ends_its_runners() -> None:
    @agl.algo
    async def fails(*, store: agl.LightningStore) -> None:
        raise LookupError("nothing to learn")

    with pytest.raises(LookupError, match="nothing to learn"):
        agl.Trainer(algorithm=fails, n_runners=2).fit(agl_runner.Halves())


def test_dev_runs_what_is_fast() -> None:
    class Slow(agl.Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            raise AssertionError

    with pytest.raises(ConfigError, match="dev runs a FastAlgorithm, and Slow is none"):
        agl.Trainer(algorithm=Slow()).dev(agl_runner.Halves(), [1])


def test_options_that_only_verl_lacks() -> None:
    with pytest.raises(UnsupportedError, match=r"'reward_match': .*lightspan knows agent_match"):
        agl.Trainer(adapter=agl.TracerTraceToTriplet(reward_match="first_sibling"))
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        adapter=agl.TraceToMessages(),
        store=agl.InMemoryLightningStore(),
        hooks=[agl.Hook()],
        max_rollouts=1,
    )
    assert isinstance(trainer.adapter, agl.TraceToMessages)
