"""Test which weights `lightspan fork` chooses, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightspan.stores.memory import MemoryStore
from lightspan.training.folder import RunFolder
from lightspan_tools.forking import weights
from lightspan_tools.forking.weights import _Source, choose_weights, versions_used

CONFIG = {"model": "."}


def episode(*versions: tuple[int, int]) -> Any:
    """Return a rollout of one call with these (version, tokens)."""
    record = SimpleNamespace(versions=versions)
    return SimpleNamespace(calls=[SimpleNamespace(policy="policy", record=record)])


async def test_steps_that_ended_with_a_version() -> None:
    """Steps 2 and 4 of the run had no update; another run published in between."""
    async with MemoryStore() as store:
        for run_id, step in [("run", 0), ("run", 1), ("other", 1), ("run", 3), ("run", 5)]:
            await store.allot_version("policy", run_id, step)

        async def used(*versions: tuple[int, int]) -> Any:
            return await versions_used(store, "run", episode(*versions), ["policy", "unused"])

        assert await used((1, 9)) == {"policy": (1, range(1))}
        assert await used((1, 9), (2, 10)) == {"policy": (2, range(1, 3))}
        assert await used((4, 9)) == {"policy": (4, range(3, 5))}
        assert await used((3, 9)) == {"policy": (3, range(0))}  # of another run
        [(version, steps)] = (await used((5, 1))).values()
        assert (version, steps.start, 10**6 in steps) == (5, 5, True)


@pytest.mark.parametrize(
    ("used", "step", "is_exact"),
    [
        ({"policy": (2, range(1, 3))}, 2, True),  # step 2 had no update
        ({"policy": (2, range(1, 2))}, 2, False),
        ({"policy": (3, range(3, 9))}, 4, True),
        ({"policy": (3, range(5, 9))}, 4, False),
        ({"policy": (9, range(0))}, 4, False),  # unknown to the store: the newest
        ({"policy": (2, range(1, 3)), "other": (1, range(9))}, 2, True),
        ({"policy": (2, range(1, 3)), "other": (1, range(1))}, 2, False),
        ({}, 4, False),
    ],
)
def test_the_chosen_step(
    used: dict[str, tuple[int, range]],
    step: int,
    is_exact: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run keeps its starting weights, and those of steps 2 and 4."""
    kept = [_Source(0, "start"), _Source(2, "checkpoint", tmp_path), _Source(4, "checkpoint")]
    monkeypatch.setattr(weights, "_sources", lambda _: kept)
    chosen = choose_weights(RunFolder(tmp_path), CONFIG, [*used] or ["policy"], used)
    assert (chosen.step, chosen.is_exact) == (step, is_exact)
    assert ("which the rollout used" in chosen.text) == is_exact
