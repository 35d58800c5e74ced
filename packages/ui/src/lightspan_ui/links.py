"""Link a trace to the tracing backend that `LIGHTSPAN_OTLP` names."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from lightspan.production.exporters import OTLP_VARIABLE
from lightspan_ui import views

_LANGFUSE_PATH = "/api/public/otel"
_PHOENIX_PORT = 6006


def links_of(trace_id: str, url: str | None = None) -> list[views.Link]:
    """Return links to a trace in Phoenix or Langfuse.

    The list is empty without a trace, and if the backend is another program or none.

    Args:
        trace_id: id of the trace, 32 hex digits.
        url: URL to which spans are exported; None for the value of `LIGHTSPAN_OTLP`.
    """
    url = os.environ.get(OTLP_VARIABLE, "") if url is None else url
    if not trace_id or not url:
        return []
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return []
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return []
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    # without a user or a query, which may hold a key
    base = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}"
    before, separator, _ = parts.path.partition(_LANGFUSE_PATH)
    if separator:
        return [views.Link(name="Langfuse", url=f"{base}{before}/trace/{trace_id}")]
    if port == _PHOENIX_PORT or "phoenix" in parts.hostname:
        before = parts.path.partition("/v1/traces")[0].rstrip("/")
        return [views.Link(name="Phoenix", url=f"{base}{before}/redirects/traces/{trace_id}")]
    return []
