"""Test the generated data: splits by schema, meaningful questions, and detected mistakes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from sql_example import names
from sql_example.database import execute
from sql_example.demonstrations import Demonstration, demonstrate
from sql_example.reward import constant_query_scores, execution_accuracy
from sql_example.worlds import (
    SPLITS,
    Split,
    Task,
    generate,
    load,
    make_worlds,
    overlap,
    query_split,
    schema_split,
)

SMALL: dict[Split, int] = {"train": 12, "dev": 6, "test": 6}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sql")
    generate(directory, seed=3, worlds=SMALL)
    return directory


@pytest.fixture(scope="module")
def tasks(data_dir: Path) -> dict[Split, list[Task]]:
    return {split: load(data_dir, split) for split in SMALL}


def test_equal_seeds_give_equal_data_and_other_seeds_do_not(
    tmp_path: Path, data_dir: Path, tasks: dict[Split, list[Task]]
) -> None:
    assert generate(tmp_path / "again", seed=3, worlds=SMALL) == tasks
    for path in sorted((data_dir / "databases").iterdir()):
        assert (tmp_path / "again" / "databases" / path.name).read_bytes() == path.read_bytes()
    assert generate(tmp_path / "other", seed=4, worlds=SMALL)["test"] != tasks["test"]


def test_no_schema_question_or_query_is_in_two_splits(tasks: dict[Split, list[Task]]) -> None:
    for split, other in itertools.permutations(tasks, 2):
        assert overlap(tasks[split], tasks[other]) == {"schema": 0.0, "question": 0.0, "gold": 0.0}


def test_each_pair_of_linked_tables_belongs_to_one_split() -> None:
    pairs = itertools.combinations(names.TABLES, 2)
    found = Counter(schema_split(*pair) for pair in pairs)
    assert found == {"train": 624, "dev": 76, "test": 80}
    assert schema_split("singers", "books") == schema_split("books", "singers")
    for split in SPLITS:
        for world in make_worlds(split, seed=0, count=100):
            parent, child = world.tables[:2]
            assert child.parent == parent.name
            assert schema_split(parent.name, child.name) == split == world.split


def test_each_query_belongs_to_one_split(tasks: dict[Split, list[Task]]) -> None:
    for split, found in tasks.items():
        assert {query_split(task["gold"]) for task in found} == {split}


def test_gold_queries_are_right_and_their_answers_vary(
    data_dir: Path, tasks: dict[Split, list[Task]]
) -> None:
    for task in tasks["test"]:
        assert execution_accuracy(task["gold"], task, data_dir) == 1.0
        answers = {execute(data_dir / name, task["gold"]).rows for name in task["databases"]}
        assert len(answers) > 1
        assert task["ordered"] == ("ORDER BY" in task["gold"])


def test_a_bound_off_by_one_is_caught(data_dir: Path, tasks: dict[Split, list[Task]]) -> None:
    swapped = {">": ">=", ">=": ">", "<": "<=", "<=": "<"}
    found = 0
    for task in itertools.chain(*tasks.values()):
        for operator, other in swapped.items():
            if f" {operator} " in task["gold"]:
                wrong = task["gold"].replace(f" {operator} ", f" {other} ")
                assert execution_accuracy(wrong, task, data_dir) == 0.0
                found += 1
    assert found > 20


def test_no_constant_query_scores(data_dir: Path, tasks: dict[Split, list[Task]]) -> None:
    candidates = [
        "SELECT 1",
        "SELECT 0",
        "SELECT NULL",
        "SELECT count(*) FROM x",
        "SELECT 1 LIMIT 0",
    ]
    candidates += [task["gold"] for task in itertools.chain(*tasks.values())]
    scores = constant_query_scores(candidates, tasks["test"], data_dir)
    assert max(scores.values()) <= 0.05
    assert scores["SELECT 1"] == 0.0
    assert scores[tasks["train"][0]["gold"]] == 0.0
    assert scores[tasks["test"][0]["gold"]] == pytest.approx(1 / 60)


@pytest.fixture(scope="module")
def demonstrations() -> list[Demonstration]:
    return demonstrate(400, seed=1)


def test_demonstrations_keep_to_train(demonstrations: list[Demonstration]) -> None:
    linked = 0
    for demonstration in demonstrations:
        if demonstration.agent != "check_query":
            text = demonstration.messages[0]["content"]
            parent, child = re.findall(r"^table (\w+):", text, re.MULTILINE)[:2]
            assert schema_split(parent, child) == "train"
            linked += 1
    assert linked > 300


def test_demonstrations_ask_nothing_that_dev_or_test_asks(
    demonstrations: list[Demonstration], tasks: dict[Split, list[Task]]
) -> None:
    asked = {task["question"] for split in ("dev", "test") for task in tasks[split]}
    for demonstration in demonstrations:
        assert not asked & set(demonstration.messages[0]["content"].splitlines())
