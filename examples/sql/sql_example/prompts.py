"""The texts that the app's agents read, and functions that read their answers.

The texts are short, because every token costs time on a laptop.
"""

from __future__ import annotations

import re

from sql_example.database import QueryError, Result, execute

CORRECT = "CORRECT"
WRONG = "WRONG"

_FENCE = re.compile(r"```(?:sqlite|sql)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_VERDICT = re.compile(r"\b(CORRECT|INCORRECT|WRONG)\b", re.IGNORECASE)


def write_prompt(schema: str, question: str) -> str:
    """Return the prompt that asks for a first query."""
    return f"Write one SQLite query.\n{schema}\n{question}"


def check_prompt(question: str, query: str, outcome: str) -> str:
    """Return the prompt that asks whether a query answers the question."""
    return f"Is it {CORRECT} or {WRONG}?\n{question}\n{query}\n{outcome}"


def rewrite_prompt(schema: str, question: str, query: str, outcome: str, feedback: str) -> str:
    """Return the prompt that asks for a corrected query."""
    return f"Fix the SQLite query.\n{schema}\n{question}\n{query}\n{outcome}\n{feedback}"


def parse_query(reply: str) -> str:
    """Return the query of a model's reply: its first fenced block, or all of it without one."""
    fenced = _FENCE.search(reply)
    return (fenced.group(1) if fenced else reply).strip()


def approves(reply: str) -> bool:
    """Return whether a checker's reply calls the query correct; the last verdict counts."""
    verdicts = _VERDICT.findall(reply)
    return bool(verdicts) and verdicts[-1].upper() == CORRECT


def run_query(db: str, query: str, truncate_length: int) -> str:
    """Return the result or the error of a query as text, cut after `truncate_length` characters."""
    try:
        outcome = _describe(execute(db, query))
    except QueryError as error:
        outcome = f"Error: {error}"
    return outcome if len(outcome) <= truncate_length else f"{outcome[:truncate_length]}..."


def _describe(result: Result) -> str:
    if not result.rows:
        return "no rows"
    return "\n".join(", ".join(_cell(cell) for cell in row) for row in result.rows)


def _cell(cell: object) -> str:
    return "NULL" if cell is None else str(cell)
