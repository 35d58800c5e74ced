"""Test errors for bad input, which name the parameter, the value and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, Optimizer, Trainer
from lightspan.errors import (
    AppError,
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    UnknownAgentError,
)
from lightspan.schema.routing import AgentPaths
from lightspan_testing.tiny import tiny_model
from lightspan_torch.learner.torch import TorchLearner

Make = Callable[..., Any]
APPS = Path(__file__).parents[1] / "apps"


# --- names of agents ----------------------------------------------------------------------------


def test_unknown_agent_is_an_error_before_the_first_update(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    learner = TorchLearner({"policy": str(tiny)}, optimizer=Optimizer(learning_rate=1.0))
    before = learner.weight_hash("policy")
    known = Trainer(rl(optimize="wirter"), folder=tmp_path / "known", learner=learner)
    with pytest.raises(UnknownAgentError, match="Agents: 'checker', 'writer'"):
        known.fit(apps.two, ask(2), agents=["writer", "checker"])
    with pytest.raises(UnknownAgentError, match="Agents: 'checker', 'writer'"):
        # as an adapter's `agents()` returns them
        known.fit(apps.two, ask(2), agents=AgentPaths(("writer", "checker"), complete=True))
    assert not (tmp_path / "known").exists()
    trainer = Trainer(rl(optimize="wirter"), folder=tmp_path / "run", learner=learner, steps=2)
    # its calls went to the app's endpoint, which is not there
    with pytest.raises(RewardError, match=r"'wirter'\. Did you mean 'writer'\?"):
        trainer.fit(apps.spell, ask(2))
    assert learner.weight_hash("policy") == before
    assert learner.usage()["updates"] == 0


# --- hosts of images ----------------------------------------------------------------------------


def test_hosts_of_images_are_names(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    trainer = Trainer(rl(), folder=tmp_path / "run", image_hosts=["https://a.example"])
    with pytest.raises(ConfigError, match=r"'https://a\.example' is not in a list of hosts"):
        trainer.fit(apps.spell, ask(2))


# --- data ---------------------------------------------------------------------------------------


def test_equal_held_out_tasks_are_named(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    val = [*ask(3), {"q": "question 1"}]
    with pytest.raises(DataError, match=r"val\[1\] and val\[3\] are equal, or have one id"):
        Trainer(rl(), folder=tmp_path / "run").fit(apps.spell, ask(2), val)


# --- rewards ------------------------------------------------------------------------------------


def test_missing_rewards_are_counted_and_told_once_per_task(
    apps: Any, rl: Make, tmp_path: Path, lines: Any
) -> None:
    tasks = [{"id": give, "q": "x", "give": give} for give in ("nan", "infinity", "none", "number")]
    trainer = Trainer(
        rl(tasks_per_step=4), steps=2, folder=tmp_path / "run", reporter=lines, validate_every=1
    )
    result = trainer.fit(apps.odd, tasks, tasks)
    [note] = [text for text in lines.texts if "unscored, which is not zero" in text]
    assert note == (
        "step 0: no usable reward, so unscored, which is not zero: nan (NaN, infinity or more "
        "than 1e+100 was returned), infinity (NaN, infinity or more than 1e+100 was returned), "
        "none (the app returned None and emitted no reward); a task is named once"
    )
    for evaluation in result.evaluations:
        assert evaluation.rewards == {"number": 0.5}
        assert (evaluation.unscored, evaluation.failed) == (3, 0)
    assert (
        "step 0: held-out reward 0.500 (no CI, n=1), 3 unscored; sampled at temperature 1"
    ) in lines.texts
    line = trainer.folder.metrics()[1]
    assert (line["rollouts"], line["scored"], line["batch/unscored"]) == (16, 4, 12)
    assert line["reward"] == 0.5
    assert any(
        text.startswith("step 1/2  reward 0.500") and "  12 unscored  " in text
        for text in lines.texts
    )
    assert result.summary() == (
        "held-out reward: 0.50 -> 0.50 (n=1, no CI of the gain); held out: unscored 3 -> 3; of 32 "
        "rollouts in training 24 unscored"
    )
    saved = json.loads((result.folder / "result.json").read_text())
    assert saved["summary"] == result.summary()
    assert saved["training"] == {
        "rollouts": 32,
        "unscored": 24,
        "failed": 0,
        "undelivered": 0,
        "silent": 0,
        "rejected": 0,
        "lost_attempts": 0,
    }
    assert [found["unscored"] for found in saved["evaluations"]] == [3, 3, 3]
    assert line["calls/rejected:unscored"] == 12


def test_nothing_scored_at_all_is_an_error(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    trainer = Trainer(rl(tasks_per_step=4), steps=1, folder=tmp_path / "run")
    with pytest.raises(RewardError) as caught:
        trainer.fit(apps.odd, ask(4, give="none"), ask(1, give="none"))
    assert str(caught.value) == (
        "no rollout has a reward, so there is nothing to learn from: the app returned None and "
        "emitted no reward (16 of 16). Return a number from the app, or call "
        "lightspan.emit_reward(number)"
    )
    assert trainer.folder.metrics()[0]["mean"] is None


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told(tiny: Path, tmp_path: Path) -> None:
    """Check the error of runner processes that import the script and reach its `fit`."""
    command = [sys.executable, APPS / "unguarded.py", tmp_path / "run", tiny]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    error, page = done.stderr.splitlines()[-2:]
    assert page == "see docs/troubleshooting.md#starts-training-when-it-is-imported"
    assert error == (
        "lightspan.errors.AppError: unguarded.py starts training when it is imported, and "
        "runner processes import it: start training under `if __name__ == '__main__':`"
    )


def test_what_is_no_reward_is_an_error(apps: Any, rl: Make, tmp_path: Path) -> None:
    message = r"task t: the app returned: a reward must be a number, not the text '0.5'"
    tasks = [{"id": "t", "q": "x", "give": "text"}]
    with pytest.raises(RewardError, match=f"{message}; convert it first .*:odd") as caught:
        Trainer(rl(), folder=tmp_path / "run").fit(apps.odd, tasks)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][1:] == ["fit", "run_sync"]  # not those inside


# --- apps that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(("failure_reward", "value"), [(None, None), (-1.0, -1.0), ("lowest", 0.0)])
def test_failing_app_is_an_outcome(
    apps: Any, rl: Make, tmp_path: Path, lines: Any, failure_reward: Any, value: float | None
) -> None:
    tasks = [{"id": "bad", "q": "a", "raise": "nam"}, {"id": "good", "q": "b"}]
    algorithm = rl(failure_reward=failure_reward)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run", reporter=lines)
    result = trainer.fit(apps.breaks, tasks, tasks)
    scored = failure_reward is not None
    [before, _] = result.evaluations
    assert before.failed == 1
    assert before.unscored == (0 if scored else 1)
    assert before.rewards.get("bad") == value
    assert ("without these" in result.summary()) == scored
    line = trainer.folder.metrics()[1]
    assert (line["rollouts"], line["failed"], line["scored"]) == (8, 4, 8 if scored else 4)
    assert (
        "step 1: 50 % of the rollouts failed (mostly app_error; for example task bad: "
        "ValueError: no such column: nam)"
    ) in lines.texts


def test_failures_of_the_first_evaluation_are_a_share_of_all_its_rollouts(
    apps: Any, rl: Make, tmp_path: Path, lines: Any
) -> None:
    """The first evaluation runs four tasks before the others."""
    val = [
        *({"id": f"good {n}", "q": "b"} for n in range(4)),
        {"id": "bad", "q": "a", "raise": "x"},
    ]
    trainer = Trainer(rl(optimize="*"), steps=1, folder=tmp_path / "run", reporter=lines)
    trainer.fit(apps.breaks, [{"id": "good", "q": "b"}, {"id": "fine", "q": "c"}], val)
    notes = [text for text in lines.texts if "of the rollouts failed" in text]
    assert [note.partition(" (")[0] for note in notes] == [
        f"step {step}: 20 % of the rollouts failed" for step in (0, 1)
    ]


def test_training_ends_with_the_error_if_every_rollout_fails_alike(
    apps: Any, rl: Make, tmp_path: Path, lines: Any
) -> None:
    advice = f"{'a long story ' * 30}: set DESK_URL"
    tasks = [{"q": letter, "raise": advice} for letter in "ab"]
    trainer = Trainer(rl(), steps=6, folder=tmp_path / "run", reporter=lines)
    with pytest.raises(AppError) as raised:
        trainer.fit(apps.breaks, tasks)
    assert str(raised.value).startswith("the latest 16 rollouts, of 2 tasks, all failed alike (app")
    assert f"ValueError: no such column: {advice}. If an answer can cause it" in str(raised.value)
    assert trainer.folder.metrics()[-1]["step"] == 1
    assert "go on with resume=True (--resume)" in lines.texts[-1]


# --- models -------------------------------------------------------------------------------------


def test_tokenizer_without_a_chat_template(apps: Any, tmp_path: Path, ask: Make) -> None:
    model = tiny_model(tmp_path / "plain", seed=0, template=None)
    with pytest.raises(ModelError, match=r"the tokenizer of .*plain has no chat template"):
        Trainer(LightningRL(model), folder=tmp_path / "run").fit(apps.spell, ask(1))


# --- folders and stores -------------------------------------------------------------------------


def test_folder_that_cannot_be_written(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run cannot be written: Not a directory; give"):
        Trainer(rl(), folder=tmp_path / "file" / "run").fit(apps.spell, ask(1))


def test_folder_that_is_not_for_one_run_alone(apps: Any, rl: Make, ask: Make) -> None:
    place = Path.home()
    before = place.stat().st_mode
    with pytest.raises(ConfigError, match="holds more than a run"):
        Trainer(rl(), folder=place).fit(apps.spell, ask(1))
    assert place.stat().st_mode == before
