"""Test `Distill`: the student acts in an app, and a teacher scores its tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan import SFT, LightningRL, LoRA, Trainer
from lightspan.errors import EngineError
from lightspan.lightning.selection import CallStatus
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode, Outcome
from lightspan.stores import open_store
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.rollout_view import RolloutView, explanation_text, read_views
from lightspan_torch import Distill, TeacherServer
from lightspan_torch.distill import server as server_module
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.distill.prompt_server import DROP, PromptServer
from tests.reports.ui_numbers import check_run

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


# --- rewards, frozen agents and damaged traces -------------------------------------------------
class Run:
    """A run of two steps, of which half of the tasks have a reward."""

    def __init__(self, algorithm: Distill, folder: Path) -> None:
        self.algorithm = algorithm
        self.folder = folder
        self.episodes = stored_episodes(RunFolder(folder).store_url, mode=Mode.TRAIN)

    @property
    def last(self) -> list[Any]:
        """The episodes of the last step."""
        assert self.algorithm.last_batch is not None
        rollouts = set(self.algorithm.last_batch.rollouts)
        return [episode for episode in self.episodes if episode.rollout_id in rollouts]


def make_mixed(apps: Any, student: Path, teacher: Any, folder: Path) -> Run:
    algorithm = Distill(
        student,
        teacher=teacher,
        optimize="writer",
        frozen="base",
        group_size=2,
        tasks_per_step=4,
        reward_weight=0.5,
        learning_rate=1e-3,
        max_length=400,
    )
    tasks = [{"q": f"question {number}", "bare": number % 2 == 0} for number in range(8)]
    Trainer(algorithm, steps=2, folder=folder, **QUIET).fit(apps.sometimes, tasks)
    return Run(algorithm, folder)


@pytest.fixture(scope="module")
def mixed(apps: Any, student: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_mixed(apps, student, teacher, tmp_path_factory.mktemp("mixed") / "run")


def views_of(folder: Path) -> list[RolloutView]:
    """Return what `lightspan inspect` shows of the run's rollouts."""

    async def read() -> list[RolloutView]:
        run = RunFolder(folder)
        async with open_store(run.store_url) as store:
            states = await store.rollouts(run_id=run.read_config()["run_id"])
            return await read_views(run, store, run.read_config(), states, None)

    return asyncio.run(read())


@pytest.mark.parametrize("is_server", [False, True])
def test_the_advantage_is_of_the_reward_and_with_a_server_of_the_teacher(
    apps: Any, student: Path, teacher: Path, tmp_path: Path, mixed: Run, is_server: bool
) -> None:
    if is_server:
        with PromptServer(teacher).running() as server:
            mixed = make_mixed(apps, student, server.url, tmp_path / "run")
    batch = mixed.algorithm.last_batch
    assert batch is not None
    assert batch.size == len(batch.rows) == 8
    by_id = {episode.rollout_id: episode for episode in mixed.last}
    scores = TorchLearner({"policy": teacher}).score(batch.rows)
    ratios = {
        row.rollout_id: [
            max(-20.0, min(20.0, q - p))
            for q, p, trained in zip(values, row.logprobs, row.mask, strict=True)
            if trained
        ]
        for row, values in zip(batch.rows, scores, strict=True)
    }
    groups: dict[str, list[float]] = {}
    for episode in mixed.last:
        if episode.reward is not None:
            groups.setdefault(episode.group_id, []).append(episode.reward)
    assert 0 < len(groups) < 4
    for row in batch.rows:
        episode = by_id[row.rollout_id]
        own = groups.get(episode.group_id)
        reward = 0.0
        if own is not None and episode.reward is not None and own[0] != own[1]:
            reward = 0.5 * (episode.reward - fmean(own)) / stdev(own)
        own_ratios = ratios[row.rollout_id]
        others = [each for key, part in ratios.items() if key != row.rollout_id for each in part]
        expected = [reward + ratio - fmean(others) for ratio in own_ratios]
        if not is_server:  # the loss has the divergence itself
            expected = [reward] * len(own_ratios)
        advantages = [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained]
        assert advantages == pytest.approx(expected, abs=1e-4)
        [why] = (each for each in batch.explanations.values() if each.rollout_id == row.rollout_id)
        explained = reward + fmean(own_ratios) - (fmean(others) if is_server else 0.0)
        assert why.advantage == pytest.approx(explained, abs=1e-4)


def test_unscored_rollouts_learn_from_the_teacher_alone(mixed: Run) -> None:
    line = lines_of(mixed.folder)[-1]
    bare = sum(episode.reward is None for episode in mixed.last)
    assert bare > 0
    assert line["scored"] == 8 - bare
    assert line["batch/unscored"] == bare
    assert line["calls/trained"] == line["calls/frozen"] == 8
    assert not any(key.startswith(("batch/zero", "batch/groups:")) for key in line)
    explanations = RunFolder(mixed.folder).explanations(2)
    assert len(explanations) == 8
    for why in explanations.values():
        assert why.agent_path == "writer"
        assert why.terms[0].name == "teacher, of the sampled tokens"
        assert "(teacher, of the sampled tokens)" in explanation_text(why)
    shown = [view for view in views_of(mixed.folder) if view.step == 2]
    calls = Counter(e.status for view in shown for e in view.coverage.entries)
    assert calls == {CallStatus.TRAINED: 8, CallStatus.FROZEN: 8}
    zero = [why for why in explanations.values() if why.zero_reason == "unscored"]
    assert len(zero) == bare


def test_frozen_agents_keep_the_starting_weights(mixed: Run, student: Path) -> None:
    base = TorchLearner({"policy": student})
    trained = mixed.algorithm.last_batch
    assert trained is not None
    checks = [c.record for e in mixed.episodes for c in e.calls if c.agent_path == "checker"]
    assert len(checks) == 16
    for record in checks:
        assert record is not None
        size = len(record.prompt_ids)
        row = replace(
            trained.rows[0],
            ids=record.prompt_ids + record.response_ids,
            constraints=(),
            responses=(),
            **{
                name: [value] * (size + len(record.response_ids))
                for name, value in {
                    "mask": True,
                    "advantages": 0.0,
                    "weights": 0.0,
                    "logprobs": 0.0,
                    "versions": 0,
                    "temperatures": record.sampling.temperature,
                }.items()
            },
        )
        assert base.score([row])[0][size:] == pytest.approx(list(record.logprobs), abs=1e-5)
    keys = {call_id for row in trained.rows for call_id, _ in row.call_ids}
    assert not keys & {record.call_id for record in checks if record is not None}


def test_the_page_has_the_numbers_of_inspect(mixed: Run) -> None:
    asyncio.run(check_run(mixed.folder))


@pytest.mark.parametrize("is_scored", [True, False])
def test_damaged_and_unfinished_traces_are_never_trained(mixed: Run, is_scored: bool) -> None:
    episodes = list(mixed.last)
    place = next(n for n, e in enumerate(episodes) if (e.reward is not None) is is_scored)
    for change in (
        {"capture_errors": ("a record is missing",)},
        {"outcome": Outcome.CANCELLED},
        {"unscored": "the app went on without an answer", "reward": None},
    ):
        changed = replace(episodes[place], **change)
        several = [*episodes[:place], changed, *episodes[place + 1 :]]
        batch = mixed.algorithm.prepare(several).finish()
        assert batch.size == len(batch.rows) == 7
        assert changed.rollout_id not in {row.rollout_id for row in batch.rows}


def test_no_reward_is_told_of_when_none_is_needed(
    apps: Any, student: Path, teacher: Path, tmp_path: Path, lines: Any
) -> None:
    algorithm = Distill(
        student, teacher=teacher, optimize="writer", tasks_per_step=4, lora=LoRA(rank=2)
    )
    trainer = Trainer(algorithm, steps=2, folder=tmp_path / "run", reporter=lines, runners=4)
    trainer.fit(apps.says, TASKS[:8])
    text = "\n".join(lines.texts)
    assert "no usable reward" not in text
    assert "M parameters, beside the student's" in text
    assert "reverse KL" in text
    assert [line["scored"] for line in lines_of(tmp_path / "run")] == [0, 0]
    report = trainer.dev(apps.says, TASKS[:8], count=2)
    assert not any("reward" in warning for warning in report.warnings)
    assert any("beside the student's" in choice for choice in report.choices)


def test_overlapping_rollouts_are_scored_by_the_current_weights(
    apps: Any, student: Path, teacher: Path, tmp_path: Path
) -> None:
    """The student's log-probabilities are the learner's, not those of the weights that sampled."""
    options: dict[str, Any] = {"optimize": "writer", "tasks_per_step": 4, "overlap": 1}
    algorithm = Distill(student, teacher=teacher, learning_rate=1e-2, **options)
    folder = tmp_path / "run"
    Trainer(algorithm, steps=2, folder=folder, **QUIET).fit(apps.says, TASKS[:8])
    batch = algorithm.last_batch
    assert batch is not None
    (step,) = {line["overlap/behind"] for line in lines_of(folder)[1:]}
    assert step > 0
    whys = [why.terms[0] for why in batch.explanations.values()]
    means = [fmean(p for p, m in zip(r.logprobs, r.mask, strict=True) if m) for r in batch.rows]
    assert sorted(term.baseline for term in whys) != pytest.approx(sorted(means), abs=1e-3)


# --- servers, kill -9 and resume ---------------------------------------------------------------
def test_a_server_that_goes_away_ends_the_run_which_resumes(
    apps: Any, student: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is trained without the teacher, and none is lost."""
    monkeypatch.setattr(server_module, "RETRY_BACKOFF_S", (0.01,))
    folder = tmp_path / "run"
    with PromptServer(teacher).running() as server:
        settings = TeacherServer(url=server.url, patience_s=0.05)
        options: dict[str, Any] = {"optimize": "writer", "tasks_per_step": 4, "max_length": 400}

        def make() -> Trainer:
            algorithm = Distill(student, teacher=settings, learning_rate=1e-3, **options)
            return Trainer(algorithm, steps=3, folder=folder, **QUIET)

        server.refuse["/v1/completions"] = [(200, "")] * 4 + [(DROP, "")] * 100_000
        with pytest.raises(EngineError, match=r"nothing was trained in this step.*resume=True"):
            make().fit(apps.says, TASKS[:8])
        assert [line["step"] for line in lines_of(folder)] == [1]
        saved = latest(RunFolder(folder).checkpoints)
        assert saved is not None
        assert load_state(saved).step == 1
        server.refuse.clear()
        make().fit(apps.says, TASKS[:8], resume=True)
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3]
    assert all(line["distill/tokens"] > 0 for line in lines_of(folder))


def test_killed_and_resumed(student: Path, teacher: Path, tmp_path: Path) -> None:
    """Kill the trainer by SIGKILL after its second step; each step is trained once."""
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, str(SCRIPT), str(folder), str(student), str(teacher), "4"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        while len(lines_of(folder) if (folder / "metrics.jsonl").exists() else []) < 2:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run([*command, "--resume"], check=True, stdout=output, stderr=output)
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3, 4]
    trained: Counter[str] = Counter()
    for step in range(1, 5):
        explanations = RunFolder(folder).explanations(step).values()
        trained.update(why.rollout_id for why in explanations)
        assert len(explanations) == 4
    assert set(trained.values()) == {1}
    config = json.loads((folder / "config.json").read_text())
    assert (config["algorithm"], config["teacher"]["model"]) == ("distill", str(teacher))


def test_the_program_of_the_page(student: Path, teacher: Path, tmp_path: Path) -> None:
    """Run docs/guides/distill.md with small models, for a step."""
    (program,) = (text for _, name, text in blocks("guides/distill.md") if name == "distill.py")
    for old, new in (
        ("Qwen/Qwen2.5-0.5B-Instruct", str(student)),
        ("Qwen/Qwen2.5-7B-Instruct", str(teacher)),
        ('["route", "answer"]', '["writer"]'),
        ("steps=50", "steps=1"),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    (tmp_path / "distill.py").write_text(program)
    (tmp_path / "my_app.py").write_text(
        "from toy_apps import spell as answer\ntasks = [{'q': str(n)} for n in range(4)]\n"
    )
    paths = [str(tmp_path), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "distill.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert lines_of(tmp_path / "runs/distilled")[0]["distill/tokens"] > 0
