"""Test that an interrupted run resumes as if it had not been, and a complete run stays
unchanged.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from drilled import Drilled, row_of  # type: ignore[import-not-found]

from lightspan import Trainer
from lightspan.algorithms import Metrics, TrainerContext
from lightspan.errors import CheckpointError, ConfigError
from lightspan.progress import SilentReporter
from lightspan.protocols.learner import SFTLoss
from lightspan.runners import discovery
from lightspan.runners.discovery import make_peer, place_of
from lightspan.runners.local import LocalRunners
from lightspan.schema.records import PeerRole
from lightspan.stores import open_store
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

SCRIPT = Path(__file__).parents[1] / "apps" / "train_toy.py"


class Drill(Drilled):  # type: ignore[misc]
    """A user's own algorithm that trains on random numbers, whatever the rollouts were."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.log: list[tuple[int, float, list[str]]] = []

    async def run_step(self, world: TrainerContext) -> Metrics:
        tasks = world.next_tasks(3)
        episodes = await world.rollouts(tasks, 1)
        drawn = world.rng.random()
        row = row_of([world.rng.randrange(300) for _ in range(8)])
        result = await world.learn(lambda: world.learner.update([row], SFTLoss()))
        await world.publish()
        self.log.append((world.step, drawn, [episode.task_id for episode in episodes]))
        return {"loss": result["loss"]}

    def state(self) -> dict[str, Any]:
        return {"steps": len(self.log)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.log = [(0, 0.0, [])] * state["steps"]


def _weights(model: Path) -> str:
    return TorchLearner({"policy": str(model)}).weight_hash("policy")


class Interrupting(SilentReporter):
    """A reporter that raises KeyboardInterrupt when a piece of work begins.

    Args:
        title: title of the piece of work.
        error: exception to raise instead; None for KeyboardInterrupt.
    """

    def __init__(self, title: str, error: BaseException | None = None) -> None:
        self.title = title
        self.error = error or KeyboardInterrupt()
        self.texts: list[str] = []

    def start(self, title: str, total: int) -> None:
        if title == self.title:
            raise self.error

    def line(self, text: str) -> None:
        self.texts.append(text)


def test_resumed_run_is_the_uninterrupted_one(
    apps: Any, tiny: Path, tmp_path: Path, ask: Make, lines: Any
) -> None:
    """Compare weights, optimizer, random numbers and the order of tasks, bit for bit."""
    whole, first, second = Drill(tiny), Drill(tiny), Drill(tiny)
    tasks = ask(5)
    expected = Trainer(whole, steps=4, folder=tmp_path / "whole").fit(apps.spell, tasks)
    folder = tmp_path / "parts"
    interrupting = Interrupting("step 3/4")
    with pytest.raises(KeyboardInterrupt):
        Trainer(first, steps=4, folder=folder, reporter=interrupting).fit(apps.spell, tasks)
    assert interrupting.texts == [
        f"stopped; {folder} keeps step-000002: go on with resume=True (--resume)"
    ]
    result = Trainer(second, steps=4, folder=folder, reporter=lines).fit(
        apps.spell, tasks, resume=True
    )
    assert lines.texts[0] == f"resuming {folder} after step 2"
    assert first.log == whole.log[:2]
    assert second.log[2:] == whole.log[2:]
    assert [len(task_ids) for _, _, task_ids in whole.log] == [3, 3, 3, 3]
    assert _weights(result.model) == _weights(expected.model)
    assert _losses(folder) == _losses(tmp_path / "whole")


def test_the_lowest_reward_survives(apps: Any, tiny: Path, tmp_path: Path, lines: Any) -> None:
    """Check a reward that only the evaluation after the checkpoint had."""
    folder = tmp_path / "run"
    train = [{"q": "a", "give": "number"}, {"q": "b", "give": "nothing"}]
    val = [{"q": "c", "give": "low"}, {"q": "d", "give": "nothing"}]
    for title in ("step 1/3", "step 2/3"):
        trainer = Trainer(Drill(tiny), steps=3, folder=folder, reporter=Interrupting(title))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(apps.odd, train, val, resume=title != "step 1/3")
    trainer = Trainer(Drill(tiny), steps=3, folder=folder, reporter=lines)
    result = trainer.fit(apps.odd, train, val, resume=True)
    assert [each.failure_reward for each in result.evaluations] == [-3.0, -3.0]
    assert [each.lowest_reward for each in result.evaluations] == [-3.0, -3.0]
    assert {line["failure_reward"] for line in trainer.folder.metrics()} == {-3.0}
    assert [list(each.rewards.values()) for each in result.evaluations] == [[-3.0, -3.0]] * 2
    assert "failed 1 -> 1 (-3.00 -> -3.00 without these)" in result.summary()


def test_an_error_says_what_is_kept(apps: Any, tiny: Path, tmp_path: Path, ask: Any) -> None:
    """Check that the error says how to resume, once there is a checkpoint."""
    folder, tasks = tmp_path / "run", ask(5)
    failing = Interrupting("step 2/4", OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        Trainer(Drill(tiny), steps=4, folder=folder, reporter=failing).fit(apps.spell, tasks)
    told = f"ended by an error; {folder} keeps step-000001: once that is mended, go on with"
    assert failing.texts == [f"{told} resume=True (--resume)"]
    wrong = Interrupting("step 4/4", ConfigError("no agent matches"))
    with pytest.raises(ConfigError, match="no agent"):
        Trainer(Drill(tiny), steps=4, folder=tmp_path / "wrong", reporter=wrong).fit(
            apps.spell, tasks
        )
    assert wrong.texts[-1].endswith("; a changed setting (optimize=) needs another folder")
    settled = Interrupting("step 4/4", ConfigError("the budget is spent: resume=True with another"))
    trainer = Trainer(Drill(tiny), steps=4, folder=folder, reporter=settled)
    with pytest.raises(ConfigError, match="the budget"):
        trainer.fit(apps.spell, tasks, resume=True)
    assert settled.texts == [f"resuming {folder} after step 1"]


def _losses(folder: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(folder).metrics()]


@pytest.fixture(scope="module")
def complete(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one step with evaluations; return the run's folder."""
    from lightspan import LightningRL

    folder = tmp_path_factory.mktemp("complete") / "run"
    algorithm = LightningRL(
        tiny, optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-3
    )
    train, val = [{"q": "a"}, {"q": "b"}], [{"q": "c"}, {"q": "d"}]
    Trainer(algorithm, steps=1, folder=folder).fit(apps.spell, train, val)
    return folder


@pytest.fixture
def copied(complete: Path, tmp_path: Path) -> Path:
    """Return a copy of the complete run, which a test may change."""
    shutil.copytree(complete, tmp_path / "run")
    return tmp_path / "run"


TRAIN = [{"q": "a"}, {"q": "b"}]
VAL = [{"q": "c"}, {"q": "d"}]


def test_complete_run_gives_its_result_without_training(
    apps: Any, rl: Make, copied: Path, lines: Any
) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    trainer = Trainer(rl(), steps=1, folder=copied, reporter=lines)
    result = trainer.fit(apps.spell, TRAIN, VAL, resume=True)
    assert (result.steps, [e.step for e in result.evaluations]) == (1, [0, 1])
    assert result.seconds["engine"] > 0
    assert lines.texts == [f"{copied} is complete: nothing is left to train"]
    after = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    assert {p for p in before if before[p] != after[p]} <= {copied / "lock", copied / "config.json"}


def test_a_complete_run_without_checkpoints_keeps_its_result(
    apps: Any, rl: Make, copied: Path, lines: Any
) -> None:
    """Check that a run whose checkpoints were deleted is returned or refused, not trained anew."""
    shutil.rmtree(copied / "checkpoints")
    kept = ["metrics.jsonl", "result.json", *(f"model/{p.name}" for p in copied.glob("model/*"))]
    before = {name: (copied / name).read_bytes() for name in kept}
    result = Trainer(rl(), steps=1, folder=copied, reporter=lines).fit(
        apps.spell, TRAIN, VAL, resume=True
    )
    assert (result.steps, [e.step for e in result.evaluations]) == (1, [0, 1])
    assert lines.texts == [f"{copied} is complete: nothing is left to train"]
    gone = "has begun, and .*checkpoints is empty, so it cannot go on: restore the checkpoints"
    with pytest.raises(CheckpointError, match=gone):
        Trainer(rl(), steps=2, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True)
    with pytest.raises(CheckpointError, match=gone):
        Trainer(rl(), folder=copied).evaluate(apps.spell, VAL, resume=True)
    for act in (Trainer.fit, Trainer.evaluate):
        with pytest.raises(ConfigError, match="holds a run already"):
            act(Trainer(rl(), steps=1, folder=copied), apps.spell, TRAIN)
    assert {name: (copied / name).read_bytes() for name in kept} == before
    (copied / "result.json").unlink()
    with pytest.raises(CheckpointError, match=gone):
        Trainer(rl(), steps=1, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True)
    assert (copied / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


def test_more_steps_go_on_from_a_complete_run(apps: Any, rl: Make, copied: Path) -> None:
    trainer = Trainer(rl(), steps=2, folder=copied)
    result = trainer.fit(apps.spell, TRAIN, VAL, resume=True)
    kinds = [(line["kind"], line["step"]) for line in trainer.folder.metrics()]
    assert kinds == [("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2)]
    assert result.steps == 2
    found = latest(trainer.folder.checkpoints)
    assert found is not None
    state = load_state(found)
    assert state.step == 2
    assert state.versions["policy"] > 3


def test_run_is_not_overwritten(apps: Any, rl: Make, copied: Path) -> None:
    with pytest.raises(ConfigError, match="holds a run already: resume it"):
        Trainer(rl(), folder=copied).fit(apps.spell, TRAIN, VAL)


def test_other_settings_are_named(apps: Any, rl: Make, copied: Path) -> None:
    algorithm = rl(estimator="rloo", seed=7, optimize=["writer", "reviewer"])
    with pytest.raises(ConfigError) as caught:
        Trainer(algorithm, steps=2, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True)
    assert (
        "(estimator: 'grpo' before, 'rloo' now; "
        "optimize: 'writer' before, ['writer', 'reviewer'] now; seed: 0 before, 7 now)"
    ) in str(caught.value)


@pytest.mark.parametrize("why", ["gone", "same place"])
def test_a_copied_folder_is_refused_while_the_other_trains(
    apps: Any, rl: Make, copied: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Check that a trainer elsewhere, which would lose its rollouts, is left alone until it is
    gone. At the same place, the folder's lock has ended with its trainer.
    """
    found = latest(copied / "checkpoints")
    assert found is not None
    run_id = load_state(found).run_id

    async def announce(place: str) -> None:
        peer = make_peer(run_id, PeerRole.TRAINER, "newsroom:answer", run_id=run_id, place=place)
        async with open_store(f"sqlite:{copied / 'store.db'}") as store:
            await store.announce(peer)

    def fit() -> Any:
        return Trainer(rl(), steps=2, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True)

    asyncio.run(announce("gpu-1:/runs/newsroom"))
    with pytest.raises(ConfigError) as caught:
        fit()
    assert re.fullmatch(
        rf"training {run_id} is live at gpu-1:/runs/newsroom, seen \d+ s ago: stop it there; if it "
        "was killed, wait for 20 s",
        str(caught.value),
    )
    if why == "gone":
        monkeypatch.setattr(discovery, "GONE_S", 0.0)
    else:
        asyncio.run(announce(place_of(copied)))
    assert fit().steps == 2


@pytest.mark.parametrize("other", [False, True])
def test_a_store_without_the_versions_of_the_run_is_refused(
    apps: Any, rl: Make, copied: Path, other: bool
) -> None:
    """Check a lost store, tried four times, and one with as many versions of another run."""
    for path in copied.glob("store.db*"):
        path.unlink()

    async def versions(new: int = 0) -> list[tuple[int, str]]:
        async with open_store(RunFolder(copied).store_url) as store:
            for _ in range(new):
                await store.allot_version("policy", "run-of-another-folder", 1)
            return [(v.version, v.run_id) for v in await store.policy_versions("policy")]

    before = asyncio.run(versions(3 if other else 0))
    for _ in range(4):
        refused = "is not the one that this run has trained with: it has no version 2 of its policy"
        with pytest.raises(CheckpointError, match=refused):
            Trainer(rl(), steps=2, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True)
        assert asyncio.run(versions()) == before


def test_a_store_without_the_rollouts_that_prune_deletes_is_the_same(
    apps: Any, rl: Make, copied: Path
) -> None:
    async def prune() -> int:
        async with open_store(RunFolder(copied).store_url) as store:
            return await store.prune(0.0)

    assert asyncio.run(prune()) > 8
    assert Trainer(rl(), steps=2, folder=copied).fit(apps.spell, TRAIN, VAL, resume=True).steps == 2


def test_resume_without_a_checkpoint_starts_anew(
    apps: Any, rl: Make, tmp_path: Path, lines: Any, ask: Make
) -> None:
    trainer = Trainer(rl(), steps=1, folder=tmp_path / "run", reporter=lines)
    assert trainer.fit(apps.spell, ask(2), resume=True).steps == 1
    assert lines.texts[0] == f"{tmp_path / 'run'} holds no checkpoint to resume from: starting anew"


def test_resume_needs_a_folder(apps: Any, rl: Make, ask: Make) -> None:
    with pytest.raises(ConfigError, match=r"resume=True needs the folder"):
        Trainer(rl()).fit(apps.spell, ask(2), resume=True)


@pytest.mark.parametrize("step", [0, 1])
def test_evaluation_that_was_interrupted_exists_once(
    apps: Any, rl: Make, tmp_path: Path, step: int
) -> None:
    folder = tmp_path / "run"
    reporter = Interrupting(f"step {step}: evaluating")
    with pytest.raises(KeyboardInterrupt):
        Trainer(rl(), steps=1, folder=folder, reporter=reporter).fit(apps.spell, TRAIN, VAL)
    trainer = Trainer(rl(), steps=1, folder=folder)
    result = trainer.fit(apps.spell, TRAIN, VAL, resume=True)
    kinds = [(line["kind"], line["step"]) for line in trainer.folder.metrics()]
    assert kinds == [("eval", 0), ("train", 1), ("eval", 1)]
    assert [evaluation.step for evaluation in result.evaluations] == [0, 1]
    found = latest(trainer.folder.checkpoints)
    assert found is not None
    assert load_state(found).step == 1


def test_fewer_steps_than_done_end_a_run(apps: Any, rl: Make, tmp_path: Path, lines: Any) -> None:
    """Check that the weights that are kept are evaluated, once."""
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Trainer(rl(), steps=9, folder=folder, reporter=Interrupting("step 3/9")).fit(
            apps.spell, TRAIN, VAL
        )
    for _ in range(2):
        lines.texts.clear()
        trainer = Trainer(rl(), steps=1, folder=folder, reporter=lines)
        result = trainer.fit(apps.spell, TRAIN, VAL, resume=True)
        assert (result.steps, [each.step for each in result.evaluations]) == (2, [0, 2])
        assert lines.texts[0] == "steps=1 is below the 2 done: none is trained"
    assert lines.texts[1:] == [f"{folder} is complete: nothing is left to train"]
    kinds = [(line["kind"], line["step"]) for line in trainer.folder.metrics()]
    assert kinds == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]


@contextmanager
def _script(folder: Path, model: Path, steps: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT), str(folder), str(model), str(steps), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Signalling(Interrupting):
    """A reporter that sends SIGINT to the process when the piece of work `title` begins."""

    def start(self, title: str, total: int) -> None:
        if title == self.title:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_a_notebook_stops_the_run(apps: Any, rl: Make, tmp_path: Path) -> None:
    """Check `fit` in a notebook, where it runs in a thread that gets no signal."""
    reporter = Signalling("step 1/9")
    trainer = Trainer(rl(), steps=9, folder=tmp_path / "run", reporter=reporter)

    async def cell() -> None:
        trainer.fit(apps.spell, TRAIN)

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    assert reporter.texts[-1].startswith(f"stopped; {tmp_path / 'run'} keeps step-000000")
    assert "lightspan-fit" not in {thread.name for thread in threading.enumerate()}


def test_the_way_to_go_on_is_said_before_the_clean_up(apps: Any, rl: Make, tmp_path: Path) -> None:
    """Check that a service manager's SIGKILL during a long clean-up leaves the hint in the log."""
    reporter = Signalling("step 1/9")
    runners = SlowToStop(2, reporter)
    trainer = Trainer(rl(), steps=9, folder=tmp_path / "run", reporter=reporter, runners=runners)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(apps.spell, TRAIN)
    assert runners.texts_at_stop[-1].startswith(f"stopped; {tmp_path / 'run'} keeps step-000000")


class SlowToStop(LocalRunners):
    """Runners that note what the trainer has said when it begins to stop them."""

    def __init__(self, slots: int, reporter: Interrupting) -> None:
        super().__init__(slots)
        self._reporter = reporter
        self.texts_at_stop: list[str] = []

    async def stop(self) -> None:
        self.texts_at_stop = self.texts_at_stop or list(self._reporter.texts)
        await super().stop()


def test_where_ctrl_c_is_ignored_the_run_goes_on(apps: Any, rl: Make, tmp_path: Path) -> None:
    """Check a process that ignores SIGINT, as with nohup or in a script's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer = Trainer(rl(), steps=1, folder=tmp_path / "run", reporter=Signalling("step 1/1"))
        assert trainer.fit(apps.spell, TRAIN).steps == 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.long  # CI interrupts the SQL example's command, after the quickstart
@pytest.mark.timeout(300)
def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _script(folder, tiny, 50) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/50"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == -signal.SIGINT
    assert f"stopped; {folder} keeps step-0000" in rest
    assert "Task was destroyed" not in rest
    assert rest.count("Traceback") == 1  # of the script, not of runners or of the cancellation
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    kept = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with _script(folder, tiny, kept["step"] + 1, "--resume") as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"resuming {folder} after step " in output
