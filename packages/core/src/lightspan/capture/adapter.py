"""Functions shared by the adapters of frameworks, public through `lightspan.instrumentation`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Final, NamedTuple

from lightspan.capture._globals import state
from lightspan.capture.context import agent_attributes, make_span, notify_call_start
from lightspan.capture.context_types import AgentContext, CallEnd, CallListener
from lightspan.capture.patch import Patch
from lightspan.capture.recorder import Recorder
from lightspan.errors import ConfigError
from lightspan.schema import semconv
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanLink, SpanStatus, text_of

MAX_TEXT_LENGTH: Final = 65_536
"""Maximum number of characters of a tool's arguments or result in its span."""


# --- versions -------------------------------------------------------------------------------
@contextmanager
def require_framework(adapter: str, framework: str, floor: str) -> Iterator[None]:
    """Check the installed version of a framework, and explain failing imports in the `with` block.

    The block contains the adapter's imports of the framework.

    Args:
        adapter: name of the adapter's distribution.
        framework: name of the framework's distribution.
        floor: oldest version that the adapter supports.

    Raises:
        ConfigError: the framework is not installed, or is older than `floor`.
        ImportError: an import in the block failed, so the framework may be newer than the adapter
            supports.
    """
    hint = f"pip install '{framework}>={floor}'"
    try:
        installed = version(framework)
    except PackageNotFoundError:
        raise ConfigError(f"{framework} is not installed in this environment: {hint}") from None
    if _numbers(installed) < _numbers(floor):
        raise ConfigError(
            f"{framework} {installed} is too old: {adapter} needs {floor} or newer: {hint}"
        )
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"this {adapter} does not support {framework} {installed} ({error}): upgrade "
            f"{adapter}, or install an older {framework}"
        ) from error


def _numbers(text: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", text)), 0, 0, 0][:3]


# --- texts ----------------------------------------------------------------------------------
def truncated_json(value: Any, limit: int | None = MAX_TEXT_LENGTH) -> str:
    """Return a string unchanged and any other value as JSON, cut to a length. Never raises.

    Args:
        value: the value to record; a part that JSON cannot express becomes its `repr`.
        limit: maximum number of characters; None for no limit.
    """
    text = value if isinstance(value, str) else _json(value)
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text)} characters)"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # keys that are not strings, cycles, a `repr` of the app's that raises
        return f"<{type(value).__name__}>"


# --- spans ----------------------------------------------------------------------------------
_ERROR_KEYS: Final = (
    *(semconv.ERROR_TYPE, semconv.EXCEPTION_TYPE),
    *(semconv.EXCEPTION_MESSAGE, semconv.EXCEPTION_STACKTRACE),
)


class SpanEnd(NamedTuple):
    """The fields of a span that describe how an agent, a tool call or a model call ended."""

    status: SpanStatus = SpanStatus.OK
    """Status of the span. UNSET if the operation was abandoned, which is not an error."""
    message: str = ""
    """Message of the error; empty without an error."""
    attributes: Mapping[str, Any] = {}
    """More attributes of the span, such as those of the error or a tool's result."""

    @classmethod
    def from_error(cls, error: BaseException) -> SpanEnd:
        """Return the end of an operation that raised `error`.

        The status is UNSET for GeneratorExit, which means that the operation was abandoned.
        """
        if isinstance(error, GeneratorExit):
            return cls(SpanStatus.UNSET)
        return cls(SpanStatus.ERROR, text_of(error), semconv.exception_attributes(error))


SUCCEEDED: Final = SpanEnd()


def error_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """Return those of `attributes` that describe an error."""
    return {key: attributes[key] for key in _ERROR_KEYS if key in attributes}


def end_span(
    around: AgentContext,
    kind: SpanKind,
    name: str,
    end: SpanEnd = SUCCEEDED,
    *,
    span_id: str | None = None,
    start_ns: int | None = None,
    attributes: Mapping[str, Any] | None = None,
    links: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> Span:
    """Return the span of an agent, tool call or model call that ends now.

    Args:
        around: the context in which the agent, tool call or model call began.
        kind: kind of the span; AGENT and TOOL spans get the attributes that all adapters write.
        name: name of the agent or tool; for another kind, name of the span.
        end: status, message and attributes of the end.
        span_id: id of the span, to which the spans inside it refer. If the agent was begun by
            `push`, pass the id in its frame. None for a new id.
        start_ns: start, nanoseconds since the epoch; None for now.
        attributes: more attributes.
        links: id and attributes of other spans of the attempt.
    """
    common: dict[str, Any] = {}
    label, more = name, end.attributes
    if kind is SpanKind.AGENT:
        common = agent_attributes(name, around.frames)
        common[semconv.AGENT_PATH] = join_path((*(frame.name for frame in around.frames), name))
        label, more = f"invoke_agent {name}", error_attributes(end.attributes)
    elif kind is SpanKind.TOOL:
        common = {
            semconv.OPERATION_NAME: "execute_tool",
            semconv.TOOL_NAME: name,
            semconv.OPENINFERENCE_KIND: "TOOL",
        }
        label = f"execute_tool {name}"
    return make_span(
        around,
        label,
        kind,
        {**common, **(attributes or {}), **more},
        span_id=span_id,
        start_ns=start_ns,
        status=end.status,
        status_message=end.message,
        links=[SpanLink(around.scope.trace_id, key, dict(value)) for key, value in links],
    )


# --- model calls ----------------------------------------------------------------------------
class FrameworkCall:
    """A model call of a framework, recorded by an adapter if nothing inside the call is recorded.

    A framework's client may call an SDK, and lightspan records the call of the SDK itself. The
    client may also try another URL or client after a failure. So the adapter records the
    framework's call only if every call inside it has ended without an answer. Thread-safe.

    Args:
        context: context of the calling agent. The call listeners (`add_call_listener`) are notified
            of the call.
        around: calls of frameworks that contain this call.
        besides: a listener that is not notified; None to notify all.
    """

    def __init__(
        self,
        context: AgentContext,
        around: Iterable[FrameworkCall] = (),
        *,
        besides: CallListener | None = None,
    ) -> None:
        self._inner: list[list[bool]] = []
        """A list for each call inside this call. It is empty while that call is open, and then
        contains whether the call was answered."""
        self._ends = [notify_call_start(context, besides=besides)]
        self._ends += [call.start_inner() for call in around]

    def start_inner(self) -> CallEnd:
        """Note that a call begins inside this call.

        Returns:
            The function to call when the inner call ends, with whether it was answered.
        """
        ends: list[bool] = []
        self._inner.append(ends)
        return ends.append

    def end(self, *, is_answered: bool) -> None:
        """Tell the listeners, and the calls that contain this call, that this call has ended.

        Args:
            is_answered: whether this call was answered.
        """
        for end in self._ends:
            end(is_answered)

    def needs_record(self, *, is_ok: bool) -> bool:
        """Return whether the adapter has to record this call.

        It has to if there was no call inside this call, or if this call was answered although every
        call inside it ended without an answer.

        Args:
            is_ok: whether this call was answered.
        """
        if not self._inner:
            return True
        return is_ok and all(ends and not ends[0] for ends in self._inner)


# --- errors ---------------------------------------------------------------------------------
def add_capture_error(recorder: Recorder, adapter: str, error: Exception) -> None:
    """Record an adapter's error as a capture error, which excludes the attempt from training."""
    recorder.add_capture_error(f"{adapter}: {type(error).__name__}: {text_of(error)}")


# --- OpenTelemetry's instrumentation scopes -------------------------------------------------
def claim_scope(adapter: str, scopes: Iterable[str]) -> None:
    """Ignore OpenTelemetry spans about agents that the adapter records itself.

    Without this, each such agent would be recorded twice.

    Args:
        adapter: name of the adapter.
        scopes: names of the instrumentation scopes (OpenTelemetry) whose spans are ignored.
    """
    state.claims[adapter] = frozenset(scopes)


def release_scope(adapter: str) -> None:
    """Undo `claim_scope`."""
    state.claims.pop(adapter, None)


# --- installing -----------------------------------------------------------------------------
def patch_subclasses(base: Any, wrap: Callable[[type], None]) -> Patch:
    """Call `wrap` with the class `base` and each subclass, also with subclasses defined later.

    Returns:
        A patch. Its `undo` stops the calls for subclasses defined later. It does not undo what
        `wrap` did; the caller does.
    """
    below: dict[type, None] = {base: None}
    queue: list[type] = list(type.__subclasses__(base))
    while queue:
        cls = queue.pop()
        if cls not in below:
            below[cls] = None
            queue += type.__subclasses__(cls)
    for cls in below:
        wrap(cls)
    own = vars(base).get("__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        if own is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            own.__func__(cls, **kwargs)
        wrap(cls)

    replacement: Any = classmethod(init_subclass)  # type: ignore[arg-type]
    return Patch(base, "__init_subclass__", lambda patch: replacement)


class Instrumentation(AbstractContextManager["Instrumentation"]):
    """The result of an adapter's `instrument()`. As a context manager it undoes `instrument()`.

    Args:
        undo: the adapter's `uninstrument`; None if `instrument()` changed nothing.
    """

    def __init__(self, undo: Callable[[], None] | None) -> None:
        self._undo = undo

    def __exit__(self, *error: object) -> None:
        if self._undo is not None:
            self._undo()


class AdapterInstrumentor:
    """Base class of an adapter's instrumentor, which the command `opentelemetry-instrument` loads.

    OpenTelemetry's own options are ignored.
    """

    on: ClassVar[Callable[[], Instrumentation]]
    """The adapter's `instrument`, as a static method."""
    off: ClassVar[Callable[[], None]]
    """The adapter's `uninstrument`, as a static method."""

    def instrument(self, **_: Any) -> None:
        """Call the adapter's `instrument`."""
        type(self).on()

    def uninstrument(self, **_: Any) -> None:
        """Call the adapter's `uninstrument`."""
        type(self).off()
