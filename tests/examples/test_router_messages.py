"""Test the router's tasks: their number and topics, and that splits share no words."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from router_example.messages import SPLITS, Split, tasks
from router_example.phrasings import DEPARTMENTS, PRODUCTS
from router_example.prompts import ANSWERED, ROUTED
from router_example.reward import score


@pytest.mark.parametrize(
    ("split", "count", "phrasings", "products"),
    [("train", 384, 48, 40), ("dev", 128, 16, 12), ("test", 320, 40, 32)],
)
def test_sizes(split: Split, count: int, phrasings: int, products: int) -> None:
    made = tasks(split)
    assert made == tasks(split)
    assert len({task["id"] for task in made}) == len({task["message"] for task in made}) == count
    assert set(Counter(task["phrasing"] for task in made).values()) == {8}
    assert len({task["phrasing"] for task in made}) == phrasings
    assert len({task["product"] for task in made}) == products
    assert Counter(task["department"] for task in made) == dict.fromkeys(DEPARTMENTS, count // 4)


@pytest.mark.parametrize(("one", "other"), list(combinations(SPLITS, 2)))
def test_splits_share_neither_phrasing_nor_product(one: Split, other: Split) -> None:
    first, second = tasks(one), tasks(other)
    assert {task["phrasing"] for task in first}.isdisjoint(task["phrasing"] for task in second)
    assert {task["product"] for task in first}.isdisjoint(task["product"] for task in second)
    # not even a message that differs from another in the product alone
    bare = [{t["message"].replace(t["product"], "…") for t in split} for split in (first, second)]
    assert bare[0].isdisjoint(bare[1])


def test_what_agents_are_shown_is_about_no_task() -> None:
    shown = {message for message, _ in (*ROUTED, *ANSWERED)}
    messages = {task["message"] for split in SPLITS for task in tasks(split)}
    assert shown.isdisjoint(messages)
    assert [(p, m) for p in PRODUCTS for m in shown if f" {p}" in m] == []
    assert {said for _, said in ANSWERED}.isdisjoint(PRODUCTS)
    assert sorted(said for _, said in ROUTED) == sorted(DEPARTMENTS)


@pytest.mark.parametrize(
    ("department", "product", "expected"),
    [
        ("payment", "quilt", {"reward": 1.0, "department": 1.0, "product": 1.0}),
        ("payment", "the quilt", {"reward": 0.5, "department": 1.0, "product": 0.0}),
        (None, "quilt", {"reward": 0.5, "department": 0.0, "product": 1.0}),
        ("return", "", {"reward": 0.0, "department": 0.0, "product": 0.0}),
    ],
)
def test_the_reward(department: str | None, product: str, expected: dict[str, float]) -> None:
    task = {"id": "t", "message": "m", "phrasing": "p"}
    asked = {**task, "department": "payment", "product": "quilt"}
    final = {"message": "m", "department": department, "product": product, "answer": ""}
    assert score(final, asked) == expected  # type: ignore[arg-type]
