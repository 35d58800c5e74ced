"""Test `lightspan fork` on real runs: runner processes, a SQLite store, the tiny model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.cli import main
from lightspan.lightning.episode import Episode
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.export import export_run
from lightspan_tools.forking.report import answer_of
from lightspan_tools.inspect import inspect_run
from tests.reports.ui_numbers import check_run

pytestmark = pytest.mark.slow

CALLS, TASKS, GROUP = 6, 2, 6


def trained(folder: Path, tiny: Path, app: Any, tasks: list[Any], **options: Any) -> RunFolder:
    settings: dict[str, Any] = {"optimize": "walker", "group_size": GROUP, **options}
    algorithm = LightningRL(tiny, tasks_per_step=TASKS, learning_rate=1e-3, **settings)
    trainer = Trainer(algorithm, runners=LocalRunners(4), steps=2, folder=folder)
    trainer.fit(app, tasks, tasks[:1])
    return RunFolder(folder)


@pytest.fixture(scope="module")
def run(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run of two steps. Continuations are added to it, and change nothing else."""
    folder = tmp_path_factory.mktemp("bridges") / "run"
    tasks = [{"q": f"bridge {number}"} for number in range(2 * TASKS)]
    return trained(folder, tiny, apps.crosses, tasks)


def rollouts(run: RunFolder, mode: Mode = Mode.TRAIN) -> list[Episode]:
    run_id = run.read_config()["run_id"]
    episodes = stored_episodes(run.store_url, run_id=run_id, mode=mode)
    return sorted(episodes, key=lambda episode: episode.rollout_id)


def lost_one(run: RunFolder, apps: Any) -> tuple[Episode, int]:
    """Return a lost rollout of a group with a success, and the number of the call that lost it.

    The call is not the first, if there is such a rollout.
    """
    episodes = rollouts(run)
    solved = {episode.group_id for episode in episodes if episode.reward == 1}
    lost = [each for each in episodes if each.reward == 0 and each.group_id in solved]
    numbers = [
        next(n for n, call in enumerate(each.calls, 1) if apps.is_careless(answer_of(call)))
        for each in lost
    ]
    return max(zip(lost, numbers, strict=True), key=lambda pair: pair[1])


def forked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command; return the exit status, and what it wrote to stdout and stderr."""
    capsys.readouterr()
    status = main(["fork", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out, output.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    status, out, err = forked(capsys, *arguments, "--json")
    assert status == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def numbers_of(run: RunFolder) -> dict[str, Any]:
    """Return what the run tells about itself in every report."""
    rows = {}
    for what in ("transitions", "messages"):
        path = run.path.parent / what
        with path.open("wb") as stream:
            export_run(run.path, what, stream)
        rows[what] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        **rows,
        "inspect": inspect_run(run.path),
        "json": json.loads(inspect_run(run.path, as_json=True)),
        "metrics": run.metrics(),
        "result": run.read_result(),
        "evaluations": [msgspec.to_builtins(each.metrics()) for each in run.evaluations()],
    }


def test_continuations_of_one_call(
    run: RunFolder, apps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check each number of the report against the stored rollouts, and that the run is the same."""
    episode, _ = lost_one(run, apps)
    before = numbers_of(run)
    report = as_json(capsys, run.path, episode.rollout_id[-9:], 4, "-n", 5, "--runners", 3)
    assert numbers_of(run) == before
    asyncio.run(check_run(run.path))
    [point] = report["points"]
    call = episode.calls[3]
    assert report["rollout_id"] == episode.rollout_id
    assert (report["calls"], report["reward"], report["loss"]) == (CALLS, 0.0, None)
    assert report["is_exact"] == ("which the rollout used" in report["weights"])
    assert point["call"] == {
        "number": 4,
        "call_id": call.call_id,
        "agent": "walker",
        "answer": answer_of(call),
    }
    forks = RunFolder(Path(report["folder"]))
    assert forks.path.parent == run.path / "forks"
    run_id = forks.read_config()["run_id"]
    stored = stored_episodes(run.store_url, run_id=run_id)
    by_id = {each.rollout_id: each for each in stored}
    assert sorted(by_id) == sorted(row["rollout_id"] for row in point["continuations"])
    for row in point["continuations"]:
        fork = by_id[row["rollout_id"]]
        assert (fork.mode, fork.task_id) == (Mode.DEV, episode.task_id)
        assert fork.fork is not None
        assert (fork.fork.attempt_id, fork.fork.call_id) == (episode.attempt_id, call.call_id)
        assert [str(each.outcome) for each in fork.calls[:3]] == ["replayed"] * 3
        answers = [answer_of(each) for each in [*episode.calls[:3], *fork.calls[3:]]]
        assert row["reward"] == float(not any(map(apps.is_careless, answers)))
        tokens = sum(len(e.record.response_ids) for e in fork.calls[3:] if e.record is not None)
        assert row["answer"] == answers[3]
        assert (row["sampled"], row["repeated"], row["tokens"]) == (3, 3, tokens)
        assert (row["tools"], row["departed"], row["message"]) == (3, "", "")
    rewards = [row["reward"] for row in point["continuations"]]
    assert point["mean"]["mean"] == pytest.approx(sum(rewards) / 5)
    assert point["mean"]["n"] == 5
    assert report["totals"] == {
        "continuations": 5,
        "departed": 0,
        "sampled_calls": 15,
        "endpoint_calls": 0,
        "repeated_calls": 15,
        "generated_tokens": sum(row["tokens"] for row in point["continuations"]),
        "repeated_tool_calls": 15,
    }
    shown = inspect_run(forks.path)
    assert "5 rollouts, 5 of them forks or replays" in shown
    assert "\ncontinuations by lightspan fork, which train nothing\n" in shown
    assert "coverage of calls: rejected:mode_not_train 15, rejected:replayed 15\n" in shown
    one = inspect_run(forks.path, point["continuations"][0]["rollout_id"])
    assert "rejected the rollout was not made for training" in one
    assert ": trained" not in one
    report = as_json(capsys, run.path, episode.rollout_id, call.call_id[-10:], "-n", 1)
    assert report["points"][0]["call"]["number"] == 4


def test_the_call_that_lost_it(
    run: RunFolder, apps: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    episode, number = lost_one(run, apps)
    plot = tmp_path / "loss.png"
    report = as_json(capsys, run.path, episode.rollout_id, "-n", 12, "--plot", plot)
    assert plot.exists()
    [call] = report["loss"]["calls"]
    assert call["number"] == number
    assert call["answer"] == answer_of(episode.calls[number - 1])
    assert apps.is_careless(call["answer"])
    assert report["success"] == 1
    assert "of 6 rollouts of the group had" in report["success_from"]
    last_good, first_lost = report["loss"]["last_good"], report["loss"]["first_lost"]
    assert (last_good, first_lost) == (number, None if number == CALLS else number + 1)
    for point in report["points"]:
        hits = [row["reward"] == 1 for row in point["continuations"]]
        assert point["successes"] == sum(hits)
        assert point["share"]["mean"] == pytest.approx(sum(hits) / len(hits))
        assert not any(hits) or point["call"]["number"] <= number
    if first_lost is not None:
        at = [point for point in report["points"] if point["call"]["number"] == first_lost]
        assert [point["is_again"] for point in at] == [False, True]
        assert report["loss"]["failures"] == 24


def test_the_first_call_is_run_unless_the_group_tells(
    run: RunFolder, tiny: Path, apps: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Check that the first call is left out only for the group and the weights of the rollout."""
    solved = {each.group_id for each in rollouts(run) if each.reward == 1}
    lost = [each for each in rollouts(run) if each.reward == 0 and each.group_id in solved]

    def first(episode: Episode, *more: object) -> tuple[int, bool, int]:
        report = as_json(capsys, run.path, episode.rollout_id, "-n", 2, "--once", *more)
        numbers = {point["call"]["number"] for point in report["points"]}
        return report["loss"]["group"], 1 in numbers, report["is_exact"]

    mates = [each.reward for each in rollouts(run) if each.group_id == lost[0].group_id]
    assert first(lost[0]) == (mates.count(1), False, True)
    assert first(lost[0], "--model", tiny) == (0, True, False)
    other = [each for each in rollouts(run) if each.group_id not in solved]
    for episode in other[:1]:  # a success of another group of the task is of no help
        assert first(episode, "--success", 1)[:2] == (0, True)


def test_texts(run: RunFolder, apps: Any, capsys: pytest.CaptureFixture[str]) -> None:
    episode, _ = lost_one(run, apps)
    status, out, err = forked(
        capsys, run.path, episode.rollout_id, "-n", 2, "--success", 1, "--once"
    )
    assert (status, err.count("continuations are answered by ")) == (0, 1)
    assert "a success has a reward of at least 1, as given (--success)" in out
    assert "  call  successes  share and its 95% interval" in out
    assert f"rollout {episode.rollout_id} (6 calls, reward 0.000)" in out
    assert "continuations, " in out
    assert f"the continuations: lightspan inspect {run.path}/forks/" in out
    status, out, _ = forked(capsys, run.path, episode.rollout_id, 6, "-n", 2, "--success", 1)
    assert status == 0
    assert "recorded call 6, of walker: " in out
    assert "mean reward " in out
    assert "successes: " in out


def test_errors(run: RunFolder, apps: Any, capsys: pytest.CaptureFixture[str]) -> None:
    episode, _ = lost_one(run, apps)
    won = next(each for each in rollouts(run) if each.reward == 1)
    name = episode.rollout_id

    def error(*arguments: object) -> str:
        status, out, err = forked(capsys, *arguments)
        assert (status, out) == (1, "")
        return err

    assert "is no run of lightspan" in error(run.path / "none", name)
    assert "there is no rollout 'xyz'; there are, for example: " in error(run.path, "xyz")
    assert "rollouts start or end with 'run-'" in error(run.path, "run-")
    assert "has no call 7: its calls are numbered 1 to 6" in error(run.path, name, 7)
    assert "calls are numbered from 1 to 6: 0 is none" in error(run.path, name, 0)
    assert "there is no call 'xyz'" in error(run.path, name, "xyz")
    assert "-n 0 must be at least 1" in error(run.path, name, 2, "-n", 0)
    assert "--success nan must be a finite number" in error(run.path, name, "--success", "nan")
    assert "leave one of them out" in error(run.path, name, 2, "--plot", "x.png")
    wrong = error(run.path, won.rollout_id)
    assert "was not lost: its reward is 1, and a success has at least 1" in wrong or (
        "what a success is has to be given: --success REWARD" in wrong
    )
    wrong = error(run.path, name, 2, "--app", "__main__:crosses")
    assert "(--app SCRIPT:crosses, such as --app train:crosses for train.py)" in wrong
    wrong = error(run.path, name, 2, "--app", "nowhere:app")
    assert "nowhere" in wrong
    assert "--app module:name" in wrong


def test_weights(
    run: RunFolder, tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Check which weights answer: those of the step, the nearest ones, the export, a model."""
    first, last = rollouts(run)[0], rollouts(run, Mode.VAL)[-1]

    def text(folder: Path, episode: Episode, *more: object) -> str:
        report = as_json(capsys, folder, episode.rollout_id, 1, "-n", 1, *more)
        weights: str = report["weights"]
        assert report["is_exact"] == weights.endswith("which the rollout used")
        return weights

    assert text(run.path, first) == "the starting weights (step 0), which the rollout used"
    exact = "the weights of step 2 (a checkpoint), which the rollout used"
    assert text(run.path, last) == exact
    assert text(run.path, last, "--model", tiny) == f"{tiny} (--model)"
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    shutil.rmtree(copy / "checkpoints")
    exact = "the weights of step 2 (the exported model), which the rollout used"
    assert text(copy, last) == exact
    (copy / "result.json").unlink()
    nearest = "the starting weights (step 0), the nearest that the run keeps: the rollout used"
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    # a step whose groups have equal rewards makes no version
    updated = max(line["step"] for line in lines if line["batch/trained_tokens"])
    assert text(copy, last).startswith(f"{nearest} those of step {updated} (version of policy ")
    config = RunFolder(copy).read_config()
    RunFolder(copy).write_config({**config, "model": str(tmp_path / "gone")})
    status, _, err = forked(capsys, copy, last.rollout_id, 1)
    assert status == 1
    assert "is gone, the weights from which policy 'policy'" in err
    assert "--model NAME_OR_FOLDER" in err


def test_adapters(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that adapters of a checkpoint and of an export answer."""
    from lightspan import LoRA

    tasks = [{"q": f"bridge {number}"} for number in range(2)]
    run = trained(tmp_path / "run", tiny, apps.crosses, tasks, lora=LoRA(rank=2), group_size=2)
    last = rollouts(run, Mode.VAL)[-1]
    for _ in range(2):
        report = as_json(capsys, run.path, last.rollout_id, 5, "-n", 1)
        assert report["is_exact"]
        assert report["points"][0]["continuations"][0]["reward"] is not None
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    assert "the exported model" in report["weights"]


def test_departed_continuations(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"q": f"bridge {number}", "clock": True} for number in range(2)]
    run = trained(tmp_path / "run", tiny, apps.crosses, tasks, group_size=2)
    [name, *_] = [each.rollout_id for each in rollouts(run)]
    status, out, err = forked(capsys, run.path, name, 3, "-n", 2)
    assert status == 1
    assert "departed: the attempt departed" in out
    assert "2 of 2 continuations departed from the recorded calls, and count nowhere" in out
    assert "no continuation has a reward" in err
    status, _, err = forked(capsys, run.path, name, "-n", 2, "--success", 2)
    assert status == 1
    assert "no continuation from call 1 has a reward: the attempt departed" in err
    assert "docs/guides/replay.md says what to do" in err


def test_a_refused_call(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer("scripted help") as server:
        tasks = [{"q": f"question {number}", "own": server.url} for number in range(2)]
        run = trained(
            tmp_path / "run", tiny, apps.converses, tasks, optimize="writer", group_size=2
        )
        name = rollouts(run)[0].rollout_id
        status, _, err = forked(capsys, run.path, name, 4)
        assert status == 1
        assert f"rollout {name} cannot be continued from call 4: it did not pass the gateway" in err
        assert (
            'serve its agent there (frozen="base" or frozen=LLM(…)) and run the task again' in err
        )
        assert err.rstrip().endswith("Calls that can: 1, 2, 3")
        report = as_json(capsys, run.path, name, 3, "-n", 2)
        counts = [(row["sampled"], row["endpoint"]) for row in report["points"][0]["continuations"]]
        assert counts == [(1, 1)] * 2
        assert report["totals"]["endpoint_calls"] == 2


def test_calls_to_endpoints_are_counted_apart(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check forks before and at the call of a frozen agent that an endpoint answers."""
    from lightspan import LLM

    with ScriptedServer("scripted help") as server:
        options = {"optimize": "writer", "frozen": LLM(base_url=server.url, model="m")}
        tasks = [{"q": f"question {number}"} for number in range(2)]
        run = trained(tmp_path / "run", tiny, apps.converses, tasks, group_size=2, **options)
        name = rollouts(run)[0].rollout_id
        for call, sampled in ((2, 2), (4, 0)):
            report = as_json(capsys, run.path, name, call, "-n", 2)
            rows = report["points"][0]["continuations"]
            assert [(row["sampled"], row["endpoint"]) for row in rows] == [(sampled, 1)] * 2
            assert [row["repeated"] for row in rows] == [call - 1] * 2
            totals = report["totals"]
            assert (totals["sampled_calls"], totals["endpoint_calls"]) == (2 * sampled, 2)
        _, out, _ = forked(capsys, run.path, name, 2, "-n", 1)
        assert "tokens sampled, 1 calls to endpoints of frozen agents; 1 calls repeated" in out


def test_ctrl_c_keeps_what_has_ended(run: RunFolder, apps: Any, tmp_path: Path) -> None:
    """Interrupt the search in a process of its own, after its first test."""
    episode, _ = lost_one(run, apps)
    command = [sys.executable, "-m", "lightspan.cli", "fork", str(run.path), episode.rollout_id]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "-n", "8", "--runners", "1", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(apps.__file__).parent,
            # a shell's background job ignores SIGINT, and its children would too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while "succeeded" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 130, log.read_text()
    report = json.loads(out)
    assert report["is_stopped"]
    assert not report["loss"]["is_complete"]
    assert len(report["points"][0]["continuations"]) == 8
