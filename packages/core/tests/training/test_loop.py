"""Tests of the progress line of a step."""

from __future__ import annotations

from lightspan.training.loop import _SHOWN


def test_a_loss_near_zero_has_no_sign() -> None:
    assert _SHOWN["learner/loss"].format(-0.00001) == "loss 0.0000"
    assert _SHOWN["learner/loss"].format(-0.5) == "loss -0.5000"
