"""Test credit rules in whole runs: a critic, Dr. GRPO's constant, overlong answers, states,
resume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan import Critic, Optimizer, Overlong, Trainer
from lightspan.errors import ConfigError
from lightspan.lightning.gae import explained_variance
from lightspan.lightning.rows import Row
from lightspan.lightning.selection import CallStatus
from lightspan.progress import SilentReporter
from lightspan.training.checkpoints import latest, load_state
from lightspan_tools.inspect import inspect_run
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

Make = Callable[..., Any]


def trainer(algorithm: Any, folder: Path, **options: Any) -> Trainer:
    return Trainer(algorithm, folder=folder, reporter=SilentReporter(), **options)


class Recording(TorchLearner):
    """A learner that stores the rows of `values` and of `update`."""

    def __init__(self, model: Path, critic: Critic | None) -> None:
        optimizer = Optimizer(learning_rate=1e-3)
        super().__init__({"policy": str(model)}, optimizer=optimizer, critic=critic)
        self.valued: list[tuple[Row, list[float]]] = []
        self.learned: list[Row] = []

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        found = super().values(rows)
        self.valued += zip(rows, found, strict=True)
        return found

    def update(self, rows: Sequence[Row], *args: Any, **more: Any) -> dict[str, float]:
        self.learned += rows
        return super().update(rows, *args, **more)


# --- a critic -------------------------------------------------------------------------------
def test_a_critic_trains_groups_of_one(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Check the way of values to the learner, the metrics and `inspect`, without groups."""
    from tool_app import parsed  # type: ignore[import-not-found]

    algorithm = rl(estimator="ppo", group_size=1, tasks_per_step=6)
    learner = Recording(tiny, algorithm.critic)
    run = trainer(algorithm, tmp_path / "run", steps=2, learner=learner)
    run.fit(parsed, ask(6))
    first, second = run.folder.metrics()
    for line in (first, second):
        assert line["learner/value_calls"] == line["calls"] == 12
        assert line["learner/lambda"] == 1.0  # while warming up
        assert line["learner/value_loss"] > 0
    assert "learner/explained_variance" in second
    last = set(algorithm.last_batch.rollouts)
    before = [values for row, values in learner.valued if row.rollout_id not in last]
    assert {value for values in before for value in values} == {0.0}  # never fitted
    # rows are those that were asked about, with what was paid at each call as targets
    rows = [row for row in learner.learned if row.rollout_id in last]
    learned = {call: row for row in rows for call in row.call_ids}
    printed: dict[str, tuple[str, str, str]] = {}
    for rollout in {row.rollout_id for row in learned.values()}:
        found = re.findall(
            r"(call-\w+)/0 writer: trained.*\n(?: +temperature.*\n)? +advantage (\S+) = .*; "
            r"credit (\S+) \(critic\(1\)\), turn \d, the critic expected (\S+); share",
            inspect_run(run.folder.path, rollout),
        )
        printed |= {call: numbers for call, *numbers in found}  # type: ignore[misc]
    expected = {
        call_id: value
        for row, values in learner.valued
        if row.rollout_id in last
        for (call_id, _), value in zip(row.call_ids, values, strict=True)
    }
    assert printed.keys() == expected.keys() == {call_id for call_id, _ in learned}
    assert len(printed) == 12
    [scale] = {why.scale for why in algorithm.last_batch.explanations.values()}
    for (call_id, _), row in learned.items():
        advantage, credit, value = printed[call_id]
        place = [call for call, _ in row.call_ids].index(call_id)
        used = row.advantages[row.responses[place].start]
        assert advantage == f"{used:+.6g}"
        assert value == f"{expected[call_id]:g}"
        assert float(credit) == pytest.approx(row.value_targets[place], rel=1e-5)
        assert used == pytest.approx((row.value_targets[place] - expected[call_id]) / scale)


def test_a_critic_is_trusted_by_what_it_said_before_it_was_fitted_to_any_of_a_step(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Check that the explained variance is that of the values before any update of the step."""
    algorithm = rl(estimator="ppo", group_size=4, tasks_per_step=2, minibatches=4)
    learner = Recording(tiny, algorithm.critic)
    run = trainer(algorithm, tmp_path / "run", steps=3, learner=learner)
    run.fit(apps.spell, ask(2))
    last = set(algorithm.last_batch.rollouts)
    said = {
        call: value
        for row, values in learner.valued
        if row.rollout_id in last
        for call, value in zip(row.call_ids, values, strict=True)
    }
    targets = {
        call: target
        for row in learner.learned
        if row.rollout_id in last
        for call, target in zip(row.call_ids, row.value_targets, strict=True)
    }
    assert said.keys() == targets.keys()
    assert len(said) == 8
    wanted = explained_variance([said[call] for call in targets], [*targets.values()])
    line = run.folder.metrics()[-1]
    assert line["learner/explained_variance"] == pytest.approx(wanted)
    assert _state(run)["critic"]["explained"] == pytest.approx(wanted)


def test_a_critic_that_is_trusted_is_built_on(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a critic that was never fitted: all values are 0.

    So the first call gets only the share of the last reward that gamma and lambda leave.
    """
    from tool_app import parsed  # type: ignore[import-not-found]

    critic = Critic(lam=0.25, warmup=7)
    options = {"estimator": "ppo", "critic": critic, "gamma": 0.5, "group_size": 1}
    algorithm = rl(**options, tasks_per_step=4)
    state = {"critic": {"explained": 0.9, "by_policy": {"policy": 7}}}
    monkeypatch.setattr(algorithm, "reset", lambda: algorithm.load_state(state))
    learner = Recording(tiny, critic)
    run = trainer(algorithm, tmp_path / "run", steps=1, learner=learner)
    run.fit(parsed, ask(4))
    assert run.folder.metrics()[0]["learner/lambda"] == 0.25
    assert 0 < run.folder.metrics()[0]["learner/gradient_left"] < 1
    paid = [row.advantages[place.start] for row in learner.learned for place in row.responses]
    firsts, seconds = paid[::2], paid[1::2]
    assert any(seconds)
    assert firsts == pytest.approx([0.25 * 0.5 * second for second in seconds])


def test_a_run_with_a_critic_goes_on_exactly(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Compare weights, the critic and its statistics with those of an uninterrupted run.

    The rollouts are taken from that run, because sampling depends on timing.
    """
    options = {"estimator": "ppo", "group_size": 1, "tasks_per_step": 4}
    replay = Replay()
    whole = trainer(replay(rl(**options)), tmp_path / "whole", steps=3)
    whole.fit(apps.spell, ask(4))
    parts = trainer(replay(rl(**options)), tmp_path / "parts", steps=2)
    parts.fit(apps.spell, ask(4))
    resumed = replay(rl(**options))
    again = trainer(resumed, tmp_path / "parts", steps=3)
    again.fit(apps.spell, ask(4), resume=True)
    lines = [run.folder.metrics() for run in (whole, again)]
    for name in ("learner/value_loss", "learner/explained_variance", "learner/loss"):
        assert [line.get(name) for line in lines[0]] == [line.get(name) for line in lines[1]]
    states = [_state(run) for run in (whole, again)]
    assert states[0] == states[1]
    assert states[0]["critic"]["by_policy"] == {"policy": 3}
    files = [_checkpoint(run) / "learner" for run in (whole, again)]
    for name in ("critic-0.safetensors", "weights-0.safetensors", "optimizer-0.safetensors"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes(), name


def test_a_killed_run_with_a_critic_mixture_statisticss_goes_on_exactly(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Compare coefficients, window, weights and critic with those of an uninterrupted run.

    The run is interrupted in the update of a step after the first fit, and resumes at its last
    checkpoint. Rollouts are those of the other run, because sampling depends on timing.
    """
    options = {"estimator": "rloo", "critic": True, "group_size": 3, "tasks_per_step": 4}
    replay, tasks = Replay(), ask(4)
    whole = trainer(replay(rl(**options)), tmp_path / "whole", steps=6)
    whole.fit(apps.spell, tasks)

    class Killed(Recording):
        def update(self, rows: Sequence[Row], *args: Any, **more: Any) -> dict[str, float]:
            if len(parts.folder.metrics()) == 4:
                raise KeyboardInterrupt
            return super().update(rows, *args, **more)

    algorithm = replay(rl(**options))
    parts = trainer(algorithm, tmp_path / "parts", steps=6, learner=Killed(tiny, algorithm.critic))
    with pytest.raises(KeyboardInterrupt):
        parts.fit(apps.spell, tasks)
    resumed = replay(rl(**options))
    again = trainer(resumed, tmp_path / "parts", steps=6, learner=Recording(tiny, resumed.critic))
    again.fit(apps.spell, tasks, resume=True)
    lines = [run.folder.metrics() for run in (whole, again)]
    names = [name for name in lines[0][-1] if name.startswith("mixture/")]
    assert names == [f"mixture/{n}" for n in ("constant", "group", "critic", "state", "groups")]
    for name in (*names, "learner/explained_variance", "learner/loss", "learner/lambda"):
        assert [line.get(name) for line in lines[0]] == [line.get(name) for line in lines[1]], name
    # the first step has no fitted critic, two steps have eight groups
    assert [line["mixture/groups"] for line in lines[0]] == [0, 0, 4, 8, 12, 16]
    assert [line["mixture/group"] for line in lines[0]][:3] == [1, 1, 1]
    assert lines[0][3]["mixture/critic"] != 0
    states = [_state(run) for run in (whole, again)]
    assert states[0] == states[1]
    assert states[0]["mixture"]["coefficients"] != [0, 1, 0, 0]
    assert len(states[0]["mixture"]["steps"]) == 4
    files = [_checkpoint(run) / "learner" for run in (whole, again)]
    for name in ("critic-0.safetensors", "weights-0.safetensors", "optimizer-0.safetensors"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes(), name
    rollout = resumed.last_batch.rollouts[0]
    told = inspect_run(whole.folder.path, rollout)
    found = re.findall(
        r"advantage (\S+) = \((\S+) - (\S+)\) / 1;.*, the critic expected (\S+), "
        r"the mixture (\S+) = (\S+) · 1 \(constant\) \+ (\S+) · (\S+) \(group\) \+ "
        r"(\S+) · (\S+) \(critic\) \+ (\S+) · (\S+) \(state\); share",
        told,
    )
    assert len(found) == 1
    advantage, credit, baseline, value, mixture, *terms = map(float, found[0])
    assert value == terms[4]
    assert mixture == baseline
    sums = terms[0] + terms[1] * terms[2] + terms[3] * terms[4] + terms[5] * terms[6]
    assert mixture == pytest.approx(sums, abs=1e-4)
    assert advantage == pytest.approx(credit - baseline, abs=1e-4)
    assert terms[1] == pytest.approx(lines[0][-1]["mixture/group"], rel=1e-5)


def test_what_is_frozen_stays_frozen_with_a_critic(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Check that frozen agents keep the starting weights and have neither value nor baseline."""
    options = {"estimator": "rloo", "critic": True, "frozen": "base", "tasks_per_step": 4}
    algorithm = rl(**options, group_size=2)
    learner = Recording(tiny, algorithm.critic)
    run = trainer(algorithm, tmp_path / "run", steps=4, learner=learner)
    before = learner.weight_hash("policy")
    result = run.fit(apps.two, ask(4))
    assert result.steps == 4
    assert learner.weight_hash("policy") != before
    assert learner.policies() == ["policy"]
    line = run.folder.metrics()[-1]
    assert line["mixture/groups"] == 8
    assert (line["calls/trained"], line["calls/frozen"]) == (8, 8)
    assert line["learner/value_calls"] == 8
    batch = algorithm.last_batch
    assert {why.agent_path for why in batch.explanations.values()} == {"writer"}
    entries = [entry for coverage in batch.coverages for entry in coverage.entries]
    frozen = [entry.call.record for entry in entries if entry.status is CallStatus.FROZEN]
    assert {(record.policy, *record.versions[0][:1]) for record in frozen} == {("base", 0)}


class Replay:
    """Wrap algorithms, so that step n of each gets the episodes that step n of the first one
    got.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def __call__(self, algorithm: Any) -> Any:
        collect = algorithm.collect

        async def replayed(world: Any) -> Any:
            episodes = await collect(world)
            return self._seen.setdefault(world.step, episodes)

        algorithm.collect = replayed
        return algorithm


def _checkpoint(run: Trainer) -> Path:
    found = latest(run.folder.checkpoints)
    assert found is not None
    return found


def _state(run: Trainer) -> dict[str, Any]:
    return load_state(_checkpoint(run)).algorithm


def test_a_learner_without_a_critic_is_refused_before_anything_runs(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    learner = TorchLearner({"policy": str(tiny)})
    run = trainer(rl(estimator="ppo"), tmp_path / "run", steps=1, learner=learner)
    with pytest.raises(ConfigError, match=r"this learner has no critic: give critic=Critic\(\)"):
        run.fit(apps.spell, ask(2))
    assert run.folder.metrics() == []


# --- Dr. GRPO, overlong answers -------------------------------------------------------------
def test_dr_grpo_divides_by_one_constant_in_the_whole_run(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Check that the constant is that of the first step, two steps and a resume later.

    The weight of a token does not depend on its answer's length. A penalty on long answers is in
    the metrics and in `inspect`.
    """
    options = {"estimator": "dr_grpo", "overlong": Overlong(max_tokens=8, buffer=4)}
    # no two pairs of them have the same mean, so that steps of two tasks do not
    tasks = [task | {"tokens": n} for task, n in zip(ask(6), (1, 2, 4, 8, 16, 24), strict=True)]
    first = rl(**options)
    trainer(first, tmp_path / "run", steps=1).fit(apps.spell_so_long, tasks)
    constants = first.state()["token_constants"]
    assert constants == {"policy": first.last_batch.usable_tokens["policy"] / 8}
    second = rl(**options)
    run = trainer(second, tmp_path / "run", steps=3)
    run.fit(apps.spell_so_long, tasks, resume=True)
    assert _state(run)["token_constants"] == constants
    assert second.last_batch.usable_tokens["policy"] / 8 != constants["policy"]
    for batch in (first.last_batch, second.last_batch):
        assert len({why.tokens for why in batch.explanations.values()}) > 1
        weights = [why.token_weight for why in batch.explanations.values()]
        assert weights == pytest.approx([1 / (8 * constants["policy"])] * 8)
        whys = {key[1:]: why for key, why in batch.explanations.items()}
        for row in batch.rows:
            [why] = [whys[call] for call in row.call_ids]
            trained = zip(row.advantages, row.weights, row.mask, strict=True)
            used = {advantage * weight for advantage, weight, is_trained in trained if is_trained}
            assert used == {why.advantage * why.token_weight}
    line = run.folder.metrics()[-1]
    found = list(second.last_batch.explanations.values())
    assert [why.penalty for why in found] == [-min(1, max(0, why.tokens - 4) / 4) for why in found]
    assert line["overlong/penalty"] == pytest.approx(sum(w.penalty or 0.0 for w in found) / 8)
    assert line["overlong/penalised"] == sum(why.tokens > 4 for why in found) / 8
    assert line["overlong/whole"] == sum(why.tokens >= 8 for why in found) / 8
    long = next(why for why in found if why.tokens >= 8)
    assert "(terminal, length -1)" in inspect_run(run.folder.path, long.rollout_id)


# --- states ---------------------------------------------------------------------------------
# --- other settings -------------------------------------------------------------------------
def test_a_run_does_not_go_on_with_another_rule(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Check that a setting that is missing in the folder of an older run counts as not set."""
    folder, tasks = tmp_path / "run", ask(2)
    trainer(rl(), folder, steps=1).fit(apps.spell, tasks)
    config = json.loads((folder / "config.json").read_text())
    assert {config.pop(name) for name in ("overlong", "critic", "token_constant")} == {None}
    (folder / "config.json").write_text(json.dumps(config))

    def refused(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            trainer(rl(**options), folder, steps=2).fit(apps.spell, tasks, resume=True)
        [told] = re.findall(r"go on with these \((.*)\): use the same", str(caught.value))
        return str(told)

    assert refused(credit="discounted") == (
        "credit: 'terminal' before, 'discounted(1)' now; step_rewards: False before, True now"
    )
    overlong = Overlong(max_tokens=4, buffer=2)
    assert refused(overlong=overlong).startswith("overlong: None before, {'max_tokens': 4, ")
    assert "critic: None before, {" in refused(estimator="ppo")
    result = trainer(rl(), folder, steps=2).fit(apps.spell, tasks, resume=True)
    assert result.steps == 2
