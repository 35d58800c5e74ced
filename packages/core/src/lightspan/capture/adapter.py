"""What adapters of frameworks share; `lightspan.instrumentation` is its public face."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self

from lightspan.capture._globals import state
from lightspan.capture.context import AgentContext, agent_attributes, make_span
from lightspan.capture.patch import Patch
from lightspan.capture.recorder import Recorder
from lightspan.errors import ConfigError
from lightspan.schema import semconv
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanLink, SpanStatus, text_of

MAX_TEXT_LENGTH: Final = 65_536
"""Characters of a tool's arguments or result in its span."""


# --- versions -------------------------------------------------------------------------------
@contextmanager
def require_framework(adapter: str, framework: str, floor: str) -> Iterator[None]:
    """Check the installed version of a framework around an adapter's imports of it.

    Args:
        adapter: name of the adapter's distribution.
        framework: name of the framework's distribution.
        floor: oldest version that the adapter supports.

    Raises:
        ConfigError: the framework is not installed, or is older than `floor`.
        ImportError: an import in the block failed: the framework is newer than the adapter.
    """
    hint = f"pip install '{framework}>={floor}'"
    try:
        installed = version(framework)
    except PackageNotFoundError:
        raise ConfigError(f"{framework} is not installed in this environment: {hint}") from None
    if _numbers(installed) < _numbers(floor):
        raise ConfigError(
            f"{framework} {installed} is older than {floor}, which this needs: {hint}"
        )
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"this {adapter} does not know {framework} {installed} ({error}): upgrade {adapter}, "
            f"or install an older {framework}"
        ) from error


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


# --- texts ----------------------------------------------------------------------------------
def truncated_json(value: Any, limit: int | None = MAX_TEXT_LENGTH) -> str:
    """Return a text as it is and any other value as JSON, cut to a length; never raise.

    Args:
        value: what is to be recorded; a part that JSON cannot express becomes its `repr`.
        limit: maximum number of characters; None for no limit.
    """
    text = value if isinstance(value, str) else _json(value)
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text)} characters)"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # keys that are no text, cycles, a `repr` of the app's that raises
        return f"<{type(value).__name__}>"


# --- spans ----------------------------------------------------------------------------------
_ERROR_KEYS: Final = (
    semconv.ERROR_TYPE,
    semconv.EXCEPTION_TYPE,
    semconv.EXCEPTION_MESSAGE,
    semconv.EXCEPTION_STACKTRACE,
)


class SpanEnd(NamedTuple):
    """How an agent, a tool or a model call ended."""

    status: SpanStatus = SpanStatus.OK
    """UNSET for what was abandoned, which is no error."""
    message: str = ""
    """Of the error."""
    attributes: Mapping[str, Any] = {}
    """More attributes of the span: those of the error, a tool's result."""

    @classmethod
    def from_error(cls, error: BaseException) -> SpanEnd:
        """Return the end by an exception; a closed generator was abandoned."""
        if isinstance(error, GeneratorExit):
            return cls(SpanStatus.UNSET)
        attributes = semconv.exception_attributes(error)
        return cls(SpanStatus.ERROR, text_of(error), attributes)


SUCCEEDED: Final = SpanEnd()


def error_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """Return those of the attributes that describe an error."""
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
    """Return the span of something that has ended now.

    Args:
        around: the context in which it began.
        kind: AGENT and TOOL spans get the attributes that all adapters write.
        name: name of the agent or tool; of another kind, of the span.
        end: how it ended.
        span_id: id of the frame that was pushed for it; None for a new id.
        start_ns: when it began, nanoseconds since the epoch; None for now.
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


# --- errors ---------------------------------------------------------------------------------
def add_capture_error(recorder: Recorder, adapter: str, error: Exception) -> None:
    """Record an error of the adapter itself: the attempt is not trained, the app never sees it."""
    recorder.add_capture_error(f"{adapter}: {type(error).__name__}: {text_of(error)}")


# --- OpenTelemetry's instrumentation scopes -------------------------------------------------
def claim_scope(adapter: str, scopes: Iterable[str]) -> None:
    """Ignore the spans of these instrumentation scopes, since an adapter records the same agents.

    Args:
        adapter: name of the adapter.
        scopes: names of OpenTelemetry's instrumentation scopes.
    """
    state.claims[adapter] = frozenset(scopes)


def release_scope(adapter: str) -> None:
    """Undo `claim_scope`."""
    state.claims.pop(adapter, None)


def is_claimed(scope: str) -> bool:
    """Return whether an adapter claims this instrumentation scope."""
    return any(scope in scopes for scopes in state.claims.values())


# --- installing -----------------------------------------------------------------------------
def patch_subclasses(base: Any, wrap: Callable[[type], None]) -> Patch:
    """Call `wrap` with a class and every class below it, also those that are defined later.

    Returns:
        What ends the calls for later classes; patches that `wrap` made are the caller's to undo.
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


class Instrumentation:
    """What `instrument()` returns: as a context manager it undoes what that call did.

    Args:
        undo: the adapter's `uninstrument`; None if the call found everything installed.
    """

    def __init__(self, undo: Callable[[], None] | None) -> None:
        self._undo = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._undo is not None:
            self._undo()


class AdapterInstrumentor:
    """What `opentelemetry-instrument` loads; a subclass names its adapter's functions.

    OpenTelemetry's own options say nothing to an adapter.
    """

    on: ClassVar[Callable[[], Instrumentation]]
    """The adapter's `instrument`, as a static method."""
    off: ClassVar[Callable[[], None]]
    """The adapter's `uninstrument`, as a static method."""

    def instrument(self, **_: Any) -> None:
        """Do what the adapter's `instrument()` does."""
        type(self).on()

    def uninstrument(self, **_: Any) -> None:
        """Do what the adapter's `uninstrument()` does."""
        type(self).off()
