"""The app with its reward, and its messages as tasks.

The messages are those of the router example. Each phrasing is used with several products. Held-out
messages share neither a phrasing nor a product with training messages.
"""

from __future__ import annotations

from typing import Final, TypedDict

from desk_example import app
from lightspan import PromptTemplate, emit_message, rollout
from router_example import messages

METRIC: Final = "routed right"
NAME: Final = "prompt"
"""Name of the prompt, and of the argument of `route` that takes it."""
PROMPT: Final = PromptTemplate(app.PROMPT)
PER_PHRASING: Final = 2
"""Held-out messages of each phrasing."""


class Task(TypedDict):
    """A message with its department; the app gets the message alone."""

    id: str
    message: str
    department: str
    phrasing: str
    """Phrasing of the message; messages of one phrasing resemble each other."""


@rollout
def route(task: Task, prompt: PromptTemplate = PROMPT) -> float:
    """Run the app on a message; return 1 if it names the right department, else 0."""
    department = app.route(task["message"], prompt.text)
    emit_message(f"the right answer is the one word {task['department']}")
    return float(department == task["department"])


def train_tasks() -> list[Task]:
    """Return 48 training messages, one of each of 48 phrasings."""
    return _some("train", 1)


def held_out_tasks() -> list[Task]:
    """Return 80 held-out messages, two of each of 40 phrasings that training does not use."""
    return _some("test", PER_PHRASING)


def _some(split: messages.Split, each: int) -> list[Task]:
    """Return the first `each` messages of each phrasing of a split."""
    taken: dict[str, int] = {}
    tasks = []
    for given in messages.tasks(split):
        taken[given["phrasing"]] = taken.get(given["phrasing"], 0) + 1
        if taken[given["phrasing"]] <= each:
            tasks.append(
                Task(
                    id=given["id"],
                    message=given["message"],
                    department=given["department"],
                    phrasing=given["phrasing"],
                )
            )
    return tasks
