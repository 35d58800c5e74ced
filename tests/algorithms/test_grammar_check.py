"""Test that calls whose grammar the learner cannot replay are rejected before rows are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightspan import LightningRL
from lightspan.algorithms.grammar_check import reject_mismatches
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.selection import Rejection
from lightspan.lightning.transitions import TransitionKey
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema.token_records import TokenRecord
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from packages.core.tests.algorithms.scripted_world import Scripted

GRAMMAR = "start: X"


@pytest.fixture
def algorithm() -> LightningRL:
    """Return an algorithm whose engine and learner can train calls with grammars."""
    made = LightningRL("a/model", group_size=2, tasks_per_step=1)
    made.check(
        EngineCapabilities(exact_tokens=True, trainable_grammar=True),
        LearnerCapabilities(trainable_grammar=True),
    )
    return made


class World(Scripted):
    """A trainer context whose learner cannot replay the grammars of some calls."""

    def __init__(
        self,
        episodes: Sequence[Episode] = (),
        mismatches: Mapping[TransitionKey, str] | None = None,
    ) -> None:
        super().__init__([])
        self.episodes = episodes
        self.mismatches = dict(mismatches or {})
        self.checked: list[str] = []

    def grammar_mismatches(self, records: Sequence[TokenRecord]) -> dict[TransitionKey, str]:
        self.checked += [record.call_id for record in records]
        return self.mismatches

    async def rollouts(self, *args: Any, **more: Any) -> list[Episode]:
        return list(self.episodes)


def episode_of(*records: TokenRecord, name: str = "1", reward: float = 1.0) -> Episode:
    return build_episode(make_attempt(name, reward), make_rollout(name), [], list(records))


async def test_mismatches_are_rejected_with_their_reason(algorithm: LightningRL) -> None:
    episode = episode_of(
        make_record("free"),
        make_record("good", grammar=GRAMMAR, sequence=(3, 4)),
        make_record("bad", grammar=GRAMMAR, sequence=(5, 6)),
        make_record("other", grammar=GRAMMAR, sequence=(7, 8), policy="other"),
    )
    world: Any = World(mismatches={("at-1", "bad", 0): "token 3 is not allowed"})
    [coverage] = await reject_mismatches(world, algorithm.coverages([episode]))
    assert world.checked == ["good", "bad"]
    assert [(e.call.call_id, e.rejection) for e in coverage.entries] == [
        ("free", None),
        ("good", None),
        ("bad", Rejection.GRAMMAR_MISMATCH),
        ("other", Rejection.OTHER_POLICY),
    ]
    text = "its tokens break its grammar as the learner compiles it"
    assert coverage.entries[2].reason == text
    assert world.kept == {("at-1", "bad", 0): "token 3 is not allowed"}
    assert world.notes == [
        f"1 of 2 calls under a grammar are not trained: {text} (call bad of attempt at-1: token 3 "
        "is not allowed)"
    ]


async def test_each_attempt_s_own_calls_are_rejected(algorithm: LightningRL) -> None:
    """Check that call ids that occur in two attempts are distinguished."""
    pair = [
        episode_of(make_record("c", attempt=name, grammar=GRAMMAR), name=name)
        for name in ("1", "2")
    ]
    world: Any = World(mismatches={("at-2", "c", 0): "why"})
    coverages = await reject_mismatches(world, algorithm.coverages(pair))
    assert [len(coverage.trained) for coverage in coverages] == [1, 0]


async def test_without_grammars_the_learner_is_not_asked() -> None:
    """Check that the learner is not called without grammars, or if their calls are rejected
    anyway.
    """
    coverages = LightningRL("a/model").coverages(
        [episode_of(make_record("free"), make_record("bound", grammar=GRAMMAR, sequence=(3, 4)))]
    )
    world: Any = World()
    assert await reject_mismatches(world, coverages) == coverages
    assert [call.call_id for call in coverages[0].trained] == ["free"]
    assert world.checked == []


async def test_a_step_goes_on_without_them(algorithm: LightningRL) -> None:
    world: Any = World(
        [
            episode_of(
                make_record("a", attempt=name, grammar=GRAMMAR),
                make_record("b", attempt=name, grammar=GRAMMAR, prompt=(9,), sequence=(3, 4)),
                name=name,
                reward=reward,
            )
            for name, reward in (("1", 0.0), ("2", 1.0))
        ],
        {("at-1", "b", 0): "another library"},
    )
    metrics = await algorithm.run_step(world)
    assert world.updated == [["ro-1", "ro-2"]]
    assert sorted(world.explained) == [("at-1", "a", 0), ("at-2", "a", 0), ("at-2", "b", 0)]
    assert metrics["calls/rejected:grammar_mismatch"] == 1
    assert metrics["calls/trained"] == 3
