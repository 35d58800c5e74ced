"""What `benchmarks/credit.py` compares, as data: docs/credit-comparison.md says why so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from _journal import MAX_TRIES, MAX_UNSCORED, Key
from learning import subject_of

from lightspan import AIR
from lightspan.lightning.credit import anchor
from lightspan.lightning.states import State, observation

Arm = tuple[str, str]
"""(rule, unit)."""
CONTROL: Final[Arm] = ("terminal", "rollout")
START: Final[Arm] = ("start", "rollout")
"""No training: where a seed begins."""
SEEDS: Final = (0, 1, 2, 3, 4)
WORLD: Final = "quest"
"""The task with the long horizon, which `--world` is about."""
WORLD_SEEDS: Final = (*SEEDS, 5)
WORLD_RULES: Final = ("terminal", "discounted")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run of a task; the recipe is the one of its README."""

    steps: int
    held_out: int
    """Tasks of the test split, as many of each cluster."""
    rules: Sequence[str]
    units: Sequence[str] = ("rollout",)
    framework: str
    """The module that its environment has."""
    minutes: float
    """Of a run, on two idle cores; what has been run says it better."""
    start_minutes: float
    """Of a warm start and its evaluation."""

    @property
    def arms(self) -> list[Arm]:
        """The control first."""
        return [(rule, unit) for unit in self.units for rule in self.rules]


ALL_RULES: Final = ("terminal", "discounted", "anchor", "critic", "air")
PLANS: Final[Mapping[str, Plan]] = {
    "quest": Plan(
        steps=8,
        held_out=100,
        rules=ALL_RULES,
        framework="langgraph",
        minutes=4.1,
        start_minutes=2.7,
    ),
    "sql": Plan(
        steps=10,
        held_out=240,
        rules=ALL_RULES,
        units=("rollout", "agent"),
        framework="langgraph",
        minutes=0.9,
        start_minutes=3.0,
    ),
    "rag": Plan(
        steps=8,
        held_out=180,
        rules=ALL_RULES[:-1],
        framework="agents",
        minutes=0.9,
        start_minutes=3.0,
    ),
    "rag-crewai": Plan(
        steps=8,
        held_out=180,
        rules=ALL_RULES[:-1],
        framework="crewai",
        minutes=1.4,
        start_minutes=3.7,
    ),
}
_COUNTED: Final = ("steps", "held_out", "rules", "units")
"""What of a plan the design is made of: how long it takes is none of it."""


def design() -> dict[str, Any]:
    """What the comparison is, as data; rows of another one are not mixed with this one's."""
    plans = {
        task: {name: value for name, value in asdict(plan).items() if name in _COUNTED}
        for task, plan in PLANS.items()
    }
    return {
        "plans": plans,
        "seeds": SEEDS,
        "world": (WORLD, WORLD_RULES, WORLD_SEEDS),
        "control": CONTROL,
        "measure": "held-out reward after training, test split",
        "most unscored": MAX_UNSCORED,
        "most tries": MAX_TRIES,
    }


def digest(value: Any) -> str:
    """Twelve digits of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# --- which runs there are ---------------------------------------------------------------------
def every_run() -> list[Key]:
    """Every run of the comparison: whole seeds one after the other, so that what is there when it
    is interrupted can be compared; the world's further seed is the last."""
    found = [
        Key(task, *arm, seed)
        for seed in SEEDS
        for task, plan in PLANS.items()
        for arm in (START, *plan.arms)
    ]
    return [*found, *(key for key in world_keys() if key not in found)]


def world_keys() -> list[Key]:
    """Those of `--world`."""
    arms = (START, *((rule, "rollout") for rule in WORLD_RULES))
    return [Key(WORLD, *arm, seed) for seed in WORLD_SEEDS for arm in arms]


# --- the arms -----------------------------------------------------------------------------------
def quest_state(state: State) -> str | None:
    """The observation of a quest: its prompt without what came of the last call."""
    from quest_example.prompts import observation_of

    return observation_of(state.observation) or None


KEYS: Final = {"quest": quest_state}
"""Task → what `anchor` tells a state by, where it is not the last observation."""


def air_of(task: str) -> Mapping[str, Any]:
    """Intermediate rewards: the example's own, or else the defaults, which are those of tools."""
    return subject_of(task).arms.get("air") or {"air": AIR()}


def options_of(task: str, rule: str, unit: str) -> dict[str, Any]:
    """What an arm adds to the recipe's arguments of LightningRL."""
    rules: dict[str, Mapping[str, Any]] = {
        "terminal": {},
        "discounted": {"credit": "discounted"},
        "anchor": {"credit": anchor(KEYS.get(task, observation))},
        "critic": {"estimator": "ppo"},
    }
    return {**(air_of(task) if rule == "air" else rules[rule]), "unit": unit}
