"""What algorithms of tests share that imitate numbers which they draw, whatever rollouts were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightspan.algorithms import Algorithm, Metrics, PolicySpec, World
from lightspan.learners import Optimizer, SFTLoss
from lightspan.lightning.rows import Row
from lightspan.schema.routing import Routing, make_routing


class Drilled(Algorithm):
    """All but the step: the writer's policy, whose weights learn."""

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
    """A row that imitates all of them but the first."""
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


class Numbers(Drilled):
    """Imitates numbers that it draws: three rows, then one, so that a second rank has none.

    Args:
        before: called before each step, with its number.
    """

    def __init__(self, model: Path, before: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(model)
        self._before = before

    async def run_step(self, world: World) -> Metrics:
        self._before(world.step)
        count = 3 if world.step % 2 else 1
        rows = [row_of([world.rng.randrange(300) for _ in range(8)], str(n)) for n in range(count)]
        result = await world.learn(lambda: world.learner.update(rows, SFTLoss()))
        await world.publish()
        return {"loss": result["loss"]}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...
