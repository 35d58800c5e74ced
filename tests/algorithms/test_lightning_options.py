"""Test LightningRL's options, and the capabilities that engine and learner have to declare."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lightspan import (
    LLM,
    Critic,
    Forks,
    LightningRL,
    LoRA,
    Optimizer,
    Overlong,
    Policy,
    PolicyLoss,
    Replay,
)
from lightspan.algorithms import Algorithm, PolicySpec
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.credit import anchor
from lightspan.lightning.episode import build_episode
from lightspan.lightning.rollout_checks import check_computed
from lightspan.lightning.selection import Rejection
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema.routing import Route
from lightspan.schema.token_records import Sampling
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_torch.engine.transformers import CAPABILITIES as EMBEDDED
from lightspan_torch.learner.torch import CAPABILITIES as TORCH
from lightspan_verl.learner import CAPABILITIES as VERL
from lightspan_vllm.engine import CAPABILITIES as SERVERS

MODEL = "a/model"


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size=0 must be at least 1"),
        ({"tasks_per_step": 0}, "tasks_per_step=0 must be at least 1"),
        ({"minibatches": 0}, "minibatches=0 must be at least 1"),
        ({"target_kl": 0}, "target_kl=0 must be .*above 0"),
        (
            {"target_kl": 0.05},
            r"target_kl=0.05 skips minibatches after the first, and minibatches=1 has none: raise",
        ),
        (
            {"target_kl": 0.05, "minibatches": 2, "replay": Replay()},
            "target_kl=0.05 skips minibatches whose groups replay= would count as trained",
        ),
        ({"group_size": 1}, "group_size=1 teaches nothing; use 2 or more"),
        ({"resample": -1}, "resample=-1 must be at least 0"),
        (
            {"resample": 2, "estimator": "reinforce++"},
            r"resample=2: groups .* estimator='reinforce\+\+' learns from those",
        ),
        ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a finite number above 0"),
        ({"seed": 2**70}, "seed=1180591620717411303424 must be at most 9223372036854775807"),
        ({"optimize": {5: Policy()}}, "optimize: 5 must be the name of an agent, or a pattern"),
        ({"optimize": {"a": "../b"}}, "the policy '../b' cannot be the name of the folder"),
        ({"lora": 16}, r"lora=16: use LoRA\(rank=16\)"),
        ({"optimize": {"a": Policy(lora=8)}}, r"lora=8: use LoRA\(rank=8\)"),  # type: ignore[arg-type]
        ({"loss": LoRA()}, r"loss=LoRA\(.*: use lightspan\.PolicyLoss\(…\)"),
        ({"optimizer": "adamw"}, r"optimizer='adamw': use lightspan\.Optimizer\(…\)"),
        ({"temperature": 0.0}, "temperature=0.0 must be a finite number above 0"),
        ({"failure_reward": float("inf")}, "failure_reward=inf must be a finite number"),
        (
            {"estimator": "ppo", "credit": "terminal"},
            'estimator="ppo" compares calls with a critic: use credit="critic", not terminal',
        ),
        ({"credit": "critic"}, r"credit critic\(1\) applies only to estimator='ppo', not 'grpo'"),
        (
            {"critic": Critic(), "estimator": "reinforce++"},
            "critic= applies to estimator=\"ppo\", and to .*: not to 'reinforce\\+\\+' with",
        ),
        ({"estimator": "ppo", "critic": False}, 'critic=False: estimator="ppo" needs a critic: le'),
        ({"credit": "critic", "estimator": "ppo", "critic": False}, "critic=False: estimator="),
        (
            {"critic": Critic(warmup=9)},
            "Critic: warmup=9 has no effect with lambda 1: set lam= below 1 too",
        ),
        ({"estimator": "ppo", "critic": Critic(lam=1, warmup=9)}, "Critic: warmup=9 has no effect"),
        ({"estimator": "ppo", "critic": 5}, r"critic=5: use lightspan\.Critic\(…\), or None"),
        ({"estimator": "ppo", "resample": 1}, "resample=1: groups .* estimator='ppo'"),
        ({"credit": "family"}, "credit family applies only to estimator='rloo', not 'grpo'"),
        (
            {"credit": "family", "estimator": "rloo", "overlap": 1},
            r"forks= needs credit=\"family\", not family, and overlap=0",
        ),
        ({"forks": Forks()}, r"forks= needs credit=\"family\", not terminal"),
        ({"forks": 2}, r"forks=2: use lightspan\.Forks\(…\)"),
        (
            {"credit": "family", "estimator": "rloo", "resample": 1},
            r"resample=1: groups .* credit=family learns from those too",
        ),
        (
            {"credit": "family", "estimator": "rloo", "tasks": "adaptive"},
            'tasks="adaptive": groups .* credit=family learns',
        ),
        (
            {"credit": "family", "estimator": "rloo", "replay": Replay()},
            "replay=: groups .* credit=family learns",
        ),
        (
            {"credit": "family", "estimator": "rloo", "critic": True},
            "critic= applies to .* not to 'rloo' with family",
        ),
        (
            {"credit": "family", "estimator": "rloo", "gamma": 0.9},
            "gamma=0.9 applies only to credit='discounted' or .*'gigpo'$",
        ),
        (
            {"credit": "family", "estimator": "rloo", "unit": "agent"},
            'credit family needs unit="rollout", and neither air=, overlong=',
        ),
        (
            {"credit": "family", "estimator": "rloo", "overlong": Overlong(max_tokens=8, buffer=2)},
            'credit family needs unit="rollout", and neither air=, overlong=',
        ),
        ({"credit": "gigpo", "resample": 1}, r"resample=1: groups .* credit=gigpo\(0.95"),
        ({"credit": "gigpo", "tasks": "adaptive"}, 'tasks="adaptive": groups .* learns from those'),
        (
            {"credit": "at_grpo", "gamma": 0.9, "replay": Replay()},
            r"replay=: groups .* credit=at_grpo\(0.9\) learns from those too: use gamma=1",
        ),
        (
            {"estimator": "rloo", "credit": "gigpo"},
            "applies only to estimator='grpo' or 'dr_grpo', not 'rl",
        ),
        (
            {"estimator": "dr_grpo", "credit": "at_grpo"},
            "applies only to estimator='grpo', not 'dr_grpo'",
        ),
        (
            {"overlong": Overlong(max_tokens=512, buffer=100), "max_tokens": 412},
            "penalises answers of more than 412 tokens, and max_tokens=412 allows none",
        ),
        ({"overlong": 100}, r"overlong=100: use lightspan\.Overlong\(…\), or None"),
        ({"gamma": 0.9}, "gamma=0.9 applies only to credit='discounted' or 'anchor' or 'critic'"),
        ({"credit": anchor(), "gamma": 0.9}, "gamma=0.9 applies only to credit='discounted' or"),
        ({"optimize": {"writer": "base"}}, "'base' means the starting weights; rename the policy"),
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


def test_a_critic_is_told_at_the_start() -> None:
    def lines(**options: Any) -> list[str]:
        return LightningRL(MODEL, learning_rate=1e-3, **options).describe_choices()

    start = "critic=: calls are compared with what a critic expects too (lambda "
    assert lines() == []
    assert lines(critic=True) == [f"{start}1)"]
    later = [f"{start}0.95, 1 until its values are trusted)"]
    assert lines(estimator="ppo") == lines(critic=Critic(lam=0.95, warmup=9)) == later


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({"critic": True}, {"critic": {"explained": 0.9, "by_policy": {"policy": 9}}}),
        ({"estimator": "dr_grpo"}, {"token_constants": {"policy": 7.5}}),
        ({"tasks": "adaptive"}, {"history": {"step": 3}}),
    ],
)
def test_an_algorithm_that_is_used_again_knows_nothing_of_the_run_before(
    options: dict[str, Any], learned: dict[str, Any]
) -> None:
    algorithm = LightningRL(MODEL, **options)
    before = algorithm.state(), algorithm.batch_config
    algorithm.load_state({**algorithm.state(), **learned})
    assert (algorithm.state(), algorithm.batch_config) != before
    algorithm.reset()
    assert (algorithm.state(), algorithm.batch_config) == before


def test_settings_that_were_stored_can_be_read_back() -> None:
    """Check that reading all fields of settings, also those without effect, is no error."""
    for settings in (
        PolicyLoss(),
        PolicyLoss(form="gspo", correction="off"),
        PolicyLoss(kl=0.1, kl_estimator="k2"),
        Optimizer(),
        Optimizer(name="muon", muon_learning_rate=0.1),
        Critic(),
        LightningRL(MODEL, critic=True).critic,
        LightningRL(MODEL, estimator="ppo", critic=Critic(warmup=9)).critic,
        Replay(groups=3),
    ):
        stored = msgspec.json.encode(settings)
        assert msgspec.json.decode(stored, type=type(settings)) == settings
    critic = LightningRL(MODEL, critic=Critic()).critic
    assert LightningRL(MODEL, critic=critic).critic == critic


SEQUENCE = PolicyLoss(importance_cap=2.0, importance_level="sequence")


@pytest.mark.parametrize(
    ("options", "enough", "lacking", "message"),
    [
        ({"loss": PolicyLoss(kl=0.1)}, {}, {"kl": False}, r"a KL term \(PolicyLoss.kl\)"),
        ({"loss": PolicyLoss(entropy=0.1)}, {}, {"entropy": False}, "an entropy bonus"),
        ({"lora": LoRA()}, {}, {"lora": False}, "LoRA"),
        ({"optimize": {"a": "x", "b": "y"}}, {}, {"policies": 1}, "2 policies"),
        ({"critic": True}, {"values": True}, {"values": False}, r"a critic \(critic=\)"),
        ({"estimator": "ppo"}, {"values": True}, {"values": False}, r"a critic \(critic=\)"),
        # a learner that was written before a form existed would compute another
        ({"loss": PolicyLoss(form="gspo")}, {"loss_forms": ("clip", "gspo")}, {}, "the loss form"),
        (
            {"loss": SEQUENCE},
            {"importance_levels": ("sequence",)},
            {},
            "importance weights per sequence",
        ),
    ],
)
def test_what_a_learner_lacks_is_refused_by_name(
    options: dict[str, Any], enough: dict[str, Any], lacking: dict[str, Any], message: str
) -> None:
    exact = EngineCapabilities(exact_tokens=True)
    algorithm = LightningRL(MODEL, **options)
    algorithm.check(exact, LearnerCapabilities(**enough))
    with pytest.raises(UnsupportedError, match=f"the learner does not support {message}"):
        algorithm.check(exact, LearnerCapabilities(**lacking))


def test_gigpo_has_its_published_discount_and_others_none() -> None:
    rules = ("discounted", "anchor", "at_grpo", "gigpo")
    gammas = [getattr(LightningRL(MODEL, credit=name).credit, "gamma", None) for name in rules]
    assert gammas == [1.0, 1.0, 1.0, 0.95]
    assert LightningRL(MODEL, credit="gigpo", gamma=0.9).credit.name.startswith("gigpo(0.9, ")


def test_verl_refuses_a_critic_with_groups_and_the_embedded_learner_has_one() -> None:
    algorithm = LightningRL(MODEL, critic=True)
    algorithm.check(EMBEDDED, TORCH)
    with pytest.raises(UnsupportedError, match=r"a critic \(critic=\): leave it out, or use the"):
        algorithm.check(EMBEDDED, VERL)


def test_engine_without_exact_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not give token ids"):
        LightningRL(MODEL).check(EngineCapabilities(exact_tokens=False), LearnerCapabilities())


def test_a_temperature_that_the_engine_does_not_sample_at_is_refused() -> None:
    vllm = EngineCapabilities(exact_tokens=True, temperatures=(0.01, 2.0))
    for temperature in (0.01, 2.0):
        LightningRL(MODEL, temperature=temperature).check(vllm, LearnerCapabilities())
    LightningRL(MODEL, temperature=9.0).check(
        EngineCapabilities(exact_tokens=True), LearnerCapabilities()
    )
    for temperature in (0.001, 2.5):
        with pytest.raises(
            UnsupportedError,
            match=rf"LightningRL\(temperature={temperature}\): .* from 0\.01 to 2: use one",
        ):
            LightningRL(MODEL, temperature=temperature).check(vllm, LearnerCapabilities())


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("by_learner", [False, True])
@pytest.mark.parametrize(
    ("declared", "fields", "rejection"),
    [
        ("trainable_truncation", {"sampling": Sampling(top_p=0.9)}, Rejection.TRUNCATED_SAMPLING),
        ("trainable_grammar", {"grammar": "start: X"}, Rejection.CONSTRAINED),
    ],
)
def test_what_engine_and_learner_both_declare_is_trained(
    declared: str, fields: dict[str, Any], rejection: Rejection, by_engine: bool, by_learner: bool
) -> None:
    """Check calls with truncated sampling or a grammar.

    They are rejected unless engine and learner both declare the capability.
    """
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


@pytest.mark.parametrize("learner", [TORCH, VERL], ids=["torch", "verl"])
@pytest.mark.parametrize("engine", [EMBEDDED, SERVERS], ids=["embedded", "vllm"])
def test_a_grammar_is_exact_or_refused_for_every_engine_and_learner(
    engine: EngineCapabilities, learner: LearnerCapabilities
) -> None:
    """Check every engine with every learner: a grammar is trained exactly, or training is
    refused.
    """
    algorithm = LightningRL(MODEL)
    algorithm.check(engine, learner)
    bound = make_record("c", grammar="start: X")
    [coverage] = algorithm.coverages([build_episode(make_attempt(), make_rollout(), [], [bound])])
    if engine is SERVERS:
        assert not engine.grammars  # so the gateway answers 400
    if engine is EMBEDDED and learner is TORCH:
        assert len(coverage.trained) == 1
        assert check_computed([coverage])
        return
    with pytest.raises(
        UnsupportedError,
        match=r"all 1 call sampled under a grammar .*\(trainable_grammar\): use the embedded",
    ):
        check_computed([coverage])


def test_some_calls_under_a_grammar_are_rejected_and_the_others_trained() -> None:
    algorithm = LightningRL(MODEL)
    records = [make_record("g", grammar="start: X"), make_record("p", sequence=(3, 4))]
    [coverage] = algorithm.coverages([build_episode(make_attempt(), make_rollout(), [], records)])
    assert [call.call_id for call in coverage.trained] == ["p"]
    assert check_computed([coverage])
    assert not check_computed([])


@pytest.mark.parametrize("options", [{"model": 5}, {"name": ""}, {"name": 7}, {"model": ""}])
def test_a_policy_is_described_in_texts(options: Any) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=f"Policy: {name}={value!r} must be a non-empty text"):
        Policy(**options)
