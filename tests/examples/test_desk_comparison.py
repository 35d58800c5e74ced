"""Test the table of the help desk's comparison, and that the page of evidence contains it."""

from __future__ import annotations

from pathlib import Path

from desk_example import comparison
from desk_example.app import PROMPT
from desk_example.candidates import CANDIDATES, GOOD
from desk_example.comparison import interval, table
from desk_example.training import held_out_tasks

ROOT = Path(__file__).parents[2]


def test_intervals() -> None:
    assert interval([[0.5] * 40] * 5) == (0.5, 0.5)
    low, high = interval([[0.0, 1.0] * 20] * 5)
    assert 0.3 < low < 0.4 < 0.6 < high < 0.7
    # orders that differ widen it
    wider = interval([[0.0] * 40, [1.0] * 40, [0.0] * 40, [1.0] * 40, [1.0] * 40])
    assert wider[1] - wider[0] > high - low


def test_the_page_shows_what_was_measured() -> None:
    measured = comparison.read(ROOT / "examples" / "desk" / "measured.jsonl")
    assert set(measured.answers) == {PROMPT, *CANDIDATES}
    page = (ROOT / "docs" / "evidence" / "desk.md").read_text("utf-8")
    assert table(measured) in page
    assert table(measured, replayed=True) in page
    assert table(measured, GOOD) in page
    held_out = len(held_out_tasks())
    assert {len(each.held_out) for each in measured.answers.values()} == {held_out}
    assert {len(each.held_out) for each in measured.searches} == {held_out}
    # a search's held-out rewards are those of the text that it chose: nothing is sampled
    differing = [
        (a != b)
        for each in measured.searches
        for a, b in zip(each.held_out, measured.answers[each.chosen].held_out, strict=True)
    ]
    assert sum(differing) <= len(differing) / 50
