"""Test the limits of sampling, top-k and top-p, in a batch of different ones."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightspan.schema.token_records import Sampling
from lightspan_torch.engine import _sampling
from lightspan_torch.engine._sampling import sample


@pytest.mark.parametrize("rows_at_once", [1, 3, 64])
def test_limits_are_those_of_each_row(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the definition leaves out gets no probability, and no other token loses its."""
    monkeypatch.setattr(_sampling, "_LIMITED_ROWS", rows_at_once)
    rng = random.Random(0)
    settings = [
        Sampling(top_k=rng.choice([0, 1, 5, 40]), top_p=rng.choice([1.0, 0.9, 0.3]))
        for _ in range(20)
    ]
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    limited = logits.clone()
    sample(limited, settings, None)
    for row, each, result in zip(logits.tolist(), settings, limited.tolist(), strict=True):
        order = sorted(range(40), key=lambda token: -row[token])[: each.top_k or 40]
        total, before = sum(math.exp(row[token]) for token in order), 0.0
        expected = [-math.inf] * 40
        for token in order:
            if before < each.top_p:
                expected[token] = row[token]
            before += math.exp(row[token]) / total
        assert result == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_reported(value: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = value
    with pytest.raises(RuntimeError, match="not finite"):
        sample(logits, [Sampling()] * 2, None)
