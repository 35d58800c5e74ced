"""Training loop: steps with evaluations and checkpoints in between."""

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
from lightspan.training.cpu_meter import Meter
from lightspan.training.folder import EvaluationKind
from lightspan.training.listeners import Listeners, RunEvent
from lightspan.training.manifest import ServedRun, fit_result, write_result
from lightspan.training.model_selection import BestSoFar
from lightspan.training.results import Evaluation, FitResult, Outcomes
from lightspan.training.session import Session
from lightspan.training.sinks import SinkRun, Sinks

_SHOWN = {
    "reward": "reward {:.3f}",
    "batch/retried": "{:.0f} calls in failed tries",
    "distill/reverse_kl": "reverse KL {:.3f}",
    "learner/loss": "loss {:z.4f}",
    "engine/tokens_per_s": "{:.0f} tokens/s",
    "seconds": "{:.1f} s",
}
"""Metric of a step → its format in the step's progress line."""


class TrainingLoop:
    """Run the remaining steps of a run, with evaluations and checkpoints in between.

    Args:
        session: open session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = session.settings
        self._folder = session.folder
        self._state = session.state
        self._total = session.last_step
        self._first_step = self._state.step + 1
        self._sinks = Sinks(self._settings.sinks, session.note)
        self._listeners = Listeners(session.note)
        self._standing = BestSoFar.of(self._folder.evaluations("selection"))
        self._trains = self._settings.has_policies
        self._is_cut = False
        """Whether `max_frozen_calls` was exceeded before the evaluations of the last step."""
        engine, learner = (session.engine, session.learner) if self._trains else (None, None)
        self._meter = Meter(engine, learner, session.collector, self._state.seconds)
        self._started = time.monotonic()

    async def run(self) -> FitResult:
        """Train until the run has ended and return the result.

        Raises:
            BudgetError: `max_frozen_calls` is exceeded; a checkpoint was saved.
        """
        with closing(self._sinks):
            is_new = self._session.checkpoint is None
            run = SinkRun(
                run_id=self._state.run_id,
                folder=self._folder.path,
                config=self._folder.read_config(),
                first_step=0 if is_new else self._first_step,
            )
            self._sinks.open(run)
            await self._begin(is_new=is_new)
            self._started = time.monotonic()
            while not self._has_ended:
                await self._step()
            return await self._finish()

    @property
    def _has_ended(self) -> bool:
        return self._settings.has_ended(self._state.step, self._total, self._standing.since_best)

    async def _begin(self, *, is_new: bool) -> None:
        """Prepare the first step of a new or resumed run, and evaluate if an evaluation is due.

        A new run saves its first checkpoint. A resumed run counts the calls that its frozen agents
        sent to endpoints before.

        Raises:
            BudgetError: `max_frozen_calls` is exceeded.
        """
        session, budget = self._session, self._session.budget
        if is_new:
            await self._save()
            await session.algorithm.check_run(session)
        else:
            await budget.count_earlier(session.store, self._state.run_id)
            budget.check(self._state.step)
        await self._evaluate_if_due()
        if not self._has_ended:
            budget.check(self._state.step)

    async def _step(self) -> None:
        """Run one iteration, then save a checkpoint and evaluate if these are due.

        Raises:
            BudgetError: `max_frozen_calls` is exceeded; a checkpoint was saved.
        """
        await self._learn()
        step, budget, settings = self._state.step, self._session.budget, self._settings
        is_saved = (
            step == self._total
            or step % settings.checkpoint_every == 0
            # This step may be the best step, whose checkpoint is kept.
            or (settings.selection_setting and settings.selects_at(step, self._total))
        )
        if is_saved:
            await self._save()
        self._is_cut = self._has_ended and budget.is_overspent
        if not budget.is_overspent:
            await self._evaluate_if_due()
        if budget.is_overspent and not is_saved:
            await self._save()
        if budget.is_overspent:
            # Runners that were started by hand would continue the rollouts in flight and their
            # paid calls.
            await self._session.cancel_in_flight()
        if not self._has_ended:
            budget.check(step)

    async def _learn(self) -> None:
        self._state.step += 1
        self._meter.start_step()
        metrics = await self._session.algorithm.run_step(self._session)
        self._session.send_spans()
        # a search has its own `failure_reward`, which no held-out task enters
        metrics = {**self._session.reward_metrics(), **metrics, **self._meter.end_step()}
        line = self._line("train", metrics)
        self._folder.add_metrics(line)
        self._sinks.add(line)
        self._session.reporter.finish(self._summary(metrics))
        self._notify("step")

    def _summary(self, metrics: Metrics) -> str:
        """Return the progress line of the current step."""
        step = self._state.step
        parts = [f"step {step}/{self._total}"]
        parts += [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]
        if problems := Outcomes.of([{**metrics, "kind": "train"}]).problems:
            parts.append(problems)
        if step < self._total:
            step_s = (time.monotonic() - self._started) / (step - self._first_step + 1)
            parts.append(f"{duration(step_s * (self._total - step))} left")
        return "  ".join(parts)

    def _line(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "step": self._state.step, **values, **self._meter.spent()}

    async def _save(self) -> None:
        session, state = self._session, self._state
        state.rng = session.rng.getstate()
        state.algorithm = session.algorithm.state()
        best = None if self._standing.best is None else self._standing.best.step
        save_learner, folder = session.learner.save if self._trains else None, self._folder
        save = partial(checkpoints.save, folder.checkpoints, state, save_learner, best=best)
        await session.learn(save)

    async def _evaluate_if_due(self) -> None:
        """Evaluate on the selection split and on the held-out tasks, if due at this step."""
        step, settings = self._state.step, self._settings
        has_selection = self._session.selection is not None
        if has_selection and settings.selects_at(step, self._total):
            await self._evaluate("selection", self._session.selection)
            self._standing = BestSoFar.of(self._folder.evaluations("selection"))
        # With model selection, the final weights are known only at the end.
        is_due = settings.evaluates_at(step, self._total, has_selection=has_selection)
        if is_due and not (settings.selection_setting and self._has_ended):
            await self._evaluate("eval", self._session.val)

    async def _evaluate(
        self, kind: EvaluationKind, tasks: Sequence[Json] | None, weights: int | None = None
    ) -> None:
        """Evaluate the loaded weights and store the evaluation.

        It does nothing if `tasks` is None, or if a run before a restart already stored the
        evaluation. An evaluation without any reward is done again.

        Args:
            kind: split of the tasks.
            tasks: tasks to run; None if the run has no such split.
            weights: step of the loaded weights, if earlier than the current step; else None.
        """
        session, folder = self._session, self._folder
        done = {(one.step, one.weights) for one in folder.evaluations(kind) if one.rewards}
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
        self._notify("evaluation")

    async def _select_model(self) -> Evaluation | None:
        """Choose the weights to keep, load them and evaluate them on the held-out tasks.

        With `keep="best"` the chosen weights are those of the best step, else those of the last.

        Returns:
            The evaluation on the selection split by which the weights were chosen. None without
                `keep="best"`, or if no evaluation has a score.
        """
        session, step = self._session, self._state.step
        if step < self._total:
            session.note(
                f"stopped early: the last {self._standing.since_best} evaluations on the selection "
                "split were no better than the best before them"
            )
        best = self._standing.best if self._settings.keep == "best" else None
        weights = None
        if best is not None:
            if best.step != step:
                weights = best.step
                await session.restore_weights(weights)
            session.note(
                f"step {best.step} is kept: its {self._settings.metric} on the selection split is "
                f"{best.interval}, the highest of {self._standing.evaluated}, so by luck too: what "
                f"counts is the held-out one{'' if session.val else ', which needs val tasks'}"
            )
        self._is_cut = self._is_cut or session.budget.is_overspent
        if not self._is_cut:
            await self._evaluate("eval", session.val, weights)
        return best

    async def _finish(self) -> FitResult:
        session, folder = self._session, self._folder
        # before the engine may serve an earlier step's weights to the rollouts in flight
        await session.cancel_in_flight()
        best = await self._select_model() if self._settings.selection_setting else None
        algorithm = session.algorithm
        served = ServedRun.of(algorithm, folder, self._state.versions) if self._trains else None
        # If a resumed run were stopped here, its old result would name other weights.
        folder.delete_result()
        folder.write_prompts(algorithm.learned_prompts())
        for name, policy in (served.policies if served is not None else {}).items():
            await session.learn(partial(session.learner.export, name, folder.path / policy.folder))
        if session.budget.is_overspent:
            session.note("more calls to endpoints than max_frozen_calls; the model is written")
            if self._is_cut and (session.val or session.selection):
                session.budget.check(self._state.step)
        result = fit_result(folder, self._state.step, self._state.seconds, best)
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
