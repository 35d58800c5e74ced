"""Fixtures of the OpenTelemetry tests."""

from packages.otel.tests.conftest import alone, server, url

__all__ = ["alone", "server", "url"]
