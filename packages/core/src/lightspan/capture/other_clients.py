"""Record model calls by clients that use no SDK of `sdks`, as spans without tokens.

The SDK instrumentation neither sees nor redirects the calls of other clients (Ollama, LiteLLM, a
client of the user's own). An adapter whose framework makes such a call records it with
`record_call`, so that the coverage report shows a call that cannot be trained. If a framework's
cache answers a call, the adapter records this with `record_call` too. For agents whose calls go to
the gateway (`is_routed`), the adapter switches the cache off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from lightspan.capture.adapter import SUCCEEDED, SpanEnd, error_attributes
from lightspan.capture.context import AgentContext, make_span
from lightspan.schema import semconv
from lightspan.schema.genai_attributes import answer_attributes, request_attributes
from lightspan.schema.media import images_into
from lightspan.schema.records import new_id
from lightspan.schema.routing import Route
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome

_URL_SETTINGS: Final = (
    *("base_url", "api_base", "openai_api_base", "endpoint", "endpoint_url", "host", "url"),
    *("_base_url", "_api_base", "_host"),
)
"""Settings in which clients store their endpoint."""
_SETTINGS: Final = ("_raw_config", "_create_args", "model_kwargs")
"""Attributes in which clients store the settings of their constructor."""
_ABANDONED: Final = ("CancelledError", "GeneratorExit")
_OUTCOMES: Final = {SpanStatus.OK: CallOutcome.OK, SpanStatus.ERROR: CallOutcome.ERROR}


class Client(NamedTuple):
    """Description of a model client whose calls lightspan does not see."""

    name: str = ""
    """Full name of the client's class; empty if the client is unknown."""
    url: str = ""
    """URL of its endpoint; empty if it cannot be read."""
    fix: str = ""
    """Change of the app that would make the client's calls trainable."""

    def attributes(self) -> dict[str, Any]:
        """Return span attributes that describe the client, with only host and port of its URL.

        A host or port that the URL does not have is None, which `clean_attributes` leaves out.
        """
        if not self.name:
            return {}
        attributes: dict[str, Any] = {semconv.CLIENT: self.name, semconv.CLIENT_FIX: self.fix}
        with contextlib.suppress(ValueError):  # an invalid port
            url = urlsplit(self.url)
            attributes |= {semconv.SERVER_PORT: url.port, semconv.SERVER_ADDRESS: url.hostname}
        return attributes


def client_of(client: Any, native: str) -> Client:
    """Describe a model client whose calls lightspan does not see. Never raises.

    Args:
        client: the framework's object.
        native: name of a client that the user should use instead, because lightspan sees its calls.
    """
    name = _class_name(type(client))
    places = [client, *(_read(client, key) for key in _SETTINGS)]
    urls = (_text(_read(place, key)) for key in _URL_SETTINGS for place in places)
    url = next((text for text in urls if "//" in text), "")
    fix = f"use {native} in its place"
    if "litellm" in name.lower() or _read(client, "is_litellm") is True:
        fix = 'name its model "openai/…": LiteLLM then uses the OpenAI SDK, which lightspan sees'
    return Client(name, url, fix)


def _text(value: Any) -> str:
    try:
        return str(value or "")
    except Exception:  # the app's object may do anything
        return ""


def _class_name(kind: type) -> str:
    """Return the full name of a class, such as `openai.OpenAI`.

    The name begins with the top-level package if the package exports the class, else with the
    module.
    """
    package = kind.__module__.partition(".")[0]
    is_public = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if is_public else kind.__module__}.{kind.__qualname__}"


def _read(place: Any, name: str) -> Any:
    """Return the value of `name` in a client or mapping; None if it cannot be read."""
    try:
        return place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
    except Exception:  # a property of the app's may do anything
        return None


def record_call(
    context: AgentContext,
    request: Mapping[str, Any],
    answer: Mapping[str, Any],
    end: SpanEnd = SUCCEEDED,
    *,
    start_ns: int,
    client: Any = None,
    native: str = "",
    is_cached: bool = False,
) -> None:
    """Record a call that a client without an SDK of `sdks` made, after the call has ended.

    A call to the attempt's own gateway is left out, because the gateway records it.

    Args:
        context: context of the calling agent.
        request: the known part of the request, as the body of an OpenAI request.
        answer: the known part of the answer, as an OpenAI completion or response; empty for none.
        end: status, message and attributes of the end.
        start_ns: start, nanoseconds since the epoch.
        client: the framework's client; None if it is unknown.
        native: name of a client that records its calls, for a hint to the user; empty for none.
        is_cached: whether a cache answered, so that no model was called.
    """
    answer = {**answer, "usage": None} if is_cached else answer
    description = Client() if client is None else client_of(client, native)
    gateway = context.scope.gateway_url
    if gateway and f"{description.url}/".startswith(f"{gateway}/"):
        return
    is_abandoned = end.attributes.get(semconv.ERROR_TYPE) in _ABANDONED
    status = SpanStatus.UNSET if is_abandoned else end.status
    with images_into(context.scope.recorder.images):
        content = {**request_attributes(request), **answer_attributes(answer)}
    attributes = {
        semconv.CALL_ID: new_id("call"),
        semconv.ROUTE: Route.APP.value,
        semconv.CACHED: is_cached or None,
        semconv.CALL_OUTCOME: _OUTCOMES.get(status, CallOutcome.CANCELLED).value,
        **content,
        **description.attributes(),
        **error_attributes(end.attributes),
    }
    span = make_span(
        context,
        f"chat {request.get('model') or ''}".rstrip(),
        SpanKind.LLM,
        attributes,
        start_ns=start_ns,
        status=end.status,
        status_message=end.message or ("error" if end.status is SpanStatus.ERROR else ""),
    )
    context.scope.recorder.add(span)
