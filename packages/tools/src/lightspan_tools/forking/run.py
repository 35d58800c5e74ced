"""Continue a recorded rollout from one of its calls, or search for the call that lost it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightspan.errors import ConfigError, DataError, LightspanError, NotFoundError
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.progress import Reporter, plural
from lightspan.schema.records import Mode, Rollout, RolloutSummary
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import Routing
from lightspan.stores import open_existing, take_credentials
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Scorer, as_scorer
from lightspan_tools.forking import report as r
from lightspan_tools.forking.loss_search import LossSearch, find_loss
from lightspan_tools.forking.session import ForkSession, ForkSettings, fork_session
from lightspan_tools.forking.weights import (
    choose_weights,
    open_engine,
    policies_of,
    versions_used,
)
from lightspan_tools.inspect import find_id
from lightspan_tools.rollout_view import ViewReader, failure_rewards, trained_rewards


class Success(NamedTuple):
    """The reward from which on a rollout counts as a success."""

    reward: float
    source: str
    """Where it comes from, for the user."""
    same: int
    """Number of other rollouts that had it from the same state: of the same group, answered by
    weights of the same versions, sampled and scored as the continuations are."""


class _Stopped(Exception):
    """The search cannot go on; the message says why, and is empty after Ctrl-C."""


@dataclass(frozen=True)
class ForkCommand:
    """One run of `lightspan fork`.

    Args:
        run: folder of the run.
        rollout: id of a rollout of the run, or a unique start or end of it.
        call: number, id, or a unique start or end of the id of one of its calls; None to search
            for the call that lost it.
        count: continuations per call.
        success: reward from which on a rollout counts as a success. None for the best of the
            rollouts of the same task.
        confirm: whether the search tests a point again before it counts as lost.
        model: model that answers in place of the run's weights; None for those.
        app: reference of the app; None for that of the run.
        reward: reference of what scores rollouts; None for what scored the run.
        runners: maximum number of continuations at once.
        python: interpreter of the app's environment; None for this one.
        seed: seed of the sampling.
        device: device of the engine.
        reporter: reporter of progress.

    Raises:
        ConfigError: `count` or `runners` is below 1, or `success` is not a finite number.
    """

    run: Path
    rollout: str
    call: str | None
    _: KW_ONLY
    count: int = 8
    success: float | None = None
    confirm: bool = True
    model: str | None = None
    app: str | None = None
    reward: str | None = None
    runners: int = 8
    python: str | None = None
    seed: int = 0
    device: str = "cpu"
    reporter: Reporter

    def __post_init__(self) -> None:
        for name, value in (("-n", self.count), ("--runners", self.runners)):
            if value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if self.success is not None and not math.isfinite(self.success):
            raise ConfigError(f"--success {self.success} must be a finite number")

    async def report(self) -> r.ForkReport:
        """Run the continuations and return the report.

        Raises:
            AppError: the app or the reward function cannot be imported.
            ConfigError: the folder holds no run, or an option does not fit it.
            DataError: the rollout cannot be continued at the call, or was not lost.
            NotFoundError: there is no such rollout or call, or several match.
            LightspanError: the engine, the gateway or the runners failed.
        """
        folder = RunFolder(self.run)
        config = folder.read_config()
        url = config.get("store") or folder.store_url
        take_credentials(url)  # before any process starts that runs the app
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_existing(url))
            subject = await self._read(folder, config, store)
            app = self._app(config, subject.rollout)
            routing = await _routing_of(store, subject.rollout)
            policies = policies_of(routing)
            for each in routing.targets:
                _ = each.endpoint and each.endpoint.api_key  # raises if its variable is not set
            used = await versions_used(store, config["run_id"], subject.episode, policies)
            weights = choose_weights(folder, config, policies, used, self.model)
            subject = replace(subject, is_exact=bool(weights.models) and weights.is_exact)
            self.reporter.line(f"continuations are answered by {weights.text}")
            engine = None
            if weights.models:
                engine = await open_engine(
                    weights,
                    routing,
                    config,
                    device=self.device,
                    seed=self.seed,
                    folder=folder.path,
                )
                stack.push_async_callback(engine.close)
            rollout = subject.rollout
            settings = ForkSettings(
                app=app,
                runners=self.runners,
                python=self.python,
                scorer=subject.scorer,
                failure_reward=failure_rewards(folder, config)(rollout.mode, rollout.step),
            )
            session = await stack.enter_async_context(
                fork_session(folder, config, store, rollout, engine, settings, self.reporter)
            )
            points: list[r.PointReport] = []
            loss = None
            if subject.point is not None:
                title = f"call {subject.point.number}"
                points = [await self._test(session, subject, subject.point, title)]
            else:
                loss = await self._search(session, subject, points)
            return r.ForkReport(
                run=str(self.run),
                rollout_id=rollout.rollout_id,
                task_id=rollout.task_id,
                mode=str(rollout.mode),
                calls=len(subject.points) - 1,
                reward=subject.episode.reward,
                weights=weights.text,
                is_exact=weights.is_exact,
                count=self.count,
                success=None if subject.success is None else subject.success.reward,
                success_from="" if subject.success is None else subject.success.source,
                points=tuple(points),
                loss=loss,
                notes=tuple(subject.notes),
                is_stopped=session.is_stopped,
                folder=str(session.folder.path),
            )

    def _app(self, config: Mapping[str, Any], rollout: Rollout) -> str:
        """Return the reference of the app.

        Raises:
            ConfigError: the run does not say in which module it is.
        """
        app = self.app or str(config.get("app") or rollout.app)
        module, _, name = app.partition(":")
        if module == "__main__":
            raise ConfigError(
                f"the app {app} of {self.run} was in the script that trained, whose name the run "
                f"does not have: name it (--app SCRIPT:{name}, such as --app train:{name} for "
                "train.py), in the script's folder"
            )
        return app

    # --- the rollout ------------------------------------------------------------------------
    async def _read(self, folder: RunFolder, config: Mapping[str, Any], store: Store) -> _Subject:
        """Return the rollout with its points, before anything is loaded."""
        rows = (await store.summaries(config.get("run_id"))).rows
        by_id = {row.rollout_id: row for row in rows}
        row = by_id[find_id(self.rollout, by_id, "rollout")]
        notes: list[str] = []
        scorer = self._scorer(config, notes)
        rewards = None if scorer is None or self.reward else trained_rewards(folder, config)
        reader = ViewReader(folder, store, config, rewards)
        views = await reader.read(await store.rollouts([row.rollout_id]))
        if not views:
            raise DataError(
                f"rollout {row.rollout_id} was never started: it has no calls to repeat"
            )
        episode, rollout = views[0].episode, views[0].state.rollout
        points = fork_points(episode)
        if len(points) == 1:
            raise DataError(
                f"rollout {row.rollout_id} made no model call: there is nothing to fork"
            )
        if rollout.mode is Mode.VAL:
            notes.append("it is of an evaluation; continuations are sampled as in training")
        point = None if self.call is None else self._point(row.rollout_id, points)
        success = None
        if self.call is None or self.success is not None:
            success = await self._success(reader, store, rows, row, episode)
        if self.call is None and (episode.reward or 0.0) >= success.reward:  # type: ignore[union-attr]
            raise DataError(
                f"rollout {row.rollout_id} was not lost: its reward is {episode.reward:g}, and a "
                f"success has at least {success.reward:g}, {success.source}. "  # type: ignore[union-attr]
                "Name one of its calls, or a higher --success"
            )
        return _Subject(rollout, episode, points, point, success, scorer, notes)

    def _scorer(self, config: Mapping[str, Any], notes: list[str]) -> Scorer | None:
        """Return what scores the continuations in place of the app; None for the app itself."""
        recorded = config.get("reward") or {}
        name = self.reward or recorded.get("function")
        if name is None and recorded:
            notes.append(
                f"the run's rewards are those of {recorded.get('name')}, which is not asked here: "
                "these are the app's own (--reward module:name asks it)"
            )
        return None if name is None else as_scorer(str(name))

    def _point(self, rollout_id: str, points: Sequence[ForkPoint]) -> ForkPoint:
        """Return the point of the call that the user named.

        Raises:
            DataError: the rollout cannot be forked there.
            NotFoundError: it has no such call.
        """
        name, calls = str(self.call), [point for point in points if point.call is not None]
        ids = {_id_of(point.call): point for point in calls}
        if name.isdecimal() and int(name) <= len(calls):
            if int(name) < 1:
                raise NotFoundError(f"calls are numbered from 1 to {len(calls)}: {name} is none")
            point = calls[int(name) - 1]
        elif name.isdecimal() and len(name) < 4:
            raise NotFoundError(
                f"rollout {rollout_id} has no call {name}: its calls are numbered 1 to {len(calls)}"
            )
        else:
            point = ids[find_id(name, ids, "call")]
        if point.refusal:
            raise DataError(
                f"rollout {rollout_id} cannot be continued from call {point.number}: "
                f"{point.refusal}{_advice(points)}"
            )
        return point

    async def _success(
        self,
        reader: ViewReader,
        store: Store,
        rows: Sequence[RolloutSummary],
        row: RolloutSummary,
        episode: Episode,
    ) -> Success:
        """Return the reward from which on a rollout counts as a success.

        Raises:
            ConfigError: it was not given, and no rollout of the task had more than this one.
        """
        others = [each for each in rows if each.task_id == row.task_id and each.fork is None]
        group = [each for each in others if row.group_id and each.group_id == row.group_id]
        own = -math.inf if episode.reward is None else episode.reward
        versions = _versions_of(episode)
        has_one = len(versions) == len({policy for policy, _ in versions})  # version per policy
        is_comparable = has_one and row.mode is not Mode.VAL and self.reward is None
        for members, name in ((group, "the group"), (others, "the task")):
            ids = [each.rollout_id for each in members]
            views = await reader.read(await store.rollouts(ids)) if ids else []
            scored = [v.episode for v in views if v.episode.reward is not None]
            rewards = [each.reward for each in scored if each.reward is not None]
            wanted = max(rewards, default=-math.inf) if self.success is None else self.success
            same = sum(
                reward >= wanted and _versions_of(each) == versions
                for each, reward in zip(scored, rewards, strict=True)
            )
            same = same if members is group and is_comparable else 0
            if self.success is not None:
                return Success(wanted, "as given (--success)", same)
            if wanted > own:
                count = sum(reward == wanted for reward in rewards)
                source = f"which {count} of {plural(len(rewards), 'rollout')} of {name} had"
                return Success(wanted, source, same)
        raise ConfigError(
            f"no rollout of task {row.task_id} had a higher reward than {row.rollout_id} "
            f"({episode.reward}), so what a success is has to be given: --success REWARD"
        )

    # --- continuations ----------------------------------------------------------------------
    async def _test(
        self,
        session: ForkSession,
        subject: _Subject,
        point: ForkPoint,
        title: str,
        *,
        is_again: bool = False,
    ) -> r.PointReport:
        episodes = await session.run(point, self.count, title)
        success = None if subject.success is None else subject.success.reward
        return r.point_report(point, episodes, subject.episode, success, is_again=is_again)

    async def _search(
        self, session: ForkSession, subject: _Subject, reports: list[r.PointReport]
    ) -> r.Loss:
        """Search for the call that lost the rollout; append a report per test to `reports`."""
        points = subject.distinct()
        search = LossSearch(len(points))

        async def succeeds(index: int) -> bool:
            point, is_again = points[index], any(index == each for each, _ in search.tests)
            title = f"call {point.number}{' again' * is_again}"
            report = await self._test(session, subject, point, title, is_again=is_again)
            reports.append(report)
            if session.is_stopped:
                raise _Stopped
            if not report.scored:
                raise _Stopped(_no_reward(report))
            successes = f"{report.successes} of {plural(len(report.scored), 'continuation')}"
            self.reporter.line(f"from {title}: {successes} succeeded")
            return bool(report.successes)

        assert subject.success is not None
        starts_good = bool(subject.success.same) and subject.is_exact and not points[0].prefix
        reason = ""
        try:
            await find_loss(search, succeeds, starts_good=starts_good, confirm=self.confirm)
        except _Stopped as stop:
            reason = str(stop)
            if reason and not any(each.scored for each in reports):
                raise LightspanError(reason) from None  # nothing was measured
        group = subject.success.same if starts_good else 0
        return _loss(search, subject, points, reports, reason, group)


@dataclass(frozen=True)
class _Subject:
    """The rollout to continue."""

    rollout: Rollout
    episode: Episode
    points: list[ForkPoint]
    """Its calls and its end."""
    point: ForkPoint | None
    """The call to continue from; None for a search."""
    success: Success | None
    scorer: Scorer | None
    notes: list[str] = field(default_factory=list)
    is_exact: bool = False
    """Whether the continuations are answered by the weights of the rollout."""

    def distinct(self) -> list[ForkPoint]:
        """Return the calls from which the rollout can be continued, in causal order.

        Of calls with the same prefix, such as those that began together, the first is kept.

        Raises:
            DataError: there are none.
        """
        points: dict[frozenset[str], ForkPoint] = {}
        for point in self.points[:-1]:
            if not point.refusal:
                points.setdefault(frozenset(point.prefix), point)
        if not points:
            raise DataError(
                f"rollout {self.rollout.rollout_id} cannot be continued from any of its calls: "
                f"{self.points[0].refusal}"
            )
        return list(points.values())


def _loss(
    search: LossSearch,
    subject: _Subject,
    points: Sequence[ForkPoint],
    reports: Sequence[r.PointReport],
    reason: str,
    group: int,
) -> r.Loss:
    good, lost = search.last_good, search.first_lost
    is_end = lost == len(points)
    calls: list[r.CallReport] = []
    if good is not None:
        before = set(points[good].prefix)
        after = None if is_end else set(points[lost].prefix)
        calls = [
            r.call_report(point)
            for point in subject.points[:-1]
            if (name := _id_of(point.call)) not in before and (after is None or name in after)
        ]
    number = None if is_end else points[lost].number
    tests = [each for each in reports if each.call.number == number and not each.successes]
    return r.Loss(
        calls=tuple(calls),
        last_good=None if good is None else points[good].number,
        first_lost=number,
        failures=sum(len(each.scored) for each in tests),
        group=group,
        reversals=tuple(points[each].number for each in search.reversals),
        is_complete=search.is_complete,
        reason=reason,
    )


def _advice(points: Sequence[ForkPoint]) -> str:
    """Return from which calls a rollout can be continued, as the end of a sentence.

    The last of `points` is the end of the rollout.
    """
    numbers = [str(point.number) for point in points[:-1] if not point.refusal]
    return f". Calls that can: {', '.join(numbers)}" if numbers else ". No other call can"


def _no_reward(report: r.PointReport) -> str:
    """Return why the continuations from a call cannot be compared."""
    name = f"no continuation from call {report.call.number} has a reward"
    for each in report.continuations:
        if each.departed:
            return f"{name}: {each.departed}. docs/guides/replay.md says what to do"
    messages = [each.message for each in report.continuations if each.message]
    return f"{name}: {messages[0] if messages else 'the app gave none'}"


def _versions_of(episode: Episode) -> set[tuple[str, int]]:
    """Return the policies that answered an episode, with the versions of their weights."""
    records = [(call.policy, call.record) for call in episode.calls if call.record is not None]
    return {(policy, version) for policy, record in records for version, _ in record.versions}


def _id_of(call: Call | None) -> str:
    return "" if call is None else call.call_id


async def _routing_of(store: Store, rollout: Rollout) -> Routing:
    named = await store.get_resources(rollout.resources_id) if rollout.resources_id else {}
    return routing_of(named)


def run_fork(command: ForkCommand) -> r.ForkReport:
    """Run the continuations of a command and return the report (`ForkCommand.report`).

    After Ctrl-C, the report has what ended before.
    """
    from lightspan.stores.aio import run_sync

    return run_sync(command.report())
