"""Test calls of classes whose parameters are defined in their settings.

mypy checks this file too: a call that it would let pass makes the `type: ignore` comment
superfluous, which is an error.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightspan import LightningRL, Trainer
from lightspan.algorithms.lightning_rl import LightningSettings
from lightspan.training.settings import TrainerSettings

CLASSES = [(Trainer, TrainerSettings), (LightningRL, LightningSettings)]


def rl() -> LightningRL:
    return LightningRL(Path("a/model"), group_size=2, loss=None, optimizer=None)


@pytest.mark.parametrize(("made", "settings"), CLASSES)
def test_the_signature_has_every_setting_and_its_default(
    made: type, settings: type[TrainerSettings] | type[LightningSettings]
) -> None:
    first, *rest = inspect.signature(made).parameters.values()
    assert [first.name, *(p.name for p in rest)] == [field.name for field in fields(settings)]
    assert {p.name: p.default for p in rest} == {f.name: f.default for f in fields(settings)[1:]}
    assert first.kind is first.POSITIONAL_OR_KEYWORD
    assert {p.kind for p in rest} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_setting_that_does_not_exist_is_an_error() -> None:
    wrong = "LightningRL.__init__() got an unexpected keyword argument 'group_sizes'"
    with pytest.raises(TypeError, match=re.escape(wrong)):
        LightningRL("a/model", group_sizes=3)  # type: ignore[call-arg]
    wrong = "Trainer.__init__() got an unexpected keyword argument 'runner'"
    with pytest.raises(TypeError, match=re.escape(wrong)):
        Trainer(rl(), runner=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional argument"):
        LightningRL("a/model", "*")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional argument"):
        Trainer(rl(), 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="algorithm"):
        Trainer(runners=3)  # type: ignore[call-arg]
