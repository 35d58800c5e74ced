"""Test a training while servers, database, runners and network are killed and cut.

It ends with exactly the same transitions as without faults. No acknowledged write is lost or stored
twice. Faults of a Ray cluster are in tests/ray_nodes/test_chaos.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos  # type: ignore[import-not-found]
from checks import check_calls  # type: ignore[import-not-found]
from places import APP, Places  # type: ignore[import-not-found]
from scripted_learning import Recording, scripted  # type: ignore[import-not-found]

from lightspan import ExternalRunners, LightningRL, LocalRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan.protocols.engine import GenerationRequest, TokenChunk
from lightspan.schema.records import AttemptStatus, Rollout, RolloutStatus
from lightspan.stores import open_store
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer
from lightspan_testing.tiny import tiny_model
from packages.gateway.tests.remote_store.served import TRAINER
from tests.postgres.cluster import Cluster, programs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

FAULTS = 30 if os.environ.get("LIGHTSPAN_SEED") else 10
PER_STEP = 8
STEPS = FAULTS // 2
"""Number of steps: with two calls per rollout there are eight for each fault."""
TASKS = [{"q": "question " + "x" * number} for number in range(PER_STEP * STEPS)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = programs()
    if found is None:
        reason = "no PostgreSQL server here: apt-get install postgresql"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with Cluster(found) as cluster:
        yield cluster


class Script:
    """Answer by the prompt, and count the calls."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer()
        self.asked = 0

    def __call__(self, request: GenerationRequest) -> str:
        self.asked += 1
        said: str = scripted(self.tokenizer.decode(request.prompt_ids))
        return said


class PacedEngine(ScriptedEngine):
    """Let calls wait until the faults have caught up with them."""

    chaos: Chaos | None = None

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        while self.chaos is not None and self.chaos.lags():  # noqa: ASYNC110 (it is a thread)
            await asyncio.sleep(0.01)
        async for chunk in super().generate(request, stream=stream):
            yield chunk


def trainer(folder: Path, model: Path, script: Script, runners: Any, store: str | None) -> Trainer:
    return Trainer(
        LightningRL(
            model,
            optimize="writer",
            estimator="reinforce++",
            group_size=1,
            tasks_per_step=PER_STEP,
        ),
        folder=folder,
        steps=STEPS,
        engine=PacedEngine(script.tokenizer, script, policies={"policy": 0}, pace_s=0.03),
        learner=Recording(model),
        runners=runners,
        store=store,
        reporter=SilentReporter(),
    )


def learned(trained: Trainer) -> object:
    learner = trained.settings.learner
    assert isinstance(learner, Recording)
    return learner.learned()


async def recorded(trained: Trainer, store: str) -> tuple[dict[str, Counter[str]], int]:
    """Return the spans of each task's successful attempt by name, and the number of lost
    attempts.
    """
    run_id = trained.folder.read_config()["run_id"]
    async with open_store(store) as opened:
        states = await opened.rollouts(run_id=run_id)
        assert Counter(state.status for state in states) == {RolloutStatus.SUCCEEDED: len(TASKS)}
        tasks = {state.rollout.rollout_id: state.rollout.task["q"] for state in states}
        attempts = await opened.attempts([*tasks])
        ids = [attempt.attempt_id for attempt in attempts]
        spans, records = await opened.spans(ids), await opened.token_records(ids)
    for attempt in attempts:
        check_calls(spans[attempt.attempt_id], records[attempt.attempt_id])
    ended = [attempt for attempt in attempts if attempt.status is AttemptStatus.SUCCEEDED]
    others = [attempt for attempt in attempts if attempt.status is not AttemptStatus.SUCCEEDED]
    assert {attempt.status for attempt in others} <= {AttemptStatus.LOST}
    assert len({attempt.rollout_id for attempt in ended}) == len(ended) == len(TASKS)
    assert [attempt.capture_errors for attempt in ended] == [[]] * len(ended)
    assert [len(records[attempt.attempt_id]) for attempt in ended] == [2] * len(ended)
    found = {
        tasks[attempt.rollout_id]: Counter(span.name for span in spans[attempt.attempt_id])
        for attempt in ended
    }
    return found, len(others)


def test_everything_around_a_training_is_killed(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moments: Callable[[Any], random.Random],
) -> None:
    model = tiny_model(tmp_path / "model", seed=0)
    calm = trainer(tmp_path / "calm", model, Script(), LocalRunners(8), None)
    assert calm.fit(APP, TASKS).steps == STEPS
    expected, lost = asyncio.run(recorded(calm, f"sqlite:///{tmp_path}/calm/store.db"))
    assert lost == 0

    # more is killed than a rollout would be tried again for
    patient = functools.partial(Rollout, max_infrastructure_tries=1000)
    monkeypatch.setattr("lightspan.training.session.Rollout", patient)
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    dice, script = moments("chaos"), Script()
    with Places(cluster, "chaos", tmp_path, dice) as places:
        runners = ExternalRunners(8, timeout_s=300)
        disturbed = trainer(tmp_path / "disturbed", model, script, runners, places.url)
        chaos = Chaos(places.faults(), FAULTS, lambda: script.asked, places.tend, dice)
        engine = disturbed.settings.engine
        assert isinstance(engine, PacedEngine)
        engine.chaos = chaos
        chaos.start()
        try:
            assert disturbed.fit(APP, TASKS).steps == STEPS
        finally:
            chaos.end()
    print(f"{FAULTS} faults: {dict(chaos.happened)}")
    assert chaos.happened.total() == FAULTS
    assert len(chaos.happened) == len(places.faults())
    assert learned(disturbed) == learned(calm)
    found, lost = asyncio.run(recorded(disturbed, cluster.url("chaos")))
    print(f"{lost} attempts lost, {script.asked} model calls for {2 * len(TASKS)}")
    assert found == expected
    assert lost >= chaos.happened["a runner killed, and its workers"]
