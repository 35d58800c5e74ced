"""Test which rollouts `RejectionSampling` imitates, and which settings it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightspan import LoRA, Optimizer
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning import Episode, build_episode
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema import semconv
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan.schema.token_records import Sampling
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_rollout,
    make_span,
)
from lightspan_torch import RejectionSampling
from lightspan_torch.rejection_sampling import best_of_each_task


def episode(name: str, reward: float | None, **fields: Any) -> Episode:
    """Return the episode of an attempt of the group that the first letter of `name` names."""
    attempt = make_attempt(name, reward, **fields)
    return build_episode(attempt, make_rollout(name, name[0]), [], [make_record("c", attempt=name)])


FAILED = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}


def names(episodes: list[Episode]) -> list[str]:
    return [each.rollout_id.removeprefix("ro-") for each in episodes]


def test_the_best_of_each_task_are_chosen() -> None:
    episodes = [
        episode("a1", 1.0),
        episode("a2", 1.0),
        episode("a3", 0.5),
        episode("a4", 9.0, capture_errors=["a span was dropped"]),
        episode("b1", 1.0),
        episode("b2", 1.0),
        episode("c1", 0.25),
        episode("c2", None),
        episode("d1", -2.0),
        episode("d2", -1.0),
        episode("d3", 9.0, outcome=Outcome.INFRASTRUCTURE),
        episode("d4", 9.0, status=AttemptStatus.RUNNING, outcome=None),
    ]
    best, left_out = best_of_each_task(episodes)
    assert names(best) == ["a1", "a2", "d2"]
    assert left_out == Counter(damaged=1, unfinished=2, unscored=1, not_best=5)
    assert len(best) + left_out.total() == len(episodes)


def test_a_failure_is_a_comparison_and_never_chosen() -> None:
    best, left_out = best_of_each_task(
        [
            episode("a1", 0.0, **FAILED),
            episode("a2", 0.5),
            episode("b1", 1.0, **FAILED),  # it failed after it had given a reward
            episode("b2", 0.0),
            episode("c1", None, **FAILED),
            episode("c2", 1.0),
        ]
    )
    assert names(best) == ["a2"]
    assert left_out == Counter(failed=3, not_best=2)


@pytest.mark.parametrize(
    ("keep", "min_reward", "chosen"),
    [
        (None, None, ["a3", "a4"]),
        (1, None, ["a3"]),
        (3, None, ["a3", "a4", "a2"]),
        (9, None, ["a3", "a4", "a2"]),  # the worst of a task is never the best of it
        (None, 0.5, ["a3", "a4", "b1", "b2"]),
        (9, 0.5, ["a3", "a4", "a2", "b1", "b2"]),
        (1, 0.9, ["a3", "b1"]),
        (None, 2.0, []),
    ],
)
def test_how_many_are_chosen(keep: int | None, min_reward: float | None, chosen: list[str]) -> None:
    rewards = {"a1": 0.0, "a2": 0.5, "a3": 1.0, "a4": 1.0, "b1": 1.0, "b2": 1.0}
    episodes = [episode(name, reward) for name, reward in rewards.items()]
    best, left_out = best_of_each_task(episodes, keep, min_reward)
    assert names(best) == chosen
    assert left_out == +Counter(not_best=len(episodes) - len(chosen))


def test_no_episode_gives_none() -> None:
    assert best_of_each_task([]) == ([], Counter())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size=1 must be at least 2"),
        ({"group_size": 0, "min_reward": 1.0}, "group_size=0 must be at least 1"),
        ({"tasks_per_step": 0}, "tasks_per_step=0"),
        ({"keep": 0}, "keep=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"min_reward": float("nan")}, "min_reward=nan"),
        ({"temperature": 0}, "temperature=0 must be a finite number above 0"),
        ({"learning_rate": -1}, "learning_rate=-1"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"seed": -1}, "seed=-1"),
        ({"lora": 8}, r"lora=8: use LoRA\(rank=8\)"),
        ({"optimizer": "adamw"}, "optimizer='adamw'"),
        ({"optimizer": Optimizer(), "learning_rate": 1e-4}, "learning_rate or optimizer, not both"),
        ({"optimize": []}, "optimize names no agent"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RejectionSampling("model", **settings)


def test_the_rate_is_chosen_from_the_model(tiny: Path) -> None:
    chosen = RejectionSampling(tiny)
    assert chosen.optimizer is not None
    [line] = chosen.describe_choices()
    assert line.startswith(
        f"learning rate {chosen.optimizer.learning_rate:.0e}".replace("e-0", "e-")
    )
    assert chosen.config()["model"] == str(tiny)
    adapters = RejectionSampling(tiny, lora=LoRA(rank=4))
    assert "LoRA of rank 4" in adapters.describe_choices()[0]
    assert adapters.policies()["policy"].lora == LoRA(rank=4)
    algorithm = RejectionSampling(tiny, learning_rate=3e-5)
    assert algorithm.optimizer == Optimizer(learning_rate=3e-5)
    assert not algorithm.describe_choices()
    assert RejectionSampling(tiny, optimizer=Optimizer(name="muon")).optimizer == Optimizer(
        name="muon"
    )


def test_what_engine_and_learner_cannot_do_is_refused_or_left_out() -> None:
    record = make_record("c", sampling=Sampling(top_p=0.5))
    attempt = build_episode(make_attempt(), make_rollout("1", "g"), [], [record])
    algorithm = RejectionSampling("model", learning_rate=1e-4, lora=LoRA())
    assert algorithm.coverages([attempt])[0].counts() == {"rejected:truncated_sampling": 1}
    engine = EngineCapabilities(exact_tokens=True, trainable_truncation=True)
    algorithm.check(engine, LearnerCapabilities(trainable_truncation=True))
    assert algorithm.coverages([attempt])[0].counts() == {"trained": 1}
    assert algorithm.coverages([attempt], modes=[Mode.DEV])[0].counts() == {
        "rejected:mode_not_train": 1
    }
    with pytest.raises(UnsupportedError, match="does not support LoRA: leave it out"):
        algorithm.check(engine, LearnerCapabilities(lora=False))


class World:
    """The parts of `TrainerContext` of a step in which nothing is learned."""

    step = 1

    def __init__(self, episodes: list[Episode]) -> None:
        self.episodes = episodes
        self.notes: list[str] = []

    def next_tasks(self, count: int) -> list[Any]:
        return [None] * count

    async def rollouts(self, tasks: list[Any], group_size: int) -> list[Episode]:
        return self.episodes

    def explain(self, explanations: Any) -> None:
        assert not explanations

    def note(self, text: str) -> None:
        self.notes.append(text)


async def test_a_rollout_whose_calls_are_rejected_is_not_imitated() -> None:
    cut = make_record("c", attempt="a1", sampling=Sampling(top_p=0.5))
    best = build_episode(make_attempt("a1", 1.0), make_rollout("a1", "a"), [], [cut])
    world = World([best, episode("a2", 0.0)])
    algorithm = RejectionSampling("model", learning_rate=1e-4)
    metrics = await algorithm.run_step(world)  # type: ignore[arg-type]
    assert metrics["imitated"] == 0
    assert metrics["calls/rejected:truncated_sampling"] == 1
    left_out = {key: value for key, value in metrics.items() if key.startswith("left_out/")}
    assert left_out == {"left_out/not_best": 1, "left_out/rejected": 1}
    [note] = world.notes
    assert "'left_out/rejected': 1" in note


def test_calls_of_a_failed_try_are_not_imitated() -> None:
    agent: dict[str, Any] = {"attributes": {semconv.AGENT_PATH: "writer"}}
    spans = [
        make_span("1", SpanKind.AGENT, status=SpanStatus.ERROR, start_ns=1, end_ns=3, **agent),
        make_span("2", SpanKind.AGENT, start_ns=4, end_ns=6, **agent),
        *(make_call_span(f"c{n}", parent_id=str(n)) for n in (1, 2)),
    ]
    records = [make_record(f"c{n}") for n in (1, 2)]
    attempt = build_episode(make_attempt(), make_rollout("1", "g"), spans, records)
    [coverage] = RejectionSampling("model", learning_rate=1e-4).coverages([attempt])
    assert coverage.counts() == {"rejected:retried": 1, "trained": 1}
