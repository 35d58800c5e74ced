"""The plug point for exports of spans to a tracing backend.

An installed plugin (lightspan-otel) gets the spans that this process records and trains, and
decides by the environment or by a call of the user whether they are exported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from lightspan.errors import ConfigError, how_to_install
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.spans import Span

log = logging.getLogger(__name__)

OTLP_VARIABLE: Final = "LIGHTSPAN_OTLP"


class SpanExporter(Protocol):
    """A plugin that exports spans."""

    def check(self) -> None:
        """Raise `ConfigError` if an export is asked for that is not possible."""

    def enqueue(self, spans: Sequence[Span]) -> None:
        """Export spans, if that is asked for. Never blocks."""

    def training_export(self, service: str, report: Callable[[str], None]) -> Any:
        """Return the export of a training: `lightspan_otel.training_export.TrainingExport`, or an
        object with the same methods.

        Args:
            service: service name of the spans, unless the environment names one.
            report: prints a message about spans that were not exported.
        """


def find_exporter() -> SpanExporter | None:
    """Return the exporter of spans; None if none is installed.

    Raises:
        ConfigError: an export is asked for that is not possible.
    """
    if "default" in installed_plugins("exporters"):
        exporter = cast("SpanExporter", load_plugin("exporters", "default"))
        exporter.check()
        return exporter
    if os.environ.get(OTLP_VARIABLE):
        raise ConfigError(f"{OTLP_VARIABLE} needs lightspan-otel: {how_to_install('otel')}")
    return None


def export(spans: Sequence[Span]) -> None:
    """Export spans, if that is asked for. Never raises."""
    try:
        exporter = find_exporter()
        if exporter is not None:
            exporter.enqueue(spans)
    except Exception as error:  # an export error must not reach the app or the store writer
        log.warning("lightspan: %d spans are not exported: %s", len(spans), type(error).__name__)
