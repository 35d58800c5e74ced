"""Export of a training's spans to a tracing backend, with rewards, advantages and agents.

The spans of a training step are queued after the weights were updated. The training itself does not
wait for the backend. At its end it waits until all spans are sent, or the backend accepts no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import TransitionKey
from lightspan.production.options import SERVICE_NAME, service_of_environment
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.images import Image, ImageReader
from lightspan.schema.media import digests_in
from lightspan.schema.spans import Span, clean_attributes
from lightspan_otel import attribute_names as a, span_exporter
from lightspan_otel.span_exporter import ExportHandle

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 30.0
"""Maximum wait at the end of a training while the backend accepts no span, in seconds."""
_POLL_INTERVAL_S: Final = 0.05


class TrainingExport:
    """Export the spans of a training's episodes. An episode is a finished run of the app.

    Args:
        service: service name of the spans, unless the environment names one.
        report: function that prints a message; called if spans were not exported.
        images: function that returns the recorded images among digests.
    """

    def __init__(self, service: str, report: Callable[[str], None], images: ImageReader) -> None:
        self._service: Final = service_of_environment() or service
        self._report = report
        self._images = images
        self._waiting: list[tuple[Episode, int, list[Image]]] = []
        """Episodes of the current step, with the number of the step and their images."""
        self._advantages: dict[TransitionKey, float] = {}

    async def add(self, episodes: Sequence[Episode], step: int, *, is_learned: bool) -> None:
        """Queue the spans of finished episodes for export. Never raises.

        If the step trains on the episodes, their spans are kept until `send` is called, so that
        they get the advantages of the step.

        Args:
            episodes: episodes of any rollouts.
            step: number of the training step.
            is_learned: whether the step trains on the episodes.
        """
        handle = span_exporter.current()
        if handle is None:
            return
        for episode in episodes:
            images = await self._images_of(episode) if handle.images else []
            if is_learned:
                self._waiting.append((episode, step, images))
            else:
                self._enqueue(episode, step, {}, images)

    async def _images_of(self, episode: Episode) -> list[Image]:
        """Return the recorded images of an episode's calls. Never raises."""
        digests = set[str]().union(*(digests_in(span.attributes) for span in episode.spans))
        try:
            return list((await self._images(sorted(digests))).values()) if digests else []
        except Exception as error:  # an export error must not end the training
            log.warning("lightspan: images are not exported: %r", error)
            return []

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Keep the advantages of model calls for the next `send`, which adds them to the spans.

        Calls with the weight 0, which no update used, have none.
        """
        if self._waiting:
            used = ((key, why) for key, why in explanations.items() if why.token_weight)
            self._advantages |= {key: why.advantage for key, why in used}

    def send(self) -> None:
        """Queue the spans that `add` has kept, with the advantages of the step. Never raises."""
        waiting, advantages = self._waiting, self._advantages
        self._waiting, self._advantages = [], {}
        for episode, step, images in waiting:
            self._enqueue(episode, step, advantages, images)

    def _enqueue(
        self,
        episode: Episode,
        step: int,
        advantages: Mapping[TransitionKey, float],
        images: Sequence[Image],
    ) -> None:
        spans = annotated_spans(episode, step, advantages, self._service)
        span_exporter.enqueue(spans, images)

    async def close(self, *, is_patient: bool) -> None:
        """Export the remaining spans, and report how many were not exported. Never raises.

        If the caller is cancelled while it waits, the wait ends.

        Args:
            is_patient: whether to wait until all spans are sent or the backend accepts no more. If
                False, `close` does not wait.
        """
        self.send()  # an interrupted step has no advantages
        handle = span_exporter.current()
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
            self._report(
                f"{plural(missing, 'span')} did not get to {handle.destination}; the store keeps "
                "them"
            )


async def _drain(handle: ExportHandle) -> None:
    """Wait until no span is pending, or the backend stops accepting spans."""
    sent, since = handle.sent, time.monotonic()
    while handle.pending and time.monotonic() - since < EXPORT_TIMEOUT_S:
        await asyncio.sleep(_POLL_INTERVAL_S)
        if handle.sent > sent:
            sent, since = handle.sent, time.monotonic()


# --- pure -----------------------------------------------------------------------------------
def annotated_spans(
    episode: Episode, step: int, advantages: Mapping[TransitionKey, float], service: str
) -> list[Span]:
    """Return the spans of an episode with its step, rewards and advantages.

    Args:
        episode: one finished run of the app.
        step: number of the training step.
        advantages: advantage of each model call, also of calls in other episodes, which are
            ignored.
        service: service name of spans that have none.
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
            a.STEP: step,
            a.EPISODE_REWARD: episode.reward if is_outermost else None,
            a.CALL_REWARD: _one_or_many(rewards.get(call_id, ())),
            a.ADVANTAGE: _one_or_many(call_advantages.get(call_id, ())),
        }
        annotated.append(
            span.replace(
                attributes={**span.attributes, **clean_attributes(more)},
                resource={SERVICE_NAME: service, **span.resource},
            )
        )
    return annotated


def _one_or_many(values: Iterable[float]) -> Any:
    """Return one value if all `values` are equal, else the list of them; None for no values."""
    listed = list(values)
    if not listed:
        return None
    return listed[0] if len(set(listed)) == 1 else listed
