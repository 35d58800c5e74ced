"""Score rollouts by a *scorer*, a function or a `Judge`, in place of the app's rewards.

`Session.rollouts` scores episodes before the algorithm gets them, so no algorithm needs code for
scorers. The trainer's process makes the model calls of a scorer after the attempt has ended, so
these calls are never among the attempt's calls. The scorer's reward is stored in the run's folder
under its name. The app's own reward stays in the store, and in the episode as one of the further
named rewards in `dimensions`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError, RewardError
from lightspan.lightning.answers import answer_of
from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.runners.app import find, is_async
from lightspan.schema.images import ImageReader
from lightspan.schema.records import Json
from lightspan.schema.reward import parse_reward
from lightspan.schema.spans import text_of

JOURNAL: Final = "journal"
"""Folder of a run for the logs of judges and prompt searches."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
_RESERVED_NAME: Final = re.compile(r"(?:gepa|apo)$|step-")
OWN: Final = "app"
"""Name of the reward that the app itself gives."""
ARGUMENTS: Final = ("task", "answer", "episode", "episodes")
"""The parameters that a reward function may have."""
MAX_CONCURRENT: Final = 8
"""Maximum number of groups that an async reward function scores concurrently."""


class Member(NamedTuple):
    """A rollout to score: its task and its episode."""

    task: Json
    episode: Episode


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a rollout."""

    value: float | None = None
    """The reward; None for an unscored rollout."""
    dimensions: dict[str, float] = {}
    why: str = ""
    """Why the rollout is unscored; empty if it is scored."""
    reasons: str = ""
    """A judge's reasons for `value`; empty for a function."""


class RewardLine(Scored, frozen=True, kw_only=True):
    """A line of `rewards/NAME.jsonl` in a run's folder."""

    rollout_id: str


class ScoringPosition(NamedTuple):
    """The run for which a scorer is opened (`Scorer.opened`)."""

    folder: Path | None
    """Folder of the run, from which a judge reads its earlier answers; None for no folder."""
    keeps: bool
    """Whether a judge's new answers are stored in `folder`."""
    note: Callable[[str], None]
    """Function that prints a note for the user."""
    images: ImageReader | None = None
    """Function that returns the recorded images among digests; None if there is no store."""


class Scoring(Protocol):
    """A scorer that is open for one run."""

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        """Return the score of each rollout, in the same order and groups.

        Args:
            groups: rollouts to score; each group has the rollouts of one task.

        Raises:
            RewardError: the scorer returned an invalid reward.
            BudgetError: the scorer's call budget is used up.
            EngineError: the scorer's model cannot answer, and a retry would not help.
        """

    def spent(self) -> Mapping[str, float]:
        """Return the costs of the run, those before a restart included, by name.

        Such as the number of calls. Empty if the scorer has no costs.
        """


@runtime_checkable
class Scorer(Protocol):
    """Source of rewards that replace the app's: a `Judge` or a function."""

    @property
    def name(self) -> str:
        """Name of the reward and of its file in the run's folder."""

    def config(self) -> dict[str, Json]:
        """Return the settings that affect the rewards, for `config.json`.

        A run is resumed with equal settings only.
        """

    def opened(self, place: ScoringPosition) -> AbstractAsyncContextManager[Scoring]:
        """Return a context manager that opens the scorer for the run that `place` describes."""


def as_scorer(reward: Scorer | Callable[..., Any] | str) -> Scorer:
    """Return the scorer for a `reward=` argument; a function is wrapped in a `FunctionScorer`.

    Args:
        reward: a scorer such as a `Judge`, a reward function, or the name `module:name` of either.

    Raises:
        AppError: the name cannot be imported.
        ConfigError: `reward` is neither a scorer nor a function.
    """
    if isinstance(reward, str):
        if not all(reward.partition(":")):
            raise ConfigError(f"reward={reward!r}: name a function or a Judge, as module:name")
        named = find(reward, "reward")
        if isinstance(named, str):
            raise ConfigError(f"reward={reward!r} is the text {named!r:.40}, and no function")
        return as_scorer(named)
    if isinstance(reward, Scorer) and not isinstance(reward, type):
        return reward
    if not callable(reward):
        raise ConfigError(f"reward={reward!r:.100}: give a function, its module:name, or a Judge")
    return FunctionScorer(reward)


# --- a function -------------------------------------------------------------------------------
@dataclass(frozen=True)
class FunctionScorer:
    """Scorer that calls a sync or async reward function in the trainer's process.

    Args:
        function: reward function, in one of two forms. The first form has any of the parameters
            `task` (the app's task), `answer` (text of the last model answer) and `episode`
            (everything recorded); it returns a reward as an app does. The second form has the
            parameter `episodes` (all episodes of a group) and returns a list with one reward per
            episode.

    Raises:
        ConfigError: the function has none of these parameters, mixes the two forms, or has further
            required parameters.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        names = set(self._parameters)
        if not names or ("episodes" in names and {"episode", "answer"} & names):
            raise ConfigError(
                f"the reward {self._title} has to ask for task, answer or episode, or for the "
                "episodes of a group"
            )

    @cached_property
    def _parameters(self) -> list[str]:
        """Names of the function's parameters that are in `ARGUMENTS`.

        Raises:
            ConfigError: the function has further required parameters, or its signature is unknown.
        """
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the arguments of reward={self.function!r} are unknown") from error
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        for parameter in named:
            if parameter.name not in ARGUMENTS and parameter.default is parameter.empty:
                raise ConfigError(
                    f"the reward {self._title} asks for {parameter.name!r}, which nothing "
                    f"provides; it can ask for {', '.join(ARGUMENTS)}, by these names"
                )
        return [parameter.name for parameter in named if parameter.name in ARGUMENTS]

    @property
    def _title(self) -> str:
        return f"{getattr(self.function, '__qualname__', type(self.function).__name__)!r}"

    @property
    def name(self) -> str:
        name = str(getattr(self.function, "__name__", ""))
        return name if name.isidentifier() and name != OWN else "reward"

    def config(self) -> dict[str, Json]:
        module = getattr(self.function, "__module__", "")
        return {"name": self.name, "function": f"{module}:{self._title[1:-1]}"}

    @asynccontextmanager
    async def opened(self, place: ScoringPosition) -> AsyncIterator[Scoring]:
        yield self

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        """Return the score of each rollout, in the same order and groups.

        A rollout is unscored if the function raises an exception.

        Raises:
            RewardError: the function returned an invalid reward.
        """
        slots = asyncio.Semaphore(MAX_CONCURRENT if is_async(self.function) else 1)

        async def score_group(group: Sequence[Member]) -> list[Scored]:
            async with slots:
                if "episodes" in self._parameters:
                    return await self._score_together(group)
                return [await self._score_one(member) for member in group]

        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(score_group(group)) for group in groups]
        return [task.result() for task in scores]

    def spent(self) -> Mapping[str, float]:
        return {}

    async def _score_together(self, group: Sequence[Member]) -> list[Scored]:
        episodes = [member.episode for member in group]
        try:
            values = await self._call({"task": group[0].task, "episodes": episodes})
        except Exception as error:
            return [self._unscored(error)] * len(group)
        values = values.tolist() if hasattr(values, "tolist") else values  # of an array or tensor
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(group):
            raise RewardError(
                f"the reward {self._title} has to return a reward for each of the "
                f"{len(group)} episodes, in a list: it returned {values!r:.100}"
            )
        return [self._parse(v, member) for v, member in zip(values, group, strict=True)]

    async def _score_one(self, member: Member) -> Scored:
        try:
            value = await self._call({"answer": answer_of(member.episode), **member._asdict()})
        except Exception as error:
            return self._unscored(error)
        return self._parse(value, member)

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        chosen = {name: arguments[name] for name in self._parameters}
        if is_async(self.function):
            return await self.function(**chosen)
        # A sync function would block the event loop of the gateway.
        return await asyncio.to_thread(self.function, **chosen)

    def _unscored(self, error: Exception) -> Scored:
        why = f"raised {type(error).__name__}: {text_of(error)}"
        return Scored(why=f"the reward {self._title} {why}")

    def _parse(self, value: Any, member: Member) -> Scored:
        try:
            reward = parse_reward(value)
        except RewardError as error:
            task = member.episode.task_id
            raise RewardError(f"task {task}: the reward {self._title} returned: {error}") from error
        if reward is None or reward.value is None:
            return Scored(why=f"the reward {self._title} returned {value!r:.40}")
        return Scored(value=reward.value, dimensions=reward.dimensions)


# --- episodes with their scores ---------------------------------------------------------------
def with_reward(episode: Episode, scored: Scored | None) -> Episode:
    """Return the episode with a scorer's reward in place of the app's.

    The app's own reward becomes one of `dimensions`, which are further named rewards: the app's
    and the scorer's, of equal names the scorer's. An unfinished episode is returned unchanged. If
    the app failed, the result has no reward (see `score_failure`).

    Args:
        episode: episode of a rollout.
        scored: score of the rollout; None if the scorer did not score it.
    """
    own = {} if episode.reward is None else {OWN: episode.reward}
    if not episode.finished:
        return episode
    if app_failed(episode):
        return replace(episode, reward=None, dimensions={}, reward_source=None)
    why = "its trace is damaged" if episode.capture_errors else "it was not scored"
    scored = scored or Scored(why=episode.unscored or why)
    named = {name: value for name, value in episode.dimensions.items() if name != "reward"}
    return replace(
        episode,
        reward=scored.value,
        dimensions={**named, **scored.dimensions, **own},
        reward_source="scored",
        unscored="" if scored.value is not None else scored.why,
        reasons=scored.reasons,
    )


async def scored_groups(scoring: Scoring, members: Sequence[Member]) -> dict[str, Scored]:
    """Score rollouts group by group; return the scores by rollout id.

    Left out are unfinished rollouts, rollouts whose app failed or went on without an answer, and
    rollouts with a capture error.

    Raises:
        RewardError: the scorer returned an invalid reward.
        BudgetError: the scorer's call budget is used up.
        EngineError: the scorer's model cannot answer, and a retry would not help.
    """
    groups: dict[str, list[Member]] = {}
    for member in members:
        episode = member.episode
        reason = episode.unscored or episode.capture_errors
        if episode.finished and not app_failed(episode) and not reason:
            groups.setdefault(episode.group_id, []).append(member)
    try:
        scores = await scoring.score(list(groups.values()))
    except BaseExceptionGroup as errors:  # the first error cancelled the other groups
        raise errors.exceptions[0] from None
    return {
        member.episode.rollout_id: score
        for group, group_scores in zip(groups.values(), scores, strict=True)
        for member, score in zip(group, group_scores, strict=True)
    }


@dataclass(eq=False)
class Rewards:
    """Score the episodes of one session, store the scores, and count costs.

    Args:
        name: name of the reward.
        scoring: open scorer.
        store: function that stores scores (by rollout id) under the name of the reward.
        reported: metric → sum in the run's lines of metrics.
    """

    name: str
    scoring: Scoring
    store: Callable[[str, Mapping[str, Scored]], None]
    reported: Mapping[str, float] = field(default_factory=dict)
    _unscored: int = 0

    async def apply(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Episode]:
        """Score episodes and store their scores; return the episodes with their rewards, in order.

        Args:
            tasks: task of each episode.
            episodes: episodes to score.

        Raises:
            RewardError: the scorer returned an invalid reward.
            BudgetError: the scorer's call budget is used up.
            EngineError: the scorer's model cannot answer, and a retry would not help.
            StoreError: the scores cannot be stored.
        """
        members = [Member(task, episode) for task, episode in zip(tasks, episodes, strict=True)]
        scores = await scored_groups(self.scoring, members)
        self._unscored += sum(score.value is None for score in scores.values())
        self.store(self.name, scores)
        return [with_reward(e, scores.get(e.rollout_id)) for e in episodes]

    def metrics(self) -> dict[str, float]:
        """Return the number of unscored rollouts and the scorer's costs, as metrics.

        Each metric is the increase since the previous call, or since the run's last line.
        """
        values = {"unscored": float(self._unscored), **self.scoring.spent()}
        total = {f"{self.name}/{name}": value for name, value in values.items()}
        before, self.reported = self.reported, total
        return {name: value - before.get(name, 0.0) for name, value in total.items()}


def check_reward_name(name: str) -> None:
    """Raise `ConfigError` unless `name` is a valid name of a reward and of its file."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name == OWN:
        raise ConfigError(
            f"name={name!r}: use letters, digits, - and _, and not {OWN!r}, which is the app's own "
            "reward"
        )
    if _RESERVED_NAME.match(name):
        raise ConfigError(
            f"name={name!r} is reserved for the log of a prompt search in the run's {JOURNAL} "
            "folder: use another name"
        )
