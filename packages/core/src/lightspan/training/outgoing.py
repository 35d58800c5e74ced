"""The spans of a training, as they are sent to a backend: with rewards, advantages and agents.

What a step did is offered when the step has learned. What finds no room then (`outlet`) is noted,
by its attempt and what was learned of it, and read from the store again when there is room: so no
step is too large for a backend that takes batches. The training waits for none of it but at its
end, and there for as long as the backend takes what it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import TransitionKey
from lightspan.production import outlet
from lightspan.production.options import SERVICE_NAME, service_of_environment
from lightspan.production.outlet import Outlet
from lightspan.progress import many
from lightspan.schema import conventions as c
from lightspan.schema.records import Rollout
from lightspan.schema.spans import Span, clean_attributes
from lightspan.stores.protocol import Store

MOST_NOTED: Final = 2**19
"""Numbers (rewards, advantages, attempts) that are kept of what waits to be read again."""
PATIENCE_S: Final = 30.0
"""How long the end of a training waits while nothing arrives at the backend."""
_AT_ONCE: Final = 256
"""Spans that are offered together."""
_LOOK_S: Final = 0.05


class Note(NamedTuple):
    """What is to be said of an attempt beside its spans."""

    attempt_id: str
    step: int
    """The iteration that it is of."""
    reward: float | None
    rewards: Mapping[str, Any]
    """Call → its rewards."""
    advantages: Mapping[str, Any]
    """Call → what the learner was told of it."""

    @property
    def size(self) -> int:
        """Numbers in it."""
        return 1 + len(self.rewards) + len(self.advantages)


class Outgoing:
    """What ended and is not sent yet; nothing is kept where nothing is sent.

    Args:
        service: whose spans these are, where the environment does not say so: the run's name.
        tell: is told what is not sent.
    """

    def __init__(self, service: str, tell: Callable[[str], None]) -> None:
        self._service: Final = service_of_environment() or service
        self._tell = tell
        self._begun: set[str] = set()
        """Rollouts that are under way, or were when they were stopped."""
        self._waiting: list[tuple[Episode, int]] = []
        """Of the step that goes on."""
        self._advantages: dict[TransitionKey, float] = {}
        self._noted: deque[Note] = deque()
        self._size = 0
        """Of all notes."""
        self._unsent = 0
        """Attempts that could not be noted, or not read again."""
        self._store: Store | None = None
        self._feeding: asyncio.Task[None] | None = None

    # --- what there is --------------------------------------------------------------------
    def open(self, store: Store) -> None:
        """What finds no room is read from here again."""
        self._store = store

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """Rollouts that begin."""
        if _current() is not None:
            self._begun.update(rollout.rollout_id for rollout in rollouts)

    def add(self, episodes: Sequence[Episode], step: int, *, is_learned: bool) -> None:
        """Episodes that have ended.

        Args:
            episodes: of any rollouts.
            step: the iteration that they are of.
            is_learned: whether the step learns of them, and `send` is still to come.
        """
        self._begun.difference_update(episode.rollout_id for episode in episodes)
        if _current() is None:
            return
        if is_learned:
            self._waiting += [(episode, step) for episode in episodes]
            return
        for episode in episodes:
            self._offer(episode, step, {})

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """What the learner was told of calls."""
        if self._waiting:
            self._advantages |= {key: why.advantage for key, why in explanations.items()}

    def send(self) -> None:
        """Have all that waits sent: the step has learned. Never raises."""
        waiting, advantages = self._waiting, self._advantages
        self._waiting, self._advantages = [], {}
        for episode, step in waiting:
            self._offer(episode, step, advantages)

    # --- on its way -----------------------------------------------------------------------
    def _offer(
        self, episode: Episode, step: int, advantages: Mapping[TransitionKey, float]
    ) -> None:
        if not episode.spans:  # nobody had claimed it
            return
        note = note_of(episode, step, advantages)
        if not self._noted and outlet.offer(told_spans(episode.spans, note, self._service)):
            return
        if self._size + note.size > MOST_NOTED:
            self._unsent += 1
            return
        self._noted.append(note)
        self._size += note.size
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.create_task(self._feed(), name="lightspan-outgoing")

    async def _feed(self) -> None:
        """Offer what is noted, whenever there is room."""
        while self._noted:
            found = _current()
            if found is None:  # the user has closed it
                return
            if not found.has_room:
                await asyncio.sleep(_LOOK_S)
                continue
            note = self._noted[0]
            told = told_spans(await self._read(note.attempt_id), note, self._service)
            for begin in range(0, len(told), _AT_ONCE):
                piece = told[begin : begin + _AT_ONCE]
                while not outlet.offer(piece):  # noqa: ASYNC110 - room is made in another thread
                    await asyncio.sleep(_LOOK_S)
            self._noted.popleft()
            self._size -= note.size

    async def _read(self, attempt_id: str) -> list[Span]:
        """The spans of an attempt, as `build_episode` takes them."""
        try:
            if self._store is None:
                return []
            stored = (await self._store.spans([attempt_id])).get(attempt_id, [])
        except Exception as error:  # a training does not end because of this
            if not self._unsent:
                self._tell(f"spans that are to be sent cannot be read again: {error}")
            stored = []
        found = [s for s in stored if not s.late and s.attempt_id in ("", attempt_id)]
        self._unsent += not found
        return found

    # --- the end --------------------------------------------------------------------------
    async def close(self, *, is_patient: bool) -> None:
        """Send what there is, and say what is not sent. Never raises; to cancel it ends the wait.

        Args:
            is_patient: wait for as long as something arrives at the backend.
        """
        self.send()  # of a step that was interrupted: without advantages
        found = _current()
        if found is not None and is_patient:
            try:
                await self._wait(found)
            except asyncio.CancelledError:  # Ctrl-C: the training itself is over
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
        if self._feeding is not None:
            self._feeding.cancel()
            with suppress(asyncio.CancelledError, Exception):  # what is left is said
                await self._feeding
        self._say_what_is_left("" if found is None else f" to {found.place}")

    async def _wait(self, found: Outlet) -> None:
        """Until all has arrived or is lost, or nothing arrives any more."""
        sent, since = found.sent, time.monotonic()
        if self._noted:
            self._tell(
                f"sending the spans of {many(len(self._noted), 'more rollout')} to {found.place}; "
                "Ctrl-C ends that"
            )
        while found.unsent or self._noted:
            await asyncio.sleep(_LOOK_S)
            if found.sent > sent:
                sent, since = found.sent, time.monotonic()
            if time.monotonic() - since > PATIENCE_S or _current() is not found:
                return

    def _say_what_is_left(self, where: str) -> None:
        left = len(self._noted) + self._unsent
        if left:
            self._tell(
                f"the spans of {many(left, 'rollout')} were not sent{where}; the store keeps them"
            )
        if self._begun:
            self._tell(
                f"{many(len(self._begun), 'rollout')} had not ended, or were of no step that did: "
                f"nothing of them is sent{where}; the store keeps what they did"
            )


def _current() -> Outlet | None:
    try:
        return outlet.current()
    except ConfigError:  # it has become wrong since the beginning
        return None


# --- pure -----------------------------------------------------------------------------------
def note_of(episode: Episode, step: int, advantages: Mapping[TransitionKey, float]) -> Note:
    """What became of an episode.

    Args:
        episode: an attempt.
        step: the iteration that it is of.
        advantages: of its calls and of others.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    learned: defaultdict[str, list[float]] = defaultdict(list)
    for call in episode.calls:
        if call.reward is not None:
            rewards[call.call_id].append(call.reward)
        key = (episode.attempt_id, call.call_id, call.choice)
        if key in advantages:
            learned[call.call_id].append(advantages[key])
    return Note(
        attempt_id=episode.attempt_id,
        step=step,
        reward=episode.reward,
        rewards={call_id: _one_or_many(found) for call_id, found in rewards.items()},
        advantages={call_id: _one_or_many(found) for call_id, found in learned.items()},
    )


def told_spans(spans: Sequence[Span], note: Note, service: str) -> list[Span]:
    """The spans of an episode, which say what became of it.

    Args:
        spans: all of the episode's.
        note: what is to be said.
        service: whose spans these are, where they do not say so.
    """
    known = {span.span_id for span in spans}
    told = []
    for span in spans:
        call_id = str(span.attributes.get(c.CALL_ID, ""))
        is_outermost = span.parent_id not in known
        more = {
            c.STEP: note.step,
            c.EPISODE_REWARD: note.reward if is_outermost else None,
            c.CALL_REWARD: note.rewards.get(call_id),
            c.ADVANTAGE: note.advantages.get(call_id),
        }
        told.append(
            span.replace(
                attributes={**span.attributes, **clean_attributes(more)},
                resource={SERVICE_NAME: service, **span.resource},
            )
        )
    return told


def _one_or_many(values: Iterable[float]) -> Any:
    """A call has one answer, but for those that were asked for several."""
    found = list(values)
    return found[0] if len(set(found)) == 1 else found
