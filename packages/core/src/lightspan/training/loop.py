"""The loop of a training: step after step, with evaluations and checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

from lightspan.algorithms.protocol import Metrics
from lightspan.progress import duration
from lightspan.schema.records import Json
from lightspan.training import checkpoints
from lightspan.training.alerts import Alert, AlertMonitor
from lightspan.training.checkpoints import RunSegment
from lightspan.training.cpu_meter import Meter, last_seconds
from lightspan.training.folder import EvaluationKind
from lightspan.training.listeners import Listeners, RunEvent
from lightspan.training.manifest import ServedRun, fit_result, write_result
from lightspan.training.model_selection import BestSoFar
from lightspan.training.results import Evaluation, FitResult, Outcomes
from lightspan.training.session import Session
from lightspan.training.sinks import SinkRun, Sinks

_SHOWN = {
    "reward": "reward {:.3f}",
    "learner/loss": "loss {:.4f}",
    "engine/tokens_per_s": "{:.0f} tokens/s",
    "seconds": "{:.1f} s",
}
"""Metric of a step → how its line says it."""


class TrainingLoop:
    """Every step that a run has left.

    Args:
        session: open.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = session.settings
        self._folder = session.folder
        self._state = session.state
        self._total = session.planned_steps
        self._first_step = self._state.step + 1
        self._sinks = Sinks(self._settings.sinks, session.note)
        self._listeners = Listeners(session.note)
        seconds = self._state.seconds
        seconds |= last_seconds(self._folder)
        self._alerts = AlertMonitor()
        self._standing = BestSoFar.of(self._folder.evaluations("selection"))
        self._trains = self._settings.has_policies
        self._meter = Meter(
            session.engine if self._trains else None,
            session.learner if self._trains else None,
            session.collector,
            seconds,
        )
        self._started = time.monotonic()

    async def run(self) -> FitResult:
        """Train.

        Raises:
            BudgetError: above `max_frozen_calls`; what was learned is kept.
        """
        with closing(self._sinks):
            self._open_sinks()
            await self._begin()
            self._started = time.monotonic()
            while not self._has_ended:
                await self._step()
            return await self._finish()

    @property
    def _has_ended(self) -> bool:
        return self._settings.has_ended(self._state.step, self._total, self._standing.waited)

    def _open_sinks(self) -> None:
        run = SinkRun(
            run_id=self._state.run_id,
            folder=self._folder.path,
            config=self._folder.read_config(),
            first_step=0 if self._session.checkpoint is None else self._first_step,
        )
        self._sinks.open(run)

    async def _begin(self) -> None:
        """What comes before the first step of this life."""
        session, budget = self._session, self._session.budget
        if session.checkpoint is None:
            await self._save()
        else:
            await budget.recall(session.store, self._state.run_id)
            budget.check(self._state.step)
            self._alerts.read(self._folder.metrics(), self._folder.evaluations())
        await self._evaluate_if_due()
        budget.check(self._state.step)

    async def _step(self) -> None:
        """One iteration, and what is due after it. Above the budget that is a checkpoint."""
        await self._learn()
        at, budget, settings = self._state.step, self._session.budget, self._settings
        is_saved = (
            at == self._total
            or at % settings.checkpoint_every == 0
            # it may be the best, which is kept
            or (settings.chooses and settings.compares(at, self._total, selection=True))
        )
        if is_saved:
            await self._save()
        if not budget.is_overspent:
            await self._evaluate_if_due()
        if budget.is_overspent and not is_saved:
            await self._save()
        if budget.is_overspent:  # what is in flight would ask on, of runners started by hand
            await self._session.cancel_in_flight()
        budget.check(at)

    async def _learn(self) -> None:
        self._state.step += 1
        self._meter.start_step()
        metrics = await self._session.algorithm.run_step(self._session)
        self._session.send_spans()
        metrics = {**metrics, **self._meter.end_step(), **self._session.reward_metrics()}
        line = self._line("train", metrics)
        self._folder.add_metrics(line)
        self._sinks.add(line)
        self._session.reporter.finish(self._told(metrics))
        self._warn(self._alerts.step(line))
        self._notify("step")

    def _warn(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._session.note(f"warning: {alert.text}")

    def _told(self, metrics: Metrics) -> str:
        """A step, for people."""
        at = self._state.step
        parts = [f"step {at}/{self._total}"]
        parts += [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]
        parts += [odd] if (odd := Outcomes.of([{**metrics, "kind": "train"}]).odd) else []
        steps = at - self._first_step + 1
        left = (time.monotonic() - self._started) / steps * (self._total - at)
        return "  ".join([*parts, f"{duration(left)} left"] if at < self._total else parts)

    def _line(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "step": self._state.step, **values, **self._meter.spent()}

    async def _save(self) -> None:
        session, state = self._session, self._state
        state.rng = session.rng.getstate()
        state.algorithm = session.algorithm.state()
        state.segments = [life for life in state.segments if life.name != session.life]
        if state.step >= self._first_step:
            state.segments.append(RunSegment(session.life, self._first_step, state.step))
        best = self._standing.best
        save = partial(
            checkpoints.save,
            self._folder.checkpoints,
            state,
            session.learner.save if self._trains else None,
            best=None if best is None else best.step,
        )
        await session.learn(save)

    async def _evaluate_if_due(self) -> None:
        """Evaluate on the selection split and on the held-out tasks."""
        at, settings = self._state.step, self._settings
        selection = self._session.selection is not None
        if settings.compares(at, self._total, selection=selection):
            await self._evaluate("selection", self._session.selection)
            self._standing = BestSoFar.of(self._folder.evaluations("selection"))
        # where a step is chosen, the weights to report are known at the end only
        is_due = settings.evaluates(at, self._total, selection=selection)
        if is_due and not (settings.chooses and self._has_ended):
            await self._evaluate("eval", self._session.val)

    async def _evaluate(
        self, kind: EvaluationKind, tasks: Sequence[Json] | None, weights: int | None = None
    ) -> None:
        """Evaluate, unless there are no tasks or an earlier life did.

        Args:
            weights: the step whose weights the learner has, if not those of this one.
        """
        session, folder = self._session, self._folder
        done = {(found.step, found.weights) for found in folder.evaluations(kind)}
        if tasks is None or (self._state.step, weights) in done:
            return
        self._meter.charge()
        evaluation = await session.evaluate(tasks, weights=weights)
        self._meter.charge("_evaluation")
        line = self._line(kind, {**evaluation.metrics(), **session.reward_metrics()})
        folder.add_evaluation(evaluation, line)
        self._sinks.add(line)
        split = "held-out" if kind == "eval" else kind
        session.reporter.finish(evaluation.text(self._settings.metric, split))
        if kind == "eval":
            self._warn(self._alerts.evaluated(evaluation))
        self._notify("evaluation")

    async def _take_kept(self) -> Evaluation | None:
        """Go back to the weights that are kept, and evaluate them on the held-out tasks. Returns
        the evaluation that they were chosen by; None without `keep="best"`."""
        session, at = self._session, self._state.step
        if at < self._total:
            session.note(
                f"stopped early: the last {self._standing.waited} evaluations on the selection "
                "split were no better than the best before them"
            )
        kept = self._standing.best if self._settings.keep == "best" else None
        weights = None
        if kept is not None:
            if kept.step != at:
                weights = kept.step
                await session.take_weights(kept.step)
            session.note(
                f"step {kept.step} is kept: its {self._settings.metric} on the selection split is "
                f"{kept.interval}, the highest of {self._standing.evaluated}, so by luck too: what "
                f"counts is the held-out one{'' if session.val else ', which needs val tasks'}"
            )
        await self._evaluate("eval", session.val, weights)
        session.budget.check(at)
        return kept

    async def _finish(self) -> FitResult:
        session, folder = self._session, self._folder
        await session.cancel_in_flight()  # before weights of an earlier step are served to them
        kept = await self._take_kept() if self._settings.chooses else None
        algorithm = session.algorithm
        served = ServedRun.of(algorithm, folder, self._state.versions) if self._trains else None
        folder.forget_result()  # a run that went on: stopped here, it would name other weights
        folder.write_prompts(algorithm.learned_prompts())
        for name, policy in (served.policies if served is not None else {}).items():
            await session.learn(partial(session.learner.export, name, folder.path / policy.folder))
        result = fit_result(folder, self._state.step, self._state.seconds, kept)
        write_result(folder, result, served, self._settings.metric)
        self._notify("end")
        await session.complete()
        return result

    def _notify(self, kind: Literal["step", "evaluation", "end"]) -> None:
        event = RunEvent(
            kind=kind,
            step=self._state.step,
            folder=self._folder.path,
            algorithm=self._session.algorithm.name,
            metric=self._settings.metric,
            trains_weights=self._trains,
        )
        self._listeners.notify(event)
