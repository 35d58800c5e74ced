"""Test `Distill`: the student acts in an app, and a teacher scores its tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, LoRA, Trainer
from lightspan.errors import ConfigError
from lightspan.lightning.selection import Rejection
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.tiny import tiny_model
from lightspan_torch import Distill, TeacherModel
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

TASKS = [{"q": f"question {number}"} for number in range(64)]
HELD_OUT = [{"q": f"held out {number}"} for number in range(32)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]


def test_the_student_becomes_its_teacher_without_a_reward(
    apps: Any, tiny: Path, teacher: Path, tmp_path: Path, lines: Any
) -> None:
    """The reverse KL falls, and the app that returns None is not told of missing rewards."""
    algorithm = Distill(
        tiny, teacher=teacher, optimize="writer", tasks_per_step=32, learning_rate=3e-3
    )
    trainer = Trainer(algorithm, steps=30, folder=tmp_path / "run", reporter=lines, runners=8)
    trainer.fit(apps.says, TASKS, HELD_OUT)
    kls = [line["distill/reverse_kl"] for line in lines_of(tmp_path / "run")]
    print(kls, [l["distill/improbable"] for l in lines_of(tmp_path / "run")])
    print(lines.texts)
    assert math.fsum(kls[-3:]) < 0.3 * math.fsum(kls[:3])
