"""Test `Distill`: the student acts in an app, and a teacher scores its tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightspan import SFT, LightningRL, LoRA, Trainer
from lightspan.errors import ConfigError, EngineError
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_torch import Distill, TeacherServer
from lightspan_torch.engine.transformers import CAPABILITIES as ENGINE
from lightspan_torch.learner.torch import CAPABILITIES as LEARNER
from packages.torch.tests.distill.prompt_server import DROP, PromptServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(570)]

TASKS = [{"q": f"question {number}"} for number in range(64)]
HELD_OUT = [{"q": f"held out {number}"} for number in range(12)]


@pytest.fixture(scope="module")
def teacher(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that was fine-tuned to answer in lower-case letters."""
    answers = ("singers", "concert", "stadium", "answer", "query")
    chats = [
        [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": answers[number % len(answers)]},
        ]
        for number in range(160)
    ]
    folder = tmp_path_factory.mktemp("teacher") / "model"
    SFT(tiny, learning_rate=3e-3, epochs=2).fit(chats, folder, reporter=SilentReporter())
    return folder


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]


def course(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines_of(folder)]


def test_the_student_becomes_its_teacher(
    apps: Any, tiny: Path, teacher: Path, tmp_path: Path
) -> None:
    """The reverse KL falls, and a reward that the student never saw rises to the teacher's."""
    options: dict[str, Any] = {"optimize": "writer", "tasks_per_step": 24, "learning_rate": 3e-3}
    algorithm, folder = Distill(tiny, teacher=teacher, **options), tmp_path / "run"
    quiet: dict[str, Any] = {"reporter": SilentReporter(), "runners": 8}
    Trainer(algorithm, steps=18, folder=folder, **quiet).fit(apps.spell, TASKS)
    of_teacher = LightningRL(teacher, **options)
    best = Trainer(of_teacher, folder=tmp_path / "teacher", **quiet).evaluate(apps.spell, HELD_OUT)
    kls, rewards = course(folder, "distill/reverse_kl"), course(folder, "reward")
    improbable = course(folder, "distill/improbable")
    print(kls, rewards, improbable, best.mean)
    assert fmean(kls[-3:]) < 0.25 * fmean(kls[:3])
    assert improbable[-1] < 0.5 * improbable[0]
    assert fmean(rewards[-3:]) > best.mean - 0.1 > fmean(rewards[:3]) + 0.1
