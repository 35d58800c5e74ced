"""Tests of losses against simple formulas, on rows that another policy sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.learner import PolicyLoss, SFTLoss
from lightspan_testing.learner_suite.base import BOTH_CLIPS, SGD_LIKE, LearnerTests
from lightspan_testing.learner_suite.reference import (
    distance,
    moved_scores,
    published,
    reference_loss,
    reference_optimizer,
    take_step,
    weights_of,
)
from lightspan_testing.learner_suite.rows import (
    make_branching_rows,
    make_call_rows,
    make_rows,
    split_rows,
    token_logprobs,
)
from lightspan_torch.engine.weights import load_model

FORMS = {
    "gspo": PolicyLoss(form="gspo"),
    "gspo narrow": PolicyLoss(form="gspo", clip_low=0.1, clip_high=0.15),
    "gspo kl": PolicyLoss(form="gspo", clip_low=0.9, clip_high=9.0, kl=0.3, entropy=0.05),
    "cispo": PolicyLoss(form="cispo"),
    "cispo narrow": PolicyLoss(form="cispo", clip_low=0.2, clip_high=0.2),
    "cispo kl": PolicyLoss(form="cispo", kl=0.3, entropy=0.05),
}
LOSSES: Mapping[str, PolicyLoss | SFTLoss] = {
    **FORMS,
    "sft": SFTLoss(),
    "clips": BOTH_CLIPS,
    "no dual clip": PolicyLoss(dual_clip=None),
    "entropy": PolicyLoss(entropy=0.05),
    "k2": PolicyLoss(kl=0.3, kl_estimator="k2"),
    "k3": PolicyLoss(kl=0.3, kl_estimator="k3"),
    "kl entropy": PolicyLoss(kl=0.3, entropy=0.05),
}
ROWS: Mapping[str, Callable[..., list[Row]]] = {
    "turns": make_rows,
    "branches": make_branching_rows,
    "calls": make_call_rows,
}
"""Name → function that makes rows.

`branches` are rows with common prefixes, which learners may compute once; `calls` are rows of
several calls, whose bounds a loss may need.
"""
CASES = [
    *((name, "turns", 100_000) for name in ("sft", "clips", "no dual clip", "entropy")),
    *((name, "turns", 100_000) for name in ("k2", "k3")),
    *((name, "branches", 64) for name in ("sft", "clips", "kl entropy")),
    ("kl entropy", "branches", 100_000),
    *((name, "calls", 16) for name in ("clips", *FORMS)),
    *((name, "calls", 100_000) for name in FORMS),
]
"""(loss, rows, token budget) of each test."""


class LossTests(LearnerTests):
    """Test losses and their gradients."""

    @pytest.mark.parametrize(("name", "kind", "budget"), CASES)
    async def test_a_step_is_the_reference_s(
        self, folder: Path, model: Any, name: str, kind: str, budget: int
    ) -> None:
        """Two steps of the learner change the weights as two steps of the simple implementation do.

        There are two steps because the loss may refer to the initial weights (KL). From the second
        step on, they differ from the current weights.
        """
        loss = LOSSES[name]
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
        if isinstance(loss, PolicyLoss) and self.refuses(learner, ROWS[kind](model), loss):
            return
        base, start = load_model(folder), await published(learner)
        optimizer = reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = ROWS[kind](model, seed=seed)
            uses_base = isinstance(loss, PolicyLoss) and loss.kl
            total = reference_loss(model, rows, loss, base=base if uses_base else None)
            norm = take_step(optimizer, model, total)
            metrics = learner.update(rows, loss)
            assert norm > 0
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert (metrics["rows"], metrics["skipped"]) == (len(rows), 0)
            assert metrics["tokens"] == sum(sum(row.mask) for row in rows)
        expected = weights_of(model)
        assert distance(await published(learner), expected) < 1e-3 * distance(expected, start)

    @pytest.mark.parametrize("budget", [100_000, 64])
    def test_scores_of_rows_that_begin_alike(self, folder: Path, model: Any, budget: int) -> None:
        learner = self.make_learner({"writer": folder}, token_budget=budget)
        rows = make_branching_rows(model)
        for row, score in zip(rows, learner.score(rows), strict=True):
            with torch.no_grad():
                assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)

    async def test_on_policy_every_form_has_the_gradient_of_clipping(
        self, folder: Path, model: Any
    ) -> None:
        rows = make_call_rows(model, off_policy=0.0)
        start = weights_of(model)
        results = []
        for form in ("clip", "gspo", "cispo"):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
            if form in learner.capabilities.loss_forms:
                metrics = learner.update(rows, PolicyLoss(form=form))
                results.append((metrics["grad_norm"], await published(learner)))
        first_norm, first = results[0]
        for norm, weights in results:
            assert norm == pytest.approx(first_norm, rel=1e-4)
            assert distance(weights, first) < 1e-3 * distance(first, start)

    @pytest.mark.parametrize("name", ["clips", "gspo", "gspo narrow", "cispo"])
    async def test_a_call_is_a_sequence_whatever_else_is_in_its_row(
        self, folder: Path, model: Any, name: str
    ) -> None:
        """Rows that merge several calls train like separate rows with one call each."""
        merged = make_call_rows(model)
        split = split_rows(merged)
        assert len(split) > 2 * len(merged)
        changes: Any = {"importance_cap": 1.5, "importance_level": "sequence"}
        loss: Any = msgspec.structs.replace(LOSSES[name], **changes)
        results = []
        for rows in (merged, split):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
            if self.refuses(learner, rows, loss):
                return
            old = moved_scores(learner.score(rows), rows, rng=random.Random(5))
            metrics = learner.update(rows, loss, old_logprobs=old)
            results.append((metrics, await published(learner)))
        (first, first_weights), (second, second_weights) = results
        for key in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "tokens"):
            assert second[key] == pytest.approx(first[key], rel=1e-5, abs=1e-6), key
        moved = distance(first_weights, weights_of(model))
        assert distance(first_weights, second_weights) < 1e-3 * moved

    @pytest.mark.parametrize(("level", "cap"), [("token", None), ("token", 1.3), ("sequence", 1.3)])
    @pytest.mark.parametrize("form", ["clip", "gspo", "cispo"])
    def test_importance_weights_of_tokens_and_of_calls(
        self, folder: Path, model: Any, level: Any, form: Any, cap: float | None
    ) -> None:
        learner = self.make_learner({"writer": folder}, token_budget=16 if cap else 100_000)
        rows = make_call_rows(model)
        loss = PolicyLoss(form=form, clip_low=0.3, importance_cap=cap, importance_level=level)
        if self.refuses(learner, rows, loss):
            return
        old = moved_scores(learner.score(rows), rows, rng=random.Random(5))
        total = reference_loss(model, rows, loss, old=old)
        norm = take_step(reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss, old_logprobs=old)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    @pytest.mark.parametrize("cap", [None, 1.3])
    def test_calls_whose_ratio_is_above_the_bound_have_no_gradient(
        self, folder: Path, model: Any, cap: float | None
    ) -> None:
        learner = self.make_learner({"writer": folder}, token_budget=16 if cap else 100_000)
        rows = make_call_rows(model)
        old = moved_scores(learner.score(rows), rows, rng=random.Random(5))
        ratios = sorted(
            math.exp(sum(values[at] - row.logprobs[at] for at in range(start, start + length)))
            for row, values in zip(rows, old, strict=True)
            for start, length in row.responses
        )
        bound = max(1.01, ratios[len(ratios) // 2] * (1 + 1e-3))
        assert ratios[0] < bound < ratios[-1]
        loss = PolicyLoss(importance_cap=cap, importance_mask=bound, kl=0.0)
        if self.refuses(learner, rows, loss):
            return
        total = reference_loss(model, rows, loss, old=old)
        norm = take_step(reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss, old_logprobs=old)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    @pytest.mark.parametrize(
        "loss",
        [
            PolicyLoss(form="gspo"),
            PolicyLoss(importance_cap=2.0, importance_level="sequence"),
            PolicyLoss(importance_mask=3.0),
        ],
        ids=["gspo", "sequence", "mask"],
    )
    def test_rows_that_do_not_say_where_their_calls_are_are_refused(
        self, folder: Path, model: Any, loss: PolicyLoss
    ) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_call_rows(model)
        if self.refuses(learner, rows, loss):
            return
        before = learner.weight_hash("writer")
        first = rows[0].responses[0]
        for wrong in ((), (first,), (first, first), (Response(len(rows[0].ids) - 1, 2),)):
            bad = [replace(rows[0], responses=wrong), *rows[1:]]
            old = learner.score(bad) if loss.needs_old_logprobs else None
            with pytest.raises(DataError, match=r"rollout ro-0.*Row\.responses"):
                learner.update(bad, loss, old_logprobs=old)
        assert learner.weight_hash("writer") == before

    def test_the_metrics_of_clips_and_ratios(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        with torch.no_grad():
            logratios = [
                (float(value) - row.logprobs[place], row.advantages[place])
                for row in rows
                for place, value in enumerate(token_logprobs(model, row))
                if row.mask[place]
            ]
        high = [1 for x, a in logratios if a > 0 and math.exp(x) > 1.28]
        low = [1 for x, a in logratios if a < 0 and math.exp(x) < 0.8]
        dual = [1 for x, a in logratios if a < 0 and math.exp(x) > 1.4]
        assert min(len(high), len(low), len(dual)) > 2
        metrics = learner.update(rows, BOTH_CLIPS)
        clipped = len(high) + len(low) + len(dual)
        assert metrics["clip_fraction"] == pytest.approx(clipped / len(logratios))
        ratios = [math.exp(x) for x, _ in logratios]
        assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
        assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)

    @pytest.mark.parametrize("setting", ["importance_cap", "importance_mask"])
    def test_importance_without_old_logprobs_is_refused(
        self, folder: Path, model: Any, setting: str
    ) -> None:
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        loss = PolicyLoss(**{setting: 2.0})  # type: ignore[arg-type]
        if self.refuses(learner, make_rows(model), loss):
            return
        with pytest.raises(ConfigError, match=rf"{setting}=2.*give old_logprobs"):
            learner.update(make_rows(model), loss)
