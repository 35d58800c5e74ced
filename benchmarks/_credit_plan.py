"""What `benchmarks/credit.py` compares, as data.

docs/evidence/credit-comparison.md gives the reasons.
"""

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
"""(rule, unit): a credit rule of LightningRL and the unit that it assigns credit to."""
CONTROL: Final[Arm] = ("terminal", "rollout")
START: Final[Arm] = ("start", "rollout")
"""The arm without training: it measures the weights that a seed starts with."""
SEEDS: Final = (0, 1, 2, 3, 4)
WORLD: Final = "quest"
"""The task with the long horizon, which `--world` runs."""
WORLD_SEEDS: Final = (*SEEDS, 5)
WORLD_RULES: Final = ("terminal", "discounted")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run for one task; the other settings are those of the example's recipe."""

    steps: int
    held_out: int
    """Number of tasks of the test split, taken evenly from its clusters."""
    rules: Sequence[str]
    units: Sequence[str] = ("rollout",)
    framework: str
    """Name of a module by which the task's framework is found to be installed."""
    minutes: float
    """Expected minutes of a run on two idle cores, used until runs have been measured."""
    start_minutes: float
    """Expected minutes of a warm start and its evaluation."""

    @property
    def arms(self) -> list[Arm]:
        """All combinations of unit and rule; the control comes first."""
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
"""Fields of a plan that are part of the comparison's design; the expected minutes are not."""


def design() -> dict[str, Any]:
    """Return the comparison's settings as data.

    Results are not mixed with results of another design.
    """
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
    """Return the first twelve hexadecimal digits of the SHA-256 of `value` as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# --- which runs there are ---------------------------------------------------------------------
def every_run() -> list[Key]:
    """Return the keys of all runs of the comparison, in order.

    One seed after the other is complete, so that an interrupted comparison can be evaluated. The
    additional seeds of `world_keys` come last.
    """
    found = [
        Key(task, *arm, seed)
        for seed in SEEDS
        for task, plan in PLANS.items()
        for arm in (START, *plan.arms)
    ]
    return [*found, *(key for key in world_keys() if key not in found)]


def world_keys() -> list[Key]:
    """Return the keys of the runs of `--world`."""
    arms = (START, *((rule, "rollout") for rule in WORLD_RULES))
    return [Key(WORLD, *arm, seed) for seed in WORLD_SEEDS for arm in arms]


# --- the arms -----------------------------------------------------------------------------------
def quest_state(state: State) -> str | None:
    """Return the observation of a quest without the last call's result; None if it is empty."""
    from quest_example.prompts import observation_of

    return observation_of(state.observation) or None


KEYS: Final = {"quest": quest_state}
"""Task → what identifies a state for the rule `anchor`; other tasks use the last observation."""


def air_of(task: str) -> Mapping[str, Any]:
    """Return the settings of intermediate rewards: those of the example, or AIR's defaults."""
    return subject_of(task).arms.get("air") or {"air": AIR()}


def options_of(task: str, rule: str, unit: str) -> dict[str, Any]:
    """Return the arguments of LightningRL in which an arm differs from the task's recipe."""
    rules: dict[str, Mapping[str, Any]] = {
        "terminal": {},
        "discounted": {"credit": "discounted"},
        "anchor": {"credit": anchor(KEYS.get(task, observation))},
        "critic": {"estimator": "ppo"},
    }
    return {**(air_of(task) if rule == "air" else rules[rule]), "unit": unit}
