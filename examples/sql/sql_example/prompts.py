"""What the app's agents read and how their answers are understood.

The prompts are short on purpose: the model trained on a laptop pays for every token.
"""

from __future__ import annotations

import re

from sql_example.database import QueryError, Result, execute

CORRECT = "CORRECT"
WRONG = "WRONG"

_FENCE = re.compile(r"```(?:sqlite|sql)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)
_VERDICT = re.compile(r"\b(CORRECT|INCORRECT|WRONG)\b", re.IGNORECASE)


def write_prompt(schema: str, question: str) -> str:
    """Ask for a first query."""
    return f"Write one SQLite query.\n{schema}\n{question}"


def check_prompt(question: str, query: str, outcome: str) -> str:
    """Ask whether a query answers the question."""
    return f"Is it {CORRECT} or {WRONG}?\n{question}\n{query}\n{outcome}"


def rewrite_prompt(schema: str, question: str, query: str, outcome: str, feedback: str) -> str:
    """Ask for a better query."""
    return f"Fix the SQLite query.\n{schema}\n{question}\n{query}\n{outcome}\n{feedback}"


def parse_query(reply: str) -> str:
    """The query in a model's reply: the first fenced block, or all of it."""
    fenced = _FENCE.search(reply)
    return (fenced.group(1) if fenced else reply).strip()


def approves(reply: str) -> bool:
    """Whether a checker's reply calls the query correct; the last verdict in it counts."""
    verdicts = _VERDICT.findall(reply)
    return bool(verdicts) and verdicts[-1].upper() == CORRECT


def run_query(db: str, query: str, truncate_length: int) -> str:
    """Execute a query and describe the outcome in at most about `truncate_length` characters."""
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
