"""Find the plugin that exports spans to a tracing backend.

An installed plugin (lightspan-otel) gets the spans of recorded attempts and of trainings. It
exports them if the environment or a call of the user enables exports.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

from lightspan.errors import ConfigError, how_to_install
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.images import Image, ImageReader
from lightspan.schema.spans import Span

if TYPE_CHECKING:
    from lightspan.lightning.advantages import Explanation
    from lightspan.lightning.episode import Episode
    from lightspan.lightning.transitions import TransitionKey

log = logging.getLogger(__name__)

OTLP_VARIABLE: Final = "LIGHTSPAN_OTLP"


class TrainingExport(Protocol):
    """The export of the spans of one training, with rewards and advantages."""

    async def add(self, episodes: Sequence[Episode], step: int, *, is_learned: bool) -> None:
        """Queue the spans of ended episodes for export. Never raises.

        If `is_learned`, the step trains on the episodes. Their spans are then kept until `send`.
        """

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Keep the advantages of model calls. The next `send` adds them to the spans."""

    def send(self) -> None:
        """Queue the spans of the current training step. Never raises."""

    async def close(self, *, is_patient: bool) -> None:
        """Export pending spans, and report how many were not exported.

        Args:
            is_patient: whether to wait for as long as the backend accepts spans. If not, spans that
                are still pending are not exported.
        """


class SpanExporter(Protocol):
    """A plugin that exports spans to a tracing backend."""

    def check(self) -> None:
        """Raise `ConfigError` if exports are enabled but not possible."""

    def enqueue(self, spans: Sequence[Span], images: Sequence[Image] = ()) -> None:
        """Queue spans for export, if exports are enabled. Never blocks.

        Args:
            spans: the spans.
            images: the images to which they refer.
        """

    def training_export(
        self, service: str, report: Callable[[str], None], images: ImageReader
    ) -> TrainingExport:
        """Return the export of a training.

        Args:
            service: service name of the spans, unless the environment names one.
            report: prints a message about spans that were not exported.
            images: function that returns the recorded images among digests.
        """


def find_exporter() -> SpanExporter | None:
    """Return the installed plugin that exports spans; None if there is none.

    Raises:
        ConfigError: exports are enabled but not possible.
    """
    if "default" in installed_plugins("exporters"):
        exporter = cast("SpanExporter", load_plugin("exporters", "default"))
        exporter.check()
        return exporter
    if os.environ.get(OTLP_VARIABLE):
        raise ConfigError(f"{OTLP_VARIABLE} needs lightspan-otel: {how_to_install('otel')}")
    return None


def export(spans: Sequence[Span], images: Sequence[Image]) -> None:
    """Queue spans, and the images to which they refer, if exports are enabled. Never raises."""
    try:
        if (exporter := find_exporter()) is not None:
            exporter.enqueue(spans, images)
    except Exception as error:  # an export error must not reach the app or the store writer
        log.warning("lightspan: %d spans are not exported: %s", len(spans), type(error).__name__)
