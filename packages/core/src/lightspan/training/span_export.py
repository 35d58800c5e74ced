"""Export of a training's spans to a tracing backend, with rewards, advantages and agents.

The spans of a step are queued when the step has learned. The training waits for the backend only
at its end, and there for as long as spans get through.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import TransitionKey
from lightspan.production import span_exporter
from lightspan.production.options import SERVICE_NAME, service_of_environment
from lightspan.production.span_exporter import ExportHandle
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, clean_attributes

EXPORT_TIMEOUT_S: Final = 30.0
"""How long the end of a training waits while the backend accepts nothing."""
_POLL_INTERVAL_S: Final = 0.05


class SpanExport:
    """Exports the spans of a training's episodes.

    Args:
        service: of the spans, where the environment does not name one: the run's name.
        tell: gets a message about spans that were not exported.
    """

    def __init__(self, service: str, tell: Callable[[str], None]) -> None:
        self._service: Final = service_of_environment() or service
        self._tell = tell
        self._waiting: list[tuple[Episode, int]] = []
        """Episodes of the step that goes on, with the number of the step."""
        self._advantages: dict[TransitionKey, float] = {}

    def add(self, episodes: Sequence[Episode], step: int, *, is_learned: bool) -> None:
        """Add episodes that have ended.

        Args:
            episodes: of any rollouts.
            step: the iteration that they are of.
            is_learned: whether the step learns from them, and `send` is still to come.
        """
        if _current() is None:
            return
        if is_learned:
            self._waiting += [(episode, step) for episode in episodes]
            return
        for episode in episodes:
            self._enqueue(episode, step, {})

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Add the advantages of calls."""
        if self._waiting:
            self._advantages |= {key: why.advantage for key, why in explanations.items()}

    def send(self) -> None:
        """Queue the spans of the step. Never raises."""
        waiting, advantages = self._waiting, self._advantages
        self._waiting, self._advantages = [], {}
        for episode, step in waiting:
            self._enqueue(episode, step, advantages)

    def _enqueue(
        self, episode: Episode, step: int, advantages: Mapping[TransitionKey, float]
    ) -> None:
        span_exporter.enqueue(annotated_spans(episode, step, advantages, self._service))

    async def close(self, *, is_patient: bool) -> None:
        """Send what waits and report what was not exported. Never raises; to cancel it ends the
        wait.

        Args:
            is_patient: wait for as long as the backend accepts spans.
        """
        self.send()  # of a step that was interrupted: without advantages
        handle = _current()
        if handle is None:
            return
        if is_patient:
            try:
                await _drain(handle)
            except asyncio.CancelledError:  # Ctrl-C: the training itself is over
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
        missing = handle.lost + handle.pending
        if missing:
            self._tell(
                f"{plural(missing, 'span')} did not get to {handle.destination}; the store keeps "
                "them"
            )


async def _drain(handle: ExportHandle) -> None:
    """Wait until nothing is pending, or the backend accepts nothing any more."""
    sent, since = handle.sent, time.monotonic()
    while handle.pending and time.monotonic() - since < EXPORT_TIMEOUT_S:
        await asyncio.sleep(_POLL_INTERVAL_S)
        if handle.sent > sent:
            sent, since = handle.sent, time.monotonic()


def _current() -> ExportHandle | None:
    try:
        return span_exporter.current()
    except ConfigError:  # the environment has changed since the beginning
        return None


# --- pure -----------------------------------------------------------------------------------
def annotated_spans(
    episode: Episode, step: int, advantages: Mapping[TransitionKey, float], service: str
) -> list[Span]:
    """Return the spans of an episode with its step, rewards and advantages.

    Args:
        episode: an attempt.
        step: the iteration that it is of.
        advantages: of its calls and of others.
        service: of the spans, where they do not name one.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    call_advantages: defaultdict[str, list[float]] = defaultdict(list)
    for call in episode.calls:
        if call.reward is not None:
            rewards[call.call_id].append(call.reward)
        key = (episode.attempt_id, call.call_id, call.choice)
        if key in advantages:
            call_advantages[call.call_id].append(advantages[key])
    span_ids = {span.span_id for span in episode.spans}
    annotated = []
    for span in episode.spans:
        call_id = str(span.attributes.get(c.CALL_ID, ""))
        is_outermost = span.parent_id not in span_ids
        more = {
            c.STEP: step,
            c.EPISODE_REWARD: episode.reward if is_outermost else None,
            c.CALL_REWARD: _one_or_many(rewards.get(call_id, ())),
            c.ADVANTAGE: _one_or_many(call_advantages.get(call_id, ())),
        }
        annotated.append(
            span.replace(
                attributes={**span.attributes, **clean_attributes(more)},
                resource={SERVICE_NAME: service, **span.resource},
            )
        )
    return annotated


def _one_or_many(values: Iterable[float]) -> Any:
    """Return the value, or the list where a call had several answers; None for no values."""
    listed = list(values)
    if not listed:
        return None
    return listed[0] if len(set(listed)) == 1 else listed
