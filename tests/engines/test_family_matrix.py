"""Run the matrix of families (`benchmarks/families.py`) for a few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import families

    return families


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "Qwen3Moe"])
def test_exact_from_sampling_to_reload(families: Any, name: str) -> None:
    cells = families.check_family(name)
    assert list(cells) == list(families.CELLS)
    assert all(cell["error"] <= families.LIMIT for cell in cells.values()), cells


@pytest.mark.slow
def test_a_family_that_the_engine_refuses(families: Any) -> None:
    """It is trained all the same."""
    cells = families.check_family("Lfm2")
    assert "Lfm2ForCausalLM cannot be served" in cells["engine"]["refusal"]
    assert "refusal" in cells["adapter in the engine"]
    assert all(cells[name]["error"] <= families.LIMIT for name in ("learner", "LoRA", "export"))


def test_cells(families: Any) -> None:
    refusal, failure = {"refusal": "it cannot"}, {"failure": "TypeError: no"}
    cells = [{"error": 3.2e-6}, {"error": 0.02}, {"error": float("nan")}, refusal, failure]
    assert [families.is_wrong(cell) for cell in cells] == [False, True, True, False, True]
    assert families.clause("X cannot be served: it is odd. Use VLLM()") == (
        "X cannot be served: it is odd"
    )
