"""Tests of learners with a critic; skipped for learners without one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import CheckpointError, ConfigError, DataError
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.learner import Critic, Learner, LoRA, Optimizer, PolicyLoss
from lightspan_testing.learner_suite.base import LearnerTests

LOSS = PolicyLoss()
MOVING = Optimizer(learning_rate=1e-3)
RESTING = Optimizer(learning_rate=1e-9)
"""Optimizer whose updates hardly change the policy's weights."""
VOCABULARY = 405


def make_row(
    tokens: Sequence[int],
    calls: Sequence[Response],
    *,
    targets: Sequence[float] = (),
    number: int = 0,
    policy: str = "writer",
) -> Row:
    """Build a row with an advantage of 0.5 at each token of its calls.

    Args:
        tokens: token ids of the row.
        calls: positions of the calls.
        targets: value target of each call; empty for none.
        number: number in the rollout id.
        policy: policy of the row.
    """
    mask = [False] * len(tokens)
    for call in calls:
        mask[call.start : call.start + call.length] = [True] * call.length
    return Row(
        rollout_id=f"ro-{number}",
        policy=policy,
        ids=list(tokens),
        mask=mask,
        advantages=[0.5 if m else 0.0 for m in mask],
        weights=[0.01 if m else 0.0 for m in mask],
        logprobs=[-6.0 if m else 0.0 for m in mask],
        versions=[0] * len(tokens),
        temperatures=[1.0] * len(tokens),
        call_ids=tuple((f"c{place}", 0) for place in range(len(calls))),
        responses=tuple(calls),
        value_targets=tuple(targets),
    )


def make_call_rows(
    seed: int = 0, *, count: int = 10, long: int = 0, policy: str = "writer"
) -> list[Row]:
    """Build rows of one to four calls with random value targets.

    Some pairs of rows have a common prefix. Some calls directly follow another call. One row has no
    call.

    Args:
        seed: seed of the random values.
        count: number of rows.
        long: number of tokens of a long prefix; 0 for no long prefix. Four more rows begin with the
            whole prefix or a part of it.
        policy: policy of the rows.
    """
    rng = random.Random(seed)
    shared = [_ids(rng, rng.randint(3, 20)) for _ in range((count + 1) // 2)]
    heads = [shared[number // 2] for number in range(count)]
    if long:
        far = _ids(rng, long)
        heads += [far, far, far[: long // 2], far[: long // 3]]
    rows = [make_row(_ids(rng, 5), [], number=len(heads), policy=policy)]
    for number, head in enumerate(heads):
        tokens, calls = list(head), []
        for place in range(rng.randint(1, 4)):
            tokens += _ids(rng, rng.choice([0, 2, 7]) if place else 0)
            calls.append(Response(len(tokens), rng.randint(1, 6)))
            tokens += _ids(rng, calls[-1].length)
        targets = [rng.gauss(0, 1) for _ in calls]
        rows.append(make_row(tokens, calls, targets=targets, number=number, policy=policy))
    return rows


def make_prompt_rows(prompts: Sequence[Sequence[int]], seed: int, noise: float = 0.0) -> list[Row]:
    """Build four rows per prompt, with value targets of 0 and 1 for alternate prompts.

    Args:
        prompts: token ids of the prompts.
        seed: seed of the answers.
        noise: standard deviation of random noise that is added to the targets.
    """
    rng = random.Random(seed)
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        for _ in range(4):
            target = number % 2 + rng.gauss(0, noise)
            tokens = [*prompt, *_ids(rng, 3)]
            call = Response(len(prompt), 3)
            rows.append(make_row(tokens, [call], targets=[target], number=len(rows)))
    return rows


def without_targets(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without value targets, as a learner without a critic requires."""
    return [replace(row, value_targets=()) for row in rows]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, VOCABULARY) for _ in range(count)]


def _flat(lists: Sequence[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]


class ValueTests(LearnerTests):
    """Test the values that a critic predicts, and updates with a critic."""

    def make_critic(self, models: Mapping[str, Any], **options: Any) -> Learner:
        """Return a learner with a critic; skip the test if there is no such learner."""
        if not self.make_learner(models).capabilities.values:
            pytest.skip("this learner has no critic")
        return self.make_learner(models, **{"critic": Critic(), **options})

    @pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
    @pytest.mark.parametrize("budget", [100_000, 64])
    def test_a_value_is_that_of_the_prompt(
        self, folder: Path, budget: int, lora: LoRA | None
    ) -> None:
        """The value of a call depends on all of its prompt, including the last token.

        It depends on nothing else: not on the row, other rows with the same prefix, the forward
        pass, or the sampled tokens.
        """
        learner = self.make_critic(
            {"writer": folder}, token_budget=budget, lora=lora, optimizer=MOVING
        )
        rows = make_call_rows(long=90)
        for _ in range(2):
            learner.update(rows, LOSS)
        results = learner.values(rows)
        assert [len(values) for values in results] == [len(row.responses) for row in rows]
        for row, values in zip(rows, results, strict=True):
            for call, value in zip(row.responses, values, strict=True):
                prompt = row.ids[: call.start]
                other = make_row([*prompt, 17, 18, 19], [Response(len(prompt), 3)])
                assert learner.values([other]) == [[pytest.approx(value, abs=1e-5)]]
                changed = replace(other, ids=[*prompt[:-1], (prompt[-1] + 1) % 400, 17, 18, 19])
                assert learner.values([changed]) != [[pytest.approx(value, abs=1e-5)]]

    def test_values_of_no_rows(self, folder: Path) -> None:
        assert self.make_critic({"writer": folder}).values([]) == []

    def test_values_are_zero_until_they_are_fitted(self, folder: Path) -> None:
        learner = self.make_critic({"writer": folder})
        rows = make_call_rows()
        metrics = learner.update(without_targets(rows), LOSS)
        assert not any(name.startswith(("value", "explained")) for name in metrics)
        assert set(_flat(learner.values(rows))) == {0.0}

    @pytest.mark.parametrize("scale", [1.0, 1000.0])
    def test_targets_that_depend_on_the_prompt(self, folder: Path, scale: float) -> None:
        """A critic learns targets of any size and offset.

        The error is measured before each update, on answers that the critic has not seen.
        """
        learner = self.make_critic({"writer": folder}, optimizer=RESTING)
        rng = random.Random(3)
        prompts = [_ids(rng, rng.randint(4, 12)) for _ in range(8)]
        for step in range(10):
            rows = [
                replace(row, value_targets=tuple(scale * (t - 5) for t in row.value_targets))
                for row in make_prompt_rows(prompts, seed=step, noise=0.1)
            ]
            metrics = learner.update(rows, LOSS)
        assert metrics["explained_variance"] > 0.9
        assert metrics["value_loss"] < 0.03 * scale**2
        assert metrics["value_calls"] == 32

    def test_the_metrics_are_of_the_values_before(self, folder: Path) -> None:
        learner = self.make_critic({"writer": folder}, optimizer=RESTING)
        rows = make_call_rows()
        for _ in range(2):
            values, targets = _flat(learner.values(rows)), _flat([r.value_targets for r in rows])
            metrics = learner.update(rows, LOSS)
            pairs = list(zip(values, targets, strict=True))
            expected = math.fsum((v - t) ** 2 for v, t in pairs) / len(pairs)
            assert metrics["value_loss"] == pytest.approx(expected, rel=1e-4)
            assert metrics["value_calls"] == len(pairs)

    def test_a_target_of_nan_is_none(self, folder: Path) -> None:
        learner = self.make_critic({"writer": folder})
        prompt, call = [7, 8, 9], Response(3, 1)
        rows = [
            make_row([*prompt, 20], [call], targets=[2.0], number=0),
            make_row([*prompt, 21], [call], targets=[math.nan], number=1),
            make_row([*prompt, 22], [call], number=2),
        ]
        metrics = learner.update(rows, LOSS)
        assert (metrics["value_loss"], metrics["value_calls"]) == (4.0, 1)
        assert learner.values(rows) == [[pytest.approx(2.0, abs=1e-5)]] * 3

    @pytest.mark.parametrize("lora", [None, LoRA(rank=4, dropout=0.2)], ids=["full", "lora"])
    def test_the_policy_does_not_notice_its_critic(self, folder: Path, lora: LoRA | None) -> None:
        """A critic changes nothing of the policy: its metrics and weights are exactly equal."""
        options = {"optimizer": MOVING, "lora": lora}
        watched = self.make_critic({"writer": folder}, **options)
        alone = self.make_learner({"writer": folder}, **options)
        for seed in range(3):
            rows = make_call_rows(seed, long=40)
            metrics = watched.update(rows, LOSS)
            expected = alone.update(without_targets(rows), LOSS)
            assert {name: metrics[name] for name in expected} == expected
        assert watched.weight_hash("writer") == alone.weight_hash("writer")
        assert watched.usage()["updates"] == alone.usage()["updates"]

    def test_a_skipped_update_leaves_the_critic_alone(self, folder: Path) -> None:
        learner = self.make_critic({"writer": folder})
        rows = make_call_rows()
        learner.update(rows, LOSS)
        before = learner.values(rows)
        bad = [replace(row, advantages=[math.nan] * len(row.ids)) for row in rows]
        assert learner.update(bad, LOSS)["skipped"] == 1
        assert learner.values(rows) == before

    def test_each_policy_has_its_own(self, folder: Path) -> None:
        both = self.make_critic({"writer": folder, "checker": folder}, optimizer=MOVING)
        alone = self.make_critic({"writer": folder}, optimizer=MOVING)
        rows = make_call_rows()
        others = make_call_rows(5, policy="checker")
        assert both.update(rows, LOSS) == alone.update(rows, LOSS)
        assert both.values(rows) == alone.values(rows)
        assert set(_flat(both.values(others))) == {0.0}
        metrics = both.update([*rows, *others], LOSS)
        calls = [metrics[f"{name}/value_calls"] for name in ("writer", "checker")]
        assert metrics["value_calls"] == sum(calls)
        alone.update(rows, LOSS)
        assert both.values(rows) == alone.values(rows)

    @pytest.mark.parametrize("lora", [None, LoRA(rank=4, dropout=0.2)], ids=["full", "lora"])
    @pytest.mark.parametrize("updates", [2, 9])
    def test_a_critic_resumes_exactly(
        self, folder: Path, tmp_path: Path, lora: LoRA | None, updates: int
    ) -> None:
        """A critic that was loaded from a checkpoint continues exactly like the one that was saved.

        A checkpoint stores a limited number of batches. The test makes fewer and more updates than
        that. The learner that loads the checkpoint was trained on other rows before.
        """
        options = {"optimizer": MOVING, "lora": lora, "critic": Critic(batches=4)}
        batches = [make_call_rows(seed) for seed in range(updates + 2)]
        whole = self.make_critic({"writer": folder}, **options)
        for batch in batches[:updates]:
            whole.update(batch, LOSS)
        whole.save(tmp_path)
        other = self.make_critic({"writer": folder}, **options)
        other.update(make_call_rows(77), LOSS)
        other.load(tmp_path)
        for batch in batches[updates:]:
            assert other.values(batch) == whole.values(batch)
            assert other.update(batch, LOSS) == whole.update(batch, LOSS)
        assert other.values(batches[0]) == whole.values(batches[0])
        assert other.weight_hash("writer") == whole.weight_hash("writer")
        suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json"}

    def test_checkpoints_with_and_without_a_critic(self, folder: Path, tmp_path: Path) -> None:
        """A learner without a critic refuses a checkpoint with a critic.

        A learner with a critic loads a checkpoint without one; then all values are zero.
        """
        plain = self.make_learner({"writer": folder})
        rows = make_call_rows()
        plain.update(without_targets(rows), LOSS)
        plain.save(tmp_path / "plain")
        learner = self.make_critic({"writer": folder})
        learner.update(rows, LOSS)
        learner.save(tmp_path / "critic")
        learner.load(tmp_path / "plain")
        assert learner.weight_hash("writer") == plain.weight_hash("writer")
        assert set(_flat(learner.values(rows))) == {0.0}
        with pytest.raises(CheckpointError, match="critic"):
            plain.load(tmp_path / "critic")

    def test_without_a_critic_nothing_tells_of_one(self, folder: Path, tmp_path: Path) -> None:
        learner = self.make_learner({"writer": folder})
        learner.update(without_targets(make_call_rows()), LOSS)
        learner.save(tmp_path)
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not any("critic" in path.name for path in written)
        assert "critic" not in json.dumps(learner.state())
        rows = make_call_rows()
        with pytest.raises(ConfigError, match="critic"):
            learner.values(rows)
        with pytest.raises(ConfigError, match="critic"):
            learner.update(rows, LOSS)

    def test_what_no_critic_could_learn_is_named(self, folder: Path) -> None:
        learner = self.make_critic({"writer": folder})
        row = make_row([7, 8, 9, 10], [Response(2, 2)], targets=[1.0], number=3)
        before = learner.weight_hash("writer")
        for wrong in (
            replace(row, value_targets=(1.0, 2.0)),
            replace(row, value_targets=(math.inf,)),
            replace(row, responses=(Response(4, 1),)),
            replace(row, mask=[False, False, False, True]),
        ):
            with pytest.raises(DataError, match="ro-3"):
                learner.update([wrong], LOSS)
        assert learner.weight_hash("writer") == before
        promptless = replace(row, responses=(Response(0, 2),))
        with pytest.raises(DataError, match="ro-3"):
            learner.values([promptless])
