"""Generated worlds: a schema, three databases with that schema, and questions with gold SQL.

A world is a schema of two or three tables, the second of which references the first. Each schema is
filled three times with different rows (*populations*), into three SQLite files; an answer must be
right on all three. A question's values come from the first population. A question is kept only if
its answer differs between the populations, and if every mistake of `queries.mistakes` gives another
answer on at least one of them: `>` for `>=` is always caught.

Splits are by schema: each pair of linked tables belongs to one split (`schema_split`), so no two
linked tables of a test schema are linked in a schema of train or dev. Each query belongs to one
split too (`query_split`), so that no short question about a single table is in two splits.
Demonstrations use the queries and schemas of train. All splits share the vocabulary (table names,
column names, values of text columns; see `names`) and the phrasing of questions. `overlap` measures
this for generated data.

The seed determines everything.
"""

from __future__ import annotations

import json
import random
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from sql_example import names
from sql_example.database import Value
from sql_example.queries import Aggregate, Condition, Operator, Query, mistakes

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

POPULATIONS = 3
"""Number of databases per schema."""

WORLDS: Mapping[Split, int] = {"train": 200, "dev": 40, "test": 60}
"""Number of schemas per split."""

QUESTIONS_PER_WORLD = 10
"""Number of questions per schema."""

_MAX_ATTEMPTS = 5_000
_ROWS = (7, 14)


class Task(TypedDict):
    """A question as it is stored; `reward` needs all of it, the app gets the part `AppInput`."""

    id: str
    question: str
    schema: str
    databases: list[str]
    """Database files, relative to the data folder; the app gets the first."""
    gold: str
    ordered: bool


class AppInput(TypedDict):
    """The part of a task that the app gets."""

    question: str
    schema: str
    db: str


@dataclass(frozen=True)
class Table:
    """A table: `id`, a label, numbers, texts, and a reference to `parent` unless that is None."""

    name: str
    label: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    parent: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the order of the database."""
        reference = (f"{self.parent}_id",) if self.parent else ()
        return ("id", self.label, *self.numbers, *self.texts, *reference)


@dataclass(frozen=True)
class World:
    """A schema, with the possible values of each text column."""

    name: str
    split: Split
    tables: tuple[Table, ...]
    values: Mapping[str, tuple[str, ...]]

    @property
    def schema(self) -> str:
        """The schema as text for a model; it equals `database.schema_text` except for the order of
        tables.
        """
        return "\n".join(f"table {table.name}: {' '.join(table.columns)}" for table in self.tables)

    def files(self, data_dir: Path, populations: int = POPULATIONS) -> list[Path]:
        """Return the paths of the world's databases."""
        return [data_dir / "databases" / f"{self.name}-{i}.sqlite" for i in range(populations)]


@dataclass(frozen=True)
class Question:
    """A question with the query that answers it."""

    text: str
    query: Query


def generate(
    data_dir: Path,
    *,
    seed: int = 0,
    worlds: Mapping[Split, int] = WORLDS,
    questions_per_world: int = QUESTIONS_PER_WORLD,
) -> dict[Split, list[Task]]:
    """Write the databases and `<split>.jsonl` of every split below `data_dir`, and return the
    tasks.
    """
    tasks: dict[Split, list[Task]] = {}
    for split, count in worlds.items():
        tasks[split] = []
        for world in make_worlds(split, seed=seed, count=count):
            paths = populate(world, data_dir, seed=seed)
            questions = _questions(world, paths, seed, questions_per_world)
            databases = [str(path.relative_to(data_dir)) for path in paths]
            tasks[split] += _tasks(world, questions, databases)
        lines = "".join(f"{json.dumps(task)}\n" for task in tasks[split])
        (data_dir / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tasks


def load(data_dir: Path, split: Split) -> list[Task]:
    """Read the tasks that `generate` wrote."""
    text = (data_dir / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def app_input(task: Task, data_dir: Path) -> AppInput:
    """Return the part of `task` that the app may see, without the gold query."""
    return {
        "question": task["question"],
        "schema": task["schema"],
        "db": str(data_dir / task["databases"][0]),
    }


def overlap(tasks: Sequence[Task], others: Sequence[Task]) -> dict[str, float]:
    """Return the shares of `tasks` whose schema, question or gold query occurs in `others`."""
    keys: tuple[Literal["schema", "question", "gold"], ...] = ("schema", "question", "gold")
    return {
        key: sum(task[key] in {other[key] for other in others} for task in tasks) / len(tasks)
        for key in keys
    }


def schema_split(parent: str, child: str) -> Split:
    """Return the split of a schema with these two linked tables, in either order.

    A tenth of all pairs is for dev and a tenth for test.
    """
    return _split(names.TABLES.index(parent) + names.TABLES.index(child))


def query_split(sql: str) -> Split:
    """Return the split of a gold query: a tenth is for dev and a tenth for test."""
    return _split(zlib.crc32(sql.encode()))


def _split(number: int) -> Split:
    shares: dict[int, Split] = {0: "dev", 1: "test"}
    return shares.get(number % 10, "train")


# Schemas


def make_worlds(split: Split, *, seed: int, count: int) -> list[World]:
    """Return `count` schemas of a split."""
    return [make_world(f"{split}-{index:03d}", split, seed=seed) for index in range(count)]


def make_world(name: str, split: Split, *, seed: int) -> World:
    """Return the schema of `split` that `name` and `seed` determine."""
    rng = random.Random(f"world {seed} {name}")
    size = 3 if rng.random() < 0.15 else 2
    table_names = _table_names(split, size, rng)
    labels = rng.sample(names.LABELS, size)
    numbers = iter(rng.sample(names.NUMBERS, 2 * size))
    texts = iter(rng.sample(sorted(names.TEXTS), 2 * size))
    tables = tuple(
        Table(
            name=table_names[position],
            label=labels[position],
            numbers=_take(numbers, 2 if position == 0 else 1),
            texts=_take(texts, 2 if position == 0 and rng.random() < 0.4 else 1),
            parent=table_names[0] if position == 1 else None,
        )
        for position in range(size)
    )
    columns = [column for table in tables for column in table.texts]
    values = {
        column: tuple(rng.sample(names.TEXTS[column], rng.randint(3, 4))) for column in columns
    }
    return World(name, split, tables, values)


def _table_names(split: Split, count: int, rng: random.Random) -> list[str]:
    while True:
        chosen = rng.sample(names.TABLES, count)
        if schema_split(*chosen[:2]) == split:
            return chosen


def _take(items: Iterator[str], count: int) -> tuple[str, ...]:
    return tuple(next(items) for _ in range(count))


# Populations


def populate(
    world: World, data_dir: Path, *, seed: int, populations: int = POPULATIONS
) -> list[Path]:
    """Write the SQLite files of `world`, replacing existing files, and return their paths."""
    paths = world.files(data_dir, populations)
    for index, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        rng = random.Random(f"population {seed} {world.name} {index}")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA page_size = 1024")
            connection.execute("PRAGMA synchronous = OFF")
            with connection:
                _fill(connection, world, rng)
    return paths


def _fill(connection: sqlite3.Connection, world: World, rng: random.Random) -> None:
    counts = rng.sample(range(*_ROWS), len(world.tables))
    rows_of = {table.name: rows for table, rows in zip(world.tables, counts, strict=True)}
    for table in world.tables:
        connection.execute(_create(table))
        rows = zip(*_column_values(table, world, rows_of, rng), strict=True)
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)


def _create(table: Table) -> str:
    columns = ["id INTEGER PRIMARY KEY", f"{table.label} TEXT NOT NULL"]
    columns += [f"{column} INTEGER NOT NULL" for column in table.numbers]
    columns += [f"{column} TEXT NOT NULL" for column in table.texts]
    if table.parent:
        columns.append(f"{table.parent}_id INTEGER NOT NULL REFERENCES {table.parent}(id)")
    return f"CREATE TABLE {table.name} ({', '.join(columns)})"


def _column_values(
    table: Table, world: World, rows_of: Mapping[str, int], rng: random.Random
) -> list[Sequence[Value]]:
    rows = rows_of[table.name]
    columns: list[Sequence[Value]] = [range(1, rows + 1), _labels(rows, rng)]
    columns += [rng.sample(names.RANGE, rows) for _ in table.numbers]
    columns += [rng.choices(world.values[column], k=rows) for column in table.texts]
    if table.parent:
        columns.append(rng.choices(range(1, rows_of[table.parent] + 1), k=rows))
    return columns


def _labels(count: int, rng: random.Random) -> list[str]:
    made: set[str] = set()
    while len(made) < count:
        made.add("".join(rng.choices(names.SYLLABLES, k=3)).capitalize())
    return rng.sample(sorted(made), count)


# Questions


class Populations:
    """Open databases of a world, for the generator's own queries."""

    def __init__(self, world: World, paths: Sequence[Path]) -> None:
        self.world = world
        self._connections = [sqlite3.connect(path) for path in paths]

    def __enter__(self) -> Populations:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    def values(self, table: str, column: str) -> list[Value]:
        """Return the values of a column in the first population."""
        return [value for (value,) in self._rows(0, f"SELECT {column} FROM {table} ORDER BY id")]

    def results(self, query: Query) -> list[object]:
        """Return the results of `query` on each population, in a form that can be compared with
        `==`.
        """
        answers: list[object] = []
        for index in range(len(self._connections)):
            try:
                rows = self._rows(index, query.sql())
            except sqlite3.Error:
                rows = [("error",)]
            answers.append(rows if query.ordered else sorted(rows))
        return answers

    def _rows(self, index: int, sql: str) -> list[tuple[Value, ...]]:
        return self._connections[index].execute(sql).fetchall()


def make_question(populations: Populations, rng: random.Random) -> Question:
    """Return a random question of the world's split that is worth asking.

    Its answer differs between populations, and every mistake changes the answer.

    Raises:
        RuntimeError: no such question was found.
    """
    for _ in range(_MAX_ATTEMPTS):
        (shape,) = rng.choices(list(_SHAPES), weights=list(_SHAPES.values()))
        question = shape(_Draw(populations, rng))
        if question and _worth_asking(question.query, populations):
            return question
    raise RuntimeError(f"no question worth asking about world {populations.world.name}")


def _questions(world: World, paths: Sequence[Path], seed: int, count: int) -> list[Question]:
    rng = random.Random(f"questions {seed} {world.name}")
    questions: dict[str, Question] = {}
    with Populations(world, paths) as populations:
        for _ in range(_MAX_ATTEMPTS):
            question = make_question(populations, rng)
            questions[question.text] = question
            if len(questions) == count:
                break
    return list(questions.values())


def _tasks(world: World, questions: Sequence[Question], databases: list[str]) -> list[Task]:
    return [
        Task(
            id=f"{world.name}-{number:02d}",
            question=question.text,
            schema=world.schema,
            databases=databases,
            gold=question.query.sql(),
            ordered=question.query.ordered,
        )
        for number, question in enumerate(questions)
    ]


def _worth_asking(query: Query, populations: Populations) -> bool:
    if query_split(query.sql()) != populations.world.split:
        return False
    answers = populations.results(query)
    if answers[0] in ([], [(0,)], [(None,)]) or len(answers) == answers.count(answers[0]) > 1:
        return False
    spoilt = mistakes(query).values()
    return all(populations.results(mistake) != answers for mistake in spoilt)


@dataclass(frozen=True)
class _Draw:
    """Random parts of a question."""

    populations: Populations
    rng: random.Random

    def table(self) -> Table:
        return self.rng.choice(self.populations.world.tables)

    def linked(self) -> tuple[Table, Table]:
        """Return a table and the table that it references."""
        parent, child = self.populations.world.tables[:2]
        return child, parent

    def number(self, table: Table) -> str:
        return self.rng.choice(table.numbers)

    def text(self, table: Table) -> str:
        return self.rng.choice(table.texts)

    def shown(self, table: Table) -> str:
        """Return a column to list."""
        return self.rng.choice((table.label, table.label, *table.numbers, *table.texts))

    def condition(self, table: Table) -> tuple[str, Condition]:
        """Return a condition in words, and the condition."""
        if self.rng.random() < 0.5:
            return self.equality(table)
        column = self.number(table)
        value = self.rng.choice(self.populations.values(table.name, column))
        assert isinstance(value, int)
        words, operator = self.rng.choice(_BOUNDS)
        return f"with {column} {words} {value}", Condition(column, operator, value)

    def equality(self, table: Table) -> tuple[str, Condition]:
        column = self.text(table)
        value = str(self.rng.choice(self.populations.values(table.name, column)))
        return f"with {column} {value}", Condition(column, "=", value)


_BOUNDS: tuple[tuple[str, Operator], ...] = (
    ("over", ">"),
    ("at least", ">="),
    ("under", "<"),
    ("at most", "<="),
)

_AGGREGATES: tuple[tuple[str, Aggregate], ...] = (
    ("average", "avg"),
    ("total", "sum"),
    ("smallest", "min"),
    ("largest", "max"),
)


def _count(draw: _Draw) -> Question:
    table = draw.table()
    return Question(f"How many {table.name} are there?", Query(table.name, aggregate="count"))


def _count_some(draw: _Draw) -> Question:
    table = draw.table()
    words, condition = draw.condition(table)
    query = Query(table.name, aggregate="count", condition=condition)
    return Question(f"How many {table.name} {words} are there?", query)


def _list_some(draw: _Draw) -> Question | None:
    table = draw.table()
    words, condition = draw.condition(table)
    column = draw.shown(table)
    if column == condition.column:
        return None
    text = f"Show the {column} of {table.name} {words}."
    return Question(text, Query(table.name, column, condition=condition))


def _aggregate(draw: _Draw) -> Question:
    table = draw.table()
    word, aggregate = draw.rng.choice(_AGGREGATES)
    column = draw.number(table)
    text = f"What is the {word} {column} of {table.name}?"
    return Question(text, Query(table.name, column, aggregate))


def _aggregate_some(draw: _Draw) -> Question:
    table = draw.table()
    word, aggregate = draw.rng.choice(_AGGREGATES)
    column = draw.number(table)
    words, condition = draw.equality(table)
    text = f"What is the {word} {column} of {table.name} {words}?"
    return Question(text, Query(table.name, column, aggregate, condition=condition))


def _top(draw: _Draw) -> Question:
    table = draw.table()
    column = draw.number(table)
    word, descending = draw.rng.choice((("highest", True), ("lowest", False)))
    limit = draw.rng.choice((1, 1, 2, 3))
    many = f"{limit} {table.name}" if limit > 1 else table.name
    text = f"Show the {table.label} of the {many} with the {word} {column}."
    query = Query(table.name, table.label, order=column, descending=descending, limit=limit)
    return Question(text, query)


def _order(draw: _Draw) -> Question:
    table = draw.table()
    column = draw.number(table)
    word, descending = draw.rng.choice((("descending", True), ("ascending", False)))
    text = f"Show the {table.label} of {table.name} by {word} {column}."
    return Question(text, Query(table.name, table.label, order=column, descending=descending))


def _distinct(draw: _Draw) -> Question:
    table = draw.table()
    column = draw.text(table)
    query = Query(table.name, column, distinct=True)
    return Question(f"Show the different {column} of {table.name}.", query)


def _count_distinct(draw: _Draw) -> Question:
    table = draw.table()
    column = draw.text(table)
    query = Query(table.name, column, aggregate="count", distinct=True)
    return Question(f"How many different {column} do {table.name} have?", query)


def _group(draw: _Draw) -> Question:
    table = draw.table()
    column = draw.text(table)
    query = Query(table.name, aggregate="count", group=column)
    return Question(f"How many {table.name} are there for each {column}?", query)


def _join_count(draw: _Draw) -> Question:
    child, parent = draw.linked()
    words, condition = draw.condition(parent)
    query = Query(child.name, aggregate="count", parent=parent.name, condition=condition)
    return Question(f"How many {child.name} belong to {parent.name} {words}?", query)


def _join_list(draw: _Draw) -> Question:
    child, parent = draw.linked()
    words, condition = draw.condition(parent)
    query = Query(child.name, child.label, parent=parent.name, condition=condition)
    return Question(f"Show the {child.label} of {child.name} of {parent.name} {words}.", query)


_SHAPES: Mapping[Callable[[_Draw], Question | None], float] = {
    _count: 0.5,
    _count_some: 3,
    _list_some: 3,
    _aggregate: 1.5,
    _aggregate_some: 1.5,
    _top: 2.5,
    _order: 1,
    _distinct: 1,
    _count_distinct: 1,
    _group: 1,
    _join_count: 0.8,
    _join_list: 0.8,
}
"""Function that makes a question of one shape → weight with which it is drawn."""
