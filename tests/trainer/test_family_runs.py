"""Test `credit="family"` in real trainings: runner processes, a SQLite store, the tiny model."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from lightspan import Forks, LightningRL, LocalRunners, Trainer
from lightspan.lightning.episode import Episode
from lightspan.lightning.states import State
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.export import export_run
from lightspan_tools.inspect import inspect_run
from tests.reports.ui_numbers import check_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(570)]

TASKS, GROUP = 2, 2
TRUNKS = TASKS * GROUP


def algorithm(tiny: Path, **options: Any) -> LightningRL:
    defaults: dict[str, Any] = {
        "optimize": "writer",
        "frozen": "shared",
        "estimator": "rloo",
        "credit": "family",
        "group_size": GROUP,
        "tasks_per_step": TASKS,
        "learning_rate": 1e-3,
    }
    return LightningRL(tiny, **{**defaults, **options})


def train(
    folder: Path, learns: LightningRL, app: Any, *, steps: int = 3, **task: Any
) -> tuple[RunFolder, list[dict[str, Any]]]:
    """Train, and return the run with the metrics of its steps."""
    tasks = [{"q": f"question {n}", **task} for n in range(TASKS)]
    trainer = Trainer(learns, runners=LocalRunners(4, processes=2), steps=steps, folder=folder)
    trainer.fit(app, tasks)
    run = RunFolder(folder)
    return run, [line for line in run.metrics() if line["kind"] == "train"]


def families_of(run: RunFolder, step: int) -> dict[str, list[Episode]]:
    """Return trunk's rollout id → episodes of the trunk and its forks, of one step."""
    families: dict[str, list[Episode]] = defaultdict(list)
    for episode in stored_episodes(run.store_url, mode=Mode.TRAIN):
        if episode.rollout_id.split("-")[-4] == str(step):
            fork = episode.fork
            families[fork.rollout_id if fork else episode.rollout_id].append(episode)
    return families


@pytest.fixture(scope="module")
def run(
    tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, list[dict[str, Any]]]:
    """Train three steps with two forks of each rollout, at the middle of the step before."""
    folder = tmp_path_factory.mktemp("family") / "run"
    learns = algorithm(tiny, forks=Forks(each=2), minibatches=2)
    return train(folder, learns, apps.converses)


def test_a_real_training(run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    """Check families, metrics and the weights of all calls; the first step has no forks."""
    folder, lines = run
    assert [line["forks/rollouts"] for line in lines] == [0, 2 * TRUNKS, 2 * TRUNKS]
    for line in lines:
        assert (line["forks/departed"], line["forks/refused"]) == (0, 0)
        assert (line["rollouts"], line["scored"]) == (TRUNKS, TRUNKS)  # forks are in no count
        assert line["batch/families"] == TRUNKS
        assert line["batch/scored"] == TRUNKS + line["forks/rollouts"]
        assert line["batch/groups"] == TASKS
        assert "batch/groups:identical" not in line
    for step, line in enumerate(lines, start=1):
        families = families_of(folder, step)
        assert len(families) == TRUNKS
        rewards = [family[0].reward for family in families.values()]
        assert line["reward"] == pytest.approx(sum(map(float, map(_number, rewards))) / TRUNKS)
        for family in families.values():
            _check_family(folder, step, family)


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _check_family(folder: RunFolder, step: int, family: list[Episode]) -> None:
    """Check the credit and the weight of each call of a family, R / 2 = 2 in a minibatch."""
    trunk, *forks = family
    assert len(forks) == (0 if step == 1 else 2)
    whys = folder.explanations(step)
    mean = math.fsum(_number(leaf.reward) for leaf in family) / len(family)
    total = 0.0
    for leaf in family:
        for number, call in enumerate(leaf.calls):
            key = f"{leaf.attempt_id}/{call.call_id}/{call.choice}"
            if call.agent_path != "writer" or call.outcome is CallOutcome.REPLAYED:
                assert key not in whys
                assert (leaf is not trunk and number < 1) or call.agent_path == "checker"
                continue
            why = whys[key]
            is_before = bool(forks) and leaf is trunk and number < 1
            assert why.credit == pytest.approx(mean if is_before else leaf.reward)
            total += why.token_weight * why.tokens
    assert total == pytest.approx(1 / (TRUNKS / 2))


def test_inspect_says_what_happened_to_each_call(
    run: tuple[RunFolder, list[dict[str, Any]]],
) -> None:
    folder, _ = run
    trunk, fork, _ = next(iter(families_of(folder, 3).values()))
    shown = inspect_run(folder.path, trunk.rollout_id)
    assert "over 2 rollouts" in shown
    assert "others in its family: 2" in shown
    shown = inspect_run(folder.path, fork.rollout_id)
    call = fork.calls[0].call_id
    why = "rejected answered as in the attempt that the rollout repeats, which trains it"
    assert f"{call}/0 writer: {why}" in shown
    assert f"{fork.calls[1].call_id}/0 writer: trained" in shown
    assert "(family)" in shown
    coverage = Counter(
        line.split(": ")[1].split()[0] for line in shown.splitlines() if "/0 w" in line
    )
    assert coverage == {"trained": 2, "rejected": 1}


async def test_the_page_has_the_numbers_of_inspect(
    run: tuple[RunFolder, list[dict[str, Any]]],
) -> None:
    await check_run(run[0].path)


def test_each_call_is_exported_once(run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    folder, _ = run
    stream = io.BytesIO()
    export_run(folder.path, "transitions", stream)
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    keys = Counter((row["call_id"], row["choice"]) for row in rows)
    assert set(keys.values()) == {1}
    assert (
        sum(bool(row["fork_of"]) for row in rows if row["agent"] == "writer") == 2 * 2 * TRUNKS * 2
    )


# --- forks that fail ----------------------------------------------------------------------------
def test_departed_forks_are_told_and_counted(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check an app with the time in its prompts: its trunks are trained as without forks."""
    learns = algorithm(tiny, forks=Forks(at=3))
    _, [line] = train(tmp_path / "run", learns, apps.converses, steps=1, clock=True)
    assert (line["forks/rollouts"], line["forks/departed"]) == (TRUNKS, TRUNKS)
    assert (line["batch/families"], line["batch/scored"]) == (TRUNKS, TRUNKS)
    assert (line["failed"], line["lost"], line["damaged"]) == (0, 0, 0)
    output = capsys.readouterr()
    assert "4 of 4 forks left out: they departed from" in output.out + output.err


def test_calls_of_an_endpoint_of_the_app_cannot_be_repeated(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that rollouts are not forked behind a call of a frozen agent, and that it is told."""
    learns = algorithm(tiny, frozen=None, forks=Forks(at=2))
    with ScriptedServer("fine") as server:
        folder = tmp_path / "run"
        _, [line] = train(folder, learns, apps.asks_between, steps=1, own=server.url)
    assert (line["forks/rollouts"], line["forks/refused"]) == (0, TRUNKS)
    assert line["batch/families"] == TRUNKS
    output = capsys.readouterr()
    note = "4 of 4 rollouts cannot be forked (for example: call 2, of 'helper', is not a call of"
    assert note in output.out + output.err


def long(state: State) -> bool:
    """Hold in the second turn."""
    return state.turn == 1


def test_a_rule_and_the_settings_of_a_run(tiny: Path, apps: Any, tmp_path: Path) -> None:
    learns = algorithm(tiny, forks=Forks(at=long))
    run, [line] = train(tmp_path / "run", learns, apps.converses, steps=1)
    assert line["forks/rollouts"] == TRUNKS
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    name = f"{long.__module__}:long"
    assert config["forks"] == {"each": 1, "at": name}
    for trunk, fork in families_of(run, 1).values():
        assert [str(call.outcome) for call in fork.calls] == ["replayed", "ok", "ok", "ok"]
        assert fork.calls[0].call_id == trunk.calls[0].call_id


def test_forks_at_the_first_call_repeat_nothing(tiny: Path, apps: Any, tmp_path: Path) -> None:
    """Check an app of one call, whose forks are further samples of the same prompt."""
    run, [line] = train(tmp_path / "run", algorithm(tiny, forks=Forks(at=1)), apps.spell, steps=1)
    assert (line["forks/rollouts"], line["batch/families"]) == (TRUNKS, TRUNKS)
    assert "batch/rejected:replayed" not in line
    for family in families_of(run, 1).values():
        assert [len(leaf.calls) for leaf in family] == [1, 1]
        whys = [run.explanations(1)[f"{e.attempt_id}/{e.calls[0].call_id}/0"] for e in family]
        assert [why.against for why in whys] == ["in its family"] * 2
        assert whys[0].advantage == pytest.approx(-whys[1].advantage)


def test_a_dry_run_counts_forks(tiny: Path, apps: Any, tmp_path: Path) -> None:
    learns = algorithm(tiny, forks=Forks(each=3))
    trainer = Trainer(learns, runners=2, steps=1, folder=tmp_path / "run")
    report = trainer.dev(apps.spell, [{"q": "a"}, {"q": "b"}], replay=False)
    assert report.costs.rollouts == 4 * TRUNKS
    assert "16 rollouts: 1 step x 2 tasks x 2 x 4, as each is forked" in str(report)


# --- a killed trainer ---------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from pathlib import Path
from lightspan.progress import SilentReporter
import lightspan, toy_apps
from lightspan import Forks, LightningRL, LocalRunners, Trainer

class Killing(LightningRL):
    async def collect(self, trainer):
        episodes = await super().collect(trainer)
        if trainer.step == 2:
            assert sum(episode.fork is not None for episode in episodes) == 4
            os.kill(os.getpid(), signal.SIGKILL)
        return episodes

if __name__ == "__main__":
    algorithm = Killing(
        sys.argv[1], optimize="writer", frozen="shared", estimator="rloo", credit="family",
        group_size=2, tasks_per_step=2, learning_rate=1e-3,
    )
    trainer = Trainer(algorithm, runners=LocalRunners(4, processes=2), steps=2, folder=sys.argv[2])
    trainer.fit(toy_apps.converses, [{"q": f"question {n}"} for n in range(2)])
"""


def test_a_run_killed_in_the_middle_of_a_step_goes_on(
    tiny: Path, apps: Any, tmp_path: Path
) -> None:
    """Kill the trainer with SIGKILL when the forks of step 2 have ended, and resume."""
    folder, script = tmp_path / "run", tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tiny), str(folder)]
    with (tmp_path / "output").open("w") as output:  # a pipe stays open in the runners
        ended = subprocess.run(command, stdout=output, stderr=output, check=False)
    assert ended.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()
    tasks = [{"q": f"question {n}"} for n in range(TASKS)]
    runners = LocalRunners(4, processes=2)
    learns = algorithm(tiny)
    Trainer(learns, runners=runners, steps=2, folder=folder).fit(apps.converses, tasks, resume=True)
    run = RunFolder(folder)
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["forks/rollouts"] for line in lines] == [0, TRUNKS]
    assert {line["batch/families"] for line in lines} == {TRUNKS}
    episodes = {e.attempt_id: e for e in stored_episodes(run.store_url, mode=Mode.TRAIN)}
    trained = {key.split("/")[0] for key in run.explanations(2)}
    assert len(trained) == 2 * TRUNKS
    # the step was repeated whole: no fork of it repeats a rollout from before the kill
    for attempt in trained:
        fork = episodes[attempt].fork
        assert fork is None or fork.attempt_id in trained
