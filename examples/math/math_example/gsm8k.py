"""GSM8K: grade school problems with worked solutions (arXiv:2110.14168).

A record has `question` and `answer`; the answer's last line is the number behind `####`:

    {"question": "Ada has 3 pens ...?", "answer": "Ada has 3*2=<<3*2=6>>6 pens.\\n#### 6"}
"""

from __future__ import annotations

from typing import Final

from lightspan.errors import DataError
from math_example.records import Record
from math_example.reward import MARK, final_answer, number
from math_example.worlds import Task

FIELD: Final = "answer"
"""Field that marks a record of this data set."""


def task(record: Record) -> Task | str:
    """Return the task of a record, or as text the reason why the record cannot be used.

    Raises:
        DataError: a field is missing, not text, or blank, or the answer has no `####`.
    """
    problem, solution = record.text("question"), record.text("answer")
    if MARK not in solution:
        raise DataError(f"{record.where}: field 'answer' has no {MARK} before the number")
    answer = final_answer(solution).strip()
    if number(answer) is None:
        return f"its answer {answer!r} is no number"
    return Task(id=record.where, problem=problem.strip(), answer=answer)
