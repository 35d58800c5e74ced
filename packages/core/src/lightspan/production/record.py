"""Record an app in production: `LIGHTSPAN_STORE=sqlite:…`, or `lightspan.record()`.

Outside every rollout, each run of an agent (whatever begins first: a graph, a crew, a team, a
`with lightspan.agent(…)`, a function marked `@rollout`) becomes an attempt of its own, and so does
a model call that nothing is around. Its calls go where the app points them and are only recorded:
messages, tools, usage, times, errors. Such attempts are of `Mode.PRODUCTION`: no runner can claim
them and no policy gradient is taken of them.

An attempt is stored whole, when it has ended, by a thread (`journal`): the app never
waits for the store and never sees its errors. Whether an attempt is kept is decided once for all of
it, by its trace id. A hook (`redact`) sees every span in the app's own thread, before
it is kept or queued anywhere.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from lightspan.capture import context, sdk_instrumentation
from lightspan.capture.context import AgentContext, AttemptHandle
from lightspan.errors import ConfigError
from lightspan.production import apply_prompts, span_exporter
from lightspan.production.auto_attempts import NullAttempt, OpenAttempt, OpenAttempts
from lightspan.production.options import STORE_VARIABLE, RecordOptions, read_options
from lightspan.production.redact import Redact, find_hook
from lightspan.production.store_writer import EXIT_S
from lightspan.schema.spans import new_trace_id

log = logging.getLogger(__name__)


class Recording:
    """What `record` returns; as a context manager it ends with the block."""

    def __init__(self, options: RecordOptions | None) -> None:
        self._attempts = None if options is None else OpenAttempts(options)

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._attempts is not None

    @property
    def settings(self) -> RecordOptions | None:
        """What is recorded, and where to; None for nothing."""
        return None if self._attempts is None else self._attempts.options

    @property
    def lost(self) -> int:
        """Attempts that could not be written, so far."""
        return 0 if self._attempts is None else self._attempts.journal.lost

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until the attempts that have ended are written; False if the time was too short."""
        return self._attempts is None or self._attempts.journal.flush(timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Record no more; what has ended is written, what has not is cut. Idempotent."""
        attempts, self._attempts = self._attempts, None
        if attempts is not None:
            _drop(self)
            attempts.close(timeout_s)

    def open(self, current: AgentContext, name: str | None, given: object) -> AttemptHandle:
        """See `scope.start_attempt`."""
        if self._attempts is not None:
            try:
                return self._attempts.open(current, name, given)
            except Exception as error:
                log.warning("lightspan: an attempt could not be recorded: %r", error)
        return NullAttempt(current.scope, new_trace_id())

    def after_fork(self) -> None:
        """What is under way and what is not written yet is the parent's."""
        if self._attempts is not None:
            self._attempts = OpenAttempts(self._attempts.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(slots=True)
class _State:
    """Of this process."""

    lock: Any = field(default_factory=threading.RLock)
    explicit: Recording | None = None
    """Of `record`; it goes before the environment's."""
    by_environment: Recording | None = None
    """Of `hold`."""
    holders: set[str] = field(default_factory=set)
    is_watched: bool = False
    """Whether the ends of the process and its forks are."""

    @property
    def recordings(self) -> list[Recording]:
        """Those that are on, the one in force first."""
        return [one for one in (self.explicit, self.by_environment) if one is not None]


_state: Final = _State()


def record(
    store: str | os.PathLike[str] | None = None,
    *,
    service: str | None = None,
    sample: float | None = None,
    redact: Redact | str | None = None,
) -> Recording:
    """Record what this process does outside rollouts, until it ends (see the module).

    Args:
        store: the URL of a store; None for `LIGHTSPAN_STORE`, and if that is not set nothing is
            recorded, so that the line can stay in the app.
        service: whose calls these are; None for `OTEL_SERVICE_NAME`, else `service.name` of
            `OTEL_RESOURCE_ATTRIBUTES`.
        sample: the share of attempts that is kept, 0 to 1, each whole or not at all; None for
            `LIGHTSPAN_SAMPLE`, else 1.
        redact: sees every span before it is kept or queued anywhere, and returns what to keep of it
            (`redact`); a function, or `module:function`. None for `LIGHTSPAN_REDACT`.

    Raises:
        ConfigError: the URL, that of `LIGHTSPAN_OTLP`, the share or the hook is none, or the
            process records already.
    """
    options = read_options(store, service, sample, redact)
    if options is None:
        return Recording(None)
    if isinstance(options.redact, str) and redact is not None:
        find_hook(options.redact)
    span_exporter.current()
    with _state.lock:
        if _state.explicit is not None:
            before = _state.explicit.settings
            where = before.store if before is not None else "another store"
            raise ConfigError(f"this process records to {where} already: close() that first")
        _state.explicit = made = Recording(options)
        _choose()
    return made


def hold(owner: str) -> None:
    """Record while `owner` (an adapter, by its `instrument()`) is on, if the environment asks; and
    use learned prompts, if it names some.

    Never raises: an app must start whatever its environment says. What is wrong is logged, and then
    nothing is recorded.
    """
    apply_prompts.hold(owner)
    if not os.environ.get(STORE_VARIABLE):
        return
    try:
        with _state.lock:
            _state.holders.add(owner)
            if _state.by_environment is None:
                _state.by_environment = Recording(read_options(None, None, None, None))
                _choose()
    except Exception as error:
        log.error("lightspan: nothing is recorded: %s", error)
        return
    try:
        span_exporter.current()
    except Exception as error:
        log.error("lightspan: no span is sent: %s", error)


def release(owner: str) -> None:
    """Undo `hold`."""
    apply_prompts.release(owner)
    with _state.lock:
        _state.holders.discard(owner)
        recording = None if _state.holders else _state.by_environment
        if recording is not None:
            _state.by_environment = None
    if recording is not None:
        recording.close()


def flush(timeout_s: float = 30.0) -> bool:
    """Wait until the attempts of this process that have ended are written."""
    recordings = _state.recordings
    return sum(one.flush(timeout_s) for one in recordings) == len(recordings)


def _choose() -> None:
    """Have the recording in force open attempts."""
    recording = next(iter(_state.recordings), None)
    if recording is None or not recording.on:
        context.set_opener(None)
        return
    if not _state.is_watched:
        _state.is_watched = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    try:
        sdk_instrumentation.install()
    except Exception as error:  # an SDK that cannot be imported, which the app may not need
        log.warning("lightspan: a client SDK could not be wrapped: %s", error)
    context.set_opener(recording.open)


def _drop(recording: Recording) -> None:
    with _state.lock:
        if _state.explicit is recording:
            _state.explicit = None
        if _state.by_environment is recording:
            _state.by_environment = None
        _choose()


def _at_exit() -> None:
    for recording in _state.recordings:
        recording.close()


def _after_fork() -> None:
    """The child records what begins in it, with a queue, a thread and a store of its own."""
    _state.lock = threading.RLock()  # somebody may have held it
    for recording in _state.recordings:
        recording.after_fork()
    current = context.current_context()
    if current is not None and isinstance(current.scope.recorder, OpenAttempt):
        context.set_agent(None)


__all__ = ["Recording", "flush", "hold", "record", "release"]
