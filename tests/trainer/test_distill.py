"""Test `Distill`: the student acts in an app, and a teacher scores its tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lightspan import SFT, LightningRL, LoRA, Trainer
from lightspan.errors import EngineError
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.rollout_view import explanation_text
from lightspan_torch import Distill, TeacherServer
from lightspan_torch.distill import server as server_module
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.distill.prompt_server import DROP, PromptServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(570)]

SCRIPT = Path(__file__).parents[1] / "apps" / "train_distill.py"
TASKS = [{"q": f"question {number}"} for number in range(64)]
HELD_OUT = [{"q": f"held out {number}"} for number in range(12)]
QUIET: dict[str, Any] = {"reporter": SilentReporter(), "runners": 8}


def imitate(model: Path, answers: list[str], folder: Path, epochs: float) -> Path:
    """Fine-tune a model to give one of `answers` to any question; return its folder."""
    chats = [
        [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": answers[number % len(answers)]},
        ]
        for number in range(120)
    ]
    SFT(model, learning_rate=3e-3, epochs=epochs).fit(chats, folder, reporter=SilentReporter())
    return folder


@pytest.fixture(scope="module")
def student(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers in capital or small letters."""
    folder = tmp_path_factory.mktemp("student") / "model"
    return imitate(tiny, ["SELECT", "singers"], folder, 2)


@pytest.fixture(scope="module")
def teacher(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model after further fine-tuning, which answers in small letters."""
    return imitate(student, ["singers"], tmp_path_factory.mktemp("teacher") / "model", 0.4)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]


def course(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines_of(folder)]


def test_the_student_becomes_its_teacher(
    apps: Any, student: Path, teacher: Path, tmp_path: Path
) -> None:
    """The reverse KL falls, and a reward that the student never saw rises to the teacher's."""
    options: dict[str, Any] = {"optimize": "writer", "tasks_per_step": 16, "learning_rate": 1e-3}
    algorithm, folder = Distill(student, teacher=teacher, **options), tmp_path / "run"
    Trainer(algorithm, steps=12, folder=folder, **QUIET).fit(apps.spell, TASKS)
    of_teacher = LightningRL(teacher, **options)
    best = Trainer(of_teacher, folder=tmp_path / "teacher", **QUIET).evaluate(apps.spell, HELD_OUT)
    kls, rewards = course(folder, "distill/reverse_kl"), course(folder, "reward")
    improbable = course(folder, "distill/improbable")
    print(kls, rewards, improbable, best.mean)
    assert fmean(kls[-3:]) < 0.25 * fmean(kls[:2])
    assert improbable[-1] <= improbable[0]
    assert fmean(rewards[-3:]) > best.mean - 0.1 > fmean(rewards[:2]) + 0.1
