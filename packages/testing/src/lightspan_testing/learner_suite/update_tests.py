"""Tests of updates, apart from losses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Optimizer, PolicyLoss, SFTLoss
from lightspan_testing.learner_suite.base import BOTH_CLIPS, SGD_LIKE, LearnerTests
from lightspan_testing.learner_suite.reference import (
    distance,
    published,
    reference_loss,
    reference_optimizer,
    take_step,
    weights_of,
)
from lightspan_testing.learner_suite.rows import make_rows


class UpdateTests(LearnerTests):
    """Test updates of the weights."""

    async def test_the_gradient_s_norm_is_bounded(self, folder: Path, model: Any) -> None:
        """The learner scales a gradient down to the maximum norm.

        The first gradient of the test is much larger than the second, so without a maximum it would
        dominate.
        """
        bounded = msgspec.structs.replace(SGD_LIKE, max_grad_norm=0.01)
        learner = self.make_learner({"writer": folder}, optimizer=bounded)
        start, optimizer = await published(learner), reference_optimizer(model, bounded)
        for seed, factor in ((0, 100.0), (1, 1.0)):
            rows = [
                replace(row, weights=[factor * weight for weight in row.weights])
                for row in make_rows(model, seed=seed)
            ]
            total = reference_loss(model, rows, SFTLoss())
            norm = take_step(optimizer, model, total, bounded.max_grad_norm)
            assert norm > 0.02
            assert learner.update(rows, SFTLoss())["grad_norm"] == pytest.approx(norm, rel=1e-3)
        expected = weights_of(model)
        assert distance(await published(learner), expected) < 1e-2 * distance(expected, start)

    async def test_the_result_does_not_depend_on_order_or_microbatches(
        self, folder: Path, model: Any
    ) -> None:
        rows = make_rows(model, 20)
        start = weights_of(model)
        results = []
        for budget, order in ((100_000, 1), (64, 1), (200, -1), (1, -1)):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
            metrics = learner.update(rows[::order], BOTH_CLIPS)
            results.append((metrics, await published(learner)))
        first_metrics, first_weights = results[0]
        moved = distance(first_weights, start)
        for metrics, weights in results[1:]:
            assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-6)
            assert distance(weights, first_weights) < 1e-3 * moved

    def test_weights_scale_the_gradient(self, folder: Path, model: Any) -> None:
        rows = make_rows(model)
        doubled = [replace(row, weights=[2 * weight for weight in row.weights]) for row in rows]
        once = self.make_learner({"writer": folder}).update(rows, BOTH_CLIPS)
        twice = self.make_learner({"writer": folder}).update(doubled, BOTH_CLIPS)
        assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-5)
        assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=1e-5)

    def test_a_weight_below_zero_makes_tokens_less_likely(self, folder: Path, model: Any) -> None:
        """Check the opposite gradient, by which algorithms learn from answers that are worse."""
        rows = make_rows(model)
        negative = [replace(row, weights=[-weight for weight in row.weights]) for row in rows]
        once = self.make_learner({"writer": folder}).update(rows, SFTLoss())
        learner = self.make_learner({"writer": folder})
        before = sum(map(sum, learner.score(rows)))
        opposite = learner.update(negative, SFTLoss())
        assert opposite["loss"] == pytest.approx(-once["loss"], rel=1e-5)
        assert opposite["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-5)
        assert sum(map(sum, learner.score(rows))) < before

    def test_untrained_tokens_do_not_matter(self, folder: Path, model: Any) -> None:
        """Advantages, weights and log-probabilities of untrained tokens have no effect."""
        rows = make_rows(model)
        noisy = [
            replace(
                row,
                advantages=[a if m else 9.0 for a, m in zip(row.advantages, row.mask, strict=True)],
                weights=[w if m else 9.0 for w, m in zip(row.weights, row.mask, strict=True)],
                logprobs=[x if m else -9.0 for x, m in zip(row.logprobs, row.mask, strict=True)],
            )
            for row in rows
        ]
        clean = self.make_learner({"writer": folder}).update(rows, BOTH_CLIPS)
        assert self.make_learner({"writer": folder}).update(noisy, BOTH_CLIPS) == clean

    def test_a_bad_gradient_changes_nothing(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        before = learner.weight_hash("writer")
        for value in (math.nan, math.inf):
            bad = replace(rows[0], advantages=[value] * len(rows[0].ids))
            metrics = learner.update([bad, *rows[1:]], BOTH_CLIPS)
            assert metrics["skipped"] == 1
            assert learner.weight_hash("writer") == before
        assert learner.usage()["updates"] == 0
        assert learner.update(rows, BOTH_CLIPS)["skipped"] == 0
        assert learner.weight_hash("writer") != before

    def test_nothing_to_train_is_no_step(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        before = learner.weight_hash("writer")
        untrained = [replace(row, mask=[False] * len(row.ids)) for row in make_rows(model, 3)]
        for rows in (untrained, []):
            assert learner.update(rows, BOTH_CLIPS)["skipped"] == 1
        assert learner.weight_hash("writer") == before

    def test_the_gap_to_the_engine_is_measured_before_the_step(
        self, folder: Path, model: Any
    ) -> None:
        exact = make_rows(model, off_policy=0.0)
        for gap in (0.0, 0.25):
            shifted = [
                replace(
                    row,
                    logprobs=[x - gap if m else 0.0 for x, m in _pairs(row)],
                )
                for row in exact
            ]
            metrics = self.make_learner({"writer": folder}).update(shifted, PolicyLoss())
            assert metrics["logprob_gap_mean"] == pytest.approx(gap, abs=1e-4)
            assert metrics["logprob_gap_max"] == pytest.approx(gap, abs=1e-4)

    def test_policies_are_updated_apart(self, folder: Path, model: Any) -> None:
        both = self.make_learner({"writer": folder, "checker": folder})
        alone = self.make_learner({"writer": folder})
        frozen = both.weight_hash("checker")
        rows = make_rows(model)
        both.update(rows, BOTH_CLIPS)
        alone.update(rows, BOTH_CLIPS)
        assert both.weight_hash("writer") == alone.weight_hash("writer")
        assert both.weight_hash("checker") == frozen
        mixed = [*rows, *(replace(row, policy="checker") for row in rows)]
        writer = both.weight_hash("writer")
        both.update(mixed, BOTH_CLIPS)
        assert both.weight_hash("checker") == alone.weight_hash("writer") == writer

    def test_an_unknown_policy_is_named(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model, 2, policy="critic")
        with pytest.raises(NotFoundError, match="critic"):
            learner.update(rows, BOTH_CLIPS)
        with pytest.raises(NotFoundError, match="critic"):
            learner.score(rows)
        with pytest.raises(NotFoundError, match="critic"):
            learner.weight_hash("critic")

    @pytest.mark.parametrize("field", ["weights", "temperatures", "mask"])
    def test_a_malformed_row_is_named(self, folder: Path, model: Any, field: str) -> None:
        learner = self.make_learner({"writer": folder})
        row = make_rows(model, 1)[0]
        wrong: Any = [0.0] * len(row.ids) if field == "temperatures" else getattr(row, field)[:-1]
        with pytest.raises(DataError, match=row.rollout_id):
            learner.update([replace(row, **dict[str, Any]({field: wrong}))], BOTH_CLIPS)

    def test_warm_up_and_counters(self, folder: Path, model: Any) -> None:
        learner = self.make_learner(
            {"writer": folder}, optimizer=Optimizer(learning_rate=1.0e-3, warmup_steps=4)
        )
        rows = make_rows(model)
        rates = [learner.update(rows, SFTLoss())["learning_rate"] for _ in range(6)]
        assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
        usage = learner.usage()
        assert usage["updates"] == 6
        assert usage["tokens"] == 6 * sum(sum(row.mask) for row in rows)
        assert usage["cpu_s"] > 0

    def test_the_rate_falls_after_the_warm_up(self, folder: Path, model: Any) -> None:
        optimizer = Optimizer(learning_rate=1.0e-3, warmup_steps=2, decay_steps=5)
        learner = self.make_learner({"writer": folder}, optimizer=optimizer)
        rows = make_rows(model)
        rates = [learner.update(rows, SFTLoss())["learning_rate"] for _ in range(8)]
        expected = [5e-4, 1e-3, 8.1e-4, 6.2e-4, 4.3e-4, 2.4e-4, 5e-5, 5e-5]
        assert rates == pytest.approx(expected)

    @pytest.mark.parametrize("name", ["adamw", "muon"])
    def test_supervised_updates_lower_the_loss(self, folder: Path, model: Any, name: Any) -> None:
        optimizer = Optimizer(name=name, learning_rate=1e-3)
        if self.lacks(folder, optimizer=optimizer):
            return
        learner = self.make_learner({"writer": folder}, optimizer=optimizer)
        rows = make_rows(model)
        losses = [learner.update(rows, SFTLoss())["loss"] for _ in range(8)]
        assert losses[-1] < 0.9 * losses[0]


def _pairs(row: Row) -> Any:
    return zip(row.logprobs, row.mask, strict=True)
