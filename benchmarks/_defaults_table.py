"""The tables of `benchmarks/defaults.py`: arms against today's defaults, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from _curves import crossed_interval, seed_interval
from _defaults_plan import ARMS, MIN_TASKS, PERMUTED, STAGES, TASKS, TODAY, Key, runs

from lightspan.training.statistics import Interval, paired_gain

Row = Mapping[str, Any]
HEADS: Final = ("arm", "tasks", "gain over today's, mean of tasks", "wins", "collapses")


def stage_report(rows: Sequence[Row], stage: str) -> str:
    """Return the tables of one stage, the arm that its rule chooses, and the missing runs."""
    done = usable(rows, stage)
    if not done:
        return "Nothing has been run yet."
    parts = [task_table(done, constants(rows, stage)), arm_table(done), choice_text(done, stage)]
    parts += [missing_text(done, stage), *errors_text(rows, stage)]
    return "\n\n".join(filter(None, parts))


def usable(rows: Sequence[Row], stage: str) -> dict[Key, Row]:
    """Return the runs of a stage that ended without an error; of several, the first."""
    done: dict[Key, Row] = {}
    for row in rows:
        if "arm" in row and "error" not in row and row["stage"] == stage:
            done.setdefault(Key.of(row), row)
    return done


def constants(rows: Sequence[Row], stage: str) -> dict[str, float]:
    """Return task → score of the best constant answer."""
    return {r["task"]: r["score"] for r in rows if "constant" in r and r["stage"] == stage}


# --- one task -------------------------------------------------------------------------------
def task_table(done: Mapping[Key, Row], constant: Mapping[str, float]) -> str:
    """Return a row for each task and arm: start, end, gain, and the difference from today's."""
    heads = (
        "task",
        "arm",
        "seeds",
        "start → end",
        "exact answers",
        "gain (95 %)",
        "against today's (95 %)",
        "KL of a step, mean and largest",
        "CPU-s",
    )
    lines = [_cells(heads), _cells(["---"] * len(heads))]
    for task in TASKS:
        arms = [arm for arm in ARMS if runs_of(done, task, arm)]
        lines += [_cells(_task_cells(done, task, arm)) for arm in arms]
        if arms and task in constant:
            score = f"{constant[task]:.3f}"
            lines.append(_cells((task, "a constant answer", "", score, "", "", "", "", "")))
    return "\n".join(lines)


def _task_cells(done: Mapping[Key, Row], task: str, arm: str) -> Sequence[str]:
    runs = runs_of(done, task, arm)
    start, end = (_mean([row[when]["mean"] for row in runs]) for when in ("start", "end"))
    exact = [row[when]["exact"] for when in ("start", "end") for row in runs]
    both = (
        ""
        if None in exact
        else " → ".join(
            f"{_mean([row[when]['exact'] for row in runs]):.3f}" for when in ("start", "end")
        )
    )
    moved = [kl for row in runs for kl in row["training"]["approx_kl"]]
    collapsed = [row["seed"] for row in runs if is_collapsed(row)]
    mark = f" **collapsed: seed {', '.join(map(str, collapsed))}**" if collapsed else ""
    against = differences(done, task, arm)
    return (
        task,
        arm,
        ", ".join(str(row["seed"]) for row in runs),
        f"{start:.3f} → {end:.3f}{mark}",
        both,
        _interval(_crossed(runs, [row["start"]["rewards"] for row in runs])),
        "" if arm == TODAY or not against else _interval(_against(done, task, arm)),
        f"{_mean(moved):.4f}, {max(moved):.3f}" if moved else "",
        f"{_mean([sum_cpu(row) for row in runs]):.0f}",
    )


def runs_of(done: Mapping[Key, Row], task: str, arm: str) -> list[Row]:
    """Return the runs of a task and an arm, by seed."""
    runs = [row for key, row in done.items() if (key.task, key.arm) == (task, arm)]
    return sorted(runs, key=lambda row: row["seed"])


def differences(done: Mapping[Key, Row], task: str, arm: str) -> dict[int, float]:
    """Return seed → end of the arm less end of today's defaults, for seeds that have both."""
    today = {row["seed"]: row["end"]["mean"] for row in runs_of(done, task, TODAY)}
    ends = {row["seed"]: row["end"]["mean"] for row in runs_of(done, task, arm)}
    return {seed: ends[seed] - today[seed] for seed in ends.keys() & today.keys()}


def _against(done: Mapping[Key, Row], task: str, arm: str) -> Interval:
    today = {row["seed"]: row for row in runs_of(done, task, TODAY)}
    pairs = [row for row in runs_of(done, task, arm) if row["seed"] in today]
    return _crossed(pairs, [today[row["seed"]]["end"]["rewards"] for row in pairs])


def _crossed(rows: Sequence[Row], before: Sequence[Sequence[float | None]]) -> Interval:
    """Return the mean gain from `before` to the end of the runs, over seeds and tasks.

    Args:
        rows: a run per seed.
        before: for each run, the rewards with which its own are compared.
    """
    gains = [
        {
            str(n): b - a
            for n, (a, b) in enumerate(zip(old, row["end"]["rewards"], strict=True))
            if a is not None and b is not None
        }
        for old, row in zip(before, rows, strict=True)
    ]
    return crossed_interval(gains, _clusters(rows[0]))


def is_collapsed(row: Row) -> bool:
    """Return whether a run ended below its start: the whole interval of its gain is below 0."""
    start, end = (
        {str(n): value for n, value in enumerate(row[when]["rewards"]) if value is not None}
        for when in ("start", "end")
    )
    return paired_gain(start, end, _clusters(row)).high < 0


def _clusters(row: Row) -> dict[str, str]:
    return {str(n): str(cluster) for n, cluster in enumerate(row["clusters"])}


def sum_cpu(row: Row) -> float:
    """Return the CPU seconds of a run, those of its runners included."""
    return float(row["cpu_s"]["process"] + row["cpu_s"]["children"])


# --- all tasks ------------------------------------------------------------------------------
def arm_table(done: Mapping[Key, Row]) -> str:
    """Return a row for each arm: its gain over today's defaults, tasks weighted equally.

    The result is empty if no task has another arm and today's defaults with the same seed.
    """
    lines = [_cells(HEADS), _cells(["---"] * len(HEADS))]
    for arm in (name for name in ARMS if name != TODAY):
        by_task = {task: differences(done, task, arm) for task in TASKS}
        by_task = {task: gains for task, gains in by_task.items() if gains}
        if not by_task:
            continue
        means = [_mean(list(gains.values())) for gains in by_task.values()]
        collapsed = [str(key) for key, row in done.items() if key.arm == arm and is_collapsed(row)]
        lines.append(
            _cells(
                (
                    arm,
                    str(len(by_task)),
                    _interval(over_tasks(done, arm)),
                    f"{sum(mean > 0 for mean in means)} of {len(means)}",
                    str(len(collapsed)),
                )
            )
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def over_tasks(done: Mapping[Key, Row], arm: str) -> Interval:
    """Return the gain over today's defaults, over seeds (Student's t), tasks weighted equally.

    Only seeds count that all tasks of the arm have; without one, it is the mean without an
    interval.
    """
    by_task = [gains for task in TASKS if (gains := differences(done, task, arm))]
    seeds = set.intersection(*(set(gains) for gains in by_task))
    if not seeds:
        mean = _mean([_mean(list(gains.values())) for gains in by_task])
        return Interval(mean, -math.inf, math.inf, 0)
    return seed_interval([_mean([gains[seed] for gains in by_task]) for seed in sorted(seeds)])


def complete_tasks(done: Mapping[Key, Row], arm: str, stage: str) -> list[str]:
    """Return the tasks that have all seeds of the stage, of the arm and of today's defaults."""
    seeds = set(STAGES[stage].seeds)
    return [task for task in TASKS if seeds <= differences(done, task, arm).keys()]


def choice(done: Mapping[Key, Row], stage: str) -> str | None:
    """Return the arm that the rule of the design chooses; None if none can be chosen.

    It is the arm with the highest mean gain over the tasks, of those that have at least `MIN_TASKS`
    whole tasks, a gain above 0 and no collapse.
    """
    candidates = {}
    for arm in (name for name in ARMS if name not in (TODAY, PERMUTED)):
        tasks = complete_tasks(done, arm, stage)
        is_steady = not any(key.arm == arm and is_collapsed(row) for key, row in done.items())
        if len(tasks) >= MIN_TASKS and is_steady:
            candidates[arm] = _mean(
                [_mean(list(differences(done, t, arm).values())) for t in tasks]
            )
    best = max(candidates, key=lambda arm: candidates[arm], default=None)
    return best if best is not None and candidates[best] > 0 else None


def choice_text(done: Mapping[Key, Row], stage: str) -> str:
    """Return a sentence on what the rule chooses, or why it cannot."""
    whole = max((len(complete_tasks(done, a, stage)) for a in ARMS if a != TODAY), default=0)
    if whole < MIN_TASKS:
        return (
            f"No arm can be chosen yet: at most {whole} tasks have all seeds of an arm and of "
            f"today's, and {MIN_TASKS} are needed."
        )
    arm = choice(done, stage)
    return f"Chosen: `{arm}`." if arm else "No arm is better than today's without a collapse."


def missing_text(done: Mapping[Key, Row], stage: str) -> str:
    """Return what has not been run, a line for each task."""
    arms = {key.arm for key in done} - {TODAY, PERMUTED}
    chosen = arms.pop() if stage == "confirmation" and len(arms) == 1 else None
    planned = runs(stage, chosen)
    lines = []
    for task in TASKS:
        left = [key for key in planned if key.task == task and key not in done]
        if left:
            arms = list(dict.fromkeys(key.arm for key in left))
            whole = [key for key in planned if key.task == task]
            names = "all" if len(left) == len(whole) else ", ".join(arms)
            cost = len(left) * TASKS[task].cpu_s / 3600
            lines.append(f"- {task}: {len(left)} of {len(whole)} runs ({names}; {cost:.1f} CPU-h)")
    return "\n".join(["Missing:", "", *lines]) if lines else "Nothing is missing."


def errors_text(rows: Sequence[Row], stage: str) -> Iterator[str]:
    """Yield the errors of runs, if there are any."""
    failures = [row for row in rows if "error" in row and row["stage"] == stage]
    if failures:
        yield "\n".join(f"- {Key.of(row)} failed: {row['error']}" for row in failures)


def _interval(interval: Interval) -> str:
    if math.isinf(interval.low):
        return f"{interval.mean:+.3f}"
    return f"{interval.mean:+.3f} ({interval.low:+.3f}..{interval.high:+.3f})"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
