"""The spans of a training, as they are sent to a backend: with rewards, advantages and agents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import TransitionKey
from lightspan.production import outlet
from lightspan.production.attempt import SERVICE_NAME
from lightspan.schema import conventions as c
from lightspan.schema.spans import Span, clean_attributes


class Outgoing:
    """What ended and is not sent yet; nothing is kept where nothing is sent.

    Args:
        service: whose spans these are, where the environment does not say so: the run's name.
    """

    def __init__(self, service: str) -> None:
        self._service: Final = service
        self._waiting: list[tuple[Episode, int]] = []
        self._advantages: dict[TransitionKey, float] = {}

    def add(self, episodes: Sequence[Episode], step: int) -> None:
        """Episodes that have ended, and the iteration that they are of."""
        try:
            is_wanted = outlet.current() is not None
        except ConfigError:  # it has become wrong since the beginning
            is_wanted = False
        if is_wanted:
            self._waiting += [(episode, step) for episode in episodes]

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """What the learner was told of calls."""
        if self._waiting:
            self._advantages |= {key: why.advantage for key, why in explanations.items()}

    def send(self) -> None:
        """Have all that waits sent. Never raises."""
        waiting, advantages = self._waiting, self._advantages
        self._waiting, self._advantages = [], {}
        for episode, step in waiting:
            outlet.put(told_spans(episode, step, advantages, self._service))


def told_spans(
    episode: Episode, step: int, advantages: Mapping[TransitionKey, float], service: str
) -> list[Span]:
    """The spans of an episode, which say what became of it.

    Args:
        episode: an attempt.
        step: the iteration that it is of.
        advantages: of its calls and of others.
        service: whose spans these are, where they do not say so.
    """
    known = {span.span_id for span in episode.spans}
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    learned: defaultdict[str, list[float]] = defaultdict(list)
    for call in episode.calls:
        if call.reward is not None:
            rewards[call.call_id].append(call.reward)
        key = (episode.attempt_id, call.call_id, call.choice)
        if key in advantages:
            learned[call.call_id].append(advantages[key])
    told = []
    for span in episode.spans:
        call_id = str(span.attributes.get(c.CALL_ID, ""))
        is_outermost = span.parent_id not in known
        more = {
            c.STEP: step,
            c.EPISODE_REWARD: episode.reward if is_outermost else None,
            c.CALL_REWARD: _one_or_many(rewards.get(call_id)),
            c.ADVANTAGE: _one_or_many(learned.get(call_id)),
        }
        told.append(
            span.replace(
                attributes={**span.attributes, **clean_attributes(more)},
                resource={SERVICE_NAME: service, **span.resource},
            )
        )
    return told


def _one_or_many(values: Iterable[float] | None) -> Any:
    """A call has one answer, but for those that were asked for several."""
    found = list(values or ())
    return found[0] if len(set(found)) == 1 else found or None
