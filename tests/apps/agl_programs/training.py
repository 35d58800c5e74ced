"""Algorithms, runners and a trainer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agl_programs.agents import agent_of
from agl_programs.program import fails, raised, shows
from agl_programs.traces import told


@shows("Algorithm", "FastAlgorithm", "algo", "Baseline")
def algorithms(agl: Any) -> Any:
    class Mine(agl.Algorithm):  # type: ignore[misc, name-defined]
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            heard.append(["ran", train_dataset, val_dataset])

    class Later(agl.FastAlgorithm):  # type: ignore[misc, name-defined]
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            heard.append(["awaited", train_dataset])

    @agl.algo
    def asks(*, store: Any, adapter: Any, initial_resources: Any, train_dataset: Any) -> None:
        heard.append([store, type(adapter).__name__, initial_resources, train_dataset])

    @agl.algo
    async def waits(*, store: Any, llm_proxy: Any) -> None:
        heard.append([store, llm_proxy])

    heard: list[Any] = []
    unset = [raised(getattr(Mine(), f"get_{name}")) for name in ("store", "adapter", "trainer")] + [
        Mine().get_llm_proxy(),
        Mine().get_initial_resources(),
    ]
    adapter = agl.TracerTraceToTriplet()
    for algorithm in (asks, waits):
        algorithm.set_store("the store")
        algorithm.set_adapter(adapter)
        algorithm.set_initial_resources({"a": 1})
    Mine()([1], val_dataset=[2])
    asyncio.run(Later().run([3]))
    asks.run([4])
    asyncio.run(waits.run())
    return {
        "unset": unset,
        "heard": heard,
        "async": [x.is_async() for x in (Mine(), Later(), asks, waits, agl.Baseline())],
        "set": [asks.get_store(), asks.get_adapter() is adapter, asks.get_initial_resources()],
        "refused": [
            raised(lambda: waits.run([1])),
            fails(lambda: agl.Algorithm().run()),
            raised(lambda: agl.Baseline(train_split=2.0)),
        ],
        "fast": [isinstance(x, agl.FastAlgorithm) for x in (agl.Baseline(), Later(), Mine(), asks)],
        "name": asks.__name__,
    }


@shows("LitAgentRunner", "Runner", "Hook", "OtelTracer", "LitAgent")
def runners(agl: Any) -> Any:
    heard: list[Any] = []

    class Listens(agl.Hook):  # type: ignore[misc, name-defined]
        async def on_rollout_start(self, *, rollout: Any, **_: Any) -> None:
            heard.append(["start", rollout.input])

        async def on_trace_start(self, *, tracer: Any, **_: Any) -> None:
            heard.append(["trace start", isinstance(tracer, agl.Tracer)])

        async def on_trace_end(self, *, runner: Any, **_: Any) -> None:
            heard.append(["trace end", isinstance(runner, agl.Runner)])

        async def on_rollout_end(self, *, rollout: Any, spans: Any, **_: Any) -> None:
            heard.append(["end", len(spans) > 0 or rollout.input])

    async def inside() -> Any:
        store = agl.InMemoryLightningStore()
        await store.add_resources(
            {"prompt": agl.PromptTemplate(template="{x}.5", engine="f-string")}
        )
        runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=3, poll_interval=0.01)
        steps: list[Any] = []
        with runner.run_context(agent=agent_of(agl)(), store=store, hooks=[Listens()]):
            steps += [
                await seen(agl, store, await runner.step(task, mode="train"))
                for task in (3, "emit", "spans", "template")
            ]
            try:
                await runner.step("fail")
            except Exception as error:
                steps.append(str(error))
            [failed] = await store.query_rollouts(status_in=["failed"])
            steps.append(await seen(agl, store, failed))
            ids = [
                (await store.enqueue_rollout(n, mode="train")).rollout_id for n in (1, 2, "fail")
            ]
            await runner.iter()
            done = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
            queued = [[r.status, r.input] for r in done]
            event = agl.ThreadingEvent()
            event.set()
            await runner.iter(event=event)
        return {"steps": steps, "queued": queued, "worker": (await store.query_workers()).total}

    return {**asyncio.run(inside()), "heard": heard}


async def seen(agl: Any, store: Any, rollout: Any) -> Any:
    spans = await store.query_spans(rollout.rollout_id)
    attempts = [a.status for a in await store.query_attempts(rollout.rollout_id)]
    return [rollout.status, attempts, agl.find_final_reward(spans), [told(s)[:2] for s in spans]]


async def everyone(store: Any, rollout_ids: list[str]) -> Any:
    """The rollouts, when all have ended: 0.3.0 looks every ten seconds if nobody asks again."""
    while True:
        ended = await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=0.05)
        if len(ended) == len(rollout_ids):
            return ended


@shows("Trainer", "algo", "Baseline", "Algorithm")
def training(agl: Any) -> Any:
    found: list[Any] = []

    @agl.algo
    async def learn(
        *, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any, adapter: Any
    ) -> None:
        update = await store.add_resources(initial_resources)
        for mode, data in (("train", train_dataset), ("val", val_dataset)):
            ids = [
                (
                    await store.enqueue_rollout(item, mode=mode, resources_id=update.resources_id)
                ).rollout_id
                for item in data
            ]
            ended = await everyone(store, ids)
            for rollout in ended:
                spans = await store.query_spans(rollout.rollout_id, "latest")
                reward = agl.find_final_reward(spans)
                found.append(
                    [mode, rollout.input, rollout.status, reward, len(adapter.adapt(spans))]
                )

    shared = {"type": "shm", "main_thread": "algorithm"}  # else its runner never ends
    options: dict[str, Any] = {"tracer": agl.OtelTracer(), "strategy": shared, "n_runners": 1}
    if agl.__name__ != "agentlightning":
        options = {"n_runners": 1}
    resources = {"prompt": agl.PromptTemplate(template="{x}.5", engine="f-string")}
    trainer = agl.Trainer(algorithm=learn, initial_resources=resources, **options)
    trainer.fit(agent_of(agl)(), [1, "template", "fail"], val_dataset=[2])
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=agl.Baseline(polling_interval=0.02),
        initial_resources=resources,
        store=store,
        **options,
    )
    trainer.dev(agent_of(agl)(), [1, 2], val_dataset=[3])

    async def ended() -> Any:
        every = await store.query_rollouts()
        return sorted([r.mode, r.input, r.status] for r in every)

    return {"found": sorted(found, key=json.dumps), "baseline": asyncio.run(ended())}
