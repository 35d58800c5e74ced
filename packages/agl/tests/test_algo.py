"""Tests of functions as algorithms: they queue rollouts and read rewards, as in its examples."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError, NotFoundError, UnsupportedError


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
    assert "without effect: port=4747, $AGL_SERVER_PORT='4747'" in capsys.readouterr().out
