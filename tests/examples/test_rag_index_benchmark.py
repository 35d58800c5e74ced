"""`benchmarks/rag_index.py`: the same data for both sides, and figures of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(FOLDER))
    import rag_index

    sys.path.remove(str(FOLDER))
    return rag_index


@pytest.fixture(autouse=True)
def small(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORDS", 500)
    monkeypatch.setattr(bench, "PHRASES", 200)


def test_both_sides_find_the_same(bench: Any, tmp_path: Path) -> None:
    asked = bench.queries(20)
    assert asked == bench.queries(20)
    assert {len(query.split()) for query in asked} <= set(range(3, 9))
    measured = {}
    for side in bench.SIDES:
        built = bench.measure_building(side, tmp_path / side, 300)
        assert built["folder_mib"] > 0
        measured[side] = bench.measure_searching(side, tmp_path / side, asked)
        assert all(len(found) == bench.BEST for found in measured[side]["best"])
        assert 0 < measured[side]["p50_ms"] <= measured[side]["p99_ms"]
    bench._check(measured["ours"]["best"], measured["peer"]["best"])
