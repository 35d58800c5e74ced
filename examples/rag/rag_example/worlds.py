"""Generated worlds: fictional people, places, companies and works, with documents and questions.

A world is a set of facts about named entities. Each fact is one short passage, titled with its
entity ("Ada", "Born in Alder."). A question asks for the last of two or three linked facts: "What
is the birthplace of the author of Winter?". It says *birthplace* where the documents say *born*: a
search finds the passage only with the documents' word.

Each world has its own passages and index. Splits are by fact and by question: each pair of linked
names belongs to one split (`pair_split`), and so does each question (`question_split`). So no
passage and no question of test occurs in train, in dev or in the demonstrations, which come from
further worlds of train. All splits share names, relations and phrasing: each chain of relations is
asked about in every split, with different names.

The seed determines everything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

from rag_example import names
from rag_example.index import Index, Passage
from rag_example.names import Kind

Split: TypeAlias = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

WORLDS: Mapping[Split, int] = {"train": 20, "dev": 12, "test": 18}
"""Number of worlds per split."""

QUESTIONS: Mapping[Split, int] = {"train": 150, "dev": 50, "test": 50}
"""Number of questions per world, half of them with two hops and half with three.

A world of dev or test has a quarter of the possible questions of a world of train.
"""

HOPS = (2, 3)

HELD_OUT: Mapping[Split, int] = {"dev": 4, "test": 4}
"""Number of names, of the 24 that can start a chain of relations, whose questions belong to dev and
to test. The questions of all other names belong to train.
"""


class Task(TypedDict):
    """A question as it is stored; the app gets `question` and the documents."""

    id: str
    question: str
    answers: list[str]
    """The gold answer, followed by its aliases."""
    hops: int
    """Number of facts that lead to the answer."""
    documents: str
    """Path of the index, relative to the data folder."""


@dataclass(frozen=True)
class Relation:
    """A relation of two entities, with its words in questions and in documents."""

    asked: str
    """Word in questions, as in "the birthplace of ..."."""
    told: str
    """Words in passages, as in "Born in ..."; a search needs the first of them."""
    subject: Kind
    object: Kind

    @property
    def keyword(self) -> str:
        """The word that a search needs."""
        return self.told.split()[0].lower()


RELATIONS = (
    Relation("birthplace", "Born in", "person", "place"),
    Relation("debut", "Known for", "person", "work"),
    Relation("employer", "Works for", "person", "company"),
    Relation("mayor", "Governed by", "place", "person"),
    Relation("founder", "Started by", "company", "person"),
    Relation("seat", "Based in", "company", "place"),
    Relation("author", "Written by", "work", "person"),
    Relation("publisher", "Printed by", "work", "company"),
)
"""All relations. None links names of one kind, because a search for Ben would then also find "Ada:
Married to Ben.".
"""


@dataclass(frozen=True)
class Fact:
    """A fact, with the passage that states it."""

    subject: str
    relation: Relation
    object: str

    @property
    def text(self) -> str:
        """The text of the passage, without its title."""
        return f"{self.relation.told} {self.object}."


@dataclass(frozen=True)
class World:
    """Entities and facts; `facts` is (subject, relation) → fact."""

    name: str
    split: Split
    facts: Mapping[tuple[str, Relation], Fact]

    def passages(self) -> list[Passage]:
        """Return the documents in random order."""
        told = sorted(self.facts.values(), key=lambda fact: (fact.subject, fact.relation.asked))
        random.Random(f"passages {self.name}").shuffle(told)
        return [
            Passage(f"{self.name}-{number:05d}", fact.subject, fact.text)
            for number, fact in enumerate(told)
        ]


@dataclass(frozen=True)
class Question:
    """A question, as the facts that lead to its answer, in the order in which they are searched
    for.
    """

    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """The question as a sentence."""
        asked = " of the ".join(fact.relation.asked for fact in reversed(self.facts))
        word = "Who" if self.facts[-1].relation.object == "person" else "What"
        return f"{word} is the {asked} of {self.facts[0].subject}?"

    @property
    def answer(self) -> str:
        """The gold answer."""
        return self.facts[-1].object


def generate(
    data_dir: Path,
    *,
    seed: int = 0,
    worlds: Mapping[Split, int] = WORLDS,
    questions: Mapping[Split, int] = QUESTIONS,
) -> dict[Split, list[Task]]:
    """Write the indexes and questions of every split to `data_dir`, and return the tasks.

    The questions of all worlds of a split are mixed in random order.
    """
    tasks: dict[Split, list[Task]] = {}
    for split, count in worlds.items():
        unordered: list[Task] = []
        for number in range(count):
            world = make_world(f"{split}-{number:02d}", split, seed=seed)
            Index.build(world.passages()).save(data_dir / _documents(world))
            unordered += _tasks(world, make_questions(world, questions[split], seed=seed))
        tasks[split] = random.Random(f"order {seed} {split}").sample(unordered, len(unordered))
        lines = "".join(f"{json.dumps(task)}\n" for task in tasks[split])
        (data_dir / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tasks


def load(data_dir: Path, split: Split) -> list[Task]:
    """Read the tasks that `generate` wrote."""
    text = (data_dir / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def pair_split(subject: str, object: str) -> Split:
    """Return the split of a fact with these two names, in either order.

    A sixth of all pairs is for dev and a sixth for test.
    """
    number = sum(names.NAMES[kind].index(name) for kind, name in _kinds(subject, object))
    shares: dict[int, Split] = {0: "dev", 1: "test"}
    return shares.get(number % 6, "train")


def question_split(facts: Sequence[Fact]) -> Split:
    """Return the split of a question, by its relations and its name: the subject of its first fact.

    These are the words of the question, so the answer does not matter.
    """
    return _starts(tuple(fact.relation for fact in facts)).get(facts[0].subject, "train")


@cache
def _starts(relations: tuple[Relation, ...]) -> Mapping[str, Split]:
    """Return name → split, for the names whose questions with these relations belong to dev or
    test.

    The names are drawn at random. If their index decided, as in `pair_split`, a question's words
    would give a hint at its answer.
    """
    asked = " ".join(relation.asked for relation in relations)
    wanted = [split for split, count in HELD_OUT.items() for _ in range(count)]
    pool = names.NAMES[relations[0].subject]
    drawn = random.Random(f"held out {asked}").sample(pool, len(wanted))
    return dict(zip(drawn, wanted, strict=True))


def _kinds(*entities: str) -> Iterator[tuple[Kind, str]]:
    for name in entities:
        yield next(kind for kind in names.KINDS if name in names.NAMES[kind]), name


def make_world(name: str, split: Split, *, seed: int) -> World:
    """Return the world that `name` and `seed` determine, with facts of the split."""
    rng = random.Random(f"world {seed} {name}")
    facts: dict[tuple[str, Relation], Fact] = {}
    for relation in RELATIONS:
        for subject in names.NAMES[relation.subject]:
            linked = _linked(subject, names.NAMES[relation.object], split, rng)
            facts[subject, relation] = Fact(subject, relation, linked)
    return World(name, split, facts)


def _linked(subject: str, objects: Sequence[str], split: Split, rng: random.Random) -> str:
    return rng.choice([name for name in objects if pair_split(subject, name) == split])


def make_questions(world: World, count: int, *, seed: int) -> list[Question]:
    """Return `count` different questions of the world's split in random order, half of them with
    two hops.

    Raises:
        ValueError: the world has fewer questions.
    """
    rng = random.Random(f"questions {seed} {world.name}")
    questions: list[Question] = []
    for number, hops in enumerate(HOPS):
        wanted = count * (number + 1) // len(HOPS) - count * number // len(HOPS)
        chains = list(_chains(world, hops))
        if wanted > len(chains):
            raise ValueError(f"world {world.name} has {len(chains)} questions of {hops} hops")
        questions += rng.sample(chains, wanted)
    rng.shuffle(questions)
    return questions


def _chains(world: World, hops: int) -> Iterator[Question]:
    """Yield every question of the world's split whose facts never return to an earlier entity."""
    for fact in world.facts.values():
        for facts in _longer(world, (fact,), hops):
            if question_split(facts) == world.split:
                yield Question(facts)


def _longer(world: World, facts: tuple[Fact, ...], hops: int) -> Iterator[tuple[Fact, ...]]:
    if len(facts) == hops:
        yield facts
        return
    visited = {facts[0].subject, *(fact.object for fact in facts)}
    for relation in RELATIONS:
        following = world.facts.get((facts[-1].object, relation))
        if following is not None and following.object not in visited:
            yield from _longer(world, (*facts, following), hops)


def _tasks(world: World, questions: Sequence[Question]) -> list[Task]:
    return [
        Task(
            id=f"{world.name}-{number:04d}",
            question=question.text,
            answers=[question.answer],
            hops=len(question.facts),
            documents=_documents(world),
        )
        for number, question in enumerate(questions)
    ]


def _documents(world: World) -> str:
    return f"{world.name}-index"
