"""Record an app in production: `LIGHTSPAN_STORE=sqlite:…`, or `lightspan.record()`.

Outside rollouts, each run of an agent becomes an attempt. A run is the outermost graph, crew, team,
`with lightspan.agent(…)` block or `@rollout` function, or a model call outside all of these. The
model calls go where the app sends them and are only recorded: messages, tools, usage, times,
errors. The rollouts have `Mode.PRODUCTION`: no runner can claim them, and no policy gradient is
computed from them.

A background thread stores an attempt as a whole when it has ended (`store_writer`). The app never
waits for the store and never gets its errors. Sampling keeps or drops a whole attempt, by its trace
id. A hook (`redact`) gets every span in the app's own thread, before the span is kept or queued.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from lightspan.capture import context, context_propagation, sdk_instrumentation
from lightspan.capture.context import AgentContext, AttemptHandle
from lightspan.errors import ConfigError
from lightspan.production import apply_prompts
from lightspan.production.auto_attempts import NullAttempt, OpenAttempt, OpenAttempts
from lightspan.production.exporters import find_exporter
from lightspan.production.options import STORE_VARIABLE, RecordOptions, read_options
from lightspan.production.redact import Redact
from lightspan.production.store_writer import EXIT_S, close_at_exit
from lightspan.schema.spans import new_trace_id

log = logging.getLogger(__name__)


class Recording(AbstractContextManager["Recording"]):
    """The result of `record`. In a `with` statement, recording stops at the end of the block."""

    def __init__(self, options: RecordOptions | None) -> None:
        self._attempts = None if options is None else OpenAttempts(options)

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._attempts is not None

    @property
    def settings(self) -> RecordOptions | None:
        """The options of the recording; None if nothing is recorded."""
        return None if self._attempts is None else self._attempts.options

    @property
    def lost(self) -> int:
        """Number of attempts so far that could not be written."""
        return 0 if self._attempts is None else self._attempts.writer.lost

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until the attempts that have ended are written; return whether they are.

        Waiting ends after `timeout_s` seconds.
        """
        return self._attempts is None or self._attempts.writer.flush(timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Stop recording. Idempotent.

        The attempts that have ended are written, and the open attempts are interrupted and written.

        Args:
            timeout_s: maximum seconds to wait for the writes.
        """
        attempts, self._attempts = self._attempts, None
        if attempts is not None:
            _remove(self)
            attempts.close(timeout_s)

    def open(self, current: AgentContext, name: str | None, input: object) -> AttemptHandle:
        """Open an attempt for an agent, function or model call that begins. Never raises.

        Args:
            current: the context outside every attempt.
            name: name of the agent or function; None for a lone model call.
            input: its input; None if unknown.
        """
        if self._attempts is not None:
            try:
                return self._attempts.open(current, name, input)
            except Exception as error:
                log.warning("lightspan: an attempt could not be recorded: %r", error)
        return NullAttempt(current.scope, new_trace_id())

    def after_fork(self) -> None:
        """Start with no attempts and an empty queue in a forked child process.

        The attempts and the queue before the fork belong to the parent process.
        """
        if self._attempts is not None:
            self._attempts = OpenAttempts(self._attempts.options)

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True)
class _State:
    """The recordings of this process."""

    lock: Any = field(default_factory=threading.RLock)
    explicit: Recording | None = None
    """The recording started by `record`. It overrides `by_environment`. None if there is none."""
    by_environment: Recording | None = None
    """The recording started by `hold`; None if there is none."""
    holders: set[str] = field(default_factory=set)
    has_hooks: bool = False
    """Whether the hooks for exit and fork are registered."""

    @property
    def recordings(self) -> list[Recording]:
        """The recordings that are on. The first is the current recording, which opens attempts."""
        both = (self.explicit, self.by_environment)
        return [recording for recording in both if recording is not None]


_state: Final = _State()


def record(
    store: str | os.PathLike[str] | None = None,
    *,
    service: str | None = None,
    sample: float | None = None,
    redact: Redact | str | None = None,
    images: bool | None = None,
) -> Recording:
    """Record the agents and model calls of this process outside rollouts, until the process ends.

    Args:
        store: URL of the store; None for the value of `LIGHTSPAN_STORE`. If that is not set,
            nothing is recorded.
        service: name of the service. None for the value of `OTEL_SERVICE_NAME`, or else for
            `service.name` in `OTEL_RESOURCE_ATTRIBUTES`.
        sample: share of attempts to keep, 0 to 1. None for the value of `LIGHTSPAN_SAMPLE`, or 1 if
            that is not set.
        redact: function that gets every span before it is kept or queued, or the name of such a
            function as `module:function`. The function returns the span to keep, or None to keep
            nothing. None as `redact` stands for the value of `LIGHTSPAN_REDACT`.
        images: whether to store the images in messages of at most 20 MiB; a span has only type,
            size and digest of an image. None for the value of `LIGHTSPAN_IMAGES`, 0 or 1. If that
            is not set, images are stored unless there is a hook, which cannot hide a part of one.
            Images whose reference the hook removes are never stored.

    Raises:
        ConfigError: the store, `LIGHTSPAN_OTLP`, `sample`, `redact` or `LIGHTSPAN_IMAGES` is
            invalid, or the process records already.
    """
    options = read_options(store, service, sample, redact, images)
    if options is None:
        return Recording(None)
    find_exporter()
    with _state.lock:
        if _state.explicit is not None:
            before = _state.explicit.settings
            where = before.store if before is not None else "another store"
            raise ConfigError(f"this process records to {where} already: close() that first")
        _state.explicit = recording = Recording(options)
        _update_attempt_factory()
    return recording


def hold(owner: str) -> None:
    """Start recording and apply learned prompts, until `release` is called for `owner`.

    The environment variable `LIGHTSPAN_STORE` names the store for the recording.
    `LIGHTSPAN_PROMPTS` names the run with the prompts. If a variable is not set, that part does not
    start.

    Never raises: an error, such as an invalid variable, is logged, and nothing is recorded.

    Args:
        owner: name of the adapter that starts the recording.
    """
    apply_prompts.hold(owner)
    if not os.environ.get(STORE_VARIABLE):
        return
    # before the exit hook of recordings: what is registered last runs first, and recordings queue
    # their last spans for the exporter when the process ends
    try:
        find_exporter()
    except Exception as error:
        log.error("lightspan: no span is sent: %s", error)
    _state.holders.add(owner)
    try:
        # without the lock, since it may import the module of the hook, and so other modules
        options = None if _state.by_environment else read_options(None, None, None, None, None)
        with _state.lock:
            if _state.by_environment is None:
                _state.by_environment = Recording(options)
                _update_attempt_factory()
    except Exception as error:
        log.error("lightspan: nothing is recorded: %s", error)


def release(owner: str) -> None:
    """Undo `hold` for the adapter `owner`. Recording stops when no adapter holds it."""
    apply_prompts.release(owner)
    with _state.lock:
        _state.holders.discard(owner)
        recording = None if _state.holders else _state.by_environment
        if recording is not None:
            _state.by_environment = None
    if recording is not None:
        recording.close()


def store_url() -> str | None:
    """Return the URL of the store to which this process records, else `LIGHTSPAN_STORE`."""
    stores = [each.settings.store for each in _state.recordings if each.settings is not None]
    return stores[0] if stores else os.environ.get(STORE_VARIABLE)


def flush(timeout_s: float = 30.0) -> bool:
    """Wait until the attempts of this process that have ended are written; return whether they are.

    Waiting ends after `timeout_s` seconds.
    """
    results = [recording.flush(timeout_s) for recording in _state.recordings]
    return all(results)


@asynccontextmanager
async def lifespan(app: object = None) -> AsyncIterator[None]:
    """Write what is recorded before an ASGI server ends: `FastAPI(lifespan=lightspan.lifespan)`.

    An app that has its own lifespan function uses `async with lightspan.lifespan():` in it.

    Args:
        app: the app, which the server passes; it is not used.
    """
    try:
        yield
    finally:
        await asyncio.to_thread(flush, EXIT_S)


def _update_attempt_factory() -> None:
    """Let the current recording open an attempt for each run of the app outside rollouts.

    Without a recording, no such attempts are opened.
    """
    recording = next(iter(_state.recordings), None)
    if recording is None or not recording.on:
        context.set_attempt_factory(None)
        context_propagation.stop_carrying(context_propagation.RECORDING)
        return
    if not _state.has_hooks:
        _state.has_hooks = True
        close_at_exit(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)
    try:
        sdk_instrumentation.install()
    except Exception as error:  # such as a broken SDK, which the app may not need
        log.warning("lightspan: a client SDK could not be wrapped: %s", error)
    context_propagation.carry(context_propagation.RECORDING)
    context.set_attempt_factory(recording.open)


def _remove(recording: Recording) -> None:
    with _state.lock:
        if _state.explicit is recording:
            _state.explicit = None
        if _state.by_environment is recording:
            _state.by_environment = None
        _update_attempt_factory()


def _at_exit() -> None:
    for recording in _state.recordings:
        recording.close()


def _after_fork() -> None:
    """Give each recording its own queue, thread and store in a forked child."""
    _state.lock = threading.RLock()  # a thread of the parent may have held it
    for recording in _state.recordings:
        recording.after_fork()
    current = context.current_context()
    if current is not None and isinstance(current.scope.recorder, OpenAttempt):
        context.set_agent(None)
