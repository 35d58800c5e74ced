"""Tests of losses against the reference, on rows that another policy sampled."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.rows import Response
from lightspan.protocols.learner import Loss, PolicyLoss, SFTLoss
from lightspan_testing.learner_suite.base import (
    BOTH_CLIPS,
    FORM_NAMES,
    FORMS,
    SGD_LIKE,
    LearnerTests,
)
from lightspan_testing.learner_suite.reference import (
    distance,
    moved_scores,
    published,
    reference_loss,
    reference_optimizer,
    take_step,
)
from lightspan_testing.learner_suite.rows import (
    make_branching_rows,
    make_call_rows,
    make_rows,
    split_rows,
    token_logprobs,
)
from lightspan_torch.engine.weights import load_model


class LossTests(LearnerTests):
    """Losses and their gradients."""

    @pytest.mark.parametrize(
        "loss",
        [
            SFTLoss(),
            BOTH_CLIPS,
            PolicyLoss(dual_clip=None),
            PolicyLoss(entropy=0.05),
            PolicyLoss(kl=0.3, kl_estimator="k1"),
            PolicyLoss(kl=0.3, kl_estimator="k2"),
            PolicyLoss(kl=0.3, kl_estimator="k3"),
        ],
    )
    async def test_a_step_is_the_reference_s(self, folder: Path, model: Any, loss: Loss) -> None:
        """Two steps, so that the weights differ from the initial ones to which the KL refers."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        base, start = load_model(folder), await published(learner)
        optimizer = reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = make_rows(model, seed=seed)
            uses_base = isinstance(loss, PolicyLoss) and loss.kl
            total = reference_loss(model, rows, loss, base=base if uses_base else None)
            norm = take_step(optimizer, model, total)
            metrics = learner.update(rows, loss)
            assert norm > 0
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert metrics["skipped"] == 0
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        moved = distance(expected, start)
        assert distance(await published(learner), expected) < 1e-3 * moved

    @pytest.mark.parametrize(
        "loss",
        [SFTLoss(), BOTH_CLIPS, PolicyLoss(kl=0.3, entropy=0.05)],
        ids=["sft", "clips", "kl"],
    )
    @pytest.mark.parametrize("budget", [100_000, 64])
    async def test_rows_that_begin_alike_stay_exact(
        self, folder: Path, model: Any, loss: Loss, budget: int
    ) -> None:
        """Each row keeps its own advantages, ratios and temperatures."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
        rows = make_branching_rows(model)
        for row, score in zip(rows, learner.score(rows), strict=True):
            with torch.no_grad():
                assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total = reference_loss(model, rows, loss, base=load_model(folder))
        norm = take_step(reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss)
        assert norm > 0
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["tokens"] == sum(sum(row.mask) for row in rows)
        assert metrics["rows"] == len(rows)
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        assert distance(await published(learner), expected) < 1e-3 * distance(expected, start)

    @pytest.mark.parametrize("loss", FORMS, ids=FORM_NAMES)
    @pytest.mark.parametrize("budget", [100_000, 16])
    async def test_every_form_is_the_reference_s(
        self, folder: Path, model: Any, loss: PolicyLoss, budget: int
    ) -> None:
        """Off-policy, on rows of several calls with common prefixes. The second step starts from
        changed weights."""
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=budget)
        if self.refuses(learner, make_call_rows(model), loss):
            return
        base, start = load_model(folder), await published(learner)
        optimizer = reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = make_call_rows(model, seed=seed)
            total = reference_loss(model, rows, loss, base=base if loss.kl else None)
            norm = take_step(optimizer, model, total)
            metrics = learner.update(rows, loss)
            assert norm > 0
            assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert 0 < metrics["clip_fraction"] < 1 or max(loss.clip_low, loss.clip_high) > 0.9
        expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        assert distance(await published(learner), expected) < 1e-3 * distance(expected, start)

    async def test_on_policy_every_form_has_the_gradient_of_clipping(
        self, folder: Path, model: Any
    ) -> None:
        rows = make_call_rows(model, off_policy=0.0)
        start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
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

    @pytest.mark.parametrize("loss", FORMS[:5], ids=FORM_NAMES[:5])
    async def test_a_call_is_a_sequence_whatever_else_is_in_its_row(
        self, folder: Path, model: Any, loss: PolicyLoss
    ) -> None:
        """Splitting merged rows into one row per call changes nothing."""
        merged = make_call_rows(model)
        split = split_rows(merged)
        assert len(split) > 2 * len(merged)
        loss = msgspec.structs.replace(loss, importance_cap=1.5, importance_level="sequence")
        results = []
        for rows in (merged, split):
            learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
            if self.refuses(learner, rows, loss):
                return
            old = moved_scores(learner.score(rows), rows, rng=random.Random(5))
            metrics = learner.update(rows, loss, old_logprobs=old)
            results.append((metrics, await published(learner)))
        (first, first_weights), (second, second_weights) = results
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "ratio_max", "tokens"):
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-6), name
        start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        moved = distance(first_weights, start)
        assert distance(first_weights, second_weights) < 1e-3 * moved

    @pytest.mark.parametrize("level", ["token", "sequence"])
    @pytest.mark.parametrize("form", ["clip", "gspo", "cispo"])
    @pytest.mark.parametrize("budget", [100_000, 16])
    def test_importance_weights_of_tokens_and_of_calls(
        self, folder: Path, model: Any, level: Any, form: Any, budget: int
    ) -> None:
        learner = self.make_learner({"writer": folder}, token_budget=budget)
        rows = make_call_rows(model)
        loss = PolicyLoss(form=form, clip_low=0.3, importance_cap=1.3, importance_level=level)
        if self.refuses(learner, rows, loss):
            return
        old = moved_scores(learner.score(rows), rows, rng=random.Random(5))
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
        ],
        ids=["gspo", "sequence"],
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
            old = learner.score(bad) if loss.importance_cap else None
            with pytest.raises(DataError, match=r"rollout ro-0.*Row\.responses"):
                learner.update(bad, loss, old_logprobs=old)
        assert learner.weight_hash("writer") == before

    def test_both_clips_are_active_in_the_reference_rows(self, folder: Path, model: Any) -> None:
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
        assert metrics["tokens"] == len(logratios)
        assert metrics["rows"] == len(rows)

    @pytest.mark.parametrize("cap", [None, 1.3])
    def test_decoupled_importance_weights(
        self, folder: Path, model: Any, cap: float | None
    ) -> None:
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        rows = make_rows(model)
        loss = PolicyLoss(importance_cap=cap)
        rng = random.Random(5)
        old = [[value + rng.uniform(-0.5, 0.5) for value in row] for row in learner.score(rows)]
        total = reference_loss(model, rows, loss, old=old)
        norm = take_step(reference_optimizer(model, SGD_LIKE), model, total)
        metrics = learner.update(rows, loss, old_logprobs=old)
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)

    def test_an_importance_cap_without_old_logprobs_is_refused(
        self, folder: Path, model: Any
    ) -> None:
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        with pytest.raises(ConfigError, match=r"importance_cap=2.*give old_logprobs"):
            learner.update(make_rows(model), PolicyLoss(importance_cap=2.0))
