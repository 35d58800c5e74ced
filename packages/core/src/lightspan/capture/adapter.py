"""What all adapters share: the versions they need, what `instrument()` returns, what spans say.

Another framework is another package beside this one, `packages/NAME`: its `_hook` listens to the
framework and tells `scope` who acts, `_identity` makes agent paths and spans of what it heard,
`_static` finds agents without running them (by `search`), and `__init__` has `instrument()` and
`agents()`. It passes `lightspan_testing.AdapterSuite`. CONTRIBUTING says where else its name goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self

from lightspan.capture.patch import Patch
from lightspan.capture.recorder import Recorder
from lightspan.capture.scope import Acting, Frame
from lightspan.capture.state import state
from lightspan.errors import ConfigError
from lightspan.schema import conventions
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Attributes, text_of

TEXT_LIMIT: Final = 65_536
"""Characters of a tool's arguments or result that its span keeps."""


# --- versions -------------------------------------------------------------------------------
def require_framework(name: str, floor: str) -> str:
    """The installed version of a framework.

    Args:
        name: of its distribution.
        floor: the oldest version that the adapter works with.

    Raises:
        ConfigError: it is not installed, or older than `floor`.
    """
    fix = f"pip install '{name}>={floor}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        raise ConfigError(f"{name} is not installed in this environment: {fix}") from None
    if _numbers(found) < _numbers(floor):
        raise ConfigError(f"{name} {found} is older than {floor}, which this needs: {fix}")
    return found


def too_new(adapter: str, framework: str, found: str, error: ImportError) -> ImportError:
    """The error of an adapter that misses something in a framework that is new enough."""
    return ImportError(
        f"this {adapter} does not know {framework} {found} ({error}): upgrade {adapter}, or "
        f"install an older {framework}"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


# --- texts ----------------------------------------------------------------------------------
def shown(value: Any) -> str:
    """A value as text or JSON, cut to `TEXT_LIMIT` characters. Never raises."""
    return shortened(value if isinstance(value, str) else as_json(value))


def shortened(text: str) -> str:
    """A text, cut to a length that a span can carry."""
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}… ({len(text)} characters)"


def as_json(value: Any) -> str:
    """A value as JSON; what JSON cannot say becomes its `repr`. Never raises."""
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # keys that are no text, cycles, a `repr` of the app's that raises
        return f"<{type(value).__name__}>"


# --- what is told ---------------------------------------------------------------------------
class Place(NamedTuple):
    """Where something happens: the agents around it, and the innermost open span."""

    frames: tuple[Frame, ...] = ()
    span_id: str | None = None

    @property
    def path(self) -> str:
        return join_path(frame.name for frame in self.frames)


def place_of(acting: Acting) -> Place:
    """Where whoever acts is."""
    return Place(acting.frames, acting.parent_span_id)


_ERROR_KEYS: Final = (
    conventions.ERROR_TYPE,
    conventions.EXCEPTION_TYPE,
    conventions.EXCEPTION_MESSAGE,
    conventions.EXCEPTION_STACKTRACE,
)


def error_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """Those of them that tell of an error."""
    return {key: attributes[key] for key in _ERROR_KEYS if key in attributes}


def damage(recorder: Recorder, adapter: str, error: Exception) -> None:
    """An error of an adapter's own: it damages the attempt and never reaches the app."""
    recorder.damage(f"{adapter}: {type(error).__name__}: {text_of(error)}")


# --- spans that tell the same ----------------------------------------------------------------
def cover(adapter: str, libraries: Iterable[str]) -> None:
    """Say that an adapter tells of the agents whose spans these instrumentations make, until
    `uncover`: who reads agents from spans (`lightspan.otel`) passes over them, or each would be
    told of twice.

    Args:
        adapter: its name.
        libraries: names of OpenTelemetry's instrumentation scopes.
    """
    state.covered[adapter] = frozenset(libraries)


def uncover(adapter: str) -> None:
    """Undo `cover`."""
    state.covered.pop(adapter, None)


def is_covered(library: str) -> bool:
    """Whether an adapter tells of what the spans of this instrumentation tell of."""
    return any(library in covered for covered in state.covered.values())


# --- installing -----------------------------------------------------------------------------
def subclasses(base: Any) -> Iterator[type]:
    """All classes below one, each once."""
    below: dict[type, None] = {}
    queue: list[type] = list(type.__subclasses__(base))
    while queue:
        one = queue.pop()
        if one not in below:
            below[one] = None
            queue += type.__subclasses__(one)
    yield from below


def follow(base: Any, wrap: Callable[[type], None]) -> Patch:
    """Call `wrap` with every class that is defined below one from now on, until undone."""
    own = vars(base).get("__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        if own is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            own.__func__(cls, **kwargs)
        wrap(cls)

    ours: Any = classmethod(init_subclass)  # type: ignore[arg-type]
    return Patch(base, "__init_subclass__", lambda patch: ours)


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
