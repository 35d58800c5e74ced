"""Describe who uses a store: trainings, runners, open rollouts, and tokens of model calls."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from lightspan.errors import ConfigError, NotFoundError, UnsupportedError
from lightspan.schema import semconv
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Outcome,
    Peer,
    PeerRole,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.spans import SpanKind
from lightspan.stores.protocol import Store
from lightspan_cluster.app_sources import differing
from lightspan_cluster.peers import is_present, problem_of

OPEN: Final = (RolloutStatus.QUEUED, RolloutStatus.RUNNING)
"""The statuses of rollouts that have not ended."""
_PAGE: Final = 200
"""Number of rollouts whose spans are read at once."""
_ATTEMPTS_PAGE: Final = 1_000
"""Number of rollouts whose attempts are read at once."""


class Tokens(msgspec.Struct, kw_only=True):
    """Number of a training's model calls, and of the tokens in them."""

    calls: int = 0
    without_usage: int = 0
    """Calls whose number of tokens was not recorded."""
    input_tokens: int = 0
    output_tokens: int = 0


class TrainingStatus(msgspec.Struct, kw_only=True):
    """State of a training in a store, or of a service whose attempts are recorded in production."""

    run_id: str
    app: str
    """Reference of the app; empty if unknown."""
    state: str
    """`live`, `complete`, `gone` (it has stopped without an end, or is silent) or `production`."""
    seen_s: float | None
    """Seconds since the trainer announced itself; None if that is more than a day ago."""
    gateway: str
    rollouts: dict[str, int]
    """Number of rollouts by status."""
    lost: int
    """Number of attempts that the infrastructure lost, also of rollouts that were run again."""
    last_loss: str
    """Message of the latest lost attempt; empty if there is none."""
    problem: str
    """Why runners of this version cannot work for it; empty if they can."""
    tokens: dict[str, Tokens] | None
    """Tokens by model; None if they were not read."""

    @property
    def open(self) -> int:
        """Number of rollouts that have not ended."""
        return sum(self.rollouts.get(status, 0) for status in OPEN)


class RunnerStatus(msgspec.Struct, kw_only=True):
    """State of a runner that the user started by `lightspan runner`."""

    name: str
    app: str
    run_id: str
    """Id of the only run for which it works; empty for any run."""
    slots: int
    running: int
    """Number of attempts under way."""
    is_present: bool
    seen_s: float
    problem: str
    """Why it works for no training; empty if it does."""
    differs: str = ""
    """Whose version of the app is another one, and in which modules; empty if none is known."""


class StoreStatus(msgspec.Struct, kw_only=True):
    """The users of a store."""

    store: str
    trainings: list[TrainingStatus]
    runners: list[RunnerStatus]
    running_elsewhere: int
    """Attempts under way in other runners: those that trainers have started."""


async def read_status(store: Store, *, with_tokens: bool = False) -> StoreStatus:
    """Return who uses a store. Nothing is changed in it.

    Args:
        store: an open store.
        with_tokens: whether to count the tokens of all model calls, which reads every span.

    Raises:
        StoreError: the store cannot be read.
        UnsupportedError: the store exists in one process only.
    """
    if not store.capabilities.multi_process:
        raise UnsupportedError(f"store {store.url!r} lives in one process: name a store in use")
    peers = [peer for peer in await store.peers() if peer.app]  # `/health` announces one without
    trainers = {peer.run_id: peer for peer in peers if peer.role is PeerRole.TRAINER}
    states = await store.rollouts(status=OPEN)
    trainings, busy = [], []
    for run_id in sorted(trainers.keys() | {state.rollout.run_id for state in states}):
        counts = await store.count(run_id)
        own = [state for state in states if state.rollout.run_id == run_id]
        trainer = trainers.get(run_id)
        if _state(trainer, own) != "production":  # in production, nothing is lost and run again
            own = await store.rollouts(run_id=run_id)
        ids = [state.rollout.rollout_id for state in own]
        attempts = [
            attempt
            for start in range(0, len(ids), _ATTEMPTS_PAGE)
            for attempt in await store.attempts(ids[start : start + _ATTEMPTS_PAGE])
        ]
        training = _training(
            run_id,
            trainer,
            own,
            attempts,
            {str(status): count for status, count in counts.items()},
            await _read_tokens(store, run_id) if with_tokens else None,
        )
        trainings.append(training)
        if training.state != "production":
            busy += [a.runner_id for a in attempts if a.status is AttemptStatus.RUNNING]
    runners = [_runner(peer, busy, peers) for peer in peers if peer.role is PeerRole.RUNNER]
    return StoreStatus(
        store=store.url,
        trainings=trainings,
        runners=runners,
        running_elsewhere=len(busy) - sum(runner.running for runner in runners),
    )


def _training(
    run_id: str,
    peer: Peer | None,
    states: Sequence[RolloutState],
    attempts: Sequence[Attempt],
    rollouts: dict[str, int],
    tokens: dict[str, Tokens] | None,
) -> TrainingStatus:
    losses = [attempt for attempt in attempts if attempt.outcome is Outcome.INFRASTRUCTURE]
    last = max(losses, key=lambda attempt: attempt.ended_at or 0.0, default=None)
    app = next((state.rollout.app for state in states if state.rollout.app), "")
    return TrainingStatus(
        run_id=run_id,
        app=peer.app if peer is not None else app,
        state=_state(peer, states),
        seen_s=None if peer is None else peer.silent_s,
        gateway="" if peer is None else peer.gateway,
        rollouts=rollouts,
        lost=len(losses),
        last_loss="" if last is None else last.message,
        problem="" if peer is None else problem_of(peer),
        tokens=tokens,
    )


def _state(peer: Peer | None, states: Sequence[RolloutState]) -> str:
    if peer is not None:
        return "complete" if peer.complete else "live" if is_present(peer) else "gone"
    is_production = all(state.rollout.mode is Mode.PRODUCTION for state in states)
    return "production" if is_production else "gone"


def _runner(peer: Peer, busy: Iterable[str], peers: Sequence[Peer]) -> RunnerStatus:
    own = f"{peer.peer_id}-"  # the processes of a runner have names of this form
    return RunnerStatus(
        name=peer.peer_id,
        app=peer.app,
        run_id=peer.run_id,
        slots=peer.slots,
        running=sum(name.startswith(own) for name in busy),
        is_present=is_present(peer),
        seen_s=peer.silent_s,
        problem=problem_of(peer),
        differs=_difference(peer, peers),
    )


def _difference(runner: Peer, peers: Sequence[Peer]) -> str:
    """Return which trainer or other runner has another version of a runner's app, and where.

    If a trainer has the app too, other runners are not compared: they may be the ones that differ.
    """
    others = [peer for peer in peers if peer.app == runner.app and is_present(peer)]
    others.sort(key=lambda peer: peer.role is PeerRole.RUNNER)  # trainers first
    for other in others if is_present(runner) else ():
        if modules := differing(runner.sources, other.sources):
            is_trainer = other.role is PeerRole.TRAINER
            name = f"training {other.run_id}" if is_trainer else f"runner {other.peer_id}"
            return f"{name} ({modules})"
        if other.role is PeerRole.TRAINER and runner.sources.keys() & other.sources.keys():
            return ""
    return ""


async def _read_tokens(store: Store, run_id: str) -> dict[str, Tokens]:
    """Count the model calls and tokens of a run, by model."""
    tokens: dict[str, Tokens] = {}
    states = await store.rollouts(run_id=run_id)
    for start in range(0, len(states), _PAGE):
        page = [state.rollout.rollout_id for state in states[start : start + _PAGE]]
        ids = [attempt.attempt_id for attempt in await store.attempts(page)]
        for spans in (await store.spans(ids)).values():
            for span in spans:
                if span.kind is not SpanKind.LLM or semconv.CACHED in span.attributes:
                    continue
                name = semconv.model_of(span.attributes) or "unknown model"
                model = tokens.setdefault(name, Tokens())
                read, written = semconv.usage_of(span.attributes)
                model.calls += 1
                model.without_usage += read is None and written is None
                model.input_tokens += read or 0
                model.output_tokens += written or 0
    return dict(sorted(tokens.items()))


# --- text -------------------------------------------------------------------------------------
def status_lines(status: StoreStatus) -> Iterator[str]:
    """Yield lines of text that describe who uses a store."""
    yield status.store
    yield "trainings:" if status.trainings else "trainings: none"
    for training in status.trainings:
        yield from (f"  {line}" for line in _training_lines(training, status.store))
    yield "runners:" if status.runners else "runners started by hand: none"
    for runner in status.runners:
        yield from (f"  {line}" for line in _runner_lines(runner))
    if status.running_elsewhere > 0:
        yield f"attempts under way in runners that trainers started: {status.running_elsewhere}"


def _training_lines(training: TrainingStatus, store: str) -> Iterator[str]:
    app = f" of {training.app}" if training.app else ""
    seen = "" if training.seen_s is None else f", seen {_ago(training.seen_s)}"
    yield f"{training.run_id}{app}: {training.state}{seen}"
    yield f"  rollouts: {_counted(training.rollouts)}"
    if training.gateway and training.state == "live":
        yield f"  gateway: {training.gateway}"
    if training.problem:
        yield f"  {training.problem}"
    if training.lost:
        yield f"  attempts lost: {training.lost}, the last one: {training.last_loss}"
    if training.state in ("gone", "complete") and training.open:
        command = shlex.join(["lightspan", "cancel", store, training.run_id])
        yield f"  to remove what is open: {command}"
    for name, tokens in (training.tokens or {}).items():
        missing = f", {tokens.without_usage} of them without usage" if tokens.without_usage else ""
        yield (
            f"  {name}: {tokens.calls:,} calls{missing}; {tokens.input_tokens:,} tokens read, "
            f"{tokens.output_tokens:,} written"
        )


def _runner_lines(runner: RunnerStatus) -> Iterator[str]:
    only = f", for {runner.run_id} only" if runner.run_id else ""
    gone = "" if runner.is_present else "gone, "
    yield (
        f"{runner.name} of {runner.app}{only}: {gone}{runner.running} of {runner.slots} attempts "
        f"under way, seen {_ago(runner.seen_s)}"
    )
    if runner.problem:
        yield f"  {runner.problem}"
    if runner.differs:
        yield f"  has another version of the app than {runner.differs}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _ago(seconds: float) -> str:
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


# --- cancellation -------------------------------------------------------------------------------
async def cancel_run(store: Store, part: str, *, force: bool = False) -> tuple[str, int]:
    """Cancel the open rollouts of a training; return its run id and their number.

    Args:
        store: an open store.
        part: id of the run, or a unique beginning or end of it.
        force: whether to cancel although the trainer is live.

    Raises:
        ConfigError: the trainer is live, or the run is recorded in production.
        NotFoundError: `part` matches no training, or several.
    """
    trainings = {training.run_id: training for training in (await read_status(store)).trainings}
    run_id = _find(part, trainings)
    training = trainings[run_id]
    if training.state == "production":
        raise ConfigError(f"run {run_id} is recorded in production, where nothing is queued")
    if training.state == "live" and not force:
        raise ConfigError(
            f"training {run_id} is live, seen {_ago(training.seen_s or 0.0)}: stop it where it "
            "runs (Ctrl-C), or add --force, and it goes on without these rollouts"
        )
    return run_id, await _cancel(store, training)


async def cancel_gone(store: Store) -> dict[str, int]:
    """Cancel the open rollouts of all trainings whose trainers are gone.

    Returns:
        Run id → number of rollouts that were cancelled.
    """
    trainings = (await read_status(store)).trainings
    return {
        training.run_id: await _cancel(store, training)
        for training in trainings
        if training.state == "gone"
    }


async def _cancel(store: Store, training: TrainingStatus) -> int:
    states = await store.rollouts(run_id=training.run_id, status=OPEN)
    ids = [s.rollout.rollout_id for s in states if s.rollout.mode is not Mode.PRODUCTION]
    cancelled = await store.cancel(ids) if ids else 0
    if training.state == "gone":
        for peer in await store.peers():
            if peer.role is PeerRole.TRAINER and peer.run_id == training.run_id:
                await store.withdraw(peer.peer_id)
    return cancelled


def _find(part: str, run_ids: Iterable[str]) -> str:
    names = sorted(run_ids)
    matching = [name for name in names if name.startswith(part) or name.endswith(part)]
    if part in names:
        return part
    if len(matching) == 1:
        return matching[0]
    if not matching:
        shown = ", ".join(names[:5]) or "none"
        raise NotFoundError(
            f"no training {part!r} is announced in this store or has open rollouts; there are: "
            f"{shown}"
        )
    raise NotFoundError(f"{len(matching)} trainings match {part!r}: {', '.join(matching[:5])}")
