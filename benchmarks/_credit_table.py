"""What `benchmarks/credit.py` prints about its results: what is left to run, and the table."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from _credit_plan import (
    CONTROL,
    PLANS,
    START,
    WORLD,
    WORLD_RULES,
    WORLD_SEEDS,
    Arm,
    Plan,
    world_keys,
)
from _curves import seed_interval
from _journal import Journal, Key, Row, arm_name, is_usable
from _paired import Block, Contrast, Family, Judged

from lightspan.training.statistics import Interval

COLLAPSED: Final = 0.5
"""A run has collapsed if it ends below this share of the reward before training."""
HEADS: Final = (
    "| task | rule | unit | held-out reward | gain over `terminal` (95 %, corrected) "
    "| p, corrected | over seeds alone, not corrected "
    "| gain of the reward in training, not corrected | unscored, failed |",
    "|---|---|---|---|---|---|---|---|---|",
)


# --- what is left -------------------------------------------------------------------------------
def minutes_of(keys: Sequence[Key], journal: Journal) -> float:
    """Return the expected minutes of runs.

    It is the median of finished runs of the same arm, else of the same task, else the planned time.
    """
    took: dict[Any, list[float]] = defaultdict(list)
    for key, row in journal.done.items():
        for same in (key[:3], (key.task, key.is_start)):
            took[same].append(row["seconds"]["all"] / 60)

    def expected(key: Key) -> float:
        known = took.get(key[:3]) or took.get((key.task, key.is_start))
        plan = PLANS[key.task]
        planned = plan.start_minutes if key.is_start else plan.minutes
        return statistics.median(known) if known else planned

    return math.fsum(map(expected, keys))


def listed(keys: Sequence[Key], journal: Journal) -> Iterator[str]:
    """Yield lines on what is done and what is left, one for each arm and a sum."""
    for task, plan in PLANS.items():
        for arm in (START, *plan.arms):
            mine = [key for key in keys if key[:3] == (task, *arm)]
            if mine:
                yield f"{task}, {arm_name(*arm)}: {_progress(mine, journal)}"
    left = journal.left(keys)
    yield (
        f"{len(keys) - len(left)} of {len(keys)} runs are done or given up; about "
        f"{minutes_of(left, journal) / 60:.1f} hours are left, one run at a time"
    )


def _progress(keys: Sequence[Key], journal: Journal) -> str:
    left = journal.left(keys)
    done = [str(key.seed) for key in keys if key in journal.done]
    given_up = [str(k.seed) for k in keys if k not in journal.done and k not in left]
    parts = [f"seeds done: {' '.join(done) or 'none'}"]
    parts += [f"given up: {' '.join(given_up)}"] if given_up else []
    parts += [f"{minutes_of(left, journal):.0f} minutes left"] if left else []
    return "; ".join(parts)


# --- the table ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """The results of one task.

    Args:
        name: the task.
        plan: what is run for the task.
        seeds: the seeds of the comparison.
        journal: the results.
    """

    name: str
    plan: Plan
    seeds: Sequence[int]
    journal: Journal

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms that were not given up."""
        return [arm for arm in self.plan.arms if not self._given_up(arm)]

    @cached_property
    def missing(self) -> list[Arm]:
        """The arms that were given up."""
        return [arm for arm in self.plan.arms if arm not in self.arms]

    @cached_property
    def complete(self) -> list[int]:
        """The seeds for which all arms have a result."""
        return [seed for seed in self.seeds if all(self.row(arm, seed) for arm in self.arms)]

    @cached_property
    def block(self) -> Block | None:
        """The results of the complete seeds, for the statistics.

        None if there are fewer than two complete seeds, or no arm besides the control.
        """
        if len(self.complete) < 2 or CONTROL not in self.arms or len(self.arms) < 2:
            return None
        rows = {arm: [self.row(arm, seed) for seed in self.complete] for arm in self.arms}
        runs = {arm_name(*arm): [rewards_of(row) for row in found] for arm, found in rows.items()}
        clusters = clusters_of(rows[CONTROL][0])
        return Block(runs, arm_name(*CONTROL), clusters)

    def row(self, arm: Arm, seed: int) -> Row | None:
        """Return the result of a run; None if there is none."""
        return self.journal.done.get(Key(self.name, *arm, seed))

    def rows(self, arm: Arm) -> list[Row]:
        """Return the results of an arm for the complete seeds."""
        return [row for seed in self.complete if (row := self.row(arm, seed))]

    def _given_up(self, arm: Arm) -> bool:
        keys = [Key(self.name, *arm, seed) for seed in self.seeds]
        return len(self.journal.left(keys)) < sum(key not in self.journal.done for key in keys)


def rewards_of(row: Row | None) -> dict[str, float]:
    """Return held-out task → reward, without tasks that have no score."""
    assert row is not None
    return {
        f"{cluster}/{place}": reward
        for cluster, rewards in row["held_out"]["rewards"].items()
        for place, reward in enumerate(rewards)
        if reward is not None
    }


def clusters_of(row: Row | None) -> dict[str, str]:
    """Return held-out task → the cluster that it belongs to."""
    assert row is not None
    return {
        f"{cluster}/{place}": cluster
        for cluster, rewards in row["held_out"]["rewards"].items()
        for place in range(len(rewards))
    }


def trained_reward(row: Row) -> float:
    """Return the mean reward of all rollouts in training.

    It is the area under the learning curve, on tasks that were not trained on before.
    """
    steps = row["training"]["steps"]
    return math.fsum(total for total, _ in steps) / math.fsum(scored for _, scored in steps)


def narrowed(tasks: Sequence[str] | None, rules: Sequence[str] | None) -> dict[str, Plan]:
    """Return the plans of `tasks`, with only `rules` and the control; None for all."""
    return {
        name: plan
        if rules is None
        else replace(plan, rules=[each for each in plan.rules if each in (CONTROL[0], *rules)])
        for name, plan in PLANS.items()
        if tasks is None or name in tasks
    }


def family_of(blocks: Mapping[str, Block], plans: Mapping[str, Plan] = PLANS) -> list[Contrast]:
    """Return the contrasts that are tested together.

    They are each arm of each task, and each rule pooled over its tasks if all of them have results.
    """
    gains = [(name, arm) for name, block in blocks.items() for arm in block.arms]
    rules = dict.fromkeys(rule for plan in plans.values() for rule in plan.rules)
    pooled = [
        [(name, rule) for name, plan in plans.items() if rule in plan.rules] for rule in rules
    ]
    there = [contrast for contrast in pooled if all(gain in gains for gain in contrast)]
    return [*([gain] for gain in gains), *there]


def table(journal: Journal, seeds: Sequence[int], plans: Mapping[str, Plan] = PLANS) -> str:
    """Return the results as a Markdown table with notes."""
    tasks = {name: Task(name, plan, seeds, journal) for name, plan in plans.items()}
    blocks = {name: task.block for name, task in tasks.items() if task.block is not None}
    found: dict[tuple[tuple[str, str], ...], Judged] = {}
    family = None
    if blocks:
        family = Family(blocks, family_of(blocks, plans))
        found = {tuple(judged.contrast): judged for judged in family.judge()}
    lines = [*HEADS]
    for task in tasks.values():
        lines += _rows_of(task, found)
    lines += [_pooled(judged) for contrast, judged in found.items() if len(contrast) > 1]
    lines += ["", *_notes(tasks, family, journal)]
    if WORLD in plans and set(WORLD_RULES) <= set(plans[WORLD].rules):
        lines.append(world_line(journal))
    return "\n".join(lines)


def _rows_of(task: Task, found: Mapping[Any, Judged]) -> Iterator[str]:
    for arm in task.plan.arms:
        rows = task.rows(arm)
        cells = [task.name, f"`{arm[0]}`", arm[1]]
        if arm in task.missing:
            yield _line(*cells, "given up", "", "", "", "", "")
        elif len(rows) < 2:
            yield _line(*cells, "not yet", "", "", "", "", "")
        else:
            judged, block = found.get(((task.name, arm_name(*arm)),)), task.block
            gains = (
                [""] * 4 if judged is None or block is None else _gains(task, block, arm, judged)
            )
            yield _line(*cells, _ends(task, arm, rows), *gains, _odd(rows))


def _ends(task: Task, arm: Arm, rows: Sequence[Row]) -> str:
    end = math.fsum(map(_mean, rows)) / len(rows)
    if arm != CONTROL:
        return f"{end:.3f}"
    starts = [row for seed in task.complete if (row := task.row(START, seed))]
    begins = f"{math.fsum(map(_mean, starts)) / len(starts):.3f} → " if starts else ""
    return f"{begins}{end:.3f}"


def _gains(task: Task, block: Block, arm: Arm, judged: Judged) -> list[str]:
    pairs = zip(task.rows(arm), task.rows(CONTROL), strict=True)
    trained = [trained_reward(row) - trained_reward(base) for row, base in pairs]
    alone = block.differences(arm_name(*arm))
    return [
        _gain(judged.mean, judged.low, judged.high, judged.verdict),
        f"{judged.p:.3f}",
        _interval(seed_interval(alone)),
        _interval(seed_interval(trained)),
    ]


def _pooled(judged: Judged) -> str:
    names = ", ".join(name for name, _ in judged.contrast)
    [rule] = {arm for _, arm in judged.contrast}
    gain = _gain(judged.mean, judged.low, judged.high, judged.verdict)
    cells = [f"mean of {names}", f"`{rule}`", "rollout", "", gain, f"{judged.p:.3f}"]
    return _line(*cells, "", "", "")


def _notes(tasks: Mapping[str, Task], family: Family | None, journal: Journal) -> Iterator[str]:
    sizes = [f"{task.name} {len(task.complete)}" for task in tasks.values()]
    yield f"Seeds: {', '.join(sizes)}."
    if any(len(task.complete) < len(task.seeds) for task in tasks.values()):
        yield "**Not complete**: nothing follows from it yet, and the family grows."
    if family is not None:
        yield f"Corrected for {family.size} gains: {family.critical:.2f} standard errors."
    left_out = sum(task.block.left_out for task in tasks.values() if task.block is not None)
    if left_out:
        yield f"{left_out} held-out tasks are left out: some arm of their seed left them unscored."
    rows = [
        row
        for key, row in journal.done.items()
        if key.task in tasks and key.rule in (START[0], *tasks[key.task].plan.rules)
    ]
    if rows:
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        dates = sorted({row["date"] for row in rows})
        hours = math.fsum(row["seconds"]["all"] for row in rows) / 3600
        unused = sum(not is_usable(row) for row in journal.rows)
        yield (
            f"{len(rows)} runs, together {hours:.1f} hours, {dates[0]} to {dates[-1]}, at "
            f"{commits}; {unused} more ended with an error or cannot be used."
        )


def world_line(journal: Journal) -> str:
    """Return whether `discounted` is as good as `terminal` on the task with the long horizon.

    It must not be worse beyond the noise, and no seed may collapse.
    """
    there = [key for key in world_keys() if key in journal.done]
    if len(there) < len(world_keys()):
        return f"{WORLD}, six seeds, `discounted`: {len(there)} of {len(world_keys())} runs."
    start, base, other = (
        [_mean(journal.done[Key(WORLD, rule, "rollout", seed)]) for seed in WORLD_SEEDS]
        for rule in (START[0], *WORLD_RULES)
    )
    gain = seed_interval([more - less for more, less in zip(other, base, strict=True)])
    fallen = [
        f"{seed} ({before:.3f} → {after:.3f})"
        for seed, before, after in zip(WORLD_SEEDS, start, other, strict=True)
        if after < COLLAPSED * before
    ]
    holds = gain.high >= 0 and not fallen
    return (
        f"{WORLD}, six seeds, `discounted` against `terminal`: {_interval(gain)}; collapsed: "
        f"{', '.join(fallen) or 'none'}: {'**holds**' if holds else '**fails**'} (as good but for "
        "noise, no collapse)."
    )


def _mean(row: Row) -> float:
    return float(row["held_out"]["sum"] / row["held_out"]["scored"])


def _odd(rows: Sequence[Row]) -> str:
    parts = [row[name] for row in rows for name in ("held_out", "training")]
    unscored, failed = (sum(part[name] for part in parts) for name in ("unscored", "failed"))
    return f"{unscored}, {failed}"


def _gain(mean: float, low: float, high: float, verdict: str) -> str:
    return f"{mean:+.3f} ({low:+.3f}..{high:+.3f}): {verdict}"


def _interval(found: Interval) -> str:
    return f"{found.mean:+.3f} ({found.low:+.3f}..{found.high:+.3f})"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
