"""Test `max_frozen_calls`, the maximum number of a run's calls to endpoints of frozen agents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM, Trainer
from lightspan.errors import BudgetError
from lightspan.progress import SilentReporter
from lightspan.training.checkpoints import latest, load_state
from lightspan_testing.scripted import ScriptedServer

pytestmark = pytest.mark.slow

Make = Callable[..., Any]


def trainer(rl: Make, folder: Path, **options: Any) -> Trainer:
    """Return a trainer with 8 rollouts per step, each with one call of the helper."""
    algorithm = rl(**options.pop("algorithm", {}))
    return Trainer(algorithm, folder=folder, reporter=SilentReporter(), **options)


def test_a_run_stops_after_the_batch_and_goes_on_with_a_larger_limit(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Check that the last step is saved without a due checkpoint, and calls are counted over
    resumes.
    """
    with ScriptedServer("scripted help") as server:
        tasks = ask(4, url=server.url)
        first = trainer(rl, tmp_path / "run", steps=3, max_frozen_calls=15, checkpoint_every=9)
        with pytest.raises(BudgetError) as stopped:
            first.fit(apps.asks_elsewhere, tasks)
        assert len(server.requests) == 16
        found = latest(tmp_path / "run" / "checkpoints")
        assert found is not None
        assert load_state(found).step == 2
        assert str(stopped.value) == (
            "after step 2 the run's frozen agents have made 16 calls to endpoints, and "
            f"max_frozen_calls is 15; {tmp_path / 'run'} keeps what was learned: go on with "
            "resume=True (--resume) and a larger max_frozen_calls, or with None for no limit. "
            'Calls to our own engine (frozen="base", "shared") are free'
        )
        again = trainer(rl, tmp_path / "run", steps=3, max_frozen_calls=15)
        with pytest.raises(BudgetError, match=r"after step 2 .* have made 16 calls"):
            again.fit(apps.asks_elsewhere, tasks, resume=True)
        assert len(server.requests) == 16
        larger = trainer(rl, tmp_path / "run", steps=3, max_frozen_calls=24)
        assert larger.fit(apps.asks_elsewhere, tasks, resume=True).steps == 3
        assert len(server.requests) == 24


def test_evaluations_count_too(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    with ScriptedServer("scripted help") as server:
        train, val = ask(2, url=server.url), ask(3, held=1, url=server.url)
        limited = trainer(rl, tmp_path / "run", steps=1, max_frozen_calls=2)
        with pytest.raises(BudgetError, match=r"after step 0 .* have made 3 calls"):
            limited.fit(apps.asks_elsewhere, train, val)
        assert len(server.requests) == 3


@pytest.mark.parametrize("frozen", ["base", "endpoint"])
def test_calls_to_our_own_engine_are_free(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, frozen: str
) -> None:
    """Check that the checker's calls are free with the starting weights, and count with an
    `LLM`.
    """
    with ScriptedServer("fine") as server:
        where = LLM(base_url=server.url, model="big") if frozen == "endpoint" else "base"
        limited = trainer(
            rl, tmp_path / "run", steps=1, max_frozen_calls=0, algorithm={"frozen": where}
        )
        if frozen == "base":
            assert limited.fit(apps.two, ask(2)).steps == 1
        else:
            with pytest.raises(BudgetError, match=r"after step 0 .* have made 1 calls"):
                limited.fit(apps.two, ask(2), ask(1, held=1))


def test_the_last_step_does_not_withhold_the_model(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Check that only an evaluation that was left out is an error, and that it can be made up."""
    with ScriptedServer("scripted help") as server:
        train, val = ask(2, url=server.url), ask(3, held=1, url=server.url)
        done = trainer(rl, tmp_path / "done", steps=1, max_frozen_calls=2)
        result = done.fit(apps.asks_elsewhere, train)
        assert (result.steps, result.model) == (1, tmp_path / "done" / "model")
        cut = trainer(rl, tmp_path / "cut", steps=1, max_frozen_calls=4)
        with pytest.raises(BudgetError, match=r"after step 1 .* have made 11 calls"):
            cut.fit(apps.asks_elsewhere, train, val)
        assert (tmp_path / "cut" / "model" / "config.json").is_file()
        assert cut.folder.read_result() is None
        again = trainer(rl, tmp_path / "cut", steps=1, max_frozen_calls=14)
        evaluations = again.fit(apps.asks_elsewhere, train, val, resume=True).evaluations
        assert [each.step for each in evaluations] == [0, 1]
        assert len(server.requests) == 8 + 14
