"""Export of recorded spans to a tracing backend: `LIGHTSPAN_OTLP=URL`, or `otel.send(exporter)`.

Off by default, and the bytes of images are left out unless `LIGHTSPAN_OTLP_IMAGES=1`. The
OpenTelemetry SDK's `BatchSpanProcessor` exports in its own thread, so neither the app nor a
training waits for a backend or gets its errors. Spans that do not fit into the queue are dropped
and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from lightspan.errors import ConfigError, how_to_install
from lightspan.production.exporters import OTLP_VARIABLE
from lightspan.production.options import resource_of_environment
from lightspan.production.store_writer import close_at_exit, close_at_exit_of_child
from lightspan.schema.content import without_keys
from lightspan.schema.images import Image, ImageReader
from lightspan.schema.redaction import bounded_text
from lightspan.schema.spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from lightspan_otel.training_export import TrainingExport

log = logging.getLogger(__name__)

MAX_QUEUE_SIZE: Final = 20_000
"""Maximum number of spans that wait for export."""
EXIT_TIMEOUT_S: Final = 5.0
"""Maximum seconds to wait for the export of queued spans when the process ends."""
IMAGES_VARIABLE: Final = "LIGHTSPAN_OTLP_IMAGES"
_MAX_BATCH_SIZE: Final = 256
_MAX_BATCH_WITH_IMAGES: Final = 8
"""Spans in a request that may have images. Backends limit a request's size."""
_MAX_WAITING_IMAGES: Final = 256
"""Waiting spans beyond which images are sent as references, because they would fill the memory."""
_SCHEDULE_DELAY_MS: Final = 200
_EXPORT_TIMEOUT_MS: Final = 30_000
_TRACES_PATH: Final = "/v1/traces"


class ExportHandle:
    """The queue of spans for one exporter, with counts of sent and lost spans.

    As a context manager it is closed at the end of the block.

    Args:
        exporter: exporter of the OpenTelemetry SDK; called in the SDK's thread.
        destination: destination of the spans, for messages.
        images: whether the messages have the bytes of images.
    """

    def __init__(self, exporter: SpanExporter, destination: str, *, images: bool = False) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from lightspan_otel.to_otel import to_otel, with_image_bytes

        self.destination: Final = destination
        self.images: Final = images
        self.sent = 0
        """Number of spans that the exporter has accepted."""
        self.lost = 0
        """Number of spans that were dropped, failed to export, or were rejected by the backend."""
        self._rejected = 0
        """Number of rejected spans in the request under way (OTLP's partial success)."""
        self._to_otel, self._with_images = to_otel, with_image_bytes
        self._resource = resource_of_environment()
        self._changed = threading.Condition()
        self._pending = 0
        self._is_closed = self._has_dropped = self._has_rejected = self._has_exit_hook = False
        self._exporter = exporter
        session = _session_of(exporter)
        if session is not None:
            session.hooks["response"].append(self._read_answer)
        # The exporter may be the user's, so it is not shut down.
        counting: Any = SimpleNamespace(export=self._export, shutdown=lambda: None)
        self._processor: Any = BatchSpanProcessor(
            counting,
            max_queue_size=MAX_QUEUE_SIZE,
            schedule_delay_millis=_SCHEDULE_DELAY_MS,
            max_export_batch_size=_MAX_BATCH_WITH_IMAGES if images else _MAX_BATCH_SIZE,
            export_timeout_millis=_EXPORT_TIMEOUT_MS,
        )

    @property
    def pending(self) -> int:
        """Number of spans that are queued or being exported."""
        return self._pending

    def enqueue(self, spans: Sequence[Span], images: Sequence[Image] = ()) -> None:
        """Queue spans for export; drop the spans that do not fit into the queue. Never blocks.

        Args:
            spans: the spans.
            images: the images to which they refer.
        """
        files = {image.digest: image for image in images} if self.images else {}
        if not self._has_exit_hook:
            self._has_exit_hook = True
            close_at_exit_of_child(self.close, priority=-1)  # after the store writer's
        for span in spans:
            resource = {**self._resource, **span.resource}
            sent = without_keys(span).replace(resource=resource)
            if files and self._pending < _MAX_WAITING_IMAGES:
                sent = self._with_images(sent, files)
            readable = self._to_otel(sent)
            with self._changed:
                if self._is_closed or self._pending >= MAX_QUEUE_SIZE:
                    self._drop()
                    continue
                self._pending += 1
            self._processor.on_end(readable)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until no span is pending; return False if this takes more than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """Flush and stop exporting. Idempotent; the exporter itself stays open."""
        with _State.lock:
            if _State.explicit is self:
                _State.explicit = None
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            is_drained = self._changed.wait_for(lambda: not self._pending, timeout_s)
            self.lost += self._pending
            self._pending = 0
        if is_drained:  # otherwise `shutdown` would wait for an exporter that hangs
            self._processor.shutdown()
        if self.lost and not was_closed:
            log.warning("lightspan: %d spans were not sent to %s", self.lost, self.destination)

    def after_fork(self) -> None:
        """Reset the counts in a child process, where the SDK has emptied the queue."""
        self._changed = threading.Condition()
        self._pending = self.sent = self.lost = 0
        self._has_exit_hook = False

    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            if self._pending:  # zero once the handle is closed
                result = self._exporter.export(spans)
        except Exception as error:
            log.warning("lightspan: %s failed: %r", type(self._exporter).__name__, error)
        with self._changed:
            if self._pending:  # zero if the handle was closed meanwhile
                self._pending -= len(spans)
                if result is SpanExportResult.SUCCESS:
                    rejected, self._rejected = min(self._rejected, len(spans)), 0
                    self.sent += len(spans) - rejected
                    self.lost += rejected
                else:
                    self.lost += len(spans)
                self._changed.notify_all()
        return result

    def _read_answer(self, response: Any, *args: object, **options: object) -> None:
        """Count the spans that the backend rejects in an answer of status 200."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        with contextlib.suppress(Exception):  # an answer of another form
            answer = trace_service_pb2.ExportTraceServiceResponse.FromString(response.content)
            rejected = answer.partial_success.rejected_spans if response.status_code == 200 else 0
            if rejected and not self._has_rejected:
                reason = bounded_text(answer.partial_success.error_message)
                log.warning(
                    "lightspan: %s rejected %d spans: %s", self.destination, rejected, reason
                )
            self._has_rejected |= rejected > 0
            self._rejected += rejected

    def _drop(self) -> None:
        self.lost += 1
        if not self._has_dropped:
            self._has_dropped = True
            reason = "closed" if self._is_closed else f"full ({MAX_QUEUE_SIZE:,} spans)"
            log.warning(
                "lightspan: spans for %s are dropped: the queue is %s", self.destination, reason
            )

    def __enter__(self) -> ExportHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _session_of(exporter: object) -> Any:
    """Return the HTTP session of OpenTelemetry's OTLP exporter; None for another exporter.

    The exporter itself does not report rejected spans.
    """
    for path in (("_session",), ("_client", "_transport", "_session")):
        value: Any = exporter
        for name in path:
            value = getattr(value, name, None)
        if isinstance(getattr(value, "hooks", None), dict) and "response" in value.hooks:
            return value
    return None


# --- the exporters of a process -------------------------------------------------------------
class _State:
    """The export handles of this process."""

    lock: Any = threading.RLock()
    explicit: ExportHandle | None = None
    by_environment: ExportHandle | None = None
    url = ""
    """URL for which `by_environment` was created."""


def send(exporter: SpanExporter, *, images: bool = False) -> ExportHandle:
    """Send this process's spans to an exporter.

    These are the spans that `lightspan.record` records, and those of a training. From then on
    `LIGHTSPAN_OTLP` is ignored. Spans are sent whole, including prompts and answers. Close the
    returned handle to stop.

    Args:
        exporter: exporter of OpenTelemetry's SDK; called in a thread of the SDK's
            `BatchSpanProcessor`.
        images: whether to send the bytes of images too. If not, messages have their digests.

    Raises:
        ConfigError: the object is not an exporter, or this process sends to an exporter already.
    """
    if isinstance(exporter, type) or not callable(getattr(exporter, "export", None)):
        raise ConfigError(f"send({exporter!r}): give an exporter of OpenTelemetry's SDK")
    with _State.lock:
        if _State.explicit is not None:
            raise ConfigError(
                "this process sends its spans to an exporter already: close() that first"
            )
        _State.explicit = ExportHandle(exporter, type(exporter).__name__, images=images)
        return _State.explicit


def check() -> None:
    """Raise `ConfigError` if `LIGHTSPAN_OTLP` requests an export that this process cannot make."""
    current()


def training_export(
    service: str, report: Callable[[str], None], images: ImageReader
) -> TrainingExport:
    """Create the export of a training's spans; the arguments are those of `TrainingExport`."""
    from lightspan_otel.training_export import TrainingExport

    return TrainingExport(service, report, images)


def current() -> ExportHandle | None:
    """Return the handle to which this process exports; None if export is off.

    Raises:
        ConfigError: `LIGHTSPAN_OTLP` is not a URL, `LIGHTSPAN_OTLP_IMAGES` is not 0 or 1, or
            OpenTelemetry's OTLP exporter cannot be imported.
    """
    if _State.explicit is not None:
        return _State.explicit
    url = os.environ.get(OTLP_VARIABLE, "")
    if not url:
        return None
    with _State.lock:
        if _State.by_environment is None or _State.url != url:
            endpoint = _endpoint(url)
            exporter = _otlp_exporter(endpoint)
            switch = os.environ.get(IMAGES_VARIABLE) or "0"
            if switch not in ("0", "1"):
                raise ConfigError(f"{IMAGES_VARIABLE}={switch!r}: give 1 to send images, or 0")
            _State.by_environment = ExportHandle(
                exporter, endpoint.partition("?")[0], images=switch == "1"
            )
            _State.url = url
        return _State.by_environment


def enqueue(spans: Sequence[Span], images: Sequence[Image] = ()) -> None:
    """Queue spans, and the images to which they refer, if export is enabled. Never raises."""
    try:
        handle = current()
        if handle is not None and spans:
            handle.enqueue(spans, images)
    except Exception as error:  # an export error must not reach the app or the store writer
        log.warning("lightspan: %d spans are not exported: %s", len(spans), type(error).__name__)


def _endpoint(url: str) -> str:
    """Check a URL; add `/v1/traces` if it has no path.

    Raises:
        ConfigError: the URL is invalid. The message does not quote it, because it may contain a
            key.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{OTLP_VARIABLE}: give a URL such as http://127.0.0.1:4318")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{OTLP_VARIABLE}: a URL with a user is not supported: use OTEL_EXPORTER_OTLP_HEADERS"
        )
    path = parts.path if parts.path.strip("/") else _TRACES_PATH
    return urllib.parse.urlunsplit(parts._replace(path=path))


def _otlp_exporter(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except Exception as error:  # protobuf raises TypeError for generated code of another version
        raise ConfigError(
            f"{OTLP_VARIABLE} needs OpenTelemetry's OTLP exporter ({error!r}): "
            f"{how_to_install('otel')}"
        ) from error
    try:
        return cast("SpanExporter", OTLPSpanExporter(endpoint=endpoint))
    except ValueError as error:
        raise ConfigError(
            f"{OTLP_VARIABLE}: a variable OTEL_EXPORTER_OTLP_… is invalid: {error}"
        ) from error


def _close() -> None:
    for handle in (_State.explicit, _State.by_environment):
        if handle is not None:
            handle.close()


def _after_fork() -> None:
    _State.lock = threading.RLock()  # another thread of the parent may have held it
    for handle in (_State.explicit, _State.by_environment):
        if handle is not None:
            handle.after_fork()


# Registered at import, before recordings are: these run in reverse order, and recordings queue
# their last spans when the process ends.
close_at_exit(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
