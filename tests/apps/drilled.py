"""Parts of test algorithms that train on random numbers instead of their rollouts."""

from __future__ import annotations

from pathlib import Path

from lightspan.algorithms import Algorithm, PolicySpec
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Optimizer
from lightspan.schema.routing import Routing, make_routing


class Drilled(Algorithm):
    """Base of algorithms that train the policy of `writer`; a subclass defines `run_step`."""

    def __init__(self, model: Path) -> None:
        self._model = str(model)

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer(learning_rate=1e-3)

    def policies(self) -> dict[str, PolicySpec]:
        return {"drilled": PolicySpec(model=self._model)}

    def routing(self) -> Routing:
        return make_routing({"writer": "drilled"}, None, "drilled")


def row_of(ids: list[int], rollout: str = "drill") -> Row:
    """Return a row that imitates all of `ids` except the first."""
    size = len(ids)
    return Row(
        rollout_id=rollout,
        policy="drilled",
        ids=ids,
        mask=[False, *[True] * (size - 1)],
        advantages=[0.0] * size,
        weights=[1.0] * size,
        logprobs=[0.0] * size,
        versions=[0] * size,
        temperatures=[1.0] * size,
    )
