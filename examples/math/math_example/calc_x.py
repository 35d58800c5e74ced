"""Calc-X: word problems with their chain of calculator calls (arXiv:2305.15017).

A record has `question` and `result`, and mostly `id`, `chain` and where it comes from:

    {"id": "ape210k__00042", "question": "How many ...?", "source_ds": "ape210k", "result": "3/4",
     "chain": "<gadget id=\\"calculator\\">3 / 4</gadget>\\n<output>3/4</output>\\n..."}

The result is a number, a fraction, or the letter of a choice. The chain is not trained on; its
`<result>` has to agree with `result`, or the record is left out.
"""

from __future__ import annotations

import re
from typing import Final

from math_example.records import Record
from math_example.reward import exact_answer, is_one_number
from math_example.worlds import Task

FIELD: Final = "result"
"""Field that marks a record of this data set."""

_RESULT: Final = re.compile(r"<result>(.*?)</result>", re.DOTALL)
_WORD: Final = re.compile(r"\w+")


def task(record: Record) -> Task | str:
    """Return the task of a record, or as text the reason why the record cannot be used.

    Raises:
        DataError: a field is missing, not text, or blank.
    """
    problem, result = record.text("question"), record.text("result")
    if not is_one_number(result) and not _WORD.fullmatch(result.strip()):
        return f"its result {result.strip()!r} is neither a number nor a choice"
    ends = _RESULT.findall(str(record.fields.get("chain", "")))
    # the chain may go on: "2/3 = around 0.666667"
    if ends and not exact_answer(ends[-1].split("=")[0], result):
        return f"its chain ends with {ends[-1].strip()!r}, but its result is {result.strip()!r}"
    return Task(id=_name(record), problem=problem.strip(), answer=result.strip())


def _name(record: Record) -> str:
    """Return a unique name: the position of the record in its file, and its id if it has one."""
    name = record.fields.get("id")
    return f"{record.where} {name}" if isinstance(name, str) and name else record.where
