"""The desk's app of `verdicts.py`: its prompt shows eight messages with their departments."""

from __future__ import annotations

from typing import Any

from desk_example.app import route
from desk_example.candidates import GOOD
from lightspan import rollout


@rollout
def desk(task: dict[str, Any]) -> float:
    """Run the app on a message; return 1 if it names the right department, else 0."""
    return float(route(task["message"], GOOD) == task["department"])
