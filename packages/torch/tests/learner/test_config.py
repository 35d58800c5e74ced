"""`learner=Torch(…)`: the values it refuses, and the learner that it builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightspan import LightningRL, Torch, Trainer
from lightspan.errors import ConfigError
from lightspan.training.backends import make_learner
from lightspan_testing.tiny import tiny_model


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "device='gpu' is unknown"),
        ({"device": 5}, "device=5 is unknown"),
        ({"dtype": "int8"}, "Torch: dtype"),
        ({"token_budget": 0}, "Torch: token_budget"),
        ({"share_prefixes": "no"}, "Torch: share_prefixes='no': use True or False"),
    ],
)
def test_what_a_description_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Torch(**options)  # type: ignore[arg-type]


def test_a_trainer_makes_the_learner_that_is_described(tmp_path: Path) -> None:
    described = Torch(device="cpu", dtype="float64", token_budget=99, share_prefixes=False)
    trainer = Trainer(
        LightningRL(tiny_model(tmp_path / "model", seed=0)), learner=described, device="cuda"
    )
    state = make_learner(trainer.settings).state()
    assert (state["device"], state["token_budget"]) == ("cpu", 99)
    assert list(state["share_prefixes"].values()) == ["each row by itself: share_prefixes=False"]
