"""Test `benchmarks/rag_index.py`: both sides get the same data, and both are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import rag_index


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rag_index, "WORDS", 500)
    monkeypatch.setattr(rag_index, "PHRASES", 200)


def test_both_sides_find_the_same(tmp_path: Path) -> None:
    asked = rag_index.queries(20)
    assert asked == rag_index.queries(20)
    assert {len(query.split()) for query in asked} <= set(range(3, 9))
    measured = {}
    for side in rag_index.SIDES:
        built = rag_index.measure_building(side, tmp_path / side, 300)
        assert built["folder_mib"] > 0
        measured[side] = rag_index.measure_searching(side, tmp_path / side, asked)
        assert all(len(found) == rag_index.BEST for found in measured[side]["best"])
        assert 0 < measured[side]["p50_ms"] <= measured[side]["p99_ms"]
    rag_index._check(measured["ours"]["best"], measured["peer"]["best"])
