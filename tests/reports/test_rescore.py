"""Test `lightspan rescore`: the effect of another reward, without changing the run."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM, Judge, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Scored
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.inspect import inspect_run
from lightspan_tools.rescore import Change, compare, most_changed, rescore

APPS = Path(__file__).parents[1] / "apps"


def by_length(answer: str) -> float:
    return float(answer.split()[1])


@pytest.fixture(scope="module")
def judged() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("judged_app")


@pytest.fixture(scope="module")
def whole(judged: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with rewards of 0.25 by the app; return the run's folder. Tests must not change it.

    There are twelve rollouts in training, and a held-out task before and after it.
    """
    folder: Path = tmp_path_factory.mktemp("rescored") / "run"
    with ScriptedServer(judged.counted) as model:
        trainer = Trainer(
            judged.Sees(), runners=2, steps=1, folder=folder, reporter=SilentReporter()
        )
        trainer.fit(judged.counts, judged.tasks(model.url, 1, 3), judged.tasks(model.url, 5))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    return folder


@pytest.fixture
def wise() -> Iterator[ScriptedServer]:
    script = importlib.import_module("scripted_judge")
    answers = script.gives(lambda text, place: int(text.rpartition("number ")[2]))
    with ScriptedServer(answers) as server:
        yield server


def files(folder: Path) -> dict[str, str]:
    """Return a hash of each file of the run, without SQLite's temporary files and the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(("store.db-", "lock"))
    }


# --- what would change ----------------------------------------------------------------------
def change(name: str, before: float | None, after: float | None, group: str = "g") -> Change:
    return Change(
        rollout_id=name,
        task_id="t",
        group_id=group,
        mode="train",
        step=1,
        before=before,
        after=after,
        why="" if after is not None else "it said nothing",
    )


def test_signs_are_counted_within_groups() -> None:
    changes = [
        # means .5 and .5: signs - + + - become + + - -
        change("a", 0.0, 1.0),
        change("b", 1.0, 1.0),
        change("c", 1.0, 0.0),
        change("d", 0.0, 0.0),
        # the same order on another scale
        change("e", 0.1, 10.0, "h"),
        change("f", 0.2, 20.0, "h"),
        # equal before, so without an advantage; they differ after
        change("g", 0.5, 0.2, "i"),
        change("h", 0.5, 0.4, "i"),
        # not to be compared: unscored on one side, which leaves one of the group
        change("i", None, 1.0, "j"),
        change("j", 1.0, None, "j"),
        change("k", 1.0, 1.0, "j"),
    ]
    [found] = compare(changes)
    assert (found.rollouts, found.both, found.compared) == (11, 9, 8)
    assert (found.unscored_before, found.unscored_after) == (1, 1)
    assert found.sign_changes == 2 + 2
    assert found.mean_before == pytest.approx(4.3 / 9)
    assert found.mean_after == pytest.approx(33.6 / 9)
    assert found.reasons == {"it said nothing": 1}
    assert [each.rollout_id for each in most_changed(changes, 3)] == ["f", "e", "a"]
    assert len(most_changed(changes, 0)) == 6


# --- a run ----------------------------------------------------------------------------------
def test_a_function_scores_a_run_again_and_leaves_it_as_it_is(run: Path) -> None:
    before = files(run)
    found = rescore(run, by_length)
    assert files(run) == before
    train, val = found.comparisons
    assert (found.before, found.after, found.written) == ("app", "by_length", "")
    assert (train.mode, train.rollouts, train.mean_before, train.mean_after) == (
        *("train", 12, 0.25),
        3.0,
    )
    # pairs that ran one text: they were equal before, and are after
    assert (train.compared, train.sign_changes) == (12, 0)
    assert (val.mode, val.rollouts, val.mean_after, val.compared) == ("val", 2, 5.0, 0)
    text = found.text(3)
    assert text.startswith(f"{run}: the reward by_length in place of app\n")
    assert "train, 12 rollouts: mean 0.250 -> 3.000 (12 scored by both); unscored 0 -> 0\n" in text
    assert "  in their groups: 0 of 12 get an advantage of another sign\n" in text
    assert "14 of 14 rollouts would have another reward, the most changed:\n" in text
    assert text.count("0.25 -> 5\n") == 3
    assert text.endswith("nothing was written (--write NAME stores the new reward in the run)")


def test_only_one_mode(run: Path) -> None:
    assert [each.mode for each in rescore(run, by_length, mode=Mode.VAL).comparisons] == ["val"]


def test_the_command(run: Path, judged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    assert main(["rescore", str(run), "--reward", "judged_app:moody", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    train, val = said["comparisons"]
    assert (train["both"], train["unscored_after"], val["unscored_after"]) == (4, 8, 0)
    assert train["reasons"] == {
        "the reward 'moody' returned nan": 4,
        "the reward 'moody' raised LookupError: nothing to compare with": 2,
        "the reward 'moody' returned None": 2,
    }
    assert [each["after"] for each in said["changes"]] == [1.0] * 6
    assert main(["rescore", str(run), "--reward", "judged_app:moody", "--limit", "1"]) == 0
    text = capsys.readouterr().out
    assert "  unscored: 4 the reward 'moody' returned nan\n" in text
    assert text.count(" -> 1\n") == 1
    for arguments, message in {
        ("judged_app:texts", "--write", "x"): "returned: a reward must be a number, not the text",
        ("judged_app:too_few",): "a reward for each of the 2 episodes",
        ("nowhere:at_all",): "the reward 'nowhere:at_all' cannot be imported",
        ("judged_app:moody", "--write", "app"): "not 'app', which is the app's own",
    }.items():
        assert main(["rescore", str(run), "--reward", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert files(run) == before


def test_a_new_reward_is_written_beside_the_old_and_replaces_none(run: Path) -> None:
    before = files(run)
    found = rescore(run, by_length, write="long")
    assert found.written == "long"
    after = files(run)
    assert after.items() - before.items() == {("rewards/long.jsonl", after["rewards/long.jsonl"])}
    assert before.keys() <= after.keys()
    kept = RunFolder(run).rewards("long")
    assert sorted(each.value or 0.0 for each in kept.values()) == sorted(
        change.after or 0.0 for change in found.changes
    )
    text = inspect_run(run)
    assert "\nreward long: mean 3.286 of 14\n" in text
    with pytest.raises(ConfigError, match="has a reward 'long' already, and rescore replaces none"):
        rescore(run, by_length, write="long")
    assert files(run) == after


def test_a_run_that_learned_from_another_reward_is_compared_with_that(run: Path) -> None:
    folder = RunFolder(run)
    folder.write_config({**folder.read_config(), "reward": {"name": "old"}})
    ids = [each.rollout_id for each in rescore(run, by_length).changes]
    folder.add_rewards("old", {name: Scored(value=float(n)) for n, name in enumerate(ids)})
    found = rescore(run, by_length)
    assert found.before == "old"
    assert [each.before for each in found.changes] == [float(n) for n in range(14)]
    assert found.comparisons[0].sign_changes == 12


def test_a_judge_scores_a_run_again(run: Path, wise: ScriptedServer) -> None:
    judge = Judge("More is better.", LLM(base_url=wise.url, model="wise"), name="wise")
    before = files(run)
    found = rescore(run, judge)
    assert files(run) == before  # what it answered is not kept either
    assert found.comparisons[0].mean_after == pytest.approx(0.3)
    assert found.spent["calls"] == len(wise.requests) == 7  # the texts are pairs, but for two
    assert "the judge was asked 7 questions, " in found.text(1)
    rescore(run, judge, write="wise")
    assert len(wise.requests) == 14
    again = rescore(run, judge)
    assert (len(wise.requests), again.spent["calls"]) == (14, 0)  # they are known now
    assert again.comparisons == found.comparisons
