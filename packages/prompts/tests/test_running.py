"""Tests of reading a search that has not ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan_prompts.search.candidates import CANDIDATES, JOURNAL
from lightspan_prompts.search.running import read_running_search, read_running_searches
from lightspan_testing.scripted import ScriptedServer
from packages.prompts.tests.made_up import World, apo, gepa, search


@pytest.mark.parametrize("make", [gepa, apo])
async def test_a_log_has_the_candidates_and_proposals_of_the_result(
    make: Callable[..., Any], server: ScriptedServer, tmp_path: Path
) -> None:
    assert read_running_search(tmp_path) is None
    assert read_running_searches(tmp_path) == {}
    result = await search(make(server), World(tmp_path))
    running = read_running_search(tmp_path)
    assert running is not None
    assert len(running.candidates) >= 2
    expected = {str(each.templates): each for each in result.candidates}
    for candidate in running.candidates:
        other = expected[str(candidate.templates)]
        assert candidate.rewards == other.rewards
        assert candidate.again == other.again
        assert candidate.mean == pytest.approx(other.mean)
        assert candidate.is_whole == other.is_whole
    assert running.proposals == result.proposals
    assert (running.rollouts, running.reflections) == (result.rollouts, result.reflections)
    assert running.tokens == result.tokens
    assert read_running_searches(tmp_path) == {}  # it has a result
    (tmp_path / JOURNAL / CANDIDATES).unlink()
    assert read_running_searches(tmp_path) == {"": running}
