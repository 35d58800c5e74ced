"""Tests of the pages of a long table, and of shortened ids."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import ConfigError
from lightspan_tools.pagination import Columns, Page, TableRow, short_ids, shown_rows, table_lines

ROWS = [
    TableRow(
        row_id=f"run-0abc-{step}-{index}",
        status="failed" if (step, index) == (3, 1) else "succeeded",
        reward=None if (step, index) == (3, 1) else (step * 7 + index) % 5 / 4,
        agents={"writer": 1} if step % 2 else {"checker": 1, "editor": 2},
        before=f"{step:>4}  ",
    )
    for step in range(6)
    for index in range(2)
]


def page(**options: object) -> list[str]:
    return list(table_lines(ROWS, Page(**options), "rollout", "step  "))  # type: ignore[arg-type]


def test_the_last_rows_are_shown_and_how_to_see_others() -> None:
    assert page(limit=3) == [
        "rollout   step  status     reward  calls  agents",
        "0abc-4-1     4  succeeded       1      3  checker, editor",
        "0abc-5-0     5  succeeded       0      1  writer",
        "0abc-5-1     5  succeeded    0.25      1  writer",
        "the last 3 of 12 rollouts; --limit 0 shows all, "
        "--sort reward|step|agent and --status choose others",
    ]
    assert len(page(limit=0)) == len(page(limit=12)) == 13


def test_the_lowest_rewards_first_and_before_them_those_without() -> None:
    assert [line.split()[:4] for line in page(sort="reward", limit=3)[1:4]] == [
        ["0abc-3-1", "3", "failed", "-"],
        ["0abc-0-0", "0", "succeeded", "0"],
        ["0abc-2-1", "2", "succeeded", "0"],
    ]


def test_unrated_attempts_of_production_are_last() -> None:
    desk = Columns(service="desk")
    rows = [
        TableRow(row_id=f"at-{n}", status="succeeded", reward=reward, columns=desk)
        for n, reward in enumerate([None, 0.5, None, -1.0, 0.0])
    ]
    shown = shown_rows(rows, Page(sort="reward", limit=4))
    assert [row.reward for row in shown] == [-1.0, 0.0, 0.5, None]


def test_by_agent() -> None:
    agents = [line.split("  ")[-1] for line in page(sort="agent", limit=0)[1:]]
    assert agents == ["checker, editor"] * 6 + ["writer"] * 6


def test_by_status() -> None:
    assert [line.split()[0] for line in page(status="failed")] == ["rollout", "0abc-3-1"]
    assert page(status="lost") == ["no rollout is lost; there are: failed 1, succeeded 11"]


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="not -1"):
        Page(limit=-1)


@given(st.sets(st.text("ab1-", min_size=1, max_size=12), min_size=1, max_size=30))
def test_short_ids_are_ends_of_one_id_alone(ids: set[str]) -> None:
    short = short_ids(ids)
    assert short.keys() == ids
    for name, end in short.items():
        assert end == name or [other for other in ids if other.endswith(end)] == [name]


def test_no_short_id_is_an_option_of_the_command() -> None:
    ids = {f"run-ab{n}cd-0-1-0-0" for n in range(3)} | {f"run-ab-0-1-{n}-0-0" for n in range(3)}
    assert not any(end.startswith("-") for end in short_ids(ids).values())
