"""Tests of functions as algorithms: they queue rollouts and read rewards, as in its examples."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError, DataError, NotFoundError, RewardError, UnsupportedError


@agl.rollout
async def scores(task: str, prompt_template: agl.PromptTemplate) -> float:
    text = prompt_template.format(question=task)
    if "broken" in text:
        raise ValueError("broken")
    return len(text) / 100


PROMPTS = ["Say it: {question}", "Say it briefly, please: {question}", "Say {question}"]


async def choose(*, store: agl.LightningStore) -> list[tuple[float, str]]:
    """Compare prompts, as a first algorithm does."""
    results = []
    for prompt in PROMPTS:
        await store.add_resources({"main_prompt": agl.PromptTemplate(template=prompt)})
        rollout = await store.enqueue_rollout(input="why?", mode="train")
        for _ in range(400):
            if ended := await store.wait_for_rollouts(
                rollout_ids=[rollout.rollout_id], timeout=0.05
            ):
                break
        assert ended[0].status == "succeeded"
        reward = agl.find_final_reward(await store.query_spans(rollout.rollout_id, "latest"))
        assert reward is not None
        results.append((reward, prompt))
    return results


def test_a_function_is_an_algorithm() -> None:
    results = []

    @agl.algo
    async def first(*, store: agl.LightningStore) -> None:
        results.extend(await choose(store=store))

    agl.Trainer(n_runners=1, algorithm=first).fit(scores)
    assert results == [(len(p.format(question="why?")) / 100, p) for p in PROMPTS]


def test_a_function_gets_what_it_takes() -> None:
    seen: dict[str, Any] = {}

    @agl.algo
    def blocking(
        store: agl.LightningStore, train_dataset: Any, val_dataset: Any, initial_resources: Any
    ) -> None:
        queued = [asyncio.run(store.enqueue_rollout(task, mode="train")) for task in train_dataset]
        ids = [rollout.rollout_id for rollout in queued]
        rollouts = asyncio.run(store.wait_for_rollouts(rollout_ids=ids))
        seen.update(status=[r.status for r in rollouts], val=val_dataset, own=initial_resources)

    prompt = agl.PromptTemplate(template="{question}")
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=blocking, strategy={"n_runners": 2}, initial_resources={"p": prompt}, store=store
    )
    assert trainer.n_runners == 2
    trainer.fit(scores, ["a", "broken", "c"], val_dataset=["d"])
    assert seen == {
        "status": ["succeeded", "failed", "succeeded"],
        "val": ["d"],
        "own": {"p": prompt},
    }


def test_an_agent_that_blocks_the_others_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        records = [r for r in caplog.records if r.name == "lightspan_agl._local"]
        return [record.getMessage() for record in records]

    @agl.rollout
    async def sleeper(task: Any) -> float:
        for _ in range(3000):
            if warnings():
                break
            time.sleep(0.01)
        return 1.0

    @agl.algo
    async def queues(*, store: agl.LightningStore, train_dataset: Any) -> None:
        queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in queued])

    agl.Trainer(algorithm=queues, n_runners=3).fit(sleeper, [1, 2, 3, 4])
    [line] = warnings()
    name = "test_an_agent_that_blocks_the_others_is_named_once.<locals>.sleeper"
    assert line.startswith(f"the agent {name} has blocked the event loop for 1 s: ")
    assert line.endswith(
        ". Its rollouts run one at a time, not 3: await there, as with openai.AsyncOpenAI or "
        "asyncio.sleep, or make the agent synchronous (`def`), which gets a thread for each rollout"
    )


def test_rollouts_are_waited_for_in_the_order_of_their_ids() -> None:
    """Check that repeated ids come back as often, and that unknown ones are not waited for."""
    seen: list[list[str]] = []

    @agl.algo
    async def waits(*, store: agl.LightningStore, train_dataset: Any) -> None:
        await store.add_resources({"p": agl.PromptTemplate(template="{question}")})
        queued = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        first, second, third = (rollout.rollout_id for rollout in queued)
        for ids in ([third, first, second, third], [second, "unknown", first], ["unknown"], []):
            waiting = store.wait_for_rollouts(rollout_ids=ids)
            seen.append([rollout.input for rollout in await asyncio.wait_for(waiting, 60)])

    agl.Trainer(algorithm=waits).fit(scores, ["a", "b", "c"])
    assert seen == [["c", "a", "b", "c"], ["b", "a"], [], []]


def test_a_function_may_take_any_arguments() -> None:
    """Check that `*args` and `**kwargs` get nothing, as in Agent Lightning."""
    calls: list[Any] = []

    @agl.algo
    def any_arguments(*args: Any, store: agl.LightningStore, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    agl.Trainer(algorithm=any_arguments).fit(scores)
    assert calls == [((), {})]


@pytest.mark.parametrize(
    ("options", "count", "line"),
    [
        ({"strategy": {"n_runners": 2}}, 2, ""),
        ({"strategy": {"n_runners": 2}, "n_runners": 4}, 2, "n_runners=4"),
        (
            {"strategy": {"type": "shm", "n_runners": 2}, "n_workers": 2},
            2,
            "strategy={'type': 'shm'}",
        ),
        ({"n_runners": 3, "n_workers": 4}, 3, "n_workers=4"),
        ({"strategy": "shm", "n_runners": 3}, 3, "strategy='shm'"),
    ],
)
def test_the_strategys_number_of_runners_counts(
    options: Any, count: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.algo
    async def nothing() -> None: ...

    trainer = agl.Trainer(algorithm=nothing, **options)
    assert trainer.n_runners == count
    trainer.fit(scores)
    printed = capsys.readouterr().out
    assert printed.startswith(f"Trainer: without effect: {line} (" if line else "")
    assert bool(printed) == bool(line)


def test_errors_of_the_function_end_fit() -> None:
    @agl.algo
    async def raises(*, store: agl.LightningStore) -> None:
        raise RuntimeError("mine")

    trainer = agl.Trainer(algorithm=raises)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(scores)
    with pytest.raises(ConfigError, match="takes no train_dataset: leave it out"):
        trainer.fit(scores, ["a"])
    with pytest.raises(ConfigError, match="takes other, which are unknown"):
        agl.algo(lambda other: None)


async def test_a_runner_serves_the_queue_of_a_store() -> None:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[str](tracer=agl.AgentOpsTracer())

    async def serve() -> None:
        with runner.run_context(agent=scores, store=store):
            await runner.iter()

    serving = asyncio.create_task(serve())
    assert [prompt for _, prompt in await choose(store=store)] == PROMPTS
    serving.cancel()
    await asyncio.wait([serving])
    with pytest.raises(NotFoundError, match="no resources 'x'"):
        await store.enqueue_rollout("a", resources_id="x")
    with pytest.raises(UnsupportedError, match="config="):
        await store.enqueue_rollout("a", config=1)  # type: ignore[arg-type]
    assert {r.status for r in await store.query_rollouts()} == {"succeeded"}


@pytest.mark.parametrize("role", ["runner", "algorithm"])
def test_one_role_alone_is_refused(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @agl.algo
    async def nothing() -> None: ...

    trainer = agl.Trainer(algorithm=nothing)
    monkeypatch.setenv("AGL_CURRENT_ROLE", role)
    for run in (trainer.fit, trainer.dev):
        with pytest.raises(UnsupportedError, match=f"AGL_CURRENT_ROLE='{role}': .* Unset"):
            run(scores)
    monkeypatch.setenv("AGL_CURRENT_ROLE", "both")
    trainer.fit(scores)


def test_variables_without_effect_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.algo
    async def nothing() -> None: ...

    monkeypatch.setenv("AGL_SERVER_PORT", "4747")
    agl.Trainer(algorithm=nothing, port=4747).fit(scores)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Trainer: without effect: port=4747 (")
    assert lines[1].startswith("Trainer: without effect: $AGL_SERVER_PORT='4747' (algorithm, store")


@pytest.mark.parametrize("dataset", ["tasks.jsonl", "http://localhost:9999", {"a": 1}])
def test_a_path_is_no_data_set(dataset: Any) -> None:
    @agl.algo
    async def nothing(*, train_dataset: Any, val_dataset: Any) -> None: ...

    trainer = agl.Trainer(algorithm=nothing)
    for data in ({"train_dataset": dataset}, {"val_dataset": dataset}):
        with pytest.raises(DataError, match="_dataset must be a list of tasks, not"):
            trainer.fit(scores, **data)


def test_options_of_an_algorithm_have_hints_for_it() -> None:
    @agl.algo
    async def nothing() -> None: ...

    with pytest.raises(UnsupportedError, match=r"max_rollouts=2\): .* the function under @algo"):
        agl.Trainer(algorithm=nothing, max_rollouts=2)
    with pytest.raises(UnsupportedError, match=r"max_tasks=2\): leave it out; dev runs each task"):
        agl.Trainer(max_tasks=2)
    with pytest.raises(
        UnsupportedError, match=r"strategy='nonsense'.* is unknown: leave strategy="
    ):
        agl.Trainer(strategy="nonsense")
    with pytest.raises(ConfigError, match="n_runners='4' must be a whole number"):
        agl.Trainer(algorithm=nothing, n_runners="4")  # type: ignore[arg-type]
    name = "agentlightning.algorithm.fast.Baseline"
    with pytest.raises(UnsupportedError, match=rf"^Trainer\(algorithm='{name}'\): use VERL"):
        agl.Trainer(algorithm=name)  # type: ignore[arg-type]


class Splits(agl.LitAgent[Any]):
    """An agent that scores training tasks 1 and other tasks 0."""

    modes: list[Any] = []  # noqa: RUF012 - of all its copies

    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.modes.append(rollout.mode)
        return 1.0

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.modes.append(rollout.mode)
        return 0.0


async def test_rollouts_without_the_mode_train_are_validation() -> None:
    Splits.modes.clear()
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](max_rollouts=3)
    queued = [await store.enqueue_rollout("a", mode=mode) for mode in (None, "train", "test")]
    with runner.run_context(agent=Splits(), store=store):
        await runner.iter()  # ends by itself
        stepped = [await runner.step("a"), await runner.step("a", mode="val")]
    assert Splits.modes == [None, "train", "test", None, "val"]
    rewards = [
        agl.find_final_reward(await store.query_spans(rollout.rollout_id))
        for rollout in (*queued, *stepped)
    ]
    assert rewards == [0.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="mode='validation' must be one of train, val, test"):
        await store.enqueue_rollout("a", mode="validation")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_rollouts=0"):
        agl.LitAgentRunner(max_rollouts=0)


class Order(agl.LitAgent[Any]):
    """An agent whose entry methods have arguments in other orders than those of `LitAgent`."""

    def training_rollout(self, task: Any, rollout: Any, resources: Any) -> float:  # type: ignore[override]
        assert isinstance(rollout, agl.AttemptedRollout)
        return float(len(resources))

    def validation_rollout(self, task: Any, *, resources: Any, rollout: Any) -> float:  # type: ignore[override]
        return float(len(resources)) / 2


class AsyncOrder(agl.LitAgent[Any]):
    async def training_rollout_async(self, task: Any, **others: Any) -> float:  # type: ignore[override]
        assert isinstance(others["rollout"], agl.AttemptedRollout)
        return float(len(others["resources"]))

    async def validation_rollout_async(  # type: ignore[override]
        self, task: Any, rollout: Any, resources: Any
    ) -> float:
        return float(len(resources)) / 2


@pytest.mark.parametrize("agent", [Order, AsyncOrder])
async def test_entry_methods_get_their_arguments_by_name(agent: Any) -> None:
    store, runner = agl.InMemoryLightningStore(thread_safe=True), agl.LitAgentRunner[Any]()
    resources: agl.NamedResources = {"p": agl.PromptTemplate(template="x")}
    with runner.run_context(agent=agent(), store=store):
        rollouts = [await runner.step("a", resources=resources, mode=m) for m in ("train", "val")]  # type: ignore[arg-type]
    assert [agl.find_final_reward(await store.query_spans(r.rollout_id)) for r in rollouts] == [
        1,
        0.5,
    ]


async def test_an_invalid_reward_names_its_rollout() -> None:
    @agl.rollout
    def agent(task: Any) -> Any:
        return "much"

    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any]()
    with (
        runner.run_context(agent=agent, store=store),  # type: ignore[arg-type]
        pytest.raises(RewardError, match=r"^rollout rollout-\w+: "),
    ):
        await runner.step("a")
    with pytest.raises(
        UnsupportedError, match=r"InMemoryLightningStore\(tracker=1\): leave it out"
    ):
        agl.InMemoryLightningStore(tracker=1)


async def test_iter_ends_at_an_event() -> None:
    event, runner = threading.Event(), agl.LitAgentRunner[Any]()
    event.set()
    with runner.run_context(agent=Splits(), store=agl.InMemoryLightningStore()):
        await runner.iter(event=event)


async def test_a_store_has_resources_rollouts_and_attempts() -> None:
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any]()
    assert await store.get_latest_resources() is None
    prompt = agl.PromptTemplate(template="x")
    await store.update_resources("own", {"p": prompt})
    latest = await store.update_resources("own", {"q": prompt})
    assert (latest.version, latest.resources) == (2, {"q": prompt})
    assert await store.get_latest_resources() == latest
    assert await store.query_resources(resources_id="own") == [latest]
    assert await store.get_resources_by_id("other") is None
    await store.update_resources("next", {"p": prompt})
    assert (await store.enqueue_rollout("a")).resources_id == "next"
    await store.update_resources("own", {"p": prompt})
    updates = [(each.resources_id, each.version) for each in await store.query_resources()]
    assert updates == [("own", 3), ("next", 1)]
    assert (await store.enqueue_rollout("a")).resources_id == "own"
    with runner.run_context(agent=Splits(), store=store):
        rollout = await runner.step("a", resources={"p": prompt})
    assert rollout.resources_id == (await store.query_resources())[-1].resources_id
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout
    assert isinstance(rollout, agl.AttemptedRollout)
    [attempt] = await store.query_attempts(rollout.rollout_id)
    assert attempt == await store.get_latest_attempt(rollout.rollout_id)
    assert attempt == rollout.attempt
    assert attempt.status == rollout.status == "succeeded"
    assert rollout.end_time is not None
    assert attempt.end_time is not None
    [span, *_] = await store.query_spans(rollout.rollout_id)
    assert span.attempt_id == attempt.attempt_id
    queued = await store.enqueue_rollout("a", metadata={"n": 1})
    assert queued.metadata == {"n": 1}
    with pytest.raises(AttributeError, match="Rollout has no 'attempt': it has not begun"):
        queued.attempt  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(UnsupportedError, match=r"query_spans\(limit=1\): leave it out"):
        await store.query_spans(rollout.rollout_id, limit=1)
    with pytest.raises(UnsupportedError, match=r"query_rollouts\(status=\): use status_in="):
        await store.query_rollouts(status=["failed"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("update_rollout", "only Trainer and LitAgentRunner run rollouts"),
        ("dequeue_rollout", "only Trainer and LitAgentRunner run rollouts"),
        ("statistics", "count the rollouts"),
    ],
)
def test_missing_methods_of_a_store_have_hints(name: str, why: str) -> None:
    with pytest.raises(AttributeError, match=f"InMemoryLightningStore has no '{name}': {why}"):
        getattr(agl.InMemoryLightningStore(), name)
