"""A results file for runs that take hours: a JSON line for each run, written at its end.

    journal = Journal(path, design="0123456789ab")
    journal.add({"task": "sql", "rule": "anchor", "unit": "rollout", "seed": 0, ...})
    journal.done, journal.tries

A run that was killed has no line and is made again. Several processes may add to one file, which is
locked while a line is written. If a crash left a part of a line, the next write removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_UNSCORED: Final = 0.05
"""A run is not used if more than this share of its held-out tasks or rollouts has no score."""
MAX_TRIES: Final = 2
"""A run is given up after this many attempts that ended with an error or cannot be used."""

Row = Mapping[str, Any]


class Key(NamedTuple):
    """Which run a row is the result of."""

    task: str
    rule: str
    unit: str
    seed: int

    @classmethod
    def of(cls, row: Row) -> Key:
        return cls(row["task"], row["rule"], row["unit"], row["seed"])

    @property
    def is_start(self) -> bool:
        """Whether the run has no training."""
        return self.rule == "start"

    def __str__(self) -> str:
        return f"{self.task}, {arm_name(self.rule, self.unit)}, seed {self.seed}"


ALIKE: Final[Mapping[str, Callable[[Key], Hashable]]] = {
    "settings": lambda key: key.task,
    "arm": lambda key: key[:3],
    "warm_start": lambda key: (key.task, key.seed),
}
"""Field of a row → function of its key. Rows with the same function value must have the same value
in this field."""


def arm_name(rule: str, unit: str) -> str:
    """Return the name of an arm: the rule, and the unit unless it is the default."""
    return rule if unit == "rollout" else f"{rule}, {unit}"


def is_usable(row: Row) -> bool:
    """Return whether a run ended without an error and almost all of its rollouts have a score."""
    if "error" in row:
        return False
    return all(
        part["unscored"] <= MAX_UNSCORED * (part["unscored"] + part["scored"])
        for part in (row["held_out"], row["training"])
        if part is not None
    )


class Journal:
    """The rows of a results file.

    Args:
        path: the file, which is created with the first row.
        design: digest of the design that all rows must have.

    Raises:
        SystemExit: the file has a row of another design, or rows that do not belong together.
    """

    def __init__(self, path: Path, design: str) -> None:
        self._path = path
        self._design = design
        self.read()

    def read(self) -> None:
        """Read the file again, because other processes may have added rows."""
        self.rows: list[Row] = [self._row(*line) for line in self._lines()]
        self.done: dict[Key, Row] = {}
        self.tries: Counter[Key] = Counter()
        for row in self.rows:
            key = Key.of(row)
            self.tries[key] += 1
            if is_usable(row):
                self.done.setdefault(key, row)  # of two sessions that ran the same, the first
        self._check_alike()

    def left(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of `keys` that still have to be run."""
        return [k for k in keys if k not in self.done and self.tries[k] < MAX_TRIES]

    def check(self, row: Row) -> None:
        """Check, before a run, that its result will belong to the rows.

        Args:
            row: the run's key, and as far as known its `settings`, `arm` and `warm_start`.

        Raises:
            SystemExit: the run does not belong to the rows.
        """
        key = Key.of(row)
        for name, group in ALIKE.items():
            same = (other for other in self.done.values() if group(Key.of(other)) == group(key))
            found = next(same, None)
            if found is not None and name in row and found[name] != row[name]:
                raise SystemExit(
                    f"{self._path} has {Key.of(found)} with another {name} ({found[name]}) than "
                    f"{key} would have ({row[name]}): name another file, or take those rows out"
                )

    def add(self, row: Row) -> None:
        """Append a row to the file, as a whole or not at all."""
        self.check(row)
        line = json.dumps({"design": self._design, **row}, separators=(",", ":")) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(_whole(file.read()))
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.read()

    def _lines(self) -> list[tuple[int, str]]:
        data = self._path.read_bytes() if self._path.exists() else b""
        return list(enumerate(data[: _whole(data)].decode().split("\n")[:-1], 1))

    def _row(self, number: int, line: str) -> Row:
        try:
            row: Row = json.loads(line)
            Key.of(row)
            design = row["design"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{self._path}, line {number}, is no row of this script") from error
        if design != self._design:
            raise SystemExit(
                f"{self._path}, line {number}, belongs to another design ({design}; this one is "
                f"{self._design}): name another file"
            )
        return row

    def _check_alike(self) -> None:
        for name, group in ALIKE.items():
            first: dict[Hashable, Row] = {}
            for key, row in self.done.items():
                other = first.setdefault(group(key), row)
                if other[name] != row[name]:
                    raise SystemExit(
                        f"{self._path}: {key} and {Key.of(other)} differ in {name}: take one out"
                    )


def _whole(data: bytes) -> int:
    """Return the number of bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1
