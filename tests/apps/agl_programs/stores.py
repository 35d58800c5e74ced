"""Stores: the life of rollouts, attempts, workers and resources."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agl_programs.program import shows


@asynccontextmanager
async def shared_store(agl: Any) -> AsyncIterator[Any]:
    """A store that another process could have a client of, too."""
    if agl.__name__ == "agentlightning":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", port)
        await server.start()
        client = agl.LightningStoreClient(f"http://127.0.0.1:{port}")
        try:
            yield client
        finally:
            await client.close()
            await server.stop()
    else:
        with tempfile.TemporaryDirectory() as folder:
            client = agl.LightningStoreClient(f"sqlite:///{folder}/store.db")
            yield client
            await client.close()


@shows("InMemoryLightningStore", "LightningStore")
def store_in_memory(agl: Any) -> Any:
    store = agl.InMemoryLightningStore()
    return {
        "is": isinstance(store, agl.LightningStore),
        "name": asyncio.run(store.statistics())["name"],
        **asyncio.run(life(agl, store)),
    }


@shows("LightningStoreClient", "LightningStore")
def store_of_several_processes(agl: Any) -> Any:
    async def inside() -> Any:
        async with shared_store(agl) as store:
            return {"is": isinstance(store, agl.LightningStore), **await life(agl, store)}

    return asyncio.run(inside())


async def life(agl: Any, store: Any) -> Any:
    """What happens in a store."""
    found: dict[str, Any] = {}
    empty = [await store.get_latest_resources(), await store.dequeue_rollout("w1")]
    found["empty"] = [*empty, await store.get_rollout_by_id("unknown")]
    found["no attempts"] = list(await store.query_attempts("unknown"))

    # resources
    prompt = {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")}
    first = await store.add_resources(prompt)
    second = await store.update_resources("named", {"llm": agl.LLM(endpoint="e", model="m")})
    third = await store.update_resources("named", {"llm": agl.LLM(endpoint="f", model="m")})
    latest = await store.get_latest_resources()
    found["resources"] = {
        "versions": [first.version, second.version, third.version],
        "latest": [latest.resources_id, latest.resources["llm"].endpoint],
        "first": (await store.get_resources_by_id(first.resources_id))
        .resources["prompt"]
        .format(x=2),
        "unknown": await store.get_resources_by_id("unknown"),
        "all": (await store.query_resources()).total,
        "named": [r.version for r in await store.query_resources(resources_id="named")],
    }

    # queued, in order
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    one = await store.enqueue_rollout(
        {"n": 1},
        mode="train",
        config=config,
        metadata={"k": ["v"]},
        resources_id=first.resources_id,
    )
    two, three = await store.enqueue_many_rollouts(
        [agl.EnqueueRolloutRequest(input="two", mode="val"), agl.EnqueueRolloutRequest(input=3)]
    )
    names = {one.rollout_id: "one", two.rollout_id: "two", three.rollout_id: "three"}
    shown = ("input", "mode", "status", "metadata")
    found["queued"] = [
        [*(getattr(r, name) for name in shown), r.config.max_attempts] for r in (one, two, three)
    ]
    found["bound"] = [one.resources_id == first.resources_id, two.resources_id]
    again = await store.get_rollout_by_id(one.rollout_id)
    found["again"] = [
        again.model_dump(exclude={"start_time"}) == one.model_dump(exclude={"start_time"})
    ]

    async def status(rollout: Any) -> str:
        return str((await store.get_rollout_by_id(rollout.rollout_id)).status)

    # taken, failed, taken again
    taken = await store.dequeue_rollout("w1")
    found["taken"] = [
        names[taken.rollout_id],
        taken.status,
        taken.attempt.status,
        taken.attempt.worker_id,
    ]
    worker = await store.get_worker_by_id("w1")
    found["worker"] = [worker.status, worker.current_rollout_id == one.rollout_id]
    note = agl.Span.from_attributes(
        attributes={"n": 1},
        name="note",
        rollout_id=one.rollout_id,
        attempt_id=taken.attempt.attempt_id,
        sequence_id=5,
        start_time=1.0,
        end_time=2.0,
    )
    kept = await store.add_span(note)
    found["kept"] = [kept == note, await store.add_span(note) is None, await status(one)]
    found["numbers"] = [
        await store.get_next_span_sequence_id(one.rollout_id, taken.attempt.attempt_id),
        list(
            await store.get_many_span_sequence_ids([(one.rollout_id, taken.attempt.attempt_id)] * 2)
        ),
    ]
    ended = await store.update_attempt(one.rollout_id, "latest", status="failed")
    found["failed"] = [ended.status, ended.sequence_id, await status(one)]
    others = await store.dequeue_many_rollouts(limit=2, worker_id="w2")
    found["next"] = len(others)  # lightspan's keep their place, 0.3.0 puts them last
    more = await store.dequeue_many_rollouts(limit=5, worker_id="w2")
    everybody = {r.rollout_id: r for r in [*others, *more]}
    found["all taken"] = [len(everybody), await store.dequeue_rollout("w1") is None]
    retried = everybody[one.rollout_id]
    found["retried"] = [retried.attempt.sequence_id, retried.status]
    await store.update_attempt(one.rollout_id, retried.attempt.attempt_id, status="failed")
    found["given up"] = [
        await status(one),
        [a.status for a in await store.query_attempts(one.rollout_id)],
    ]

    # succeeded, cancelled
    success = everybody[two.rollout_id].attempt
    await store.update_attempt(two.rollout_id, success.attempt_id, status="running")
    await store.update_attempt(two.rollout_id, success.attempt_id, status="succeeded")
    await store.update_rollout(three.rollout_id, status="cancelled")
    found["ended"] = [await status(two), await status(three)]
    last = await store.get_latest_attempt(two.rollout_id)
    found["last"] = [last.status, last.sequence_id, last.end_time is not None]
    waited = await store.wait_for_rollouts(rollout_ids=[*names, "unknown"], timeout=0.05)
    found["waited"] = sorted([names[r.rollout_id], r.status] for r in waited)

    # started outside the queue
    started = await store.start_rollout({"n": 4}, mode="test", worker_id="w3")
    names[started.rollout_id] = "started"
    found["started"] = [started.status, started.mode, started.attempt.sequence_id, started.input]
    found["still"] = list(
        await store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=0.05)
    )
    # long enough for all queries below to come before it is over, on a busy machine too
    late = await store.start_rollout(5, config=agl.RolloutConfig(timeout_seconds=2.0))
    names[late.rollout_id] = "late"

    # queries
    everything = await store.query_rollouts()
    found["query"] = {
        "total": everything.total,
        "failed": [names[r.rollout_id] for r in await store.query_rollouts(status_in=["failed"])],
        "either": (
            await store.query_rollouts(
                status_in=["cancelled"], rollout_id_in=[one.rollout_id], filter_logic="or"
            )
        ).total,
        "both": (
            await store.query_rollouts(status_in=["cancelled"], rollout_id_in=[one.rollout_id])
        ).total,
        "part": [
            (p := await store.query_rollouts(limit=2, offset=1)).total,
            len(p),
            p.limit,
            p.offset,
        ],
        "sorted": [
            names[r.rollout_id] for r in await store.query_rollouts(sort_by="status", limit=1)
        ],
        "contains": (await store.query_rollouts(rollout_id_contains=one.rollout_id[3:])).total,
        "attempts": [type(r).__name__ for r in everything][:1],
    }
    attempt_id = started.attempt.attempt_id
    spans = [
        agl.Span.from_attributes(
            attributes={},
            name=name,
            rollout_id=started.rollout_id,
            attempt_id=attempt_id,
            sequence_id=number,
            parent_id=parent,
        )
        for name, number, parent in (("c", 3, None), ("a", 1, "p" * 16), ("b", 2, None))
    ]
    added = await store.add_many_spans(spans)
    query = store.query_spans
    rollout_id = started.rollout_id
    found["spans"] = {
        "added": len(added),
        "order": [s.name for s in await query(rollout_id)],
        "latest": [s.name for s in await query(rollout_id, "latest", sort_order="desc")],
        "attempt": len(await query(rollout_id, attempt_id)),
        "name": [s.name for s in await query(rollout_id, name="b")],
        "either": [
            s.name
            for s in await query(rollout_id, name="b", parent_id_contains="p", filter_logic="or")
        ],
        "by name": [s.name for s in await query(rollout_id, sort_by="name", limit=2)],
        "unknown": len(await query("unknown")),
    }
    found["refused"] = [
        await refusal(store.add_span(note.model_copy(update={"rollout_id": "unknown"}))),
        await refusal(store.update_attempt("unknown", "latest", status="failed")),
        await refusal(store.update_rollout("unknown", status="failed")),
    ]

    # time is over
    await asyncio.sleep(2.1)
    if isinstance(store, agl.InMemoryLightningStore):
        store._last_scan_entrance_time = 0.0  # 0.3.0 looks every ten seconds only
        found["late"] = [
            await status(late),
            (await store.get_latest_attempt(late.rollout_id)).status,
        ]
    workers = await store.query_workers(sort_by="worker_id")
    found["workers"] = [[w.worker_id, w.status] for w in workers]
    await store.update_worker("w9", {"cpu": 1})
    found["heartbeat"] = (await store.get_worker_by_id("w9")).heartbeat_stats
    found["busy"] = [w.worker_id for w in await store.query_workers(status_in=["busy"])]
    return found


async def refusal(work: Any) -> bool:
    try:
        await work
    except Exception:
        return True
    return False
