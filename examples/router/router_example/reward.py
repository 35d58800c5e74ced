"""The reward of an outcome of the app."""

from __future__ import annotations

from router_example.messages import Task
from router_example.state import State


def score(final: State, task: Task) -> dict[str, float]:
    """Return the rewards of an outcome: 1 or 0 each for the department and for the product.

    `reward`, their mean, is trained on.
    """
    department = float(final.get("department") == task["department"])
    product = float(final.get("product") == task["product"])
    return {"reward": (department + product) / 2, "department": department, "product": product}
