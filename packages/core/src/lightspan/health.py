"""What a person has to hear of rollouts: failures, missing rewards, agents that do not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from lightspan import conventions as c
from lightspan.errors import RewardError, UnknownAgentError
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import check_agents
from lightspan.records import Mode, Outcome
from lightspan.routing import Routing
from lightspan.spans import SpanKind

FAILURE_WARNING: Final = 0.05
"""Share of failed rollouts above which a batch warns (design law 4)."""
NAMED: Final = 5
"""Tasks that a note names; it counts the others."""


class Health:
    """Looks at every batch of rollouts.

    Args:
        routing: whose patterns have to match an agent.
        note: where notes go.
        agents: every agent path where that is known; it was checked already then.
    """

    def __init__(
        self, routing: Routing, note: Callable[[str], None], agents: Sequence[str] | None = None
    ) -> None:
        self._routing = routing
        self._note = note
        self._seen: set[str] = set()
        self._agents_checked = agents is not None
        self._told: set[str] = set()

    def look(self, episodes: Sequence[Episode]) -> None:
        """Note what is odd.

        Raises:
            RewardError: the app returned something that is no reward.
            UnknownAgentError: after the first training batch, a pattern matches no agent.
        """
        check_rewards(episodes)
        self._failures(episodes)
        self._unscored(episodes)
        self._seen |= seen_agents(episodes)
        trained = any(episode.mode is Mode.TRAIN for episode in episodes)
        if trained and not self._agents_checked:
            check_seen(self._routing, self._seen, episodes)
            self._agents_checked = True

    def _failures(self, episodes: Sequence[Episode]) -> None:
        failed = [episode for episode in episodes if app_failed(episode)]
        lost = [episode for episode in episodes if not episode.finished]
        for what, found in (("failed", failed), ("were lost", lost)):
            if len(found) > FAILURE_WARNING * len(episodes):
                why = Counter(str(episode.outcome) for episode in found).most_common(1)[0][0]
                self._note(
                    f"{100 * len(found) / len(episodes):.0f} % of the rollouts {what} (mostly "
                    f"{why}; for example task {found[0].task_id}: {found[0].message[:200]})"
                )

    def _unscored(self, episodes: Sequence[Episode]) -> None:
        """Once per task; failures are told of apart."""
        fresh = {
            episode.task_id: episode
            for episode in episodes
            if episode.reward is None
            and episode.finished
            and not app_failed(episode)
            and episode.task_id not in self._told
        }
        if not fresh:
            return
        self._told |= fresh.keys()
        named = [f"{task} ({_why_unscored(e)})" for task, e in list(fresh.items())[:NAMED]]
        more = f" and {len(fresh) - NAMED} more tasks" if len(fresh) > NAMED else ""
        self._note(
            f"no usable reward, so unscored, which is not zero: {', '.join(named)}{more}; a task "
            "is named once"
        )


def app_failed(episode: Episode) -> bool:
    """Whether the app failed (not the infrastructure under it)."""
    return episode.finished and episode.outcome is not Outcome.OK


def check_rewards(episodes: Sequence[Episode]) -> None:
    """Raise `RewardError` if an app returned something that is no reward."""
    for episode in episodes:
        if episode.outcome is Outcome.BAD_REWARD:
            raise RewardError(f"task {episode.task_id}: {episode.message}")


def check_seen(routing: Routing, seen: Iterable[str], episodes: Sequence[Episode]) -> None:
    """Check that every pattern matches an agent that was seen; where none was, say why instead.

    Raises:
        UnknownAgentError: a pattern matches no agent.
    """
    seen = set(seen)
    try:
        check_agents(routing, seen)
    except UnknownAgentError:
        if seen:
            raise
        raise UnknownAgentError(why_no_call(episodes)) from None


def why_no_call(episodes: Sequence[Episode]) -> str:
    """What to tell of rollouts without any model call."""
    failed = [episode for episode in episodes if episode.outcome is not Outcome.OK]
    silent = "the app made no model call through the OpenAI SDK, nor to OPENAI_BASE_URL"
    if not failed:
        return f"{silent} (rollouts: {len(episodes)})"
    every = len(failed) == len(episodes)
    count = f"all {len(failed)}" if every else f"{len(failed)} of {len(episodes)}"
    first = f"{failed[0].outcome}: {failed[0].message[:300]}".rstrip(": ")
    rest = "" if every else f"; in the others {silent}"
    return f"no model call was seen: {count} rollouts failed, the first: {first}{rest}"


def seen_agents(episodes: Sequence[Episode]) -> set[str]:
    """Paths of every agent that acted or called a model."""
    paths = {call.agent_path for episode in episodes for call in episode.calls}
    for episode in episodes:
        agents = (span for span in episode.spans if span.kind is SpanKind.AGENT)
        paths |= {str(span.attributes[c.AGENT_PATH]) for span in agents}
    return paths


def _why_unscored(episode: Episode) -> str:
    if episode.reward_source is None:
        return "the app returned None and emitted no reward"
    return f"NaN or infinity was {episode.reward_source}"
