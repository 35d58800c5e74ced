"""Alerts about a training that goes wrong, from its metrics and evaluations.

An `AlertMonitor` gets the lines of `metrics.jsonl` one by one and raises each alert once. Alerts
depend only on these lines. So a resumed run and `lightspan inspect` raise the same alerts. A
training prints its alerts by `print_alerts`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from operator import add
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import PAGE, page_of
from lightspan.lightning.rollout_checks import FAILURE_WARNING
from lightspan.progress import plural
from lightspan.training.folder import RunFolder
from lightspan.training.listeners import RunEvent
from lightspan.training.results import Evaluation
from lightspan.training.statistics import paired_gain, t_quantile

Line = Mapping[str, Any]

WINDOW: Final = 3
"""Number of steps whose mean is compared."""
MIN_FALL_SE: Final = 4.0
"""Minimum fall of a reward that raises an alert, in standard errors, in a run of at most
`MIN_FALL_STEPS` steps."""
MIN_FALL_STEPS: Final = 10
"""Number of steps above which the minimum fall grows: in a longer run, the best of more windows is
compared."""
MIN_LOSS_SE: Final = 3.5
"""Minimum fall of the reward since the start that raises an alert, in standard errors, in a run of
at most `MIN_LOSS_STEPS` steps."""
SKEW: Final = 0.12
"""Share by which the fall of rare successes has to be larger. Tasks differ in how often they
succeed, so that numbers of successes are more skewed than those of equal trials."""
MIN_LOSS_STEPS: Final = 20
"""Number of steps above which the minimum fall since the start grows."""
MIN_START_GROUPS: Final = 12
"""Minimum groups at the start with which later steps are compared."""
MIN_RISE_SE: Final = 3.8
"""Minimum rise of a failure rate that raises an alert, in standard errors, in a run of at most
`MIN_FALL_STEPS` steps or evaluations."""
MIN_HELD_OUT_SE: Final = 3.1
"""Minimum fall of a held-out reward at the second evaluation, as a normal variable. It grows with
the number of evaluations; an alert needs a fall of `MIN_FALL_SE` besides."""
MIN_FALL_GROUPS: Final = 24
"""Minimum groups in a window for an alert: with fewer, standard errors are too uncertain."""
MIN_FALL_TASKS: Final = 10
"""Minimum number of held-out tasks for an alert, or of clusters if the tasks have clusters."""
MAX_IDLE_GROUPS: Final = 24
"""Consecutive groups without reward variance that raise an alert."""
MIN_KL: Final = 1e-7
"""Mean `approx_kl` per token and step below which an alert is raised."""
MAX_GAP: Final = 0.05
"""Mean difference of log-probabilities between engine and learner above which a note is printed.
Rounding causes much smaller differences; a larger one means that their models differ.
"""
MAX_CORRECTED_GAP: Final = 0.2
"""The same if the tokens are weighted by the ratio of learner and engine. A larger difference means
that the engine samples from other weights."""
MANY_SILENT: Final = 0.25
"""Share of a step's rollouts without a call of the policy from which an alert is raised."""
MANY_REJECTED: Final = 0.2
"""Share of a step's calls that are rejected above which an alert is raised."""
ADAPTIVE: Final = "tasks/zero_gradient_shuffled"
"""Metric that only steps with `tasks="adaptive"` have."""
MIN_UPDATES: Final = 10
"""Number of updates over which `approx_kl` is averaged."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about a training, with the numbers behind it and the setting to change."""

    name: str
    step: int
    text: str

    @property
    def page(self) -> str:
        """Page of the documentation that explains the alert."""
        return page_of(self.text) or PAGE


class _Windows:
    """The lines that a check compares, and the best of their windows before the latest one.

    Only the new window is compared when a line is added, so that a long run costs no more per step.

    Args:
        is_compared: returns whether a line is compared.
        rating: returns a number of a window; the window with the highest is the best, the first of
            equally good ones.
    """

    def __init__(
        self, is_compared: Callable[[Line], bool], rating: Callable[[Sequence[Line]], float]
    ) -> None:
        self._is_compared, self._rating = is_compared, rating
        self._highest = -math.inf
        self.lines: list[Line] = []
        """The lines that are compared."""
        self.best: Sequence[Line] = ()
        """The best window; empty while there are too few lines."""

    @property
    def latest(self) -> Sequence[Line]:
        """The latest window."""
        return self.lines[-WINDOW:]

    def add(self, line: Line) -> None:
        """Add a line."""
        if not self._is_compared(line):
            return
        self.lines.append(line)
        if len(self.lines) >= 2 * WINDOW:
            window = self.lines[-2 * WINDOW : -WINDOW]
            rating = self._rating(window)
            if not self.best or rating > self._highest:
                self.best, self._highest = window, rating


class _RewardSums:
    """Sums of the rewards of a run's first steps, so that a long run costs no more per step."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        """The lines with a reward and its standard error."""
        self._sums: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
        """For each number of steps, the sums of rewards, squared standard errors and groups."""
        self._ends = 0.0, 0.0
        """The lowest and the highest reward of a step, or 0."""

    def add(self, line: Line) -> None:
        """Add a line."""
        if "reward" not in line or "reward_se" not in line:
            return
        self.lines.append(line)
        terms = line["reward"], line["reward_se"] ** 2, line.get("batch/groups", 0)
        self._sums.append(tuple(map(add, self._sums[-1], terms)))
        self._ends = min(self._ends[0], line["reward"]), max(self._ends[1], line["reward"])

    @property
    def variance(self) -> float:
        """Mean squared standard error of the steps' rewards; 0 without steps."""
        return self._sums[-1][1] / max(1, len(self.lines))

    def deviance_errors(self, first: float, size: int, later: float, rest: int) -> float:
        """Return how certain a fall of the reward is, as a normal variable; 0 if it did not fall.

        A mean of few successes is skewed: it is often far above what is expected, and never far
        below. So the fall is tested as one of the shares of successes in two samples of independent
        trials (`_deviance_errors`), with as many trials per step as give the run's mean and
        variance. For rare successes the first steps count half a success less, because successes
        are whole, and the result is less by `SKEW`.

        Args:
            first: sum of the rewards of the first steps.
            size: number of the first steps.
            later: sum of the rewards of the later steps.
            rest: number of the later steps.
        """
        low, high = self._ends
        low = low if low < -1 else -1.0 * (low < 0)
        # rewards above 1 have no bound that is known: as if it were far away
        width = 1 - low if high <= 1 else 1e6 * (high - low)
        share = (self._sums[-1][0] / len(self.lines) - low) / width
        variance = self.variance / width**2
        if not variance or not 0 < share < 1:
            return 0.0
        trials = share * (1 - share) / variance  # per step
        before = (first - size * low) / width * trials - abs(0.5 - share)
        after = (later - rest * low) / width * trials
        parts = (size * trials, before), (rest * trials, after)
        return _deviance_errors(*parts) / (1 + SKEW * abs(1 - 2 * share))

    def largest_loss(self) -> _Loss | None:
        """Return the most certain fall of the reward since the start; None if nothing is compared.

        The first 1, 2, 4, … steps and the first half are each compared with all later steps, which
        must be at least as many. This tests the hypothesis that the reward does not change, so the
        variance is the mean over all steps; that of a single step is too uncertain.
        """
        count = len(self.lines)
        rewards, _, groups = self._sums[-1]
        losses = []
        for size in _first_sizes(count):
            first, _, first_groups = self._sums[size]
            rest = count - size
            if first_groups < MIN_START_GROUPS or groups - first_groups < MIN_FALL_GROUPS:
                continue
            error = math.sqrt(self.variance * (1 / size + 1 / rest))
            before, now = first / size, (rewards - first) / rest
            errors = (before - now) / error if error else 0.0
            if errors >= MIN_LOSS_SE:
                errors = min(errors, self.deviance_errors(first, size, rewards - first, rest))
            losses.append(_Loss(errors, size, before, now, error))
        return max(losses, default=None)


def _deviance_errors(high: tuple[float, float], low: tuple[float, float]) -> float:
    """Return how certain it is that one share of successes is above another, as a normal variable.

    It is the signed root of the deviance (McCullagh and Nelder, Generalized Linear Models, 1989); 0
    if the share is not above the other.

    Args:
        high: numbers of trials and of successes of the sample whose share is to be above.
        low: the same of the other.
    """
    pooled = (high[1] + low[1]) / (high[0] + low[0])
    if high[1] / high[0] <= low[1] / low[0]:
        return 0.0
    ratio = math.fsum(_deviance(number, count, pooled) for number, count in (high, low))
    return math.sqrt(2 * max(0.0, ratio))


def _deviance(number: float, count: float, share: float) -> float:
    """Return by how much `count` successes of `number` trials are likelier than at `share`.

    It is the logarithm of the ratio of the likelihoods.
    """
    pairs = (count, share), (number - count, 1 - share)
    return math.fsum(n * math.log(n / number / part) for n, part in pairs if n > 0)


class _FailureSums:
    """Sums of the failures of a run's first steps."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        """The lines with numbers of rollouts and failures."""
        self._sums: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
        """For each number of steps, the sums of failures, rollouts and tasks."""

    def add(self, line: Line) -> None:
        """Add a line."""
        if not _has_failures(line):
            return
        self.lines.append(line)
        terms = line["failed"], line["rollouts"], line.get("batch/groups", line["rollouts"])
        self._sums.append(tuple(map(add, self._sums[-1], terms)))

    def rise(self) -> int:
        """Return the number of first steps after which failures have risen; 0 if they have not.

        The first 1, 2, 4, … steps and the first half are each compared with all later steps, each
        task counting once. Failures that were frequent for a while, and are not now, do not count.
        """
        count = len(self.lines)
        latest = _failure_rate(self.lines[-WINDOW:]) if count else 0.0
        least = _least_errors(MIN_RISE_SE, count, MIN_LOSS_STEPS)
        for size in _first_sizes(count):
            failed, rollouts, tasks = self._sums[size]
            more = [x - y for x, y in zip(self._sums[-1], self._sums[size], strict=True)]
            if tasks < MIN_START_GROUPS or more[2] < MIN_FALL_GROUPS:
                continue
            before, now = failed / rollouts, more[0] / more[1]
            if not (now > FAILURE_WARNING and latest > before):
                continue
            half = abs(0.5 - (failed + more[0]) / (rollouts + more[1]))
            later = more[2], max(0.0, now * more[2] - half)
            if _deviance_errors(later, (tasks, before * tasks)) >= least:
                return size
        return 0


def _first_sizes(count: int) -> set[int]:
    """Return the numbers of first steps to compare with the others, which are at least `WINDOW`."""
    sizes = {count // 2, *(2**power for power in range(count.bit_length() - 1))}
    return {size for size in sizes if size and count - size >= WINDOW}


class _Loss(NamedTuple):
    """A fall of the reward between the first steps and all later ones."""

    errors: float
    """The fall in standard errors."""
    size: int
    """Number of first steps."""
    before: float
    now: float
    error: float


class AlertMonitor:
    """Check a training after every step and every evaluation on held-out tasks.

    Raise each alert once.
    """

    def __init__(self) -> None:
        self._train: list[Line] = []
        self._rewards, self._failures = _reward_windows(), _failure_windows()
        self._sums, self._failure_sums = _RewardSums(), _FailureSums()
        self._evaluations: list[Evaluation] = []
        self._names: set[str] = set()
        self.lines: list[Line] = []
        """Lines that have been read."""

    def step(self, line: Line) -> list[Alert]:
        """Add the metrics of a training step, and return the new alerts."""
        finite = {name: value for name, value in line.items() if value is not None}
        self._train.append(finite)
        self._failures.add(finite)
        self._failure_sums.add(finite)
        # adaptive tasks get harder as the run goes on, so the reward falls though nothing is worse
        if ADAPTIVE not in line:
            self._rewards.add(finite)
            self._sums.add(finite)
        checks = (
            no_group_varies,
            policy_stays,
            air_is_idle,
            rewards_are_stray,
            call_rewards_are_unused,
            rollouts_are_silent,
            calls_are_rejected,
        )
        texts = {
            "reward_falls": (
                _reward_falls(self._rewards, self._sums) or _reward_is_lost(self._sums)
            ),
            "failures_rise": (
                _failures_rise(self._failures) or _failures_have_risen(self._failure_sums)
            ),
            **{check.__name__: check(self._train) for check in checks},
        }
        return self._new(texts, line["step"])

    def evaluated(self, evaluation: Evaluation) -> list[Alert]:
        """Add the result of an evaluation on held-out tasks, and return the new alerts."""
        self._evaluations.append(evaluation)
        checks = (validation_falls, validation_failures_rise)
        texts = {check.__name__: check(self._evaluations) for check in checks}
        texts["policy_is_silent"] = policy_is_silent(evaluation)
        return self._new(texts, evaluation.step)

    def read(self, metrics: Sequence[Line], evaluations: Sequence[Evaluation]) -> list[Alert]:
        """Add further lines of a run's metrics, and return the new alerts.

        Args:
            metrics: lines that have not been added yet.
            evaluations: evaluations of the run; those that `metrics` mention must be included.
        """
        self.lines += metrics
        by_step = {evaluation.step: evaluation for evaluation in evaluations}
        alerts: list[Alert] = []
        for line in metrics:
            if line["kind"] == "train":
                alerts += self.step(line)
            elif line["kind"] == "eval" and line["step"] in by_step:
                alerts += self.evaluated(by_step[line["step"]])
        return alerts

    def _new(self, texts: Mapping[str, str], step: int) -> list[Alert]:
        new = {name: text for name, text in texts.items() if text and name not in self._names}
        self._names |= new.keys()
        return [Alert(name=name, step=step, text=text) for name, text in new.items()]


def run_alerts(
    metrics: Sequence[Line], evaluations: Sequence[Evaluation], failure: str
) -> list[Alert]:
    """Return all alerts of a run, and at last one if its latest training step failed.

    Args:
        metrics: lines of the run's metrics.
        evaluations: evaluations of the run.
        failure: message of a rollout that failed; empty if none is known.
    """
    latest = latest_step_fails(metrics, failure)
    alerts = AlertMonitor().read(metrics, evaluations)
    return alerts if latest is None else [*alerts, latest]


def latest_step_fails(metrics: Sequence[Line], failure: str = "") -> Alert | None:
    """Return an alert if the app failed in many rollouts of the latest training step; else None.

    Other than the alerts of `AlertMonitor`, it is gone once a later step succeeds.

    Args:
        metrics: lines of the run's metrics.
        failure: message of a rollout that failed; empty if none is known.
    """
    line = next((each for each in reversed(metrics) if each["kind"] == "train"), {})
    failed, count = int(line.get("failed") or 0), int(line.get("rollouts") or 0)
    if not failed or failed < FAILURE_WARNING * count:
        return None
    example = f", for example {' '.join(failure.split())[:MAX_MESSAGE]}" if failure else ""
    text = f"{failed} of {plural(count, 'rollout')} failed in step {line['step']}{example}"
    return Alert(name=STEP_FAILS, step=line["step"], text=text)


STEP_FAILS: Final = "latest_step_fails"
MAX_MESSAGE: Final = 300
"""Maximum characters of the message of a failed rollout in an alert."""

_monitors: dict[Path, AlertMonitor] = {}
"""Folder of a run → its monitor, while it trains."""


def print_alerts(event: RunEvent) -> list[str]:
    """Return the new alerts of a run as lines to print.

    The trainer calls this function with each event of the run.
    """
    folder = RunFolder(event.folder)
    metrics = folder.metrics()
    monitor = _monitors.pop(event.folder, AlertMonitor())
    if event.kind == "end":
        return []
    seen = len(monitor.lines)
    if metrics[:seen] != monitor.lines:  # the run was resumed at an earlier step
        monitor, seen = AlertMonitor(), 0
    _monitors[event.folder] = monitor
    new = metrics[seen:]
    has_evaluation = any(line["kind"] == "eval" for line in new)
    alerts = monitor.read(new, folder.evaluations() if has_evaluation else [])
    # of a run that was resumed, earlier steps were reported before
    train = [line for line in new if line["kind"] == "train" and line["step"] == event.step]
    notes = [text for line in train for text in update_notes(line)]
    if event.step == 1 and train:
        notes += few_tasks_notes(folder.read_config())
    new_alerts = [alert for alert in alerts if alert.step == event.step]
    return notes + [f"warning: {alert.text} ({alert.page})" for alert in new_alerts]


def few_tasks_notes(config: Line) -> list[str]:
    """Return a note if a run, whose configuration is `config`, has fewer tasks than a step takes.

    Empty if it has enough.
    """
    size, count = config.get("tasks_per_step") or 0, config["train"]["tasks"]
    if count >= size:
        return []
    return [
        f"tasks_per_step={size}, and there are {plural(count, 'training task')}: in a step a task "
        f"runs about {size / count:.2g} times, each time as a group of its own"
    ]


# --- notes on one step, which are repeated ----------------------------------------------------
def update_notes(line: Line) -> list[str]:
    """Return a text for each problem in the weight update of a training step.

    Empty if there is no problem.
    """
    notes = []
    groups = int(line.get("batch/groups", 0))
    varying = groups - int(sum(line[name] for name in line if name.startswith("batch/groups:")))
    if "resample/groups" in line and varying < groups:
        notes.append(
            f"after resampling {varying} of {groups} groups vary: the step trains on those"
        )
    if line.get("batch/rows") == 0:
        return [*notes, _why_no_rows(line)]
    # null stands for NaN or infinity, which JSON lacks
    numbers = {name: math.nan if value is None else value for name, value in line.items()}
    gap = numbers.get("learner/logprob_gap_mean", 0.0)
    is_corrected = "learner/engine_ratio_truncated" in numbers
    if numbers.get("learner/fresh_tokens") and (note := _gap_note(gap, is_corrected)):
        notes.append(note)
    if skipped := numbers.get("learner/skipped", 0.0):
        were = "update was" if skipped == 1 else "updates were"
        notes.append(
            f"{skipped:.0f} {were} skipped, and changed no weights: {_why_skipped(numbers)}"
        )
    return notes


def _gap_note(gap: float, is_corrected: bool) -> str:
    """Return a note if the log-probabilities of engine and learner differ too much; else "".

    Args:
        gap: mean difference; it may be NaN.
        is_corrected: whether tokens are weighted by the ratio of learner and engine.
    """
    if gap <= (MAX_CORRECTED_GAP if is_corrected else MAX_GAP):
        return ""
    weigh = "" if is_corrected else ", or weigh the tokens with loss=PolicyLoss(importance_cap=2.0)"
    return (
        f"engine and learner disagree: log-probabilities of the same tokens differ by {gap:.3g} on "
        f"average (at most {MAX_GAP} is rounding), so that the update is biased. Compare their "
        f"dtypes and attention implementations{weigh}; if it stays above {MAX_CORRECTED_GAP}, stop "
        "the run: the engine samples from other weights than those that are trained"
    )


def _why_no_rows(line: Line) -> str:
    """Return why no call was trained in a step, as text."""
    if line.get("batch/transitions"):
        return "no group varied: nothing to learn from in this step"
    calls = Counter({name[6:]: int(line[name]) for name in line if name.startswith("calls/")})
    counts = ", ".join(f"{count} {status}" for status, count in calls.most_common())
    return f"no call could be trained in this step ({counts or 'there was none'})"


def _why_skipped(line: Line) -> str:
    """Return why weight updates were skipped, as text.

    Args:
        line: metrics with `learner/loss` and `learner/grad_norm`, each a mean over the updates. A
            mean shows that a value was not finite, because then the mean is not finite either.
    """
    names = ("loss", "grad_norm")
    values = {name: line[f"learner/{name}"] for name in names if f"learner/{name}" in line}
    if len(values) == 2 and all(map(math.isfinite, values.values())):
        return "their rows had no token to train"
    shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    return (
        f"the loss or the gradient is not finite{f' ({shown})' if shown else ''}; lower "
        "learning_rate if it goes on"
    )


# --- checks: each returns the text of an alert, or "" ---------------------------------------
def _reward_windows() -> _Windows:
    return _Windows(lambda line: "reward" in line and "reward_se" in line, _reward)


def _reward_falls(windows: _Windows, sums: _RewardSums) -> str:
    """Return the text of an alert if the latest rewards are far below the best ones; else "".

    The best window of a long run is high by chance, and more so with a small standard error of its
    own. So the threshold grows with the number of steps, and the error is at least that of the
    run's mean variance.

    Args:
        windows: the steps of the run.
        sums: sums of the steps' rewards.
    """
    best, latest = windows.best, windows.latest
    if not best:
        return ""
    own = math.fsum(line["reward_se"] ** 2 for line in [*best, *latest]) / WINDOW**2
    error = math.sqrt(max(own, 2 * sums.variance / WINDOW))
    groups = sum(line.get("batch/groups", 0) for line in latest)
    count = len(windows.lines)
    least = _least_errors(MIN_FALL_SE, count, MIN_FALL_STEPS, 3)
    if groups < MIN_FALL_GROUPS or not _reward(best) - _reward(latest) > least * error:
        return ""
    totals = [math.fsum(line["reward"] for line in part) for part in (best, latest)]
    if sums.deviance_errors(totals[0], WINDOW, totals[1], WINDOW) <= least:
        return ""
    return _fall_text(best, latest, _reward(best), _reward(latest), error, windows.lines)


def _least_errors(least: float, count: int, few: int, power: int = 2) -> float:
    """Return the minimum change that raises an alert, in standard errors.

    It grows with the number of comparisons: a normal variable exceeds it with a probability that
    falls as a power of 1/count, so that the sum over a run of any length stays small.

    Args:
        least: minimum for at most `few` steps or evaluations.
        count: number of steps or evaluations so far.
        few: number above which the minimum grows.
        power: the power; 3 where the latest steps are compared with the best of all windows, whose
            number grows too.
    """
    return math.sqrt(least**2 + 2 * power * math.log(max(1, count / few)))


def _reward_is_lost(sums: _RewardSums) -> str:
    """Return the text of an alert if the training reward has fallen since the start; else "".

    This finds a collapse within the first steps, and a slow decline, as of a policy that is trained
    on rewards unrelated to its answers. A reward that rose early and stays raises no alert.
    """
    loss = sums.largest_loss()
    least = _least_errors(MIN_LOSS_SE, len(sums.lines), MIN_LOSS_STEPS)
    if loss is None or loss.errors < least:
        return ""
    first, rest = sums.lines[: loss.size], sums.lines[loss.size :]
    return _fall_text(first, rest, loss.before, loss.now, loss.error, sums.lines)


def _fall_text(
    first: Sequence[Line],
    latest: Sequence[Line],
    before: float,
    now: float,
    error: float,
    lines: Sequence[Line],
) -> str:
    moved = [line["learner/approx_kl"] for line in lines if "learner/approx_kl" in line]
    largest = f"; the largest update moved the policy by a KL of {max(moved):.2g}" if moved else ""
    return (
        f"the training reward is falling: {before:.3f} in {_steps(first)}, {now:.3f} in "
        f"{_steps(latest)} (standard error of the difference {error:.3f}{largest}). Lower "
        f"learning_rate{_rate(lines)}, or hold the policy near its start with "
        "loss=PolicyLoss(kl=0.02)"
    )


def _steps(lines: Sequence[Line]) -> str:
    first, last = lines[0]["step"], lines[-1]["step"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def validation_falls(evaluations: Sequence[Evaluation]) -> str:
    """Return the text of an alert if the latest held-out evaluation is far below the best one.

    Return "" if there is no alert. Only tasks that have a score in both evaluations are compared.
    The threshold grows with the number of evaluations. It is that of a normal variable, turned into
    one of Student's t with the same likelihood ratio, because few tasks give an uncertain error.
    """
    latest = evaluations[-1]
    comparable = [earlier.restated(latest.failure_reward) for earlier in evaluations[:-1]]
    scored = [earlier for earlier in comparable if math.isfinite(earlier.mean)]
    if not scored:
        return ""
    best = max(scored, key=lambda earlier: earlier.mean)
    gain = paired_gain(best.rewards, latest.rewards, latest.clusters, latest.lowest_reward)
    units = gain.clusters or gain.n
    if units < MIN_FALL_TASKS:
        return ""
    # the lower bound may be cut at the smallest possible reward
    error = (gain.high - gain.mean) / t_quantile(units - 1)
    normal = _least_errors(MIN_HELD_OUT_SE, len(evaluations), 2)
    least = math.sqrt((units - 1) * math.expm1(normal**2 / (units - 1)))
    if not -gain.mean > max(MIN_FALL_SE, least) * error:
        return ""
    return (
        f"the held-out reward has fallen since step {best.step}: by {gain} on the tasks that both "
        "evaluations scored. Lower learning_rate, train for fewer steps, or keep the best step by "
        'a selection split: Trainer(keep="best"), fit(…, selection=…)'
    )


def policy_is_silent(evaluation: Evaluation) -> str:
    """Return the text of an alert if an evaluation made no call to the trained policy; else ""."""
    if evaluation.policy_calls != 0 or not evaluation.silent:
        return ""
    return (
        f"the evaluation of step {evaluation.step} asked the policy nothing, so its reward says "
        "nothing of the weights or prompts. Check that optimize= names agents that call a model; "
        "if a cache of the app answers, switch it off in rollouts"
    )


def rollouts_are_silent(train: Sequence[Line]) -> str:
    """Return the text of an alert if many rollouts of a step asked the policy nothing; else ""."""
    silent, rollouts = train[-1].get("silent", 0), train[-1].get("rollouts", 0)
    if not rollouts or silent < MANY_SILENT * rollouts:
        return ""
    return (
        f"{silent:.0f} of {rollouts:.0f} training rollouts made no call of the policy, so they "
        "teach nothing. If a cache of the app answers, switch it off in rollouts"
    )


def calls_are_rejected(train: Sequence[Line]) -> str:
    """Return the text of an alert if many calls of the agents to train are rejected; else ""."""
    start = "calls/rejected:"
    rejected = Counter({k.removeprefix(start): v for k, v in train[-1].items() if start in k})
    # the step's output counts these; replayed calls are trained where they were sampled
    for name in ("unscored", "target_kl", "replayed"):
        del rejected[name]
    total = rejected.total() + train[-1].get("calls/trained", 0)
    if rejected.total() <= MANY_REJECTED * total:
        return ""
    reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in rejected.most_common())
    return (
        f"{rejected.total():.0f} of {total:.0f} calls of the agents to train are rejected, so not "
        f"trained ({reasons}): lightspan inspect RUN shows them"
    )


def _failure_windows() -> _Windows:
    return _Windows(_has_failures, lambda window: -_failure_rate(window))


def _has_failures(line: Line) -> bool:
    """Return whether a step has numbers of rollouts and of failures."""
    return bool(line.get("rollouts")) and "failed" in line


def _failures_rise(windows: _Windows) -> str:
    """Return the text of an alert if the app fails more often in training than before; else "".

    Rollouts of the same task often fail together. So the standard error counts each task once. It
    is at least that of the run's mean rate, and the threshold grows with the number of steps,
    because the best window of a long run is low by chance.
    """
    best, latest = windows.best, windows.latest
    if not best:
        return ""
    before, now = _failure_rate(best), _failure_rate(latest)
    sizes = [sum(x.get("batch/groups", x["rollouts"]) for x in part) for part in (best, latest)]
    if not _rises(before, now, *sizes, run=_failure_rate(windows.lines), count=len(windows.lines)):
        return ""
    return _rise_text(best, latest)


def _failures_have_risen(sums: _FailureSums) -> str:
    """Return the text of an alert if failures have become more frequent since the start; else "".

    This finds a slow rise, which is too small between two windows of a few steps.
    """
    size = sums.rise()
    return _rise_text(sums.lines[:size], sums.lines[size:]) if size else ""


def _rise_text(first: Sequence[Line], latest: Sequence[Line]) -> str:
    return (
        f"the app fails more often: {100 * _failure_rate(first):.0f} % of the rollouts in "
        f"{_steps(first)}, {100 * _failure_rate(latest):.0f} % in {_steps(latest)}. "
        f"{_FAILURE_ADVICE}"
    )


def validation_failures_rise(evaluations: Sequence[Evaluation]) -> str:
    """Return the text of an alert if the app fails on more held-out tasks than before; else "".

    The standard error counts each cluster of tasks once.
    """
    sizes = [len(each.rewards) + each.unscored for each in evaluations]
    rates = [each.failed / max(1, size) for each, size in zip(evaluations, sizes, strict=True)]
    best = min(range(len(rates)), key=rates.__getitem__)
    units = [_units(evaluations[place], sizes[place]) for place in (best, -1)]
    run = sum(each.failed for each in evaluations) / max(1, sum(sizes))
    if not _rises(rates[best], rates[-1], *units, run=run, count=len(evaluations)):
        return ""
    return (
        f"the app fails on more held-out tasks: on {evaluations[best].failed} of {sizes[best]} at "
        f"step {evaluations[best].step}, on {evaluations[-1].failed} of {sizes[-1]} now. "
        f"{_FAILURE_ADVICE}"
    )


def _units(evaluation: Evaluation, size: int) -> float:
    """Return the number of independent units among `size` tasks: of clusters if they have some."""
    clusters = evaluation.clusters
    return size * len(set(clusters.values())) / len(clusters) if clusters else size


_FAILURE_ADVICE: Final = (
    "Let the app return a low reward in place of raising, give failure_reward= a value below that "
    "of a wrong answer, or look at what fails: lightspan inspect"
)


def _rises(
    before: float, now: float, size_before: float, size_now: float, *, run: float, count: int
) -> bool:
    """Return whether a failure rate has risen above `FAILURE_WARNING`, and not by chance.

    Args:
        before: lowest rate of the run so far.
        now: latest rate.
        size_before: number of independent units behind `before`.
        size_now: number of independent units behind `now`.
        run: rate of the run so far.
        count: number of steps or evaluations so far.
    """
    if not size_before or not size_now or now <= FAILURE_WARNING:
        return False
    pooled = (before * size_before + now * size_now) / (size_before + size_now)
    variance = max(pooled * (1 - pooled), run * (1 - run))
    error = math.sqrt(variance * (1 / size_before + 1 / size_now))
    return now - before > _least_errors(MIN_RISE_SE, count, MIN_FALL_STEPS, 3) * error


def _failure_rate(lines: Sequence[Line]) -> float:
    return float(sum(x["failed"] for x in lines) / sum(x["rollouts"] for x in lines))


def no_group_varies(train: Sequence[Line]) -> str:
    """Return the text of an alert if no group's rewards differed in the latest steps; else "".

    A group is the rollouts of one task.
    """
    latest = list(takewhile(_is_idle, reversed(train)))
    groups = sum(int(line["batch/groups"]) for line in latest)
    if groups < MAX_IDLE_GROUPS:
        return ""
    return (
        f"no group varied in the latest {plural(len(latest), 'step')}: in each of {groups} the "
        "rollouts had equal rewards, so there was nothing to learn from. Give tasks that are "
        "neither solved nor failed each time, a reward that pays for part of a solution, a larger "
        "group_size, a higher temperature, or resample=3"
    )


def air_is_idle(train: Sequence[Line]) -> str:
    """Return the text of an alert if the option `air=` had no effect in the latest step; else "".

    The option changes rewards by signals from tool calls. There was no signal in this step.
    """
    counts = [
        value
        for name, value in train[-1].items()
        if name.startswith("air/") and name.endswith("/seen")
    ]
    if not counts or any(counts):
        return ""
    return (
        "air= had no effect in this step: no signal found a tool call (`with "
        'lightspan.tool("name"):` or an adapter records them), so rewards are unshaped'
    )


def stray_rewards_text(count: int) -> str:
    """Return a warning about `count` rewards that were emitted on an id of no call; "" for 0."""
    if not count:
        return ""
    return (
        f"{plural(count, 'reward')} on a call went to an id that no call has, and had no effect: "
        "emit_reward(call=) takes the id of the response, which starts with chatcmpl-, resp_ or "
        "msg_ (LangChain: message.response_metadata['id'], not message.id)"
    )


def unused_rewards_text(count: int) -> str:
    """Return a warning about `count` calls whose own reward has no effect; "" for 0."""
    if not count:
        return ""
    return (
        f'the reward of {plural(count, "call")} had no effect: credit="terminal" uses the '
        'reward of the rollout alone (credit="discounted" uses both), and no rule uses a reward '
        "on a call of a frozen agent that came before all trained calls"
    )


def rewards_are_stray(train: Sequence[Line]) -> str:
    """Return the text of an alert if the latest step had rewards on no call; else ""."""
    return stray_rewards_text(int(train[-1].get("batch/stray_rewards", 0)))


def call_rewards_are_unused(train: Sequence[Line]) -> str:
    """Return the text of an alert if rewards on calls had no effect in the latest step; else ""."""
    return unused_rewards_text(int(train[-1].get("batch/unused_step_rewards", 0)))


def policy_stays(train: Sequence[Line]) -> str:
    """Return the text of an alert if the latest updates hardly changed the policy; else "".

    There is no alert while the learning rate still rises.
    """
    lines = _having(reversed(train), ("learner/approx_kl",), MIN_UPDATES)[::-1]
    rates = [line.get("learner/learning_rate", 0.0) for line in lines]
    if len(lines) < MIN_UPDATES or rates[-1] > rates[0]:
        return ""
    kl = _mean(lines, "learner/approx_kl")
    if kl >= MIN_KL:
        return ""
    return (
        f"the policy hardly moves: approx_kl was {kl:.2g} per token and step in the latest "
        f"{MIN_UPDATES} updates. Raise learning_rate{_rate(train)}: tenfold at first"
    )


def _having(lines: Iterable[Line], names: Sequence[str], count: int) -> list[Line]:
    """Return the first `count` lines that have all names."""
    return [*islice((line for line in lines if all(name in line for name in names)), count)]


def _mean(lines: Sequence[Line], name: str) -> float:
    return math.fsum(line[name] for line in lines) / len(lines)


def _reward(lines: Sequence[Line]) -> float:
    return _mean(lines, "reward")


def _is_idle(line: Line) -> bool:
    """Return whether there was nothing to learn from the rewards of a step.

    All rewards in each group of rollouts were equal, and all advantages were zero. Equal rewards
    alone do not exclude learning: an algorithm that compares rollouts with the batch or a critic
    can learn from them.
    """
    groups = line.get("batch/groups", 0)
    idle = sum(value for key, value in line.items() if key.startswith("batch/groups:"))
    learned = line.get("batch/scored", 0) - line.get("batch/zero_advantage_rollouts", 0)
    return bool(groups and idle >= groups and learned <= 0)


def _rate(train: Sequence[Line]) -> str:
    rates = [line["learner/learning_rate"] for line in train if "learner/learning_rate" in line]
    return f" (now {rates[-1]:.3g})" if rates else ""
