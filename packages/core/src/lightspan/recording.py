"""Record an app in production: `LIGHTSPAN_STORE=sqlite:…`, or `lightspan.record()`.

Outside every rollout, each run of an agent (whatever begins first: a graph, a crew, a team, a
`with lightspan.agent(…)`, a function marked `@rollout`) becomes an attempt of its own, and so does
a model call that nothing is around. Its calls go where the app points them and are only recorded:
messages, tools, usage, times, errors. Such attempts are of `Mode.PRODUCTION`: no runner can claim
them and no policy gradient is taken of them.

An attempt is stored whole, when it has ended, by a thread (`lightspan.journal`): the app never
waits for the store and never sees its errors. Whether an attempt is kept is decided once for all of
it, by its trace id. A hook (`lightspan.redaction`) sees every span in the app's own thread, before
it is kept or queued anywhere.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lightspan import conventions as c
from lightspan import messages, scope, wire
from lightspan.emit import exception_attributes, make_span, text_of
from lightspan.errors import ConfigError
from lightspan.journal import (
    EXIT_S,
    Journal,
    Parcel,
    more_of,
    parcel_of,
    report_of,
    text_size,
)
from lightspan.records import AttemptStatus, Json, Mode, Outcome
from lightspan.redaction import Redact, Redactor, check_hook, find_hook
from lightspan.scope import Acting, Recorder, Root, Scope, Unrecorded
from lightspan.spans import Span, SpanKind, SpanStatus, new_span_id, new_trace_id, now_ns
from lightspan.stores import open_store

log = logging.getLogger(__name__)

STORE_VARIABLE: Final = "LIGHTSPAN_STORE"
SAMPLE_VARIABLE: Final = "LIGHTSPAN_SAMPLE"
REDACT_VARIABLE: Final = "LIGHTSPAN_REDACT"
SERVICE_VARIABLE: Final = "OTEL_SERVICE_NAME"
SERVICE_NAME: Final = "service.name"
"""OpenTelemetry's attribute of a resource; on every span that is recorded."""
UNNAMED_SERVICE: Final = "unknown_service"

MOST_SPANS: Final = 10_000
"""Of one attempt; what comes after is counted, and damages it."""
MOST_OPEN: Final = 10_000
"""Attempts that are under way at once."""
LONGEST_INPUT: Final = 262_144
"""Characters of an attempt's input, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is recorded, and where to."""

    store: str
    service: str
    sample: float = 1.0
    redact: Redact | str | None = None


# --- one attempt ----------------------------------------------------------------------------
class _Attempt(Recorder):
    """The spans of one attempt; it is over when its root has ended and nothing is under way."""

    def __init__(self, owner: _Owner, *, is_call: bool) -> None:
        super().__init__(MOST_SPANS)
        self._owner = owner
        unique = f"{time.time_ns():016x}{secrets.token_hex(8)}"
        self.attempt_id: Final = f"at-{unique}"
        self.rollout_id: Final = f"ro-{unique}"
        self._call_stem = f"call-{unique}-"
        self.is_call: Final = is_call
        self._calls = 0
        self._started_at = time.time()
        self._ended = self._failed = self._cut = False
        self._handed_over = self._taken = False
        self._left_out = 0
        self._failures: dict[str, int] = {}
        """Kind of error → how many spans the hook failed on."""
        self.size = 0

    def new_call_id(self) -> str:
        """It holds the attempt's: feedback finds the call by it."""
        with self._lock:
            self._calls += 1
            return f"{self._call_stem}{self._calls}"

    def add(self, span: Span) -> None:
        if self._owner.journal.is_parents:  # the parent records the attempt, and ends it
            if span.kind is SpanKind.LLM:
                log.warning("lightspan: a call of an attempt that began before a fork is lost")
            return
        kept, failure = self._owner.redacted(span)
        with self._lock:
            if failure:
                self._failures[failure] = self._failures.get(failure, 0) + 1
            if kept is None:
                self._left_out += 1
            else:
                size = text_size(kept)
                self.size += size
        if kept is not None:
            super().add(kept)
        if self._taken:
            self._owner.journal.put(self)

    def damage(self, reason: str) -> None:
        """A reason may quote the app's data; with a hook only its head is kept."""
        super().damage(reason.partition(": ")[0] if self._owner.redactor.on else reason)

    def settle(self, key: str) -> bool:
        settled = super().settle(key)
        if settled:
            self._hand_over_if_over()
        return settled

    def end(self, *, failed: bool) -> None:
        """The root has ended."""
        self._ended, self._failed = True, self._failed or failed
        self._hand_over_if_over()

    def cut(self) -> None:
        """The process ends before the attempt does."""
        self._cut = not self._ended
        self.give_up()
        self.end(failed=False)

    def _hand_over_if_over(self) -> None:
        with self._lock:
            if not self._ended or self._pending or self._handed_over:
                return
            self._handed_over = True
        self._owner.over(self)

    # --- in the journal's thread ----------------------------------------------------------
    def take(self) -> Parcel:
        with self._lock:
            spans, self._spans = self._spans, []
            first, self._taken = not self._taken, True
            self.size = 0
        if not first:
            return more_of(self.attempt_id, spans)
        return parcel_of(
            self.attempt_id,
            self.rollout_id,
            self._owner.settings.service,
            task_of(spans, is_call=self.is_call),
            spans,
            started_at=self._started_at,
            report=report_of(
                self.attempt_id,
                *self._outcome(spans),
                message=f"{self._left_out} spans were left out by redact" * bool(self._left_out),
                damage=self._all_damages(),
            ),
        )

    def _outcome(self, spans: list[Span]) -> tuple[AttemptStatus, Outcome]:
        if self._cut:
            return AttemptStatus.CANCELLED, Outcome.CANCELLED
        failed = self._failed or (self.is_call and any(s.status is _ERROR for s in spans))
        if failed:
            return AttemptStatus.FAILED, Outcome.APP_ERROR
        return AttemptStatus.SUCCEEDED, Outcome.OK

    def _all_damages(self) -> list[str]:
        failed = [
            f"redact failed on {count} spans ({kind}): their content was dropped"
            for kind, count in self._failures.items()
        ]
        return [*self.damages(), *failed, *(["the process ended first"] if self._cut else [])]


_ERROR: Final = SpanStatus.ERROR


def task_of(spans: list[Span], *, is_call: bool) -> Json:
    """The input of an attempt: what its root was given, else the messages of its first call.

    Those are `{"messages": […]}`, without the app's own instructions unless the attempt is one bare
    call; None where nothing is known.
    """
    for span in spans:
        if c.OPERATION_INPUT in span.attributes and span.parent_id is None:
            return _loaded(span.attributes[c.OPERATION_INPUT])
    calls = (span for span in spans if c.INPUT_MESSAGES in span.attributes)
    first = min(calls, key=lambda span: span.start_ns, default=None)
    if first is None:
        return None
    try:
        asked = messages.asked_of(first.attributes)
    except (ValueError, KeyError, TypeError, AttributeError):  # a hook made something else of it
        return None
    own = () if is_call else ("system", "developer")
    return {"messages": [message for message in asked if message["role"] not in own]}


def _loaded(text: Any) -> Json:
    try:
        value = json.loads(str(text))
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):  # no JSON, or numbers beyond 64 bits
        return str(text)
    return value


class _Root:
    """An attempt that is kept (`scope.Root`)."""

    def __init__(self, attempt: _Attempt, current: Scope, name: str | None, given: str) -> None:
        self._attempt = attempt
        self._name = name
        self._given = given
        self._start_ns = now_ns()
        self._lock = threading.RLock()
        self._closed = False
        self.acting = Acting(current, parent_span_id=current.root_span_id)

    def close(self, error: BaseException | str | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._name is not None:
                self._attempt.add(self._span(error))
        except Exception as failure:
            self._attempt.damage(f"the root could not be recorded: {failure!r}")
        is_left = isinstance(error, GeneratorExit)
        self._attempt.end(failed=error is not None and not is_left)

    def _span(self, error: BaseException | str | None) -> Span:
        is_ok = error is None
        attributes: dict[str, Any] = {
            c.OPERATION_NAME: "invoke_workflow",
            c.OPENINFERENCE_KIND: "CHAIN",
            **({c.OPERATION_INPUT: self._given} if self._given else {}),
            **(exception_attributes(error) if isinstance(error, BaseException) else {}),
        }
        return make_span(
            Acting(self.acting.scope),
            f"invoke_workflow {self._name}",
            SpanKind.CHAIN,
            attributes,
            span_id=self.acting.scope.root_span_id,
            start_ns=self._start_ns,
            status=SpanStatus.OK if is_ok else _ERROR,
            status_message=text_of(error) if isinstance(error, BaseException) else error or "",
        )


class _Unsampled:
    """An attempt that is not kept (`scope.Root`)."""

    def __init__(self, current: Scope) -> None:
        self.acting = Acting(current)

    def close(self, error: BaseException | str | None = None) -> None:
        """Nothing was recorded."""


# --- one process ----------------------------------------------------------------------------
class _Owner:
    """What opens attempts in one process, and keeps those that are under way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redactor = Redactor(settings.redact)
        self.journal = Journal(settings.store, settings.service)
        self._resource = {SERVICE_NAME: settings.service}
        self._under_way: dict[str, _Attempt] = {}
        self._warned = False

    def open(self, current: Acting, name: str | None, given: Any) -> Root:
        """See `scope.open_root`."""
        trace_id = current_trace_id() or new_trace_id()
        if not sampled(trace_id, self.settings.sample):
            return _Unsampled(_scope_in(current.scope, trace_id, Unrecorded()))
        if len(self._under_way) >= MOST_OPEN:
            self.journal.lose(1, 0, f"more than {MOST_OPEN} attempts were under way at once")
            return _Unsampled(_scope_in(current.scope, trace_id, Unrecorded()))
        self.journal.begin()
        attempt = _Attempt(self, is_call=name is None)
        self._under_way[attempt.attempt_id] = attempt
        return _Root(
            attempt, _scope_in(current.scope, trace_id, attempt), name, self._input(attempt, given)
        )

    def _input(self, attempt: _Attempt, given: Any) -> str:
        if given is None:
            return ""
        text = as_json(given)
        if len(text) <= LONGEST_INPUT:
            return text
        attempt.damage(f"an input of {len(text)} characters was not kept")
        return ""

    def redacted(self, span: Span) -> tuple[Span | None, str]:
        """What is kept of the span; of which service it is, the hook sees too.

        What the hook itself does (it may ask a model) is not recorded.
        """
        span = span.replace(resource={**span.resource, **self._resource})
        if not self.redactor.on:
            return span, ""
        outer = scope.pushed()
        unrecorded = None if outer is None else _scope_in(outer.scope, span.trace_id, Unrecorded())
        token = scope.set_acting(None if unrecorded is None else Acting(unrecorded))
        try:
            kept, failure = self.redactor(span)
        finally:
            scope.reset_acting(token)
        if failure and not self._warned:
            self._warned = True
            log.warning(
                "lightspan: redact failed (%s); the content of such spans is dropped, and their "
                "attempts are marked as damaged",
                failure,
            )
        return kept, failure

    def over(self, attempt: _Attempt) -> None:
        """An attempt has ended."""
        self._under_way.pop(attempt.attempt_id, None)
        self.journal.put(attempt)

    def close(self, timeout_s: float) -> None:
        """Write what there is."""
        for attempt in list(self._under_way.values()):
            attempt.cut()
        self.journal.close(timeout_s)


def _scope_in(outer: Scope, trace_id: str, recorder: Recorder) -> Scope:
    """The scope of a new attempt; calls go where they go outside of it."""
    attempt = recorder if isinstance(recorder, _Attempt) else None
    return Scope(
        rollout_id="" if attempt is None else attempt.rollout_id,
        attempt_id="" if attempt is None else attempt.attempt_id,
        mode=Mode.PRODUCTION,
        gateway_url=outer.gateway_url,
        call_token=outer.call_token,
        routing=outer.routing,
        trace_id=trace_id,
        root_span_id=None if attempt is None or attempt.is_call else new_span_id(),
        recorder=recorder,
    )


def sampled(trace_id: str, ratio: float) -> bool:
    """Whether a trace is among the `ratio` that is kept: the same answer for the same trace in
    every process, as OpenTelemetry's TraceIdRatioBased sampler gives it."""
    return int(trace_id[16:], 16) < round(ratio * 2**64)


def current_trace_id() -> str | None:
    """The trace that the app's own OpenTelemetry is in, if it uses that."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    context = opentelemetry.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None


def as_json(given: Any) -> str:
    """An input as JSON; models of pydantic and their like as what they dump, the rest as text."""
    try:
        return _input_encoder.encode(given).decode()
    except Exception:  # a circle, a lone surrogate, a key that is no text
        return messages.dump_json(given)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else str(value)


_input_encoder: Final = msgspec.json.Encoder(enc_hook=_plain)


# --- turning it on --------------------------------------------------------------------------
class Recording:
    """What `record` returns; as a context manager it ends with the block."""

    def __init__(self, settings: Settings | None) -> None:
        self._owner = None if settings is None else _Owner(settings)

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._owner is not None

    @property
    def settings(self) -> Settings | None:
        """What is recorded, and where to; None for nothing."""
        return None if self._owner is None else self._owner.settings

    @property
    def lost(self) -> int:
        """Attempts that could not be written, so far."""
        return 0 if self._owner is None else self._owner.journal.lost

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until the attempts that have ended are written; False if the time was too short."""
        return self._owner is None or self._owner.journal.flush(timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Record no more; what has ended is written, what has not is cut. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            _drop(self)
            owner.close(timeout_s)

    def _after_fork(self) -> None:
        """What is under way and what is not written yet is the parent's."""
        if self._owner is not None:
            self._owner = _Owner(self._owner.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_lock = threading.RLock()
_explicit: Recording | None = None
"""Of `record`; it goes before the environment's."""
_by_environment: Recording | None = None
"""Of `hold`."""
_holders: Final[set[str]] = set()
_is_watched = False
"""Whether the ends of the process and its forks are."""


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
        service: whose calls these are; None for `OTEL_SERVICE_NAME`.
        sample: the share of attempts that is kept, 0 to 1, each whole or not at all; None for
            `LIGHTSPAN_SAMPLE`, else 1.
        redact: sees every span before it is kept or queued anywhere, and returns what to keep of it
            (`lightspan.redaction`); a function, or `module:function`. None for `LIGHTSPAN_REDACT`.

    Raises:
        ConfigError: the URL, the share or the hook is none, or the process records already.
    """
    global _explicit
    settings = read_settings(store, service, sample, redact)
    if settings is None:
        return Recording(None)
    if isinstance(settings.redact, str) and redact is not None:
        find_hook(settings.redact)
    with _lock:
        if _explicit is not None:
            known = _explicit.settings
            where = known.store if known is not None else "another store"
            raise ConfigError(f"this process records to {where} already: close() that first")
        _explicit = made = Recording(settings)
        _choose()
    return made


def hold(owner: str) -> None:
    """Record while `owner` (an adapter, by its `instrument()`) is on, if the environment asks.

    Never raises: an app must start whatever its environment says. What is wrong is logged, and then
    nothing is recorded.
    """
    if not os.environ.get(STORE_VARIABLE):
        return
    global _by_environment
    try:
        with _lock:
            _holders.add(owner)
            if _by_environment is None:
                settings = read_settings(None, None, None, None)
                _by_environment = Recording(settings)
                _choose()
    except Exception as error:
        log.error("lightspan: nothing is recorded: %s", error)


def release(owner: str) -> None:
    """Undo `hold`."""
    global _by_environment
    with _lock:
        _holders.discard(owner)
        recording = None if _holders else _by_environment
        if recording is not None:
            _by_environment = None
    if recording is not None:
        recording.close()


def flush(timeout_s: float = 30.0) -> bool:
    """Wait until the attempts of this process that have ended are written."""
    known = [one for one in (_explicit, _by_environment) if one is not None]
    return sum(one.flush(timeout_s) for one in known) == len(known)


def read_settings(
    store: str | os.PathLike[str] | None,
    service: str | None,
    sample: float | None,
    redact: Redact | str | None,
) -> Settings | None:
    """What arguments and environment say; None if nothing is to be recorded.

    Raises:
        ConfigError: see `record`.
    """
    url = os.fspath(store) if store is not None else os.environ.get(STORE_VARIABLE)
    if not url:
        return None
    if not open_store(url).capabilities.multi_process:
        raise ConfigError(f"store {url!r} is of one process: nobody could read what is recorded")
    hook: Redact | str | None = redact or os.environ.get(REDACT_VARIABLE) or None
    if not isinstance(hook, str | None):
        check_hook(hook)
    if isinstance(hook, str) and not all(hook.partition(":")):
        raise ConfigError(f"redact={hook!r}: name the function as module:function")
    return Settings(
        store=open_store(url).url,  # of this folder, wherever the process goes
        service=service or os.environ.get(SERVICE_VARIABLE) or UNNAMED_SERVICE,
        sample=_share(sample),
        redact=hook,
    )


def _share(sample: float | None) -> float:
    """The share to keep, from what was given or the environment says."""
    given: Any = os.environ.get(SAMPLE_VARIABLE) or 1.0 if sample is None else sample
    name = SAMPLE_VARIABLE if sample is None else "sample"
    try:
        share = float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"{name}={given!r}: give the share of attempts to keep, from 0 to 1")
    return share


def _choose() -> None:
    """Have the recording in force open attempts."""
    recording = _explicit or _by_environment
    if recording is None or not recording.on:
        scope.set_opener(None)
        return
    _watch()
    try:
        wire.install()
    except Exception as error:  # an SDK that cannot be imported, which the app may not need
        log.warning("lightspan: the OpenAI SDK could not be wrapped: %s", error)
    scope.set_opener(_open)


def _open(current: Acting, name: str | None, given: Any) -> Root:
    recording = _explicit or _by_environment
    owner = None if recording is None else recording._owner
    try:
        if owner is not None:
            return owner.open(current, name, given)
    except Exception as error:
        log.warning("lightspan: an attempt could not be recorded: %r", error)
    return _Unsampled(_scope_in(current.scope, new_trace_id(), Unrecorded()))


def _drop(recording: Recording) -> None:
    global _explicit, _by_environment
    with _lock:
        if _explicit is recording:
            _explicit = None
        if _by_environment is recording:
            _by_environment = None
        _choose()


def _watch() -> None:
    global _is_watched
    if not _is_watched:
        _is_watched = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    for recording in (_explicit, _by_environment):
        if recording is not None:
            recording.close()


def _after_fork() -> None:
    """The child records what begins in it, with a queue, a thread and a store of its own."""
    global _lock
    _lock = threading.RLock()  # somebody may have held it
    for recording in (_explicit, _by_environment):
        if recording is not None:
            recording._after_fork()
    current = scope.pushed()
    if current is not None and isinstance(current.scope.recorder, _Attempt):
        scope.set_acting(None)


__all__ = [
    "Recording",
    "Settings",
    "flush",
    "hold",
    "read_settings",
    "record",
    "release",
    "sampled",
    "task_of",
]
