"""Support of frameworks by their OpenTelemetry spans.

    import lightspan_otel

    lightspan_otel.instrument("pydantic-ai")    # a framework by name, traced by the app or not
    lightspan_otel.instrument(provider)         # or any framework, by the app's TracerProvider
    lightspan_otel.instrument(provider, content=True)  # also record calls known from spans only
    lightspan_otel.agents()                     # agents so far, for `optimize=`

`instrumentation` switches frameworks on, `frameworks` lists them, `framework_patches` patches those
whose spans name no agent. `agent_names` reads an agent from a span, `open_spans` holds the state of
open spans (of the `identity_tracer`, or of a provider with the `processor`), `resolver` finds the
current agent, `llm_spans` records model calls known from spans only, `convert` converts spans. For
traces of other processes `otlp` decodes, `otlp_ingest` receives over HTTP, `normalize` translates
attribute names, `ingest` stores attempts, `import_traces` reads files, `export_formats` reads the
exports of Phoenix and Langfuse. `span_exporter` sends recorded spans to a tracing backend,
`training_export` the spans of a training, and `to_otel` converts spans to OpenTelemetry's SDK.
`attribute_names` has the attributes that only exported spans have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_otel.convert import (
        LightspanSpanProcessor as LightspanSpanProcessor,
        decode_otlp as decode_otlp,
        encode_otlp as encode_otlp,
        export as export,
    )
    from lightspan_otel.instrumentation import (
        instrument as instrument,
        uninstrument as uninstrument,
    )
    from lightspan_otel.resolver import agents as agents
    from lightspan_otel.span_exporter import send as send

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "LightspanSpanProcessor": "lightspan_otel.convert",
        "agents": "lightspan_otel.resolver",
        "decode_otlp": "lightspan_otel.convert",
        "encode_otlp": "lightspan_otel.convert",
        "export": "lightspan_otel.convert",
        "instrument": "lightspan_otel.instrumentation",
        "uninstrument": "lightspan_otel.instrumentation",
        "send": "lightspan_otel.span_exporter",
    },
)
