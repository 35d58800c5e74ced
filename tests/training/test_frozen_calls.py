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
            with pytest.raises(BudgetError, match="have made 8 calls"):
                limited.fit(apps.two, ask(2))
