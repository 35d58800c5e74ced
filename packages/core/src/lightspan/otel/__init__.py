"""Every framework that speaks OpenTelemetry: who acts is read from the app's spans.

from lightspan import otel

otel.instrument("pydantic-ai")        # a framework by its name, whether the app traces it or not
otel.instrument(provider)             # or: hear what goes to the app's own TracerProvider
otel.instrument(provider, content=True)   # and record the model calls that only its spans tell of
otel.agents()                         # whom `optimize=` may name, as far as they have acted

`identity` says what a span says of an agent, `notes` are taken of the spans that are open (by the
`processor` in a provider of the app's, and by the `tracer` of ours), the `resolver` makes agents of
them, `frameworks` are switched on by name, by `hooks` of their own where their spans name nobody,
and `install` does all that. What spans say beside identity, where it is wanted, is `hearsay`.
`translation` is between OpenTelemetry's spans and ours, whole ones.
What others send: `otlp` decodes it, `vocabulary` has their words for ours, `arrivals` keeps it.
What lies in `files` goes the same way; `backends` knows how Phoenix and Langfuse write spans.
"""

from __future__ import annotations

from lightspan.otel.install import instrument, uninstrument
from lightspan.otel.resolver import agents
from lightspan.otel.translation import (
    LightspanSpanProcessor,
    decode_otlp,
    encode_otlp,
    export,
)
from lightspan.production.span_exporter import send

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
