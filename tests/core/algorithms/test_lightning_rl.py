"""LightningRL: what it accepts, how it resamples, and what it says of a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightspan import LLM, Critic, LightningRL, LoRA, Optimizer, Overlong, Policy, PolicyLoss
from lightspan.algorithms import Algorithm, PolicySpec
from lightspan.algorithms.metrics import (
    alarms,
    approximate_kl,
    merge_updates,
    rollout_metrics,
    why_nothing,
)
from lightspan.engines.protocol import EngineCapabilities
from lightspan.errors import ConfigError, RewardError, UnknownAgentError, UnsupportedError
from lightspan.learners import LearnerCapabilities, Loss
from lightspan.lightning.advantages import Explanation, Zero
from lightspan.lightning.credit import anchor
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.health import Health
from lightspan.lightning.rows import Row
from lightspan.lightning.selection import Rejection
from lightspan.lightning.transitions import TransitionKey
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route
from lightspan.schema.tokens import Sampling, TokenRecord
from lightspan.testing.strategies import make_attempt, make_record, make_rollout

MODEL = "a/model"


# --- what it accepts ----------------------------------------------------------------------------


def test_every_agent_is_one_policy_by_default() -> None:
    algorithm = LightningRL(MODEL)
    assert algorithm.policies() == {"policy": PolicySpec(model=MODEL)}
    target = algorithm.routing().target("team/anyone")
    assert (target.route, target.policy) == (Route.POLICY, "policy")
    assert target.sampling is not None
    assert target.sampling.temperature == 1.0
    assert isinstance(algorithm, Algorithm)


def test_mapping_names_and_describes_policies() -> None:
    lora = LoRA(rank=4)
    algorithm = LightningRL(
        MODEL,
        optimize={
            "writer": "sql",
            "rewriter": "sql",
            "planner": Policy(lora=lora),
            "team/critic": Policy(name="judge", model="b/model"),
        },
        frozen={"checker": "base", "search": LLM(base_url="http://x/v1", model="m")},
    )
    assert algorithm.policies() == {
        "sql": PolicySpec(model=MODEL),
        "planner": PolicySpec(model=MODEL, lora=lora),
        "judge": PolicySpec(model="b/model"),
    }
    routing = algorithm.routing()
    found = {path: routing.target(path) for path in ("writer", "team/critic", "checker", "search")}
    assert {path: (t.route, t.policy) for path, t in found.items()} == {
        "writer": (Route.POLICY, "sql"),
        "team/critic": (Route.POLICY, "judge"),
        "checker": (Route.BASE, "base"),
        "search": (Route.ENDPOINT, ""),
    }
    assert routing.target("somebody").route is Route.APP
    assert algorithm.base_model == MODEL


def test_shared_is_the_only_policy() -> None:
    algorithm = LightningRL(MODEL, optimize={"writer": "sql"}, frozen="shared")
    target = algorithm.routing().target("checker")
    assert (target.route, target.policy) == (Route.SHARED, "sql")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size=0 must be at least 1"),
        ({"tasks_per_step": 0}, "tasks_per_step=0 must be at least 1"),
        ({"minibatches": 0}, "minibatches=0 must be at least 1"),
        ({"group_size": 1}, "group_size=1 teaches nothing; use 2 or more"),
        ({"group_size": 1, "estimator": "ppo?"}, "estimator='ppo\\?': use one of grpo, "),
        ({"group_size": 2.5}, "group_size=2.5 must be a whole number of at least 1"),
        ({"tasks_per_step": 2.5}, "tasks_per_step=2.5 must be a whole number of at least 1"),
        ({"minibatches": 2.5}, "minibatches=2.5 must be a whole number of at least 1"),
        ({"group_size": None}, "group_size=None must be a whole number of at least 1"),
        ({"resample": -1}, "resample=-1 must be at least 0"),
        (
            {"resample": 2, "estimator": "reinforce++"},
            r"resample=2 replaces groups .* estimator='reinforce\+\+' with group_size=8 learns",
        ),
        ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ({"learning_rate": -1e-3}, "learning_rate=-0.001 must be a finite number above 0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite number"),
        ({"lora": 16}, r"lora=16: use LoRA\(rank=16\)"),
        ({"lora": True}, r"lora=True: use lightspan\.LoRA\(…\), or None"),
        ({"optimize": {"a": Policy(lora=8)}}, r"lora=8: use LoRA\(rank=8\)"),  # type: ignore[arg-type]
        ({"loss": LoRA()}, r"loss=LoRA\(.*: use lightspan\.PolicyLoss\(…\)"),
        ({"optimizer": "adamw"}, r"optimizer='adamw': use lightspan\.Optimizer\(…\)"),
        ({"temperature": 0.0}, "temperature=0.0: training needs a positive one"),
        ({"temperature": float("nan")}, "temperature=nan: training needs a positive one"),
        ({"failure_reward": float("inf")}, "failure_reward=inf must be finite, or None"),
        ({"estimator": "ppg"}, "estimator='ppg': use one of grpo, dr_grpo, rloo, reinforce"),
        (
            {"estimator": "ppo", "credit": "terminal"},
            'estimator="ppo" compares calls with a critic: use credit="critic", not terminal',
        ),
        ({"credit": "critic"}, r"credit critic\(1\) is of estimator='ppo', not 'grpo'"),
        ({"critic": Critic()}, "critic= is of estimator=\"ppo\", not 'grpo'"),
        ({"estimator": "ppo", "critic": 5}, r"critic=5: use lightspan\.Critic\(…\), or None"),
        ({"estimator": "ppo", "resample": 1}, "resample=1 replaces groups"),
        ({"estimator": "rloo", "credit": "gigpo"}, "is of estimator='grpo' or 'dr_grpo', not 'rl"),
        ({"estimator": "dr_grpo", "credit": "at_grpo"}, "is of estimator='grpo', not 'dr_grpo'"),
        (
            {"overlong": Overlong(max_tokens=512, buffer=100), "max_tokens": 412},
            "takes nothing from answers of up to 412 tokens, and max_tokens=412 allows no longer",
        ),
        ({"overlong": 100}, r"overlong=100: use lightspan\.Overlong\(…\), or None"),
        ({"unit": "turn"}, "unit='turn': use one of rollout, agent"),
        ({"token_constant": 8}, "token_constant is of weight='token', not 'rollout'"),
        ({"token_constant": 0, "weight": "token"}, "token_constant=0 must be a finite number abov"),
        ({"weight": "row"}, "weight='row': use one of rollout, transition, token"),
        ({"credit": "shapley"}, "credit='shapley': use 'terminal', 'discounted', 'anchor', 'cri"),
        ({"gamma": 0.9}, "gamma=0.9 is of credit='discounted' or 'anchor' or 'critic'"),
        ({"credit": anchor(), "gamma": 0.9}, "gamma=0.9 is of credit='discounted' or"),
        ({"credit": "discounted", "gamma": 1.5}, "gamma must be above 0 and at most 1, not 1.5"),
        ({"optimize": []}, "optimize names no agent"),
        ({"optimize": {"writer": "base"}}, "'base' means the starting weights; rename the policy"),
        ({"optimize": ["a"], "frozen": {"a": "base"}}, r"\['a'\] is in optimize and in frozen"),
        ({"frozen": "still"}, "frozen='still': use None"),
        (
            {"optimize": {"a": "x", "b": "y"}, "frozen": "shared"},
            r"frozen=\"shared\" does not say which of the policies \['x', 'y'\] is shared",
        ),
        (
            {"optimize": {"a": Policy(name="x"), "b": Policy(name="x", model="other")}},
            "the policy 'x' is described twice",
        ),
        (
            {"learning_rate": 1e-3, "optimizer": Optimizer()},
            "give learning_rate or optimizer, not both",
        ),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(MODEL, **options)


def test_batch_statistics_allow_groups_of_one() -> None:
    assert LightningRL(MODEL, group_size=1, estimator="reinforce++").group_size == 1


def test_the_config_is_that_of_every_earlier_run() -> None:
    """It is compared when a run goes on, and a folder may be older than this version: what it does
    not have counts as None, parts of a setting must be equal."""
    assert LightningRL(MODEL, credit="discounted", gamma=0.5, learning_rate=1e-3).config() == {
        "algorithm": "lightning_rl",
        "model": MODEL,
        "optimize": "*",
        "frozen": None,
        "estimator": "grpo",
        "unit": "rollout",
        "credit": "discounted(0.5)",
        "step_rewards": True,
        "air": None,
        "overlong": None,
        "critic": None,
        "weight": "rollout",
        "token_constant": None,
        "group_size": 8,
        "tasks_per_step": 16,
        "minibatches": 1,
        "resample": 0,
        "temperature": 1.0,
        "max_tokens": None,
        "max_length": None,
        "max_staleness": None,
        "failure_reward": None,
        "timeout_s": 600.0,
        "loss": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 3.0,
            "kl": 0.0,
            "kl_estimator": "k3",
            "entropy": 0.0,
            "importance_cap": None,
        },
        "optimizer": {
            "name": "adamw",
            "learning_rate": 1e-3,
            "muon_learning_rate": 0.01,
            "betas": (0.9, 0.95),
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "warmup_steps": 0,
            "decay_steps": None,
        },
        "lora": None,
        "seed": 0,
    }


def test_the_config_names_what_later_versions_added() -> None:
    loss = PolicyLoss(form="gspo", importance_cap=2.0, importance_level="sequence")
    found: Any = LightningRL(MODEL, loss=loss, weight="token", token_constant=512.0).config()
    assert (found["loss"]["form"], found["loss"]["importance_level"]) == ("gspo", "sequence")
    assert found["token_constant"] == 512.0


def test_dr_grpo_divides_by_a_constant() -> None:
    """Two answers of two tokens of four in the step: each token weighs 1 / (4 · 8)."""
    algorithm = LightningRL(
        MODEL, estimator="dr_grpo", weight="token", token_constant=8, group_size=2
    )
    assert algorithm.batch_config.token_constant == 8
    episodes = [_episode("g", member, float(member)) for member in range(2)]
    batch = algorithm.build([*episodes, *[_episode("h", m, 0.5) for m in range(2)]])
    assert [row.weights for row in batch.rows] == [[0.0, 0.0, 1 / 32, 1 / 32]] * 2
    assert [row.advantages[-1] for row in batch.rows] == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "lacks", "message"),
    [
        ({"loss": PolicyLoss(kl=0.1)}, {"kl": False}, r"a KL term \(PolicyLoss.kl\)"),
        ({"loss": PolicyLoss(entropy=0.1)}, {"entropy": False}, "an entropy bonus"),
        ({"lora": LoRA()}, {"lora": False}, "LoRA"),
        ({"optimize": {"a": "x", "b": "y"}}, {"policies": 1}, "2 policies"),
    ],
)
def test_what_a_learner_lacks_is_refused_by_name(
    options: dict[str, Any], lacks: dict[str, Any], message: str
) -> None:
    exact = EngineCapabilities(exact_tokens=True)
    algorithm = LightningRL(MODEL, **options)
    algorithm.check(exact, LearnerCapabilities())
    with pytest.raises(UnsupportedError, match=f"the learner does not support {message}"):
        algorithm.check(exact, LearnerCapabilities(**lacks))


@pytest.mark.parametrize(
    ("loss", "declared", "message"),
    [
        (PolicyLoss(form="gspo"), {"loss_forms": ("clip", "gspo")}, "the loss form 'gspo'"),
        (PolicyLoss(form="cispo"), {"loss_forms": ("cispo",)}, "the loss form 'cispo'"),
        (
            PolicyLoss(importance_cap=2.0, importance_level="sequence"),
            {"importance_levels": ("sequence",)},
            "importance weights per sequence",
        ),
    ],
)
def test_a_learner_has_to_declare_a_loss(
    loss: PolicyLoss, declared: dict[str, Any], message: str
) -> None:
    """One that was written before a form existed would compute another."""
    exact = EngineCapabilities(exact_tokens=True)
    algorithm = LightningRL(MODEL, loss=loss)
    algorithm.check(exact, LearnerCapabilities(**declared))
    with pytest.raises(UnsupportedError, match=f"the learner does not support {message}"):
        algorithm.check(exact, LearnerCapabilities())


def test_engine_without_exact_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not give token ids"):
        LightningRL(MODEL).check(EngineCapabilities(exact_tokens=False), LearnerCapabilities())


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("by_learner", [False, True])
@pytest.mark.parametrize(
    ("declared", "fields", "rejection"),
    [
        ("trainable_truncation", {"sampling": Sampling(top_p=0.9)}, Rejection.TRUNCATED_SAMPLING),
        ("trainable_truncation", {"sampling": Sampling(top_k=5)}, Rejection.TRUNCATED_SAMPLING),
        ("trainable_grammar", {"grammar": "start: X"}, Rejection.CONSTRAINED),
    ],
)
def test_what_engine_and_learner_both_declare_is_trained(
    declared: str, fields: dict[str, Any], rejection: Rejection, by_engine: bool, by_learner: bool
) -> None:
    """Design law 11."""
    algorithm = LightningRL(MODEL)
    episode = build_episode(make_attempt(), make_rollout(), [], [make_record("c", **fields)])
    [unchecked] = algorithm.coverages([episode])
    algorithm.check(
        EngineCapabilities(exact_tokens=True, **{declared: by_engine}),
        LearnerCapabilities(**{declared: by_learner}),
    )
    [coverage] = algorithm.coverages([episode])
    assert [entry.rejection for entry in unchecked.entries] == [rejection]
    expected = None if by_engine and by_learner else rejection
    assert [entry.rejection for entry in coverage.entries] == [expected]


def test_one_declaration_does_not_stand_for_the_other() -> None:
    algorithm = LightningRL(MODEL)
    records = [
        make_record("p", sampling=Sampling(top_p=0.9)),
        make_record("g", grammar="start: X", sequence=(3, 4)),
    ]
    algorithm.check(
        EngineCapabilities(exact_tokens=True, trainable_truncation=True, trainable_grammar=True),
        LearnerCapabilities(trainable_grammar=True),
    )
    [coverage] = algorithm.coverages([build_episode(make_attempt(), make_rollout(), [], records)])
    assert [call.call_id for call in coverage.trained] == ["g"]


# --- resampling ---------------------------------------------------------------------------------


def _episode(group: str, member: int, reward: float | None, **attempt: Any) -> Episode:
    rollout_id = f"{group}-{member}"
    record = TokenRecord.create(
        attempt_id=f"at-{rollout_id}",
        call_id="call",
        choice=0,
        policy="policy",
        prompt_ids=[1, 2],
        response_ids=[3, 4 + member],
        logprobs=[-0.5, -0.25],
        versions=[(1, 2)],
        agent_path="writer",
        sequence_start=1,
        sequence_end=2,
    )
    facts: dict[str, Any] = {
        "status": AttemptStatus.SUCCEEDED,
        "outcome": Outcome.OK,
        "reward": None if reward is None else Reward(reward),
    }
    return build_episode(
        Attempt(
            attempt_id=f"at-{rollout_id}",
            rollout_id=rollout_id,
            number=1,
            epoch=1,
            **{**facts, **attempt},
        ),
        Rollout(rollout_id=rollout_id, task=group, task_id=group, group_id=group),
        [],
        [record],
    )


class Scripted:
    """A world in which the n-th task's group has the n-th rewards."""

    def __init__(self, groups: Sequence[Sequence[float | None]]) -> None:
        self.groups = groups
        self.asked: list[int] = []
        self.notes: list[str] = []
        self.explained: dict[TransitionKey, Explanation] = {}
        self.updated: list[list[str]] = []
        self.step = 1
        self.versions = {"policy": 1}
        self.rng = random.Random(0)

    def next_tasks(self, count: int) -> list[int]:
        start = sum(self.asked)
        self.asked.append(count)
        return list(range(start, start + count))

    async def rollouts(
        self, tasks: Sequence[int], group_size: int, mode: Mode = Mode.TRAIN
    ) -> list[Episode]:
        groups = [(task, self.groups[task]) for task in tasks]
        assert all(len(rewards) == group_size for _, rewards in groups)
        return [
            _episode(f"g{task}", member, reward)
            for task, rewards in groups
            for member, reward in enumerate(rewards)
        ]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def keep_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        self.kept = dict(mismatches)

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        self.explained = dict(explanations)

    async def learn(self, function: Callable[[], Any]) -> Any:
        return function()

    async def publish(self) -> None:
        self.versions["policy"] += 1

    @property
    def learner(self) -> Any:
        return self

    def score(self, rows: Sequence[Row]) -> list[list[float]]:
        """Each update makes every token likelier by .1, what the prompt says too."""
        return [[0.1 * len(self.updated) - 1] * len(row.ids) for row in rows]

    def update(self, rows: Sequence[Row], loss: Loss, *, old_logprobs: None) -> dict[str, float]:
        self.updated.append(sorted({row.rollout_id for row in rows}))
        return {}


FLAT, VARIES, UNSCORED = (1.0, 1.0), (0.0, 1.0), (None, 1.0)


@pytest.mark.parametrize(
    ("resample", "groups", "asked", "notes"),
    [
        (0, [FLAT, FLAT, VARIES], [3], []),
        (3, [VARIES, VARIES, VARIES], [3], []),
        (3, [FLAT, VARIES, VARIES, VARIES], [3, 1], []),
        # what a round replaced is not missing again in the next one
        (3, [FLAT, UNSCORED, VARIES, VARIES, FLAT, VARIES], [3, 2, 1], []),
        (
            2,
            [FLAT, FLAT, VARIES, FLAT, FLAT, FLAT, VARIES],
            [3, 2, 2],
            [
                "after 2 rounds of resampling 2 of 3 groups vary: the step learns from those",
            ],
        ),
    ],
)
async def test_groups_that_do_not_vary_are_replaced_in_bounds(
    resample: int,
    groups: list[tuple[float | None, ...]],
    asked: list[int],
    notes: list[str],
) -> None:
    world: Any = Scripted(groups)
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=3, resample=resample)
    episodes = await algorithm.collect(world)
    assert world.asked == asked
    assert len(episodes) == 2 * sum(asked)
    assert world.notes == notes


async def test_replaced_groups_leave_the_step() -> None:
    """DAPO's batch is of groups that vary: what they are is as if the others had not been. A group
    that is unscored is replaced like one that is flat; the last flat one has no successor."""
    world: Any = Scripted([FLAT, VARIES, UNSCORED, VARIES, FLAT, FLAT])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=3, resample=2)
    episodes = await algorithm.collect(world)
    assert world.asked == [3, 2, 1]
    assert algorithm.replaced(episodes) == {"g0", "g2", "g4"}
    batch = algorithm.build(episodes, {"policy": 1})
    assert batch.rollouts == ("g1-0", "g1-1", "g3-0", "g3-1", "g5-0", "g5-1")
    assert batch.counters["groups"] == 3
    assert batch.counters["groups:identical"] == 1
    assert batch.weight_mass() == pytest.approx(4 / 6)
    alone = LightningRL(MODEL, group_size=2, tasks_per_step=3)
    kept = [episode for episode in episodes if episode.group_id in ("g1", "g3", "g5")]
    same = alone.build(kept, {"policy": 1})
    assert (same.rows, same.explanations) == (batch.rows, batch.explanations)


async def test_groups_are_replaced_only_where_that_was_asked() -> None:
    """A foreign trainer may hand over more groups than a step of ours has."""
    world: Any = Scripted([FLAT, VARIES, VARIES])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2)
    episodes = await world.rollouts([0, 1, 2], 2)
    assert algorithm.replaced(episodes) == set()
    assert algorithm.build(episodes, {"policy": 1}).size == 6


async def test_replaced_rollouts_are_counted() -> None:
    """Comparisons are made at equal rollouts: those that were replaced were sampled too."""
    groups = [FLAT, VARIES, FLAT, VARIES]
    world: Any = Scripted(groups)
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2, resample=3)
    metrics = await algorithm.run_step(world)
    assert world.asked == [2, 1, 1]
    assert metrics["rollouts"] == 8
    assert (metrics["resample/groups"], metrics["resample/rollouts"]) == (2, 4)
    assert (metrics["batch/scored"], metrics["batch/groups"]) == (4, 2)
    assert metrics["reward"] == sum(map(sum, groups)) / 8
    assert {key[0] for key in world.explained} == {"at-g1-0", "at-g1-1", "at-g3-0", "at-g3-1"}
    plain = LightningRL(MODEL, group_size=2, tasks_per_step=2)
    assert not any(name.startswith("resample/") for name in await plain.run_step(Scripted(groups)))  # type: ignore[arg-type]


async def test_a_step_without_variance_explains_its_transitions_too() -> None:
    """`inspect` and `export` say what an explanation says: zero, because the group is identical."""
    world: Any = Scripted([FLAT, FLAT])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2)
    await algorithm.run_step(world)
    assert world.updated == []
    assert sorted(world.explained) == [
        (f"at-g{group}-{member}", "call", 0) for group in (0, 1) for member in (0, 1)
    ]
    assert {(why.advantage, why.zero) for why in world.explained.values()} == {
        (0.0, Zero.IDENTICAL)
    }


async def test_what_no_minibatch_learns_from_is_explained_too() -> None:
    """Four rollouts in four optimiser steps: those of the flat group make steps without rows."""
    world: Any = Scripted([VARIES, FLAT])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2, minibatches=4)
    await algorithm.run_step(world)
    assert sorted(world.updated) == [["g0-0"], ["g0-1"]]
    assert {key[0]: bool(why.advantage) for key, why in world.explained.items()} == {
        "at-g0-0": True,
        "at-g0-1": True,
        "at-g1-0": False,
        "at-g1-1": False,
    }


# --- what it says of a step ---------------------------------------------------------------------


async def test_how_far_a_step_moved_the_policy() -> None:
    """Of two updates of .1 each: exp(.2) - 1 - .2 per trained token."""
    world: Any = Scripted([VARIES])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=1, minibatches=2)
    metrics = await algorithm.run_step(world)
    assert metrics["learner/approx_kl"] == pytest.approx(math.expm1(0.2) - 0.2)
    idle: Any = Scripted([FLAT])
    assert "learner/approx_kl" not in await algorithm.run_step(idle)


@pytest.mark.parametrize(("groups", "looked_at"), [(1, 2), (2, 4), (31, 4), (40, 5), (64, 8)])
async def test_how_many_rows_tell_it(groups: int, looked_at: int) -> None:
    """Two rows a group: all of few, four at least, and one of sixteen."""
    world: Any = Scripted([VARIES] * groups)
    scored: list[int] = []
    score = world.score

    def counted(rows: Sequence[Row]) -> list[list[float]]:
        scored.append(len(rows))
        found: list[list[float]] = score(rows)
        return found

    world.score = counted
    await LightningRL(MODEL, group_size=2, tasks_per_step=groups).run_step(world)
    assert scored == [looked_at, looked_at], "before and after"


def test_movement_is_bounded_and_of_trained_tokens_alone() -> None:
    row = _row(mask=[False, True, True])
    moved = approximate_kl([row], [[0.0, -1.0, -1.0]], [[9.0, -1.0, -0.5]])
    assert moved == pytest.approx((math.expm1(0.5) - 0.5) / 2)
    assert math.isfinite(approximate_kl([row], [[0.0, -900.0, 0.0]], [[0.0, 0.0, -900.0]]))
    assert approximate_kl([], [], []) == 0.0


def _row(mask: list[bool]) -> Row:
    size = len(mask)
    return Row(
        rollout_id="r",
        policy="policy",
        ids=[1] * size,
        mask=mask,
        advantages=[0.0] * size,
        weights=[0.0] * size,
        logprobs=[0.0] * size,
        versions=[0] * size,
        temperatures=[1.0] * size,
    )


def test_error_of_the_reward_is_over_groups() -> None:
    """Two groups of means 1 and .5, the second half as large: rollouts of a group are alike."""
    episodes = [
        *(_episode("a", member, 1.0) for member in range(4)),
        *(_episode("b", member, float(member)) for member in range(2)),
        _episode("c", 0, None),
    ]
    metrics = rollout_metrics(episodes)
    mean = metrics["reward"]
    assert mean == pytest.approx(5 / 6)
    expected = math.sqrt(2 * ((4 * (1 - mean)) ** 2 + (2 * (0.5 - mean)) ** 2)) / 6
    assert metrics["reward_se"] == pytest.approx(expected)
    same = [_episode(f"g{n}", 0, float(n % 2)) for n in range(8)]
    plain = math.sqrt(8 * 0.25 / 7 / 8)  # of groups of one it is the textbook's
    assert rollout_metrics(same)["reward_se"] == pytest.approx(plain)


def test_metrics_of_rollouts() -> None:
    episodes = [
        _episode("g", 0, 1.0),
        _episode("g", 1, None),
        _episode("g", 2, 0.5, damage=["a span was dropped"]),
        _episode("g", 3, None, status=AttemptStatus.FAILED, outcome=Outcome.APP_ERROR),
        _episode("g", 4, None, status=AttemptStatus.LOST, outcome=Outcome.INFRASTRUCTURE),
    ]
    assert rollout_metrics(episodes) == {
        "rollouts": 5,
        "scored": 2,
        "failed": 1,
        "lost": 1,
        "damaged": 1,
        "calls": 5,
        "reward": 0.75,
        "agent/writer/calls": 5,
        "agent/writer/reward": 0.75,
    }


def test_updates_are_merged_by_what_their_metrics_are() -> None:
    """The gap is that of the updates that saw fresh tokens; policies may be in some parts only."""
    first = {
        "loss": 1.0,
        "tokens": 10.0,
        "skipped": 0.0,
        "ratio_max": 1.0,
        "fresh_tokens": 10.0,
        "logprob_gap_mean": 0.001,
        "a/loss": 4.0,
        "a/fresh_tokens": 10.0,
        "a/logprob_gap_mean": 0.001,
    }
    second = {
        "loss": 3.0,
        "tokens": 20.0,
        "skipped": 1.0,
        "ratio_max": 2.0,
        "fresh_tokens": 0.0,
        "logprob_gap_mean": 0.5,
    }
    assert merge_updates([first, second]) == {
        "loss": 2.0,
        "tokens": 30.0,
        "skipped": 1.0,
        "ratio_max": 2.0,
        "fresh_tokens": 10.0,
        "logprob_gap_mean": 0.001,
        "a/loss": 4.0,
        "a/fresh_tokens": 10.0,
        "a/logprob_gap_mean": 0.001,
    }
    assert merge_updates([]) == {}


@pytest.mark.parametrize(
    ("learned", "count", "text"),
    [
        ({"logprob_gap_mean": 0.04, "fresh_tokens": 9.0}, 0, ""),
        ({"logprob_gap_mean": 0.3, "fresh_tokens": 0.0}, 0, ""),
        ({"logprob_gap_mean": 0.3, "fresh_tokens": 9.0}, 1, "differ by 0.3 on average"),
        ({"logprob_gap_mean": float("nan"), "fresh_tokens": 9.0}, 1, "differ by nan"),
        ({"skipped": 0.0, "loss": 1.0, "grad_norm": 1.0}, 0, ""),
        ({"skipped": 2.0}, 1, "2 updates were skipped, and changed no weights: the loss or the "),
        (
            {"skipped": 1.0, "loss": float("nan"), "grad_norm": 2.0},
            1,
            "1 update was skipped, and changed no weights: the loss or the gradient is not finite "
            "(loss nan, grad_norm 2); lower learning_rate",
        ),
        ({"skipped": 1.0, "loss": 0.0, "grad_norm": 0.0}, 1, "their rows had no token to train"),
    ],
)
def test_alarms(learned: Mapping[str, float], count: int, text: str) -> None:
    found = alarms(learned)
    assert len(found) == count
    assert all(text in alarm for alarm in found)


def test_reason_for_an_empty_batch() -> None:
    algorithm = LightningRL(MODEL, optimize="writer")
    flat = algorithm.build([_episode("g", 0, 1.0), _episode("g", 1, 1.0)])
    assert why_nothing(flat) == "no group varied: nothing to learn from in this step"
    unscored = algorithm.build([_episode("g", 0, None), _episode("g", 1, None)])
    assert why_nothing(unscored) == "no call could be trained in this step (2 rejected:unscored)"
    other = LightningRL(MODEL, optimize="reviewer").build([_episode("g", 0, 1.0)])
    assert why_nothing(other) == "no call could be trained in this step (1 frozen)"


# --- health -------------------------------------------------------------------------------------


def test_failures_are_told_above_five_per_cent() -> None:
    notes: list[str] = []
    health = Health(LightningRL(MODEL).routing(), notes.append)
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    good = [_episode("g", member, 1.0) for member in range(19)]
    health.look([*good, _episode("bad", 0, None, **failure)])
    assert notes == []
    health.look([*good[:18], _episode("bad", 0, None, **failure)])
    [note] = notes
    assert note == "5 % of the rollouts failed (mostly app_error; for example task bad: boom)"


def test_lost_rollouts_are_told_apart() -> None:
    notes: list[str] = []
    health = Health(LightningRL(MODEL).routing(), notes.append)
    lost = {"status": AttemptStatus.LOST, "outcome": Outcome.INFRASTRUCTURE, "message": "died"}
    health.look([_episode("g", 0, None, **lost)])
    assert notes == [
        "100 % of the rollouts were lost (mostly infrastructure; for example task g: died)"
    ]


def test_unscored_tasks_are_named_once_and_then_counted() -> None:
    notes: list[str] = []
    health = Health(LightningRL(MODEL).routing(), notes.append)
    health.look([_episode(f"t{n}", 0, None) for n in range(7)])
    health.look([_episode(f"t{n}", 1, None) for n in range(7)])
    [note] = notes
    assert "t0 (the app returned None and emitted no reward)" in note
    assert "t4 (" in note
    assert "t5" not in note
    assert "and 2 more tasks" in note


def test_training_stops_when_no_call_of_several_tasks_can_be_trained() -> None:
    """Not over one, and not over apps that failed before they called."""
    notes: list[str] = []
    health = Health(LightningRL(MODEL).routing(), notes.append, agents=["writer"])
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    silent = [replace(_episode(f"t{n}", 0, 1.0), calls=[]) for n in range(4)]
    failed = [replace(_episode("bad", 0, None, **failure), calls=[])]
    health.look(failed)
    del notes[:]
    health.look(silent[:1])
    assert [note[:44] for note in notes] == ["the app made no model call through the OpenA"]
    health.look(silent[1:3])
    with pytest.raises(UnsupportedError, match="no model call"):
        health.look(silent[3:])
    again = Health(LightningRL(MODEL).routing(), print, agents=["writer"])
    again.look(silent[:1])
    with pytest.raises(UnsupportedError, match="no model call"):
        again.look(silent[:1])  # there are no more tasks
    other = Health(LightningRL(MODEL).routing(), print, agents=["writer"])
    other.look(silent[:1])
    other.look([_episode("g", 0, 1.0)])
    other.look(silent)


def test_what_is_no_reward_is_an_error() -> None:
    bad = {"status": AttemptStatus.FAILED, "outcome": Outcome.BAD_REWARD, "message": "a text"}
    health = Health(LightningRL(MODEL).routing(), print)
    with pytest.raises(RewardError, match="task g: a text"):
        health.look([_episode("g", 0, None, **bad)])


def test_agents_are_checked_after_training_rollouts_with_all_that_was_seen() -> None:
    routing = LightningRL(MODEL, optimize="reviewer").routing()
    Health(routing, print, agents=["reviewer"]).look([_episode("g", 0, 1.0)])
    with pytest.raises(UnknownAgentError, match="no agent matches 'reviewer'"):
        Health(routing, print).look([_episode("g", 0, 1.0)])


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (2, "no model call was seen: all 2 rollouts failed, the first: app_error: boom"),
        (
            0,
            "the app made no model call through the OpenAI SDK, nor to OPENAI_BASE_URL "
            "(rollouts: 2). Give another client (LiteLLM, httpx, requests) base_url=llm.base_url "
            "and api_key=llm.api_key(), where `llm` is an argument that the app asks for, and the "
            "agent's name as the model; or use the OpenAI SDK",
        ),
        (
            1,
            "no model call was seen: 1 of 2 rollouts failed, the first: app_error: boom; in the "
            "others the app made no model call through the OpenAI SDK, nor to OPENAI_BASE_URL",
        ),
    ],
)
def test_without_any_model_call_that_is_what_is_said(failed: int, said: str) -> None:
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    episodes = [_episode("g", n, None, **(failure if n < failed else {})) for n in range(2)]
    episodes = [replace(episode, calls=(), spans=()) for episode in episodes]
    health = Health(LightningRL(MODEL, optimize="planner").routing(), lambda text: None)
    with pytest.raises(UnknownAgentError) as raised:
        health.look(episodes)
    assert str(raised.value) == said
