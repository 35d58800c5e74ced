"""Summarise runs: their state, progress, evaluations, gain and warnings.

Everything is computed by the functions that `lightspan inspect` and the trainer use. What depends
on all lines of the metrics, such as the warnings, is kept and continued with the new lines.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightspan.errors import LightspanError
from lightspan.schema.redaction import without_keys
from lightspan.training.folder import METRICS, PROMPTS
from lightspan.training.results import Evaluation, FitResult
from lightspan.training.statistics import Interval, Z
from lightspan_tools.alerts import AlertMonitor, latest_step_fails
from lightspan_ui import views
from lightspan_ui.run_files import LiveRunFolder, is_alive, stamp_of

Line = Mapping[str, Any]

SILENT_S: Final = 300.0
"""Seconds without a new line after which a run counts as silent, unless its steps take long."""
MAX_REWARDS: Final = 100
"""Maximum values of `RunSummary.rewards`."""
_PACE_STEPS: Final = 5
"""Number of the last steps from which the remaining time is computed."""
_SPLITS: Final[Mapping[str, Any]] = {"eval": "held-out", "selection": "selection"}
_PASSWORD: Final = re.compile(r"(\w:\/\/[^\s\/@:]*:)[^\s\/@]*@")
_RUN_ID: Final = re.compile(r"run-([0-9a-f]{16})[0-9a-f]*")
_PROMPT_ALGORITHMS: Final = ("GEPA", "APO", "Alternate")


class Failure(NamedTuple):
    """The message of the newest rollout that failed when a step had ended."""

    step: int = -1
    message: str = ""


class Progress(NamedTuple):
    """What is known of a run's lines, and is continued with new ones."""

    generation: int
    monitor: AlertMonitor
    alerts: list[views.AlertView]
    evaluations: tuple[Evaluation, ...] = ()
    """Held-out evaluations."""
    gain: Interval | None = None
    costs: tuple[float, ...] = ()
    lines: int = 0


class Run:
    """A run that is shown.

    Args:
        name: name of the run in addresses.
        path: folder of the run.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.folder = LiveRunFolder(path)
        self.failure = Failure()
        self._progress = Progress(0, AlertMonitor(), [])
        self._summary: tuple[object, views.RunSummary] | None = None
        self._grew_without_process = False
        self._changed: float | None = None
        self._summarising = threading.Lock()

    def summary(self) -> views.RunSummary:
        """Return the summary of the run; one with an error if its files are damaged."""
        try:
            with self._summarising:  # a thread goes on although its request has ended
                return self._read_summary()
        except (LightspanError, OSError) as error:
            text = error_text(error)
        except Exception as error:  # the files may hold anything, and must not hide other runs
            text = f"{self.folder.path} holds no run that can be read: {error_text(error)}"
        return views.RunSummary(name=self.name, state="damaged", error=text)

    def _read_summary(self) -> views.RunSummary:
        folder = self.folder
        config, lines, state = folder.read_config(), folder.metrics(), self.state()
        result = folder.read_result()
        key = (
            *(stamp_of(folder.path / "config.json"), folder.tail.generation, len(lines), state),
            self.failure,
        )
        if self._summary is not None and self._summary[0] == key and state != "running":
            return self._summary[1]
        progress = self._continue(lines)
        train = [line for line in lines if line["kind"] == "train"]
        planned = planned_steps(config)
        seconds = [float(line.get("seconds") or 0.0) for line in train]
        summary = views.RunSummary(
            name=self.name,
            state=state,
            algorithm=str(config.get("algorithm") or ""),
            model=model_name(config),
            app=str(config.get("app") or ""),
            metric=str(config.get("metric") or "reward"),
            optimize=optimize_text(config.get("optimize")),
            started=started(config),
            changed=self._changed,
            steps=int((result or {}).get("steps") or (train[-1]["step"] if train else 0)),
            planned=planned,
            rewards=averaged([line.get("reward") for line in train], MAX_REWARDS),
            evaluations=list(evaluation_points(lines)),
            gain=None if progress.gain is None else estimate(progress.gain),
            alerts=[*progress.alerts, *state_alerts(lines, state, planned, self.failure)],
            eta_s=remaining_s(seconds, planned) if state == "running" else None,
            seconds=math.fsum(seconds),
            cost=total_cost(progress.costs, lines),
            has_prompts=has_prompts(folder, config),
            has_rollouts=config.get("algorithm") != "SFT",
        )
        self._summary = key, summary
        return summary

    def state(self) -> views.RunState:
        """Return the state of the run. The lock is never tested.

        A trainer on another machine has an id that means nothing here. That it runs shows only in
        the metrics, which grow.
        """
        folder = self.folder
        stamp = stamp_of(folder.path / METRICS)
        changed = None if stamp is None else stamp[2] / 1e9
        if folder.read_result() is not None:
            self._changed = changed
            return "finished"
        lock = stamp_of(folder.path / "lock")
        pid = folder.pid()
        is_running = pid is not None and lock is not None and is_alive(pid, lock[2] / 1e9)
        if not is_running and self._changed is not None and changed != self._changed:
            self._grew_without_process = True
        self._changed = changed
        if not is_running and not self._grew_without_process:
            return "stopped"
        latest = changed if changed is not None else (lock[2] / 1e9 if lock else 0.0)
        return "running" if time.time() - latest < silence_s(folder.tail.lines) else "silent"

    def _continue(self, lines: list[dict[str, Any]]) -> Progress:
        """Add the new lines to what is known of the run."""
        progress = self._progress
        if progress.generation != self.folder.tail.generation:
            progress = Progress(self.folder.tail.generation, AlertMonitor(), [])
        new = lines[progress.lines :]
        evaluations, gain = progress.evaluations, progress.gain
        if any(line["kind"] == "eval" for line in new):
            evaluations = tuple(self.folder.evaluations())
            gain = gain_of(evaluations)
        alerts = [
            views.AlertView(name=alert.name, step=alert.step, text=alert.text, page=alert.page)
            for alert in progress.monitor.read(new, evaluations)
        ]
        progress = Progress(
            progress.generation,
            progress.monitor,
            progress.alerts + alerts,
            evaluations,
            gain,
            progress.costs + tuple(cost for line in new for cost in costs_of(line)),
            len(lines),
        )
        self._progress = progress
        return progress

    @property
    def is_complete(self) -> bool:
        """Whether the run was complete when it was last summarised."""
        return self._summary is not None and self._summary[1].state == "finished"

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The held-out evaluations of the last summary."""
        return self._progress.evaluations


# --- alerts -----------------------------------------------------------------------------------
def state_alerts(
    lines: Sequence[Line], state: views.RunState, planned: int | None, failure: Failure
) -> Iterator[views.AlertView]:
    """Yield alerts about the present state of a run, which a later step may end.

    Args:
        lines: lines of its metrics.
        state: its state.
        planned: number of planned steps; None if unknown.
        failure: message of a rollout that failed.
    """
    alert = latest_step_fails(lines)
    if alert is not None and alert.step == failure.step:
        alert = latest_step_fails(lines, failure.message)
    if alert is not None:
        yield views.AlertView(name=alert.name, step=alert.step, text=alert.text, page=alert.page)
    if state == "stopped":
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        step = steps[-1] if steps else 0
        of = "" if planned is None else f" of {planned}"
        text = (
            f"the run stopped after step {step}{of} and has no result. To go on from its latest "
            "checkpoint, run the same program with fit(…, resume=True)"
        )
        yield views.AlertView(name="stopped", step=step, text=text, page=RESUME_PAGE)


RESUME_PAGE: Final = "docs/guides/resume.md"
"""The page that explains how a run is resumed."""


# --- parts of a summary -----------------------------------------------------------------------
def gain_of(evaluations: Sequence[Evaluation]) -> Interval | None:
    """Return the gain from the first to the last evaluation, as `FitResult` computes it."""
    if len(evaluations) < 2:
        return None
    failure_reward = evaluations[-1].failure_reward
    restated = tuple(each.restated(failure_reward) for each in evaluations)
    return FitResult(folder=Path(), model=None, evaluations=restated, seconds={}, steps=0).gain


def estimate(interval: Interval) -> views.Estimate:
    """Return an interval as part of an answer."""
    return views.Estimate(
        mean=finite(interval.mean),
        low=interval.low if interval.is_known else None,
        high=interval.high if interval.is_known else None,
        n=interval.n,
    )


def evaluation_points(lines: Sequence[Line]) -> Iterator[views.EvaluationPoint]:
    """Yield the evaluations in lines of the metrics."""
    for line in lines:
        split = _SPLITS.get(line["kind"])
        if split is None:
            continue
        low, high = number(line.get("low")), number(line.get("high"))
        yield views.EvaluationPoint(
            step=line["step"],
            split=split,
            reward=views.Estimate(
                mean=number(line.get("mean")), low=low, high=high, n=int(line.get("n") or 0)
            ),
            failed=int(line.get("failed") or 0),
            unscored=int(line.get("unscored") or 0),
            silent=int(line.get("silent") or 0),
        )


def planned_steps(config: Mapping[str, Any]) -> int | None:
    """Return the number of planned steps by a run's settings; None if they do not tell."""
    if config.get("algorithm") in ("GEPA", "APO"):
        return 1  # the whole search is one step
    steps = config.get("steps")
    if isinstance(steps, int):
        return steps
    tasks = (config.get("train") or {}).get("tasks")
    per_step, epochs = config.get("tasks_per_step"), config.get("epochs")
    if not (isinstance(tasks, int) and isinstance(per_step, int) and per_step > 0):
        return None
    if not isinstance(epochs, int | float):
        return None
    return max(1, math.ceil(epochs * tasks / per_step))


def remaining_s(seconds: Sequence[float], planned: int | None) -> float | None:
    """Return the seconds until the planned steps are done, at the pace of the last steps."""
    if planned is None or not seconds or len(seconds) >= planned:
        return None
    last = seconds[-_PACE_STEPS:]
    return (planned - len(seconds)) * math.fsum(last) / len(last)


def silence_s(lines: Sequence[Line]) -> float:
    """Return the seconds without a new line after which a run counts as silent."""
    seconds = [float(line.get("seconds") or 0.0) for line in lines[-2 * _PACE_STEPS :]]
    return max(SILENT_S, 3 * max(seconds, default=0.0))


def started(config: Mapping[str, Any]) -> float | None:
    """Return when a run began, by the time in its id (`new_id`); None if it has no such id."""
    match = _RUN_ID.fullmatch(str(config.get("run_id")))
    return None if match is None else int(match[1], 16) / 1e9


def averaged(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return at most `size` values, each the mean of neighbours; None where all are None."""
    if len(values) <= size:
        return list(values)
    bounds = [round(i * len(values) / size) for i in range(size + 1)]
    return [
        mean_of([value for value in values[start:end] if value is not None])
        for start, end in pairwise(bounds)
    ]


def costs_of(line: Line) -> list[float]:
    """Return the costs of a training step: of its search for prompts, and of its judges."""
    if line["kind"] != "train":
        return []
    names = (name for name in line if name == "cost" or name.endswith("/cost"))
    return [value for name in names if (value := number(line[name])) is not None]


def total_cost(costs: Sequence[float], lines: Sequence[Line]) -> float | None:
    """Return the cost of a run so far; None if nothing has a price.

    Args:
        costs: costs of its steps.
        lines: lines of its metrics. Those of a search that still runs have its cost so far.
    """
    last = lines[-1] if lines else {}
    running = number(last.get("cost")) if last.get("kind") == "search" else None
    total = [*costs, *([] if running is None else [running])]
    return math.fsum(total) if total else None


def has_prompts(folder: LiveRunFolder, config: Mapping[str, Any]) -> bool:
    """Return whether the run learned or searched prompts."""
    return (
        config.get("algorithm") in _PROMPT_ALGORITHMS
        or (folder.path / PROMPTS).exists()
        or (folder.path / "proposals.jsonl").exists()
    )


def model_name(config: Mapping[str, Any]) -> str:
    """Return the name of the model in a run's settings; empty if the run trains none."""
    return Path(str(config.get("model") or "")).name


def optimize_text(value: Any) -> str:
    """Return the setting `optimize` as text, such as `write, rewrite`."""
    if isinstance(value, dict):
        return ", ".join(f"{agents}: {policy}" for agents, policy in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


# --- settings ---------------------------------------------------------------------------------
def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by dotted name, as texts without keys and passwords."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flat_settings(value, f"{name}.")
        else:
            flat[name] = setting_text(value)
    return flat


def setting_text(value: Any) -> str:
    """Return the value of a setting as text, without keys and passwords."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return secretless("" if value is None else str(value))


# --- curves -----------------------------------------------------------------------------------
def metrics_view(
    lines: Sequence[Line], kind: str, names: Sequence[str], after: int, size: int
) -> views.Metrics:
    """Return curves of the lines of a kind.

    Args:
        lines: all lines of the metrics.
        kind: kind of the lines, such as `train`.
        names: names of the numbers; empty for all.
        after: number of lines at the start that are left out.
        size: maximum points of a curve.
    """
    chosen = [line for line in lines[after:] if line["kind"] == kind]
    series = {name: curve(chosen, name, size) for name in names or metric_names(chosen)}
    return views.Metrics(lines=len(lines), series=series)


def metric_names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the numbers in lines of the metrics, in the order of their occurrence."""
    names: dict[str, None] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "low", "high") and number(value) is not None:
                names[name] = None
    return list(names)


def curve(lines: Sequence[Line], name: str, size: int) -> list[views.Point]:
    """Return the curve of a number by step, averaged to at most `size` points.

    The points of a reward have an interval: that of the evaluation, or 1.96 standard errors.
    """
    points = [point for line in lines if (point := point_of(line, name)) is not None]
    if len(points) <= size:
        return points
    bounds = [round(i * len(points) / size) for i in range(size + 1)]
    return [merged(points[start:end]) for start, end in pairwise(bounds)]


def point_of(line: Line, name: str) -> views.Point | None:
    """Return the point of a number in a line; None if the line lacks it."""
    value = number(line.get(name))
    if value is None:
        return None
    low = high = None
    error = number(line.get("reward_se")) if name == "reward" else None
    if error is not None:
        low, high = value - Z * error, value + Z * error
    elif name == "mean":
        low, high = number(line.get("low")), number(line.get("high"))
    return views.Point(x=float(line["step"]), y=value, low=low, high=high)


def merged(points: Sequence[views.Point]) -> views.Point:
    """Return the mean of neighbouring points, with the interval of a mean of independent ones."""
    x = math.fsum(point.x for point in points) / len(points)
    y = math.fsum(point.y for point in points) / len(points)
    halves = [(p.high - p.low) / 2 for p in points if p.low is not None and p.high is not None]
    if len(halves) < len(points):
        return views.Point(x=x, y=y)
    half = math.sqrt(math.fsum(value**2 for value in halves)) / len(points)
    return views.Point(x=x, y=y, low=y - half, high=y + half)


# --- small things -----------------------------------------------------------------------------
def number(value: Any) -> float | None:
    """Return a value as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return finite(float(value))


def finite(value: float) -> float | None:
    """Return a number; None if it is NaN or infinite."""
    return value if math.isfinite(value) else None


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of values; None if there are none."""
    return math.fsum(values) / len(values) if values else None


def error_text(error: BaseException) -> str:
    """Return the message of an error without keys and passwords."""
    return secretless(str(error) or type(error).__name__)


def secretless(text: str) -> str:
    """Return a text without keys, and without the passwords of URLs."""
    return _PASSWORD.sub(r"\1…@", without_keys(text))
