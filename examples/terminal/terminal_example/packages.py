"""Generated repair tasks: a small Python package with one bug, and tests that find it.

A package has two modules with two functions each. The docstring of a function says what it returns.
One function returns something else, and one of its tests fails. Splits are by kind of bug: the
kinds of the test split occur in no other (`bugs`). The seed determines everything.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType
from typing import Any, Final, Literal, TypeAlias, TypedDict

from terminal_example import bugs

Split: TypeAlias = Literal["train", "dev", "test", "sessions"]

COUNTS: Final[Mapping[Split, int]] = {"train": 40, "dev": 40, "test": 40}
PACKAGES: Final = ("shop", "farm", "bank", "club", "game", "trip", "mill", "port")
MODULES: Final = ("rules", "sums", "tools", "core", "rates", "stock", "plans", "units")
FUNCTIONS: Final = (
    *("price", "score", "load", "cost", "share", "rank", "stay", "limit", "bonus", "gain"),
    *("quota", "fee", "depth", "speed", "value", "claim", "total", "level", "grade", "span"),
    *("toll", "crop", "debt", "ratio", "charge", "reach", "delay", "surplus", "margin", "worth"),
)
PARAMETERS: Final = (
    *("width", "height", "count", "size", "days", "hours", "rate", "stock", "boxes", "guests"),
    *("seats", "lines", "points", "weeks", "units", "items"),
)
FORMS: Final = (
    *("{p} + {q}", "{p} - {q}", "{p} * {q}", "{p} // {c}", "{p} % {c}"),
    *("{p} * {q} + {c}", "{p} + {q} - {c}", "({p} + {q}) * {c}", "({p} - {q}) * {c}"),
    *("({p} + {q}) // {c}", "max({p}, {q})", "min({p}, {q})", "max({p} - {q}, {c})"),
    *("{p} < {q}", "{p} >= {q}", "{p} + {c} <= {q}"),
    *("{p} < {q} and {q} < {r}", "{p} <= {q} and {p} > {c}"),
)
"""Expressions: parameters p, q and r, constants c and d."""
INPUTS: Final = range(1, 21)
"""Arguments in tests."""


class Task(TypedDict):
    """A package with a bug."""

    id: str
    kind: str
    """Kind of the bug: a key of `bugs.TRAINED` or `bugs.HELD_OUT`."""
    package: str
    """Name of the package."""
    function: str
    """Name of the function with the bug."""
    failure: str
    """The line in which pytest names the failing test."""
    files: dict[str, str]
    """Path → text of the package's modules, one of which has the bug."""
    tests: dict[str, str]
    """Path → text of the tests."""
    path: str
    """Path of the module with the bug."""
    line: int
    """Number of the line with the bug."""
    parameters: list[str]
    right: str
    """Expression that the function should return: its docstring has it."""
    wrong: str
    """Expression that it returns."""


@dataclass(frozen=True)
class Function:
    """A function without a bug, and arguments that tell it from all mutants."""

    name: str
    parameters: tuple[str, ...]
    right: str
    inputs: tuple[tuple[int, ...], ...]

    def source(self, returned: str) -> str:
        """Return the source code of the function that returns the expression `returned`."""
        signature = f"def {self.name}({', '.join(self.parameters)}):"
        return f'{signature}\n    """Return {self.right}."""\n    return {returned}\n'

    def test(self, inputs: Sequence[tuple[int, ...]]) -> str:
        """Return the source code of a test of the function."""
        lines = [f"def test_{self.name}():"]
        for values in inputs:
            result = evaluate(self.right, self.parameters, values)
            called = f"{self.name}({', '.join(map(str, values))})"
            operator = "is" if isinstance(result, bool) else "=="
            lines.append(f"    assert {called} {operator} {result}")
        return "\n".join(lines) + "\n"


def generate(
    split: Split, *, seed: int = 0, count: int | None = None, apart: Collection[str] = ()
) -> list[Task]:
    """Return the tasks of a split.

    Args:
        count: number of tasks; None for `COUNTS`.
        apart: expressions that no bug of the split may be in.
    """
    number = COUNTS[split] if count is None else count
    rng = random.Random(f"{split} {seed}")
    kinds = bugs.HELD_OUT if split == "test" else bugs.TRAINED
    found: list[Task] = []
    while len(found) < number:
        kind = list(kinds)[len(found) % len(kinds)]
        if (task := _task(f"{split}-{len(found):04d}", kind, rng)) and task["right"] not in apart:
            found.append(task)
    return found


def evaluate(expression: str, parameters: Sequence[str], values: Sequence[int]) -> Any:
    """Return the value of a generated expression; None if it has none."""
    names = {"max": max, "min": min, **dict(zip(parameters, values, strict=True))}
    try:
        return eval(_compiled(expression), {"__builtins__": {}}, names)
    except ZeroDivisionError:
        return None


@lru_cache(maxsize=10_000)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<expression>", "eval")


def _task(name: str, kind: str, rng: random.Random) -> Task | None:
    """Return a task, or None if the random function cannot have a bug of the kind."""
    functions = [_function(rng) for _ in range(4)]
    broken = functions[0]
    kinds = {**bugs.TRAINED, **bugs.HELD_OUT}
    wrongs = [
        wrong
        for wrong in bugs.mutants(broken.right, broken.parameters, kinds[kind])
        if all(evaluate(wrong, broken.parameters, each) is not None for each in broken.inputs)
    ]
    names = {function.name for function in functions}
    if not wrongs or len(names) < len(functions) or not all(each.inputs for each in functions):
        return None
    wrong = rng.choice(wrongs)
    # the failing test comes first
    inputs = sorted(
        broken.inputs,
        key=lambda each: (
            evaluate(wrong, broken.parameters, each)
            == evaluate(broken.right, broken.parameters, each)
        ),
    )
    rng.shuffle(functions)
    package, modules = rng.choice(PACKAGES), rng.sample(MODULES, 2)
    files = {f"{package}/__init__.py": ""}
    tests = [f"from {package}.{module} import {{}}" for module in modules]
    for number, module in enumerate(modules):
        pair = functions[2 * number : 2 * number + 2]
        sources = [each.source(wrong if each is broken else each.right) for each in pair]
        files[f"{package}/{module}.py"] = "\n\n".join(sources)
        tests[number] = tests[number].format(", ".join(sorted(each.name for each in pair)))
    tests = [
        "\n".join(sorted(tests)) + "\n",
        *(each.test(inputs if each is broken else each.inputs[:2]) for each in functions),
    ]
    path, line = _place(files, broken, wrong)
    result, expected = (
        evaluate(expression, broken.parameters, inputs[0]) for expression in (wrong, broken.right)
    )
    operator = "is" if isinstance(expected, bool) else "=="
    return Task(
        id=name,
        kind=kind,
        package=package,
        function=broken.name,
        failure=f"FAILED test_{package}.py::test_{broken.name} - "
        f"assert {result} {operator} {expected}",
        files=files,
        tests={f"test_{package}.py": "\n\n".join(tests)},
        path=path,
        line=line,
        parameters=list(broken.parameters),
        right=broken.right,
        wrong=wrong,
    )


def _place(files: Mapping[str, str], broken: Function, wrong: str) -> tuple[str, int]:
    """Return the path and the line number of the bug."""
    for path, text in files.items():
        if f"def {broken.name}(" in text:
            head = text[: text.index(f"def {broken.name}(")]
            return path, head.count("\n") + 3
    raise AssertionError(f"{broken.name} is in no file")


def _function(rng: random.Random) -> Function:
    """Return a random function; its `inputs` are empty if none tell it from all mutants."""
    form, names = rng.choice(FORMS), rng.sample(PARAMETERS, 3)
    c, d = rng.sample(list(bugs.CONSTANTS), 2)
    general = form.format(p="p", q="q", r="r", c=c, d=d)
    letters = tuple(letter for letter in "pqr" if f"{{{letter}}}" in form)
    named = dict(zip("pqr", names, strict=True))
    return Function(
        name=rng.choice(FUNCTIONS),
        parameters=tuple(named[letter] for letter in letters),
        right=form.format(c=c, d=d, **named),
        inputs=_inputs(general, letters),
    )


@cache
def _inputs(right: str, parameters: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return arguments that together tell `right` from all mutants; none if some mutant is equal
    for sixty random arguments.
    """
    rng = random.Random(right)
    left = {
        mutant
        for changes in (*bugs.TRAINED.values(), *bugs.HELD_OUT.values())
        for mutant in bugs.mutants(right, parameters, changes)
    }
    chosen: list[tuple[int, ...]] = []
    for _ in range(60):
        values = tuple(rng.choice(INPUTS) for _ in parameters)
        value = evaluate(right, parameters, values)
        told = {each for each in left if evaluate(each, parameters, values) != value}
        if told or not chosen:
            chosen.append(values)
            left -= told
        if not left:
            return tuple(chosen)
    return ()


def sources(tasks: Sequence[Task]) -> set[str]:
    """Return the right expressions of tasks, for `generate(apart=)`."""
    return {task["right"] for task in tasks}


def guess_scores(tasks: Sequence[Task]) -> dict[str, float]:
    """Return kind of bug → share of tasks repaired by a player that does not read the docstring.

    The player finds the function, and undoes a bug of that kind at a random place.
    """
    scores: dict[str, float] = {}
    for kind, changes in {**bugs.TRAINED, **bugs.HELD_OUT}.items():
        shares = [
            guesses.count(task["right"]) / len(guesses)
            for task in tasks
            if (guesses := bugs.mutants(task["wrong"], task["parameters"], changes))
        ]
        scores[kind] = sum(shares) / len(tasks)
    return scores
