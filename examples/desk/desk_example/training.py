"""The app with its reward, and the messages.

They are the router example's: each phrasing is asked about several products, and the held-out
messages share neither a phrasing nor a product with those that prompts are learned from.
"""

from __future__ import annotations

from typing import Final, TypedDict

from desk_example import app
from lightspan import PromptTemplate, emit_message, rollout
from router_example import messages

METRIC: Final = "routed right"
NAME: Final = "prompt"
"""Of the prompt: `route` takes it as an argument."""
PROMPT: Final = PromptTemplate(app.PROMPT)
PER_PHRASING: Final = 2
"""Held-out messages of each phrasing."""


class Task(TypedDict):
    """A message, and whose it is; the app gets the message alone."""

    id: str
    message: str
    department: str
    phrasing: str
    """Messages of one resemble each other."""


@rollout
def route(task: Task, prompt: PromptTemplate = PROMPT) -> float:
    """Run the app on a message."""
    department = app.route(task["message"], prompt.text)
    emit_message(f"the right answer is the one word {task['department']}")
    return float(department == task["department"])


def train_tasks() -> list[Task]:
    """48 messages of 48 phrasings."""
    return _some("train", 1)


def held_out_tasks() -> list[Task]:
    """80 messages of 40 other phrasings, about other products."""
    return _some("test", PER_PHRASING)


def _some(split: messages.Split, each: int) -> list[Task]:
    """So many messages of each phrasing of a split."""
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
