"""What the help desk's comparison makes of its measurements, and that the README shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from desk_example import comparison
from desk_example.app import PROMPT
from desk_example.candidates import CANDIDATES, GOOD
from desk_example.comparison import Answers, Measured, Search, interval, table
from desk_example.training import held_out_tasks

DESK = Path(__file__).parents[2] / "examples" / "desk"


def answers(train: str = "0" * 48, held_out: str = "0" * 80, text: str = "") -> Answers:
    return Answers(text=text, train=train, held_out=held_out)


@pytest.fixture
def one_is_good() -> dict[str, Answers]:
    found = {text: answers(text=text) for text in (PROMPT, *CANDIDATES)}
    found[CANDIDATES[7]] = answers("1" * 48, "1" * 80, CANDIDATES[7])
    return found


def test_intervals() -> None:
    assert interval([[0.5] * 40] * 5) == (0.5, 0.5)
    low, high = interval([[0.0, 1.0] * 20] * 5)
    assert 0.3 < low < 0.4 < 0.6 < high < 0.7
    # orders that differ widen it
    wider = interval([[0.0] * 40, [1.0] * 40, [0.0] * 40, [1.0] * 40, [1.0] * 40])
    assert wider[1] - wider[0] > high - low


def test_the_table(one_is_good: dict[str, Answers]) -> None:
    searches = [
        Search(
            order=order,
            begins=PROMPT,
            chosen=CANDIDATES[7],
            rollouts=190,
            reflections=12,
            candidates=3,
            held_out="1" * 80,
        )
        for order in (0, 1)
    ]
    lines = table(Measured(one_is_good, searches)).splitlines()
    assert lines[2] == "| GEPA | 1.000 1.000 | 1.000 (1.000..1.000) |  |"
    assert "| at random: the mean of the list | 0.042 0.042 | 0.042 " in lines[-2]
    assert lines[-1] == (
        "| the prompt as it was | 0.000 0.000 | 0.000 (0.000..0.000) | +1.000 (+1.000..+1.000) |"
    )


def test_the_readme_shows_what_was_measured() -> None:
    measured = comparison.read(DESK / "measured.jsonl")
    assert set(measured.answers) == {PROMPT, *CANDIDATES}
    readme = (DESK / "README.md").read_text("utf-8")
    assert table(measured) in readme
    assert table(measured, replayed=True) in readme
    assert table(measured, GOOD) in readme
    held_out = len(held_out_tasks())
    assert {len(each.held_out) for each in measured.answers.values()} == {held_out}
    assert {len(each.held_out) for each in measured.searches} == {held_out}
    # with the model, or from what it had answered: the same searches
    real = {e.order: e for e in measured.searches if e.begins == PROMPT and not e.replayed}
    again = {e.order: e for e in measured.searches if e.begins == PROMPT and e.replayed}
    assert set(real) == set(comparison.ORDERS) < set(again) == set(comparison.MORE_ORDERS)
    for order, each in real.items():
        assert (each.chosen, each.rollouts) == (again[order].chosen, again[order].rollouts)
    # a search's held-out rewards are those of the text that it chose: nothing is sampled
    differing = [
        (a != b)
        for each in measured.searches
        for a, b in zip(each.held_out, measured.answers[each.chosen].held_out, strict=True)
    ]
    assert sum(differing) <= len(differing) / 50
