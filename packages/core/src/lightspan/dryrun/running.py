"""DryRun: runs the tasks and puts the report together."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from lightspan.app import App
from lightspan.dryrun import measuring
from lightspan.dryrun.estimating import with_estimates
from lightspan.dryrun.reading import (
    Findings,
    as_if_tokens_were_known,
    host_of,
    read_agents,
    read_air,
    read_costs,
    read_overrides,
    read_rewards,
    read_rows,
)
from lightspan.dryrun.report import AgentReport, CostReport, DevReport, RewardReport, RowReport
from lightspan.engines import ChatTokenizer
from lightspan.engines.chat import load_tokenizer
from lightspan.engines.hub import is_here
from lightspan.errors import (
    ConfigError,
    EngineError,
    ModelError,
    OutOfMemoryError,
    UnknownAgentError,
)
from lightspan.folders import RunFolder
from lightspan.forecast import MemoryForecast, RunSize, TimeForecast, time_forecast
from lightspan.health import FAILURE_WARNING, check_seen
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import Transition
from lightspan.llm import LLM, check_url
from lightspan.records import Json, Mode
from lightspan.routing import Route, Routing, Target
from lightspan.session import Session, Settings

GROUP_SIZE: Final = 4
"""Rollouts per task at most, unless more are asked for."""
DEFAULT_URL: Final = "https://api.openai.com/v1"
NO_MODEL: Final = "no-model-given"
"""Stands for the model to train where none is known and an endpoint answers."""
_REACH_S: Final = 10.0
MODES: Final = (Mode.TRAIN, Mode.DEV)


class DryRun:
    """One dry run (see `Trainer.dev`).

    Raises:
        ConfigError: settings that contradict each other.
    """

    def __init__(
        self,
        settings: Settings,
        app: App,
        tasks: Sequence[Json],
        val: Sequence[Json] | None,
        *,
        agents: Sequence[str] | None,
        count: int,
        group_size: int | None,
        endpoint: LLM | None,
        local: bool | None,
        folder: Path | None,
    ) -> None:
        if count < 1 or (group_size is not None and group_size < 1):
            raise ConfigError(f"count={count}, group_size={group_size}: both must be at least 1")
        if endpoint is not None and local:
            raise ConfigError("local=True runs the algorithm's own model: leave endpoint= out")
        if folder is not None and folder.resolve() == settings.folder.path.resolve():
            raise ConfigError(f"{folder} is the trainer's own folder: give the dry run another")
        if folder is not None and RunFolder(folder).is_used:
            raise ConfigError(
                f"{folder} holds a run already, whose rollouts nothing would lead to any more: "
                "give the dry run another folder, or delete this one"
            )
        self._settings = settings
        self._algorithm = settings.algorithm
        self._app = app
        self._tasks = tasks
        self._val = val
        self._agents = agents
        self._count = min(count, len(tasks))
        self._group_size = group_size or min(self._algorithm.group_size, GROUP_SIZE)
        self.endpoint = endpoint if local is not True else None
        if endpoint is None and local is not True:
            models = [spec.model for spec in self._algorithm.policies().values()]
            self.endpoint = _environment_endpoint(models, local)
        if self.endpoint is not None:
            check_url(self.endpoint.base_url, "the endpoint's base URL")
        self._folder = folder
        self._missing: list[str] = []
        self._problems: list[str] = []
        """What would keep `fit` from working, beside what the report's sections show."""

    async def report(self) -> DevReport:
        """Run the tasks and say what was found."""
        folder = self._folder or Path(tempfile.mkdtemp(prefix="lightspan-dev-"))
        try:
            return await (self._local(folder) if self.endpoint is None else self._remote(folder))
        finally:
            if self._folder is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _session(self, folder: Path) -> Session:
        """Like that of `fit`, in a folder and a store of its own."""
        run = RunFolder(folder)
        settings = replace(
            self._settings,
            folder=run,
            store_url=run.store_url,
            sinks=(),
            max_frozen_calls=None,
        )
        return Session(settings, self._app, self._tasks)

    async def _rollouts(self, session: Session) -> tuple[list[Episode], float]:
        """The episodes, and the wall time they took."""
        started = time.monotonic()
        tasks = session.next_tasks(self._count)
        limit = self._algorithm.timeout_s
        at_most = "" if limit is None else f", {limit:g} s each at most"
        session.reporter.line(
            f"dry run: {len(tasks) * self._group_size} rollouts, {self._runners} at once{at_most}"
        )
        episodes = await session.rollouts(tasks, self._group_size, Mode.DEV)
        session.reporter.finish()
        return episodes, time.monotonic() - started

    # --- with the algorithm's own model ---------------------------------------------------
    async def _local(self, folder: Path) -> DevReport:
        process = await asyncio.to_thread(_process_bytes)
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            started = time.monotonic()
            await session.open()
            opened = time.monotonic() - started
            cpu = session.engine.usage().get("cpu_s", 0.0)
            episodes, seconds = await self._rollouts(session)
            cpu = session.engine.usage().get("cpu_s", 0.0) - cpu
            found = self._judged(episodes)
            transitions = found.transitions()
            rows = self._rows(found, transitions, _tokenizers_of(session), exact=True)
            rewards = self._rewards(found)
            runner_bytes = measuring.runner_bytes(session.runners)
            updates = await self._updates(session, transitions, folder)
        times = measuring.rollout_times(episodes, seconds, cpu)
        forecast = None
        if updates is not None and rows is not None:
            speed = measuring.speed_of(
                start_s=opened,
                rollouts=times,
                updates=updates,
                rows=rows,
                rewards=rewards,
                on_cpu=self._settings.device.startswith("cpu"),
            )
            if speed.save_s is None:
                self._missing.append("the time of checkpoints: they are large, none was written")
            forecast = time_forecast(self._size, speed, self._runners)
        memory = self._memory(process, rows, len(episodes))
        if memory is not None:
            memory = msgspec.structs.replace(
                memory,
                measured_peak_bytes=measuring.peak_bytes(),
                runner_bytes=runner_bytes,
            )
        return self._put_together(found, rows, rewards, memory, forecast, seconds)

    async def _updates(
        self, session: Session, transitions: Sequence[Transition], folder: Path
    ) -> measuring.UpdateTimes | None:
        rows = measuring.practice_rows(transitions, self._algorithm.batch_config.max_length)
        if self._settings.learner is not None:
            self._missing.append("time: learner= is your own, and a dry run does not train it")
            return None
        if not rows:
            self._missing.append("time: no call could be trained, so the learner was not measured")
            return None
        session.reporter.start("dry run: timing updates", 1)
        try:
            return await measuring.update_times(session, rows, folder)
        except OutOfMemoryError as error:
            self._problems.append(f"fit would stop: {error}")
            self._missing.append("time: the learner ran out of memory")
            return None
        finally:
            session.reporter.finish()

    # --- with an endpoint -----------------------------------------------------------------
    async def _remote(self, folder: Path) -> DevReport:
        assert self.endpoint is not None
        await _check_reachable(self.endpoint.base_url)
        routing = endpoint_routing(self._algorithm.routing(), self.endpoint)
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            await session.open_without_models(routing)
            episodes, seconds = await self._rollouts(session)
        tokenizers = await asyncio.to_thread(self._local_tokenizers)
        found = self._judged(with_estimates(episodes, self._algorithm.routing(), tokenizers))
        rows = None
        if tokenizers:
            rows = self._rows(found, found.transitions(), tokenizers, exact=False)
        else:
            self._missing.append(f"rows: {self._without('the tokenizer')}")
        process = await asyncio.to_thread(_process_bytes)
        memory = self._memory(process, rows, len(episodes))
        self._missing.append("time: an endpoint's speed says nothing of a model trained here")
        return self._put_together(found, rows, self._rewards(found), memory, None, seconds)

    def _local_tokenizers(self) -> dict[str, ChatTokenizer]:
        """Policy → its tokenizer, where that is on this machine."""
        found: dict[str, ChatTokenizer] = {}
        for name, spec in self._algorithm.policies().items():
            if is_here(spec.model, "tokenizer_config.json"):
                try:
                    found[name] = load_tokenizer(spec.model)
                except ModelError as error:
                    self._missing.append(f"rows: {error}")
        return found

    # --- what was found -------------------------------------------------------------------
    def _judged(self, episodes: Sequence[Episode]) -> Findings:
        step_rewards = self._algorithm.batch_config.credit.step_rewards
        coverages = self._algorithm.coverages(episodes, modes=MODES)
        if self.endpoint is not None:
            pairs = zip(coverages, episodes, strict=True)
            coverages = [as_if_tokens_were_known(c, e, step_rewards) for c, e in pairs]
        return Findings(
            episodes=episodes,
            coverages=coverages,
            routing=self._algorithm.routing(),
            step_rewards=step_rewards,
            endpoint=self.endpoint,
        )

    def _rewards(self, found: Findings) -> RewardReport:
        rewards, rules = read_rewards(found), self._algorithm.batch_config
        if rules.air is None:
            return rewards
        try:
            air = read_air(found, rules.air, rules.credit)
        except ConfigError as error:
            self._problems.append(f"fit would stop: {error}")
            return rewards
        return msgspec.structs.replace(rewards, air=air)

    def _rows(
        self,
        found: Findings,
        transitions: Sequence[Transition],
        tokenizers: Mapping[str, ChatTokenizer],
        *,
        exact: bool,
    ) -> RowReport:
        def decode(policy: str, ids: Sequence[int]) -> str:
            return tokenizers[policy].decode(ids, skip_special_tokens=False)

        return read_rows(found, transitions, decode, exact=exact)

    @property
    def _size(self) -> RunSize:
        """How much `fit` would do."""
        settings = self._settings
        steps = settings.planned_steps(len(self._tasks))
        evaluations = sum(settings.evaluates(step, steps) for step in range(steps + 1))
        return RunSize(
            steps=steps,
            tasks_per_step=self._algorithm.tasks_per_step,
            group_size=self._algorithm.group_size,
            evaluations=0 if self._val is None else evaluations,
            val_tasks=0 if self._val is None else len(self._val),
            minibatches=self._algorithm.minibatches,
            checkpoint_every=settings.checkpoint_every,
        )

    @property
    def _runners(self) -> int:
        """Attempts at once."""
        given = self._settings.runners
        return given if isinstance(given, int) else int(getattr(given, "slots", 1))

    @property
    def _model_given(self) -> bool:
        return all(spec.model != NO_MODEL for spec in self._algorithm.policies().values())

    def _without(self, what: str) -> str:
        if self._model_given:
            return f"{what} of the model to train is not on this machine"
        return f"{what} of the model to train is needed (--model)"

    def _memory(self, process: int, rows: RowReport | None, rollouts: int) -> MemoryForecast | None:
        if not self._model_given:
            self._missing.append(f"memory: {self._without('the configuration')}")
            return None
        if self._settings.engine is not None or self._settings.learner is not None:
            self._missing.append("memory: engine= or learner= is your own")
            return None
        try:
            return measuring.forecast_memory(
                self._settings,
                process_bytes=process,
                rows=rows,
                rollouts=rollouts,
                step_rollouts=self._size.step_rollouts,
            )
        except ModelError as error:
            self._missing.append(f"memory: {error}")
            return None

    def _put_together(
        self,
        found: Findings,
        rows: RowReport | None,
        rewards: RewardReport,
        memory: MemoryForecast | None,
        forecast: TimeForecast | None,
        seconds: float,
    ) -> DevReport:
        agents = read_agents(found, self._agents)
        costs = read_costs(found, self._size, self._settings.max_frozen_calls)
        where = self.endpoint
        return DevReport(
            lightspan=version("lightspan"),
            app=self._app.reference,
            algorithm=self._algorithm.name,
            models={
                name: spec.model
                for name, spec in self._algorithm.policies().items()
                if spec.model != NO_MODEL
            },
            answered_by="local" if where is None else "endpoint",
            endpoint=None if where is None else _shown(where),
            exact=where is None,
            tasks=self._count,
            group_size=self._group_size,
            rollouts=len(found.episodes),
            seconds=seconds,
            warnings=[
                *self._problems,
                *self._names(found, agents),
                *warn_of_rewards(rewards),
                *warn_of_calls(agents),
                *warn_of_rows(rows),
                *warn_of_costs(costs),
                *warn_of_memory(memory),
            ],
            agents=agents,
            overrides=read_overrides(found),
            rewards=rewards,
            rows=rows,
            costs=costs,
            memory=memory,
            time=forecast,
            missing=self._missing,
            folder=None if self._folder is None else str(self._folder),
        )

    def _names(self, found: Findings, agents: Sequence[AgentReport]) -> list[str]:
        """Patterns that `fit` would refuse, and agents that did nothing."""
        seen = [agent.path for agent in agents]
        try:
            check_seen(self._algorithm.routing(), self._agents or seen, found.episodes)
        except UnknownAgentError as error:
            return [f"fit would stop: {error}"]
        idle = [agent.path for agent in agents if agent.policy is not None and not agent.calls]
        return [f"never called, so not trained: {', '.join(idle)}"] if idle else []


# --- warnings ---------------------------------------------------------------------------------
def warn_of_rewards(rewards: RewardReport) -> list[str]:
    """Failures, missing rewards, groups that teach nothing."""
    found = []
    ended = {"failed": rewards.failed, "were lost": rewards.lost, "are damaged": rewards.damaged}
    for what, count in ended.items():
        if count > FAILURE_WARNING * rewards.rollouts:
            why = f", first of all: {rewards.failures[0]}" if rewards.failures else ""
            found.append(f"{count} of {rewards.rollouts} rollouts {what}{why}")
    if rewards.unscored:
        found.append(
            f"{rewards.unscored} of {rewards.rollouts} rollouts have no usable reward: they are "
            "left out, which is not a reward of zero"
        )
    groups, size = len(rewards.groups), max((len(g.rewards) for g in rewards.groups), default=0)
    if size == 1:
        found.append("one rollout per task compares nothing: use group_size=2 or more")
    elif groups and not rewards.varying:
        found.append(
            f"no reward varies inside a group ({groups} groups): there is nothing to learn from. "
            "The tasks may be too easy or too hard, or the reward too coarse"
        )
    elif rewards.varying < groups / 2:
        found.append(f"rewards vary inside {rewards.varying} of {groups} groups only")
    if rewards.air is not None and rewards.air.idle:
        found.append(f"AIR: {rewards.air.idle}: air= would change nothing")
    return found


def warn_of_calls(agents: Sequence[AgentReport]) -> list[str]:
    """Calls of selected agents that would not be trained."""
    selected = [agent for agent in agents if agent.policy is not None]
    trained = sum(agent.trained for agent in selected)
    rejected: Counter[str] = Counter()
    for agent in selected:
        for reason in agent.rejected:
            rejected[f"{reason.code}: {reason.text}"] += reason.calls
    told = "; ".join(f"{count} {text}" for text, count in rejected.most_common(3))
    if not trained:
        return [f"no call would be trained ({told or 'no selected agent called a model'})"]
    total = trained + sum(rejected.values())
    return [f"{total - trained} of {total} calls would be rejected ({told})"] if told else []


def warn_of_rows(rows: RowReport | None) -> list[str]:
    """Conversations that break."""
    if rows is None or not rows.broken:
        return []
    causes = ", ".join(f"{count} {cause}" for cause, count in rows.causes.items() if count)
    return [
        f"{rows.broken} of {rows.broken + rows.merged} calls that go on with a conversation begin "
        f"a new row ({causes}): the learner computes their history again"
    ]


def warn_of_costs(costs: CostReport) -> list[str]:
    """A limit that `fit` would reach."""
    limit = costs.max_frozen_calls
    if limit is None or costs.expected_frozen_calls <= limit:
        return []
    return [
        f"fit would make about {costs.expected_frozen_calls:,.0f} calls to endpoints and stop at "
        f"max_frozen_calls={limit:,}"
    ]


def warn_of_memory(memory: MemoryForecast | None) -> list[str]:
    """More than there is."""
    if memory is None or memory.fits is not False:
        return []
    return ["the memory that fit would need is more than is free: see below"]


# --- who answers ------------------------------------------------------------------------------
def endpoint_routing(routing: Routing, endpoint: LLM) -> Routing:
    """The routing in which an endpoint answers for every model of ours. Agents that would be
    trained keep the sampling of training; other endpoints stay what they are."""

    def routed(target: Target) -> Target:
        if target.route in (Route.APP, Route.ENDPOINT):
            return target
        sampling = target.sampling if target.selected else None
        return Target(route=Route.ENDPOINT, endpoint=endpoint, sampling=sampling)

    rules = [msgspec.structs.replace(rule, target=routed(rule.target)) for rule in routing.rules]
    return msgspec.structs.replace(routing, rules=rules, default=routed(routing.default))


def environment_endpoint(model: str | None = None) -> LLM | None:
    """The endpoint of `OPENAI_BASE_URL` and `OPENAI_API_KEY`; None where neither is set.

    Args:
        model: None for `OPENAI_MODEL`, else what the app asks for.
    """
    url, has_key = os.environ.get("OPENAI_BASE_URL"), bool(os.environ.get("OPENAI_API_KEY"))
    if not url and not has_key:
        return None
    return LLM(
        base_url=url or DEFAULT_URL,
        model=model or os.environ.get("OPENAI_MODEL", ""),
        api_key_env="OPENAI_API_KEY" if has_key else None,
    )


def named_endpoint(base_url: str | None, model: str | None) -> LLM | None:
    """The endpoint of the options `--base-url` and `--endpoint-model`; None if neither is given.

    Raises:
        ConfigError: only the model is given, and the environment names no endpoint.
    """
    if base_url is not None:
        key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else None
        known = model or os.environ.get("OPENAI_MODEL", "")
        return LLM(base_url=base_url, model=known, api_key_env=key)
    if model is None:
        return None
    found = environment_endpoint(model)
    if found is None:
        raise ConfigError(
            f"--endpoint-model {model} is of no endpoint: give --base-url, or set OPENAI_BASE_URL "
            "or OPENAI_API_KEY"
        )
    return found


def _environment_endpoint(models: Sequence[str], local: bool | None) -> LLM | None:
    """Who answers if nobody said."""
    if local is None and all(is_here(model, "config.json") for model in models):
        return None
    found = environment_endpoint()
    if found is None and local is False:
        raise ConfigError(
            "local=False needs an endpoint: give endpoint=LLM(...), or set OPENAI_BASE_URL or "
            "OPENAI_API_KEY"
        )
    return found


async def _check_reachable(url: str) -> None:
    """Raise `EngineError` if nobody listens there: each rollout would find out by itself, after
    the retries of the app's client."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, UnicodeError) as error:  # a name that is none
        why = getattr(error, "strerror", None) or str(error) or "no answer"
        raise EngineError(
            f"the endpoint {url} cannot be reached ({why}): start it, or name another one"
        ) from error
    writer.close()


def _shown(endpoint: LLM) -> str:
    return f"{endpoint.model or 'the model that the app names'} at {host_of(endpoint.base_url)}"


def _tokenizers_of(session: Session) -> dict[str, ChatTokenizer]:
    return {policy: session.engine.tokenizer(policy) for policy in session.engine.policies()}


def _process_bytes() -> int:
    """Of this process with everything imported that training needs, before a model is loaded."""
    import lightspan.engines.transformers
    import lightspan.learners.torch  # noqa: F401

    return measuring.resident_bytes()
