"""How good an outcome is."""

from __future__ import annotations

from router_example.messages import Task
from router_example.state import State


def score(final: State, task: Task) -> dict[str, float]:
    """Half for the right department, half for the right product; `reward` is what is trained."""
    department = float(final.get("department") == task["department"])
    product = float(final.get("product") == task["product"])
    return {"reward": (department + product) / 2, "department": department, "product": product}
