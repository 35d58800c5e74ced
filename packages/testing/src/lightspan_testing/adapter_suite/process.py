"""A child process that builds apps before the adapter is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Final

import msgspec

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import POLICY, Played
from lightspan_testing.adapter_suite.scenarios import Model
from lightspan_testing.attempts import ROOT_ID

NO_WAY_OUT: Final = {
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
"""Proxy settings that keep a child process from reaching other machines."""

CHILD: Final = "from lightspan_testing.adapter_suite.process import child; child()"


def scope_as_json(played: Played) -> dict[str, str | None]:
    """Return the fields of an attempt for the child process."""
    scope = played.scope
    return {
        "text": played.text,
        "rollout_id": scope.rollout_id,
        "attempt_id": scope.attempt_id,
        "gateway_url": scope.gateway_url,
        "call_token": scope.call_token,
        "trace_id": scope.trace_id,
    }


def child() -> None:
    """Build the apps, then instrument, then run the attempts (in the child process)."""
    message = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location("adapter_under_test", message["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = getattr(module, message["suite"])()
    model = Model(base_url=message["url"])
    apps = {name: suite.build(name, model) for name in {name for name, _ in message["attempts"]}}
    suite.adapter.instrument()

    async def attempts() -> None:
        for name, fields in message["attempts"]:
            text = fields.pop("text")
            scope = AttemptContext(**fields, routing=POLICY, root_span_id=ROOT_ID)
            with open_scope(scope):
                await apps[name].run(text)
            assert scope.recorder.capture_errors() == []
            print("spans:" + msgspec.msgpack.encode(scope.recorder.drain()).hex())
        await sdk_instrumentation.aclose()

    asyncio.run(attempts())
    suite.check_telemetry(message["telemetry"])
