"""What `benchmarks/defaults.py` compares, as data. docs/evidence/defaults.md gives the reasons."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

Model = Literal["tiny", "smollm2"]
TODAY: Final = "today"
"""The arm with the defaults of `LightningRL`."""
PERMUTED: Final = "permuted"
ROLLOUTS: Final = 128
"""Rollouts of a step of `TODAY`. Other arms take more or fewer steps, with the same sum."""
HELD_OUT: Final = 320
"""Number of held-out tasks, or all of a split that has fewer."""
MIN_TASKS: Final = 6
"""Number of tasks, each with all seeds of the stage, without which an arm cannot be chosen, and a
default cannot change."""


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One task of the comparison."""

    kind: Literal["reasoning", "textworld", "example"]
    model: Model = "tiny"
    steps: int = 12
    """Steps of the arm `TODAY`."""
    demonstrations: int = 4_800
    """Of the warm start; 0 for none. An example has its own."""
    wrong: float = 0.5
    """Share of the demonstrations with a wrong answer."""
    cpu_s: int
    """Expected CPU seconds of a run."""


TASKS: Final[Mapping[str, TaskPlan]] = {
    "family_relationships": TaskPlan(kind="reasoning", cpu_s=25),
    "letter_counting": TaskPlan(kind="reasoning", cpu_s=25),
    "leg_counting": TaskPlan(kind="reasoning", cpu_s=25),
    "gcd": TaskPlan(kind="reasoning", cpu_s=25),
    "coin_collector": TaskPlan(kind="textworld", demonstrations=3_000, cpu_s=250),
    "number_filtering-smollm2": TaskPlan(
        kind="reasoning", model="smollm2", steps=8, demonstrations=0, cpu_s=320
    ),
    "gcd-smollm2": TaskPlan(
        kind="reasoning", model="smollm2", steps=8, demonstrations=0, cpu_s=320
    ),
    "sql": TaskPlan(kind="example", steps=10, cpu_s=100),
    "math": TaskPlan(kind="example", steps=10, cpu_s=100),
    "rag": TaskPlan(kind="example", steps=8, cpu_s=120),
    "quest": TaskPlan(kind="example", steps=8, cpu_s=400),
}
"""Task → what is run. The cheapest tasks come first."""
SCREENED: Final = (
    *("family_relationships", "letter_counting", "leg_counting", "gcd"),
    *("coin_collector", "sql", "math", "rag"),
)
"""Tasks on which all arms are run. The others cost as much again, and only confirm."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Settings of `LightningRL` that differ from its defaults."""

    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    """Factor of the learning rate that `LightningRL` chooses."""
    warmup: int = 0
    """Updates over which the rate rises."""
    clip_high: float | None = None
    """`PolicyLoss.clip_high`; None for the default."""
    lora: bool = False
    """Whether adapters with their own rate are trained; only with the tiny model, because SmolLM2
    is always trained by LoRA here."""
    permuted: bool = False
    """Whether rewards are permuted within groups: the control, which must not learn."""

    def steps(self, today: int) -> int:
        """Return the number of steps with as many rollouts as `today` steps of `ROLLOUTS`.

        Raises:
            ValueError: there is no such number.
        """
        each = self.options.get("group_size", 8) * self.options.get("tasks_per_step", 16)
        steps, rest = divmod(today * ROLLOUTS, each)
        if rest:
            raise ValueError(f"{today * ROLLOUTS} rollouts are no whole number of steps of {each}")
        return steps


ARMS: Final[Mapping[str, Arm]] = {
    TODAY: Arm(),
    "minibatches-4": Arm(options={"minibatches": 4}),
    "tasks-4": Arm(options={"tasks_per_step": 4}),
    "minibatches-4-kl": Arm(options={"minibatches": 4, "target_kl": 0.05}),
    "minibatches-4-warmup": Arm(options={"minibatches": 4}, warmup=8),
    "minibatches-2": Arm(options={"minibatches": 2}),
    "rate-x3": Arm(rate=3.0),
    "rate-third": Arm(rate=1 / 3),
    "group-4": Arm(options={"group_size": 4, "tasks_per_step": 32}),
    "group-16": Arm(options={"group_size": 16, "tasks_per_step": 8}),
    "minibatches-4-clip": Arm(options={"minibatches": 4}, clip_high=0.2),
    "lora": Arm(lora=True),
    PERMUTED: Arm(permuted=True),
}
"""Name → arm. Arms with a cheaper or a likelier change come first."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the two looks at the arms."""

    split: Literal["dev", "test"]
    seeds: Sequence[int]
    tasks: Sequence[str]


STAGES: Final[Mapping[str, Stage]] = {
    "screening": Stage(split="dev", seeds=(0,), tasks=SCREENED),
    "confirmation": Stage(split="test", seeds=(10, 11, 12, 13, 14), tasks=tuple(TASKS)),
}


class Key(NamedTuple):
    """Which run a row is the result of."""

    stage: str
    task: str
    arm: str
    seed: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        return cls(row["stage"], row["task"], row["arm"], row["seed"])

    def __str__(self) -> str:
        return f"{self.stage}, {self.task}, {self.arm}, seed {self.seed}"


def runs(stage: str, chosen: str | None = None) -> list[Key]:
    """Return the runs of a stage, a whole seed of all tasks of an arm after the other.

    Args:
        stage: key of `STAGES`.
        chosen: arm that screening chose; the confirmation is between it, today's and the control.
            None if none was chosen, and then the confirmation is of today's and the control.
    """
    arms = list(ARMS)
    if stage == "confirmation":
        arms = list(dict.fromkeys([TODAY, *([chosen] if chosen else []), PERMUTED]))
    plans = {task: TASKS[task] for task in STAGES[stage].tasks}
    return [
        Key(stage, task, arm, seed)
        for seed in STAGES[stage].seeds
        for kind in ("reasoning", "textworld", "example")
        for arm in arms
        for task, plan in plans.items()
        if plan.kind == kind and (plan.model == "tiny" or not ARMS[arm].lora)
    ]


def design() -> str:
    """Return a digest of the tasks, the arms and the stages. Rows of another are refused."""
    parts = {
        "tasks": {
            n: {k: v for k, v in asdict(p).items() if k != "cpu_s"} for n, p in TASKS.items()
        },
        "arms": {name: asdict(arm) for name, arm in ARMS.items()},
        "stages": {name: asdict(stage) for name, stage in STAGES.items()},
        "held out": HELD_OUT,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
