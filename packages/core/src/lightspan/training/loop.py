"""The loop of a training: step after step, with evaluations and checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from lightspan.algorithms.protocol import Metrics
from lightspan.progress import duration
from lightspan.training import checkpoints
from lightspan.training.checkpoints import Life
from lightspan.training.manifest import Served, fit_result, write_result
from lightspan.training.meter import Meter, last_seconds
from lightspan.training.results import FitResult
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
        seconds = self._state.seconds
        seconds |= last_seconds(self._folder)
        self._meter = Meter(session.engine, session.learner, session.collector, seconds)
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
            while self._state.step < self._total:
                await self._step()
            return await self._finish()

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
        if self._state.step not in {done.step for done in self._folder.evaluations()}:
            await self._validate_if_due()
        budget.check(self._state.step)

    async def _step(self) -> None:
        """One iteration, and what is due after it. Above the budget that is a checkpoint."""
        await self._learn()
        at, budget = self._state.step, self._session.budget
        is_saved = at == self._total or at % self._settings.checkpoint_every == 0
        if is_saved:
            await self._save()
        if not budget.is_overspent:
            await self._validate_if_due()
        if budget.is_overspent and not is_saved:
            await self._save()
        budget.check(at)

    async def _learn(self) -> None:
        self._state.step += 1
        self._meter.start_step()
        metrics = await self._session.algorithm.run_step(self._session)
        metrics = {**metrics, **self._meter.end_step()}
        line = self._line("train", metrics)
        self._folder.add_metrics(line)
        self._sinks.add(line)
        self._session.reporter.finish(self._told(metrics))

    def _told(self, metrics: Metrics) -> str:
        """A step, for people."""
        at = self._state.step
        parts = [f"step {at}/{self._total}"]
        parts += [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]
        steps = at - self._first_step + 1
        left = (time.monotonic() - self._started) / steps * (self._total - at)
        return "  ".join([*parts, f"{duration(left)} left"] if at < self._total else parts)

    def _line(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "step": self._state.step, **values, **self._meter.spent()}

    async def _save(self) -> None:
        session, state = self._session, self._state
        state.rng = session.rng.getstate()
        state.algorithm = session.algorithm.state()
        state.lives = [life for life in state.lives if life.name != session.life]
        if state.step >= self._first_step:
            state.lives.append(Life(session.life, self._first_step, state.step))
        save = partial(checkpoints.save, self._folder.checkpoints, state, session.learner.save)
        await session.learn(save)

    async def _validate_if_due(self) -> None:
        """Evaluate on the held-out tasks: before training, after it, and every so often."""
        held_out = self._session.val
        if held_out is None or not self._settings.evaluates(self._state.step, self._total):
            return
        self._meter.charge()
        evaluation = await self._session.evaluate(held_out)
        self._meter.charge("_evaluation")
        line = self._line("eval", evaluation.metrics())
        self._folder.add_evaluation(evaluation, line)
        self._sinks.add(line)
        self._session.reporter.finish(evaluation.text(self._settings.metric))
        self._draw()

    async def _finish(self) -> FitResult:
        session, folder = self._session, self._folder
        served = Served.of(session.algorithm, folder, self._state.versions)
        for name, policy in served.policies.items():
            await session.learn(partial(session.learner.export, name, folder.path / policy.folder))
        self._draw()
        result = fit_result(folder, self._state.step, self._state.seconds)
        write_result(folder, result, served, self._settings.metric)
        await session.complete()
        return result

    def _draw(self) -> None:
        from lightspan.training.plots import learning_curve

        learning_curve(
            self._folder.metrics(),
            self._folder.curve,
            title=f"{self._folder.path.name}: {self._session.algorithm.name}",
            metric=self._settings.metric,
        )
