"""Test adaptive tasks and replay in real trainings that are killed and resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lightspan.cli import main
from lightspan.schema.records import Mode
from lightspan.stores import open_store
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from tests.reports.ui_numbers import check_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "apps" / "train_choice.py"
STEPS = 7


def begin(folder: Path, model: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), str(folder), str(model), str(STEPS), *more]
    with folder.with_name(f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def end(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Kill the trainer and its runners as soon as the metrics of a step are written."""
    path, limit = folder / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert process.poll() is None, folder.with_name(f"{folder.name}.log").read_text()
        assert time.monotonic() < limit
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def trained_tasks(run: RunFolder) -> list[dict[str, list[str]]]:
    """Return for each step the ids of its tasks, of new groups and of replayed ones."""

    async def rollouts() -> list[Any]:
        async with open_store(run.store_url) as store:
            return [state.rollout for state in await store.rollouts()]

    of_rollout = {one.rollout_id: one for one in asyncio.run(rollouts()) if one.mode is Mode.TRAIN}
    first, steps = dict[str, int](), []
    for step in range(1, STEPS + 1):
        tasks: dict[str, set[str]] = defaultdict(set)
        for why in run.explanations(step).values():
            rollout = of_rollout[why.rollout_id]
            kind = "new" if first.setdefault(why.group_id, step) == step else "again"
            tasks[kind].add(f"{rollout.task_id}")
            assert rollout.step == first[why.group_id]
        steps.append({kind: sorted(names) for kind, names in sorted(tasks.items())})
    return steps


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert begin(folder, tiny).wait(240) == 0
    return RunFolder(folder)


def test_a_killed_run_draws_and_replays_what_the_whole_run_does(
    whole: RunFolder, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for step in (2, 5):
        end(begin(folder, tiny), folder, step)
    assert begin(folder, tiny).wait(240) == 0
    run = RunFolder(folder)
    expected = trained_tasks(whole)
    assert trained_tasks(run) == expected
    assert any("again" in tasks for tasks in expected)
    keys = [f"tasks/zero_gradient{part}" for part in ("", "_predicted", "_shuffled")]
    keys += ["replay/groups", "replay/age", "replay/row_share", "reward"]
    for mine, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        assert {key: mine[key] for key in keys} == pytest.approx({key: theirs[key] for key in keys})
    assert history(run)["records"] == history(whole)["records"]
    assert [*history(run)["replays"]] == [*history(whole)["replays"]]
    asyncio.run(check_run(folder))


def history(run: RunFolder) -> Any:
    checkpoint = latest(run.checkpoints)
    assert checkpoint is not None
    return load_state(checkpoint).algorithm["history"]


def test_replayed_rollouts_are_in_the_store_once(whole: RunFolder) -> None:
    """Check that replay starts no rollouts: each step has 3 new groups of 4."""
    lines = whole.metrics()
    assert [line["rollouts"] for line in lines] == [12] * STEPS
    assert sum(line["replay/groups"] for line in lines) > 0
    assert all(line["replay/age"] <= 3 for line in lines)
    scored = [12 + 4 * line["replay/groups"] for line in lines]
    assert [line["batch/scored"] for line in lines] == scored


def test_inspect_describes_both_in_a_line(
    whole: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(whole.path)]) == 0
    out = capsys.readouterr().out
    lines = whole.metrics()

    def share(key: str, of: str = "rollouts") -> str:
        total = sum(line[of] for line in lines)
        return f"{100 * sum(line[key] * line[of] for line in lines) / total:.0f} %"

    assert (
        f"tasks='adaptive': {share('tasks/zero_gradient')} of groups had no gradient (predicted "
        f"{share('tasks/zero_gradient_predicted')}, for shuffled order "
        f"{share('tasks/zero_gradient_shuffled')})\n"
    ) in out
    groups = sum(line["replay/groups"] for line in lines)
    assert f"replay: {groups} groups trained again, " in out
    assert f"{share('replay/row_share', 'batch/rows')} of the rows\n" in out


def test_adaptive_tasks_work_with_overlap_and_a_kill(tiny: Path, tmp_path: Path) -> None:
    """Check that groups in flight are started again with their tasks, and every group ends."""
    folder = tmp_path / "run"
    end(begin(folder, tiny, "1"), folder, 3)
    assert begin(folder, tiny, "1").wait(240) == 0
    run = RunFolder(folder)
    lines = run.metrics()
    assert [line["rollouts"] for line in lines] == [12] * STEPS
    assert all(0 <= line["tasks/zero_gradient_predicted"] <= 1 for line in lines)
    records = history(run)["records"].values()
    assert sum(groups for *_, groups in records) == 3 * STEPS
    assert all(draws == groups for *_, draws, groups in records)
