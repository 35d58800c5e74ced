"""OTLP over HTTP, as it is sent: protobuf, or JSON with ids in hexadecimal.

OpenTelemetry's own exporter encodes the spans, and does not send them: its HTTP part has no JSON,
logs each batch that fails, and does not read which spans a backend refused.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from lightspan.errors import ConfigError, how_to_install
from lightspan.schema.spans import Span

OTLP_VARIABLE: Final = "LIGHTSPAN_OTLP"
_PATH: Final = "/v1/traces"
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_TIMEOUT_S: Final = 10.0
_AGAIN: Final = frozenset({429, 502, 503, 504})
"""What OTLP has a sender try again after."""
_MOST_ANSWER: Final = 2**20
_ENCODER: Final = "opentelemetry.exporter.otlp.proto.common"
_NEEDED: Final = (
    "lightspan.capture.readable_spans",
    f"{_ENCODER}.trace_encoder",
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    "google.protobuf.json_format",
    "encodings.idna",  # to look up the name of a host
)
"""Imported before the thread that sends begins: see `outlet`."""


class Undelivered(Exception):
    """Nothing of a batch has arrived.

    Args:
        text: why.
        again: whether another try may help.
        pause_s: how long the backend asks to wait before it.
    """

    def __init__(self, text: str, *, again: bool = False, pause_s: float | None = None) -> None:
        super().__init__(text)
        self.again = again
        self.pause_s = pause_s


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Keys go to whom they were meant for only."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class OtlpSender:
    """Sends batches to one URL.

    Args:
        url: of the endpoint, its path included.
        headers: of each request, such as a key.
        is_json: JSON in place of protobuf.
        timeout_s: of one request.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        is_json: bool = False,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self.place: Final = url.partition("?")[0].partition("#")[0]
        self._url = url
        self._is_json = is_json
        self._headers = {**(headers or {}), "Content-Type": _JSON if is_json else _PROTOBUF}
        self._timeout_s = timeout_s
        self._open = urllib.request.build_opener(_NoRedirects).open

    @classmethod
    def of_environment(cls, url: str) -> OtlpSender:
        """For `LIGHTSPAN_OTLP`, with the headers, the protocol and the timeout of OpenTelemetry's
        variables.

        Raises:
            ConfigError: it is no URL, the timeout is no number, or the encoder is not installed or
                cannot be imported.
        """
        parts = _parts(url)
        if find_spec("opentelemetry.exporter") is None or find_spec(_ENCODER) is None:
            raise ConfigError(f"{OTLP_VARIABLE} needs {_ENCODER}: {how_to_install('otlp')}")
        _import_needed()
        if parts.path in ("", "/"):
            url = urllib.parse.urlunsplit(parts._replace(path=_PATH))
        from opentelemetry.util.re import parse_env_headers

        given = _variable("HEADERS") or ""
        timeout = _variable("TIMEOUT") or _TIMEOUT_S
        try:
            timeout_s = float(timeout)
        except ValueError as error:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT={timeout!r} is no number") from error
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_TIMEOUT={timeout!r}: give seconds above 0")
        headers = parse_env_headers(given, liberal=True)
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):  # the value is a key: not told
                raise ConfigError(f"OTEL_EXPORTER_OTLP_HEADERS: {name} has no printable ASCII text")
        return cls(
            url,
            headers,
            is_json=_variable("PROTOCOL") == "http/json",
            timeout_s=timeout_s,
        )

    def __call__(self, spans: Sequence[Span]) -> int:
        """See `outlet.Sender`."""
        body = encoded(spans, is_json=self._is_json)
        request = urllib.request.Request(self._url, data=body, headers=self._headers)
        try:
            with self._open(request, timeout=self._timeout_s) as response:
                answer = response.read(_MOST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                text = f"it answered {error.code} {error.reason}"
                pause = _seconds(error.headers.get("Retry-After"))
                raise Undelivered(text, again=error.code in _AGAIN, pause_s=pause) from None
        except ValueError as error:  # of the URL or a header: its words may quote a key
            raise Undelivered(type(error).__name__) from None
        except (OSError, http.client.HTTPException) as error:
            raise Undelivered(str(error) or repr(error), again=True) from error
        return min(len(spans), self._refused(answer))

    def _refused(self, answer: bytes) -> int:
        """How many spans the backend says that it left out; an answer that says nothing is yes."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        try:
            if self._is_json:
                said = json.loads(answer or b"{}").get("partialSuccess", {})
                return max(0, int(said.get("rejectedSpans", 0)))
            whole = trace_service_pb2.ExportTraceServiceResponse.FromString(answer)
            return max(0, int(whole.partial_success.rejected_spans))
        except (DecodeError, ValueError, TypeError, AttributeError, RecursionError):
            return 0


def _parts(url: str) -> urllib.parse.SplitResult:
    """Of the address. What is wrong with it is told without it: a key may stand in it."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(f"{OTLP_VARIABLE}: give a URL such as http://127.0.0.1:4318")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{OTLP_VARIABLE}: a URL with a user is not supported: use OTEL_EXPORTER_OTLP_HEADERS"
        )
    return parts


def _import_needed() -> None:
    try:
        for name in _NEEDED:
            import_module(name)
    except Exception as error:  # protobuf raises TypeError where generated code does not fit it
        text = f"{OTLP_VARIABLE}: {name} cannot be imported ({error!r}): {how_to_install('otlp')}"
        raise ConfigError(text) from error


def _variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(
        f"OTEL_EXPORTER_OTLP_{name}"
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.strip().isdecimal() else None


def encoded(spans: Sequence[Span], *, is_json: bool) -> bytes:
    """An `ExportTraceServiceRequest`. Needs `lightspan[otlp]`."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from lightspan.capture.readable_spans import to_otel

    message = encode_spans([to_otel(span) for span in spans])
    if not is_json:
        data: bytes = message.SerializeToString()
        return data
    from google.protobuf.json_format import MessageToDict

    value = MessageToDict(message, use_integers_for_enums=True)
    for told in _with_ids(value):
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in told:
                told[key] = base64.b64decode(told[key]).hex()
    return json.dumps(value, separators=(",", ":")).encode()


def _with_ids(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource_spans in value.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                yield span
                yield from span.get("links", ())
