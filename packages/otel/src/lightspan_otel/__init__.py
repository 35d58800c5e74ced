"""Agents of every framework with OpenTelemetry spans.

    import lightspan_otel

    lightspan_otel.instrument("pydantic-ai")    # a framework by its name, traced by the app or not
    lightspan_otel.instrument(provider)         # or: what goes to the app's own TracerProvider
    lightspan_otel.instrument(provider, content=True)  # and record calls known from its spans only
    lightspan_otel.agents()                     # names for `optimize=`, of agents that have acted

`instrumentation` switches frameworks on, `frameworks` lists them, `framework_patches` patches those
whose spans name no agent. `agent_names` reads an agent from a span, `open_spans` holds the state of
open spans (by the `processor` in an app's provider, or `identity_tracer`'s), `resolver` answers who
acts now, `llm_spans` records model calls that only spans show, `convert` converts spans.
Traces from elsewhere: `otlp` decodes, `otlp_ingest` receives over HTTP, `normalize` translates
attribute names, `ingest` stores attempts, `import_traces` reads files, `export_formats` knows those
of Phoenix and Langfuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan.production.span_exporter import send
    from lightspan_otel.convert import LightspanSpanProcessor, decode_otlp, encode_otlp, export
    from lightspan_otel.instrumentation import instrument, uninstrument
    from lightspan_otel.resolver import agents

__all__ = [
    "LightspanSpanProcessor",
    "agents",
    "decode_otlp",
    "encode_otlp",
    "export",
    "instrument",
    "send",
    "uninstrument",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "LightspanSpanProcessor": "lightspan_otel.convert",
        "agents": "lightspan_otel.resolver",
        "decode_otlp": "lightspan_otel.convert",
        "encode_otlp": "lightspan_otel.convert",
        "export": "lightspan_otel.convert",
        "instrument": "lightspan_otel.instrumentation",
        "uninstrument": "lightspan_otel.instrumentation",
        "send": "lightspan.production.span_exporter",
    },
)


def __dir__() -> list[str]:
    return __all__
