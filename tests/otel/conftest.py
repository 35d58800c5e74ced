"""Fixtures of the OpenTelemetry tests."""

from packages.otel.tests.conftest import alone, client, provider, server, tracer, url

__all__ = ["alone", "client", "provider", "server", "tracer", "url"]
