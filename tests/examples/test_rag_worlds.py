"""Test the generated data: splits without a common fact, multi-hop questions, and mistakes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from rag_example import names
from rag_example.demonstrations import (
    MISTAKE_RATES,
    demonstrate,
    research,
)
from rag_example.index import Index
from rag_example.reward import constant_answer_scores, score
from rag_example.worlds import (
    RELATIONS,
    SPLITS,
    Fact,
    Split,
    Task,
    World,
    generate,
    load,
    make_questions,
    make_world,
    pair_split,
    question_split,
)

SMALL: dict[Split, int] = {"train": 2, "dev": 1, "test": 1}
EACH: dict[Split, int] = dict.fromkeys(SPLITS, 31)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rag")
    generate(directory, seed=3, worlds=SMALL, questions=EACH)
    return directory


@pytest.fixture(scope="module")
def tasks(data_dir: Path) -> dict[Split, list[Task]]:
    return {split: load(data_dir, split) for split in SPLITS}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world("train-00", "train", seed=0)


@pytest.fixture(scope="module")
def built(world: World) -> Index:
    return Index.build(world.passages())


# --- splits ---------------------------------------------------------------------------------
def test_sizes_and_hops(tasks: dict[Split, list[Task]]) -> None:
    assert {split: len(found) for split, found in tasks.items()} == {
        "train": 62,
        "dev": 31,
        "test": 31,
    }
    assert Counter(task["hops"] for task in tasks["train"]) == {2: 30, 3: 32}
    assert Counter(task["hops"] for task in tasks["test"]) == {2: 15, 3: 16}


def test_equal_seeds_give_equal_data_and_other_seeds_do_not(
    tmp_path: Path, tasks: dict[Split, list[Task]]
) -> None:
    assert generate(tmp_path / "again", seed=3, worlds=SMALL, questions=EACH) == tasks
    other = generate(tmp_path / "other", seed=4, worlds=SMALL, questions=EACH)
    assert other["test"] != tasks["test"]
    assert make_world("w", "dev", seed=1).passages() == make_world("w", "dev", seed=1).passages()


def test_each_pair_of_names_belongs_to_one_split() -> None:
    pairs = itertools.product(names.NAMES["person"], names.NAMES["place"])
    found = Counter(pair_split(*pair) for pair in pairs)
    assert found == {"train": 384, "dev": 96, "test": 96}
    assert pair_split("Ada", "Alder") == pair_split("Alder", "Ada") == "dev"
    for split in SPLITS:
        for number in range(20):
            world = make_world(f"{split}-{number}", split, seed=0)
            assert {pair_split(fact.subject, fact.object) for fact in world.facts.values()} == {
                split
            }


def test_no_question_is_asked_in_two_splits(tmp_path: Path) -> None:
    """Check in the complete data that no two splits have a question with the same words."""
    asked = {
        split: {task["question"] for task in found} for split, found in generate(tmp_path).items()
    }
    for split, other in itertools.combinations(SPLITS, 2):
        assert not asked[split] & asked[other]
    imitated = {chat["messages"][1]["content"] for chat in demonstrate(4000, 0)}
    assert not imitated & (asked["dev"] | asked["test"])
    assert len(imitated & asked["train"]) > 500


def test_each_split_asks_the_same_kinds_of_questions() -> None:
    """Check that each split asks about every chain of relations, with its own names."""
    chains = [
        chain
        for hops in (2, 3)
        for chain in itertools.product(RELATIONS, repeat=hops)
        if all(one.object == other.subject for one, other in itertools.pairwise(chain))
    ]
    assert len(chains) == 17 + 34
    for chain in chains:
        found = Counter(
            question_split([Fact(name, relation, "") for relation in chain])
            for name in names.NAMES[chain[0].subject]
        )
        assert found == {"train": 16, "dev": 4, "test": 4}


# --- worlds and questions -------------------------------------------------------------------


def test_questions_are_chains_that_never_return(world: World) -> None:
    questions = make_questions(world, 300, seed=0)
    assert len({question.text for question in questions}) == 300
    for question in questions:
        visited = [question.facts[0].subject, *(fact.object for fact in question.facts)]
        assert len({*visited}) == len(visited) == len(question.facts) + 1
        for before, after in itertools.pairwise(question.facts):
            assert before.object == after.subject
            assert world.facts[after.subject, after.relation] == after


def test_no_constant_answer_scores_well() -> None:
    """Check that the best constant answer has a mean reward below 0.2."""
    worlds = [make_world(f"test-{number:02d}", "test", seed=0) for number in range(18)]
    questions = [question for world in worlds for question in make_questions(world, 50, seed=0)]
    candidates = [name for pool in names.NAMES.values() for name in pool]
    candidates += [" ".join(pool) for pool in names.NAMES.values()]
    scores = constant_answer_scores(candidates, [[question.answer] for question in questions])
    assert 0.1 <= max(scores.values()) < 0.2


# --- demonstrations -------------------------------------------------------------------------


def test_imitating_the_demonstrations_is_not_enough_and_no_mistake_is(
    world: World, built: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = make_questions(world, 400, seed=0)

    def mean() -> float:
        rng = random.Random(0)
        last = [research(question, built, rng)[-1]["content"] for question in questions]
        golds = [[question.answer] for question in questions]
        return sum(map(score, last, golds)) / len(questions)

    assert mean() < 0.5
    for mistake in MISTAKE_RATES:
        monkeypatch.setitem(MISTAKE_RATES, mistake, 0.0)  # type: ignore[arg-type]
    assert mean() == 1.0
