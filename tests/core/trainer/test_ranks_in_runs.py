"""`learner=Torch(ranks=2)`: a run of it equals one on a single device; a rank that dies ends it,
and what was saved goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from drilled import Numbers  # type: ignore[import-not-found]
from torch import Tensor

from lightspan import LightningRL, Torch, Trainer
from lightspan.engines.weights import load_model
from lightspan.errors import RankError
from lightspan.testing.learner_suite.reference import distance
from lightspan.training.checkpoints import latest
from lightspan.training.folder import RunFolder

pytestmark = pytest.mark.timeout(300)


def weights(folder: Path | None) -> dict[str, Tensor]:
    assert folder is not None
    return dict(load_model(folder).state_dict())


def check_alike(one: Path, two: Path, model: Path, start: Path) -> None:
    """Two runs' metrics, and their weights to 1e-5 of what they moved by."""
    names = ("learner/loss", "learner/grad_norm", "reward", "loss")
    lines = [
        [{name: line[name] for name in names if name in line} for line in RunFolder(run).metrics()]
        for run in (one, two)
    ]
    assert len(lines[0]) == len(lines[1])
    for expected, found in zip(*lines, strict=True):
        # the advantages of a group cancel, and with them nearly all of the loss
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    first, second = (weights(run / model) for run in (one, two))
    moved = distance(first, weights(start))
    assert moved > 0.01
    assert distance(second, first) < 1e-5 * moved


@pytest.mark.slow
def test_five_steps_on_two_ranks_are_those_on_one(
    apps: Any, tiny: Path, tmp_path: Path, ask: Callable[..., Any], lines: Any
) -> None:
    # float64: gradients of what a group's answers share cancel, and Adam makes whole steps of their
    # rounding errors, by which float32 runs of other microbatches differ too (4e-5 of the step)
    for name, ranks in {"one": 1, "two": 2}.items():
        algorithm = LightningRL(
            tiny, optimize="writer", group_size=4, tasks_per_step=3, learning_rate=1e-3
        )
        trainer = Trainer(
            algorithm,
            steps=5,
            runners=1,  # the engine samples from one stream, in the order in which calls come
            folder=tmp_path / name,
            learner=Torch(ranks=ranks, dtype="float64"),
            checkpoint_every=5,
            reporter=lines,
        )
        result = trainer.fit(apps.spell, ask(6))
        assert result.steps == 5
    assert "starting 2 ranks of the learner: cpu, cpu" in lines.texts
    assert not ranks_of(os.getpid())
    check_alike(tmp_path / "one", tmp_path / "two", Path("model"), tiny)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a process has started."""
    return [
        child
        for child in psutil.Process(pid).children()
        if "lightspan.learners.ranks.worker" in child.cmdline()
    ]


def kill_rank_before(step: int) -> Callable[[int], None]:
    """What kills the rank of this process before a step."""

    def kill(now: int) -> None:
        if now == step:
            [rank] = ranks_of(os.getpid())
            rank.send_signal(signal.SIGKILL)

    return kill


@pytest.mark.ranks
def test_a_run_goes_on_after_a_killed_rank(
    apps: Any, tiny: Path, tmp_path: Path, ask: Callable[..., Any], lines: Any
) -> None:
    """On two ranks again, and the result is that of an uninterrupted run on one device. In float64:
    what float32 rounds, Adam makes whole steps of."""
    options: dict[str, Any] = {"steps": 5, "runners": 1, "reporter": lines}
    alone = Torch(dtype="float64")
    whole = Trainer(Numbers(tiny), folder=tmp_path / "whole", learner=alone, **options)
    expected = whole.fit(apps.spell, ask(3))
    two = Torch(ranks=2, dtype="float64")
    parts = {**options, "folder": tmp_path / "parts", "learner": two}
    with pytest.raises(RankError, match=r"^rank 1 of the learner .* was ended by SIGKILL.*resume="):
        Trainer(Numbers(tiny, kill_rank_before(4)), **parts).fit(apps.spell, ask(3))
    saved = latest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    assert saved.name == "step-000003"
    Trainer(Numbers(tiny), **parts).fit(apps.spell, ask(3), resume=True)
    assert f"resuming {tmp_path / 'parts'} after step 3" in lines.texts
    assert expected.model is not None
    name = expected.model.relative_to(tmp_path / "whole")
    check_alike(tmp_path / "whole", tmp_path / "parts", name, tiny)


@pytest.mark.ranks
def test_a_run_goes_on_after_kill_9_of_its_trainer(
    apps: Any, tiny: Path, tmp_path: Path, ask: Callable[..., Any], lines: Any
) -> None:
    """Killed twice in mid-fit: no process is left of either life, and the end is that of a run on
    one device that was never interrupted."""
    steps = 40
    options: dict[str, Any] = {"steps": steps, "runners": 1, "reporter": lines}
    expected = Trainer(Numbers(tiny), folder=tmp_path / "whole", **options).fit(apps.spell, ask(3))
    folder, log = tmp_path / "parts", tmp_path / "log"
    script = Path(__file__).parents[2] / "apps" / "train_ranks.py"
    command = [sys.executable, str(script), str(folder), str(tiny), str(steps), "--resume"]
    for least in (3, 8):
        with (
            log.open("ab") as output,
            subprocess.Popen(command, stdout=output, stderr=output) as it,
        ):
            while steps_of(folder) < least:
                assert it.poll() is None, log.read_text()
                time.sleep(0.01)
            children = psutil.Process(it.pid).children(recursive=True)
            assert any("lightspan.learners.ranks.worker" in each.cmdline() for each in children)
            it.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        assert steps_of(folder) < steps
    with log.open("ab") as output:
        subprocess.run(command, stdout=output, stderr=output, check=True, timeout=240)
    assert log.read_text().count("resuming") == 2
    trained = [line["step"] for line in RunFolder(folder).metrics() if line["kind"] == "train"]
    assert trained == list(range(1, steps + 1))
    assert expected.model is not None
    check_alike(tmp_path / "whole", folder, expected.model.relative_to(tmp_path / "whole"), tiny)


def steps_of(folder: Path) -> int:
    """How many steps a run's metrics show."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


SCRIPT = """
    import os
    import sys

    from toy_apps import spell

    from lightspan import LightningRL, Torch, Trainer

    if __name__ == "__main__":
        print("script of rank", os.environ["RANK"], flush=True)
        algorithm = LightningRL(sys.argv[1], group_size=2, tasks_per_step=2)
        trainer = Trainer(algorithm, steps=1, runners=2, folder=sys.argv[2], learner=Torch())
        result = trainer.fit(spell, [{"q": "one"}, {"q": "two"}])
        print("result of rank", os.environ["RANK"], result.steps, flush=True)
"""


@pytest.mark.ranks
def test_under_torchrun_rank_0_alone_trains(tiny: Path, tmp_path: Path) -> None:
    """The others serve it, and end quietly with it."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    apps = Path(__file__).parents[2] / "apps"
    paths = os.pathsep.join([str(apps), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script), str(tiny), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert sorted(re.findall(r"(?:script|result) of rank .*", ended.stdout)) == [
        "result of rank 0 1",
        "script of rank 0",
        "script of rank 1",
    ]
    assert "Traceback" not in ended.stdout
    assert len(list(RunFolder(tmp_path / "run").metrics())) == 1
