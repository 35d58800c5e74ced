"""Rewards from elsewhere than the app: a function, or a `Judge`, scores what rollouts did.

It happens between the rollouts and the algorithm (`Session.rollouts`), so that every algorithm
learns from such rewards, and none knows of it. What a scorer asks of a model is asked by the
trainer's process, when the attempt is sealed: it is never among its calls. The app's own reward
stays in the store and is a dimension of the episode; the new one is in the run's folder, by its
name, for whoever reads the run later.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError, RewardError
from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.lightning.transcript import answer_of
from lightspan.runners.app import find
from lightspan.schema.records import Json
from lightspan.schema.reward import parse_reward
from lightspan.schema.spans import text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lightspan.training.folder import RunFolder

JOURNAL: Final = "journal"
"""Folder of a run for the logs of judges and prompt searches."""
_NAME: Final = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
_RESERVED_NAME: Final = re.compile(r"(?:gepa|apo)$|step-")
OWN: Final = "app"
"""The name of the app's own reward beside another one."""
ARGUMENTS: Final = ("task", "answer", "episode", "episodes")
"""What a reward function may ask for by name."""
MAX_CONCURRENT: Final = 8
"""Groups that an async function is asked about at once."""


class Member(NamedTuple):
    """One rollout to score."""

    task: Json
    episode: Episode


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout is worth."""

    value: float | None = None
    """None: unscored, which is not zero."""
    dimensions: dict[str, float] = {}
    why: str = ""
    """Why there is none."""
    reasons: str = ""
    """Why it is this much, in a judge's words."""


class Kept(Scored, frozen=True, kw_only=True):
    """A line of `rewards/NAME.jsonl` in a run's folder."""

    rollout_id: str


class ScoringPosition(NamedTuple):
    """Where a scorer works."""

    folder: Path | None
    """Of the run, whose answers are known from earlier lives; None for none."""
    keeps: bool
    """Whether further answers are written there."""
    note: Callable[[str], None]


class Scoring(Protocol):
    """A scorer at work."""

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        """What each rollout of each group is worth.

        Raises:
            RewardError: what it gave is no reward.
            BudgetError: it may ask no more.
            EngineError: the model that it asks can never answer.
        """
        ...

    def spent(self) -> Mapping[str, float]:
        """What was asked since it was opened; empty where nothing is."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Gives rewards in the app's place: a `Judge`, or a function."""

    @property
    def name(self) -> str:
        """Of the reward, and of its file in the run's folder."""
        ...

    def config(self) -> dict[str, Json]:
        """What decides the rewards, for `config.json`: a run goes on with the same only."""
        ...

    def opened(self, place: ScoringPosition) -> AbstractAsyncContextManager[Scoring]: ...


def as_scorer(reward: Scorer | Callable[..., Any] | str) -> Scorer:
    """The scorer that was given or named.

    Raises:
        AppError: a name that cannot be imported.
        ConfigError: it is none.
    """
    if isinstance(reward, str):
        if not all(reward.partition(":")):
            raise ConfigError(
                f"reward={reward!r}: name a function or a Judge, as in my_rewards:exact"
            )
        named = find(reward, "reward")
        if isinstance(named, str):
            raise ConfigError(f"reward={reward!r} is the text {named!r:.40}, and no function")
        return as_scorer(named)
    if isinstance(reward, Scorer) and not isinstance(reward, type):
        return reward
    if not callable(reward):
        raise ConfigError(
            f"reward={reward!r:.100}: give a function, its name (module:name), or a lightspan.Judge"
        )
    return FunctionScorer(reward)


# --- a function -------------------------------------------------------------------------------
@dataclass(frozen=True)
class FunctionScorer:
    """A plain function that gives a reward, sync or async, in the trainer's process.

    Args:
        function: asks by name for `task` (as the app was given it), `answer` (the text of the last
            answer of a model) and `episode` (all that was recorded), and returns a reward as an app
            does; or for `episodes`, those of a group, and returns a reward for each.

    Raises:
        ConfigError: it asks for anything else.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        asked = self._asked
        if not asked or ("episodes" in asked and {"episode", "answer"} & set(asked)):
            raise ConfigError(
                f"the reward {self._shown} has to ask for task, answer or episode, or for the "
                "episodes of a group"
            )

    @property
    def _asked(self) -> list[str]:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the arguments of reward={self.function!r} cannot be seen"
            ) from error
        named = [
            each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        for each in named:
            if each.name not in ARGUMENTS and each.default is each.empty:
                raise ConfigError(
                    f"the reward {self._shown} asks for {each.name!r}, which nothing provides; it "
                    f"can ask for {', '.join(ARGUMENTS)}, by these names"
                )
        return [each.name for each in named if each.name in ARGUMENTS]

    @property
    def _shown(self) -> str:
        return f"{getattr(self.function, '__qualname__', type(self.function).__name__)!r}"

    @property
    def name(self) -> str:
        name = str(getattr(self.function, "__name__", ""))
        return name if name.isidentifier() and name != OWN else "reward"

    def config(self) -> dict[str, Json]:
        module = getattr(self.function, "__module__", "")
        return {"name": self.name, "function": f"{module}:{self._shown[1:-1]}"}

    @asynccontextmanager
    async def opened(self, place: ScoringPosition) -> AsyncIterator[Scoring]:
        yield self

    async def score(self, groups: Sequence[Sequence[Member]]) -> list[list[Scored]]:
        """See `Scoring`."""
        turns = asyncio.Semaphore(MAX_CONCURRENT if _is_async(self.function) else 1)

        async def one(group: Sequence[Member]) -> list[Scored]:
            async with turns:
                return await self._of_group(group)

        async with asyncio.TaskGroup() as tasks:
            scored = [tasks.create_task(one(group)) for group in groups]
        return [task.result() for task in scored]

    def spent(self) -> Mapping[str, float]:
        return {}

    async def _of_group(self, group: Sequence[Member]) -> list[Scored]:
        if "episodes" not in self._asked:
            return [await self._of_one(member) for member in group]
        task, episodes = group[0].task, [member.episode for member in group]
        try:
            values = await self._call({"task": task, "episodes": episodes})
        except Exception as error:
            return [self._raised(error)] * len(group)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(group):
            raise RewardError(
                f"the reward {self._shown} has to return a reward for each of the "
                f"{len(group)} episodes, in a list: it returned {values!r:.100}"
            )
        return [self._scored(v, member) for v, member in zip(values, group, strict=True)]

    async def _of_one(self, member: Member) -> Scored:
        task, episode = member
        offered = {"task": task, "answer": answer_of(episode), "episode": episode}
        try:
            value = await self._call(offered)
        except Exception as error:
            return self._raised(error)
        return self._scored(value, member)

    async def _call(self, offered: Mapping[str, Any]) -> Any:
        asked = {name: offered[name] for name in self._asked}
        if _is_async(self.function):
            return await self.function(**asked)
        # beside the event loop, in which the gateway answers
        return await asyncio.to_thread(self.function, **asked)

    def _raised(self, error: Exception) -> Scored:
        return Scored(
            why=f"the reward {self._shown} raised {type(error).__name__}: {text_of(error)}"
        )

    def _scored(self, value: Any, member: Member) -> Scored:
        try:
            reward = parse_reward(value)
        except RewardError as error:
            task = member.episode.task_id
            raise RewardError(f"task {task}: the reward {self._shown} returned: {error}") from error
        if reward is None or reward.value is None:
            return Scored(why=f"the reward {self._shown} returned {value!r:.40}")
        return Scored(value=reward.value, dimensions=reward.dimensions)


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - objects with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


# --- what becomes of episodes -----------------------------------------------------------------
def is_scorable(episode: Episode) -> bool:
    """Whether it is for a scorer: the app ended well, and all of it was recorded."""
    return episode.finished and not app_failed(episode) and not episode.capture_errors


def with_reward(
    episode: Episode, scored: Scored | None, *, failure_reward: float | None = None
) -> Episode:
    """The episode with the reward of a scorer in place of the app's own, which becomes a dimension.

    Args:
        scored: None: it was not scored.
        failure_reward: of an episode whose app failed, which no scorer is asked about.
    """
    own = {} if episode.reward is None else {OWN: episode.reward}
    if not episode.finished:
        return episode
    if app_failed(episode):
        failed = replace(episode, reward=failure_reward, dimensions={}, reward_source=None)
        return failed if failure_reward is None else replace(failed, reward_source="failure")
    if scored is None:
        why = "its trace is damaged" if episode.capture_errors else "it was not scored"
        scored = Scored(why=why)
    return replace(
        episode,
        reward=scored.value,
        dimensions={**scored.dimensions, **own},
        reward_source="scored",
        unscored="" if scored.value is not None else scored.why,
        reasons=scored.reasons,
    )


async def scored_groups(scoring: Scoring, members: Sequence[Member]) -> dict[str, Scored]:
    """Rollout id → what it is worth, of those that are for a scorer; rollouts of one group are
    scored together."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        if is_scorable(member.episode):
            groups.setdefault(member.episode.group_id, []).append(member)
    try:
        scored = await scoring.score(list(groups.values()))
    except BaseExceptionGroup as errors:  # the first says why the others were cancelled
        raise errors.exceptions[0] from None
    return {
        member.episode.rollout_id: each
        for group, of_group in zip(groups.values(), scored, strict=True)
        for member, each in zip(group, of_group, strict=True)
    }


class Rewards:
    """Gives the episodes of one session their rewards.

    Args:
        scorer: who says what they are worth.
        scoring: the same, at work.
        folder: of the run, which keeps what was said.
        failure_reward: of the algorithm.
    """

    def __init__(
        self, scorer: Scorer, scoring: Scoring, folder: RunFolder, failure_reward: float | None
    ) -> None:
        self.scorer = scorer
        self._scoring = scoring
        self._folder = folder
        self._failure_reward = failure_reward
        self._unscored = 0
        self._told: dict[str, float] = {}

    async def apply(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes with their rewards, in the order given.

        Raises:
            RewardError, BudgetError, EngineError: see `Scoring.score`.
            StoreError: they cannot be kept.
        """
        members = [Member(task, each) for task, each in zip(tasks, episodes, strict=True)]
        scored = await scored_groups(self._scoring, members)
        self._unscored += sum(each.value is None for each in scored.values())
        self._folder.add_rewards(self.scorer.name, scored)
        return [
            with_reward(each, scored.get(each.rollout_id), failure_reward=self._failure_reward)
            for each in episodes
        ]

    def metrics(self) -> dict[str, float]:
        """How many rollouts got no score, and what was asked, since this was asked last."""
        spent = {"unscored": float(self._unscored), **self._scoring.spent()}
        fresh = {f"{self.scorer.name}/{k}": v - self._told.get(k, 0.0) for k, v in spent.items()}
        self._told = spent
        return fresh


def own_reward(episodes: Sequence[Episode]) -> str:
    """What the app itself said of episodes that a scorer has scored, for people; empty where it
    said nothing."""
    own = [
        e.dimensions[OWN] for e in episodes if e.reward_source == "scored" and OWN in e.dimensions
    ]
    return f"{math.fsum(own) / len(own):.3f} of {len(own)} rollouts" if own else ""


def check_reward_name(name: str) -> None:
    """Raise `ConfigError` unless a reward can have this name, which also names a file."""
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
