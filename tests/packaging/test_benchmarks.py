"""Test that benchmarks end with status 1 if they miss a target or lack what they compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _report

    return _report


@pytest.mark.parametrize(
    ("fields", "reached"),
    [
        ({"ours": 2.0, "theirs": 20.0, "at_least": 10}, True),
        ({"ours": 2.1, "theirs": 20.0, "at_least": 10}, False),
        ({"ours": 30.0, "theirs": 10.0, "at_least": 3, "more_is_better": True}, True),
        ({"ours": 29.0, "theirs": 10.0, "at_least": 3, "more_is_better": True}, False),
        ({"ours": 3.5, "theirs": 9.0, "at_least": 2, "at_most": 3.0}, False),
        ({"ours": 1.0, "at_least": 2}, False),
        ({"ours": 1.0}, None),
    ],
)
def test_whether_a_target_is_reached(
    report: Any, fields: dict[str, Any], reached: bool | None
) -> None:
    """Check that a ratio without its comparison misses its target; without a target there is
    None.
    """
    assert report.Figure(what="w", unit="ms", **fields).reached is reached


def test_finish_writes_json_and_says_what_was_missed(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = report.Figure(what="good", unit="ms", ours=1.0, at_most=2.0)
    bad = report.Figure(what="bad", unit="ms", ours=3.0, at_most=2.0)
    path = tmp_path / "figures.json"
    assert report.finish([good], None) == 0
    assert report.finish([good, bad], path) == 1
    assert "missed: bad" in capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]
    assert [figure["reached"] for figure in figures] == [True, False]
