"""Calls of model clients that use no SDK of `sdks`: recorded as structure, without tokens.

The wire shim sees every call of those. A client of another kind (Ollama, LiteLLM, one of the
user's own) asks past it: such a call goes where it went, and an adapter that knows of it
records it (`record_call`), so that it shows in the coverage as a call that cannot be trained. So it
does with an answer of a framework's cache, which adapters switch off where a call `is_routed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from lightspan.capture.adapter import SUCCEEDED, SpanEnd, error_attributes
from lightspan.capture.context import AgentContext, CallEnd, make_span
from lightspan.schema import semconv
from lightspan.schema.genai_attributes import answer_attributes, request_attributes
from lightspan.schema.records import new_id
from lightspan.schema.routing import Route
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanStatus, now_ns
from lightspan.schema.token_records import CallOutcome

_URLS: Final = (
    *("base_url", "api_base", "openai_api_base", "endpoint", "endpoint_url", "host", "url"),
    *("_base_url", "_api_base", "_host"),
)
"""Settings in which clients keep where they ask."""
_SETTINGS: Final = ("_raw_config", "_create_args", "model_kwargs")
"""Attributes in which clients keep the settings that they were made with."""


class Client(NamedTuple):
    """A model client that the wire shim does not see."""

    name: str
    """Of its class."""
    url: str
    """Where it asks; empty where that cannot be read."""
    fix: str
    """What to do so that its calls can be trained."""

    def attributes(self) -> Attributes:
        """What a span says of it: never a key, nor a query, where one may stand."""
        known: Attributes = {semconv.CLIENT: self.name, semconv.CLIENT_FIX: self.fix}
        try:
            address, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        except ValueError:  # a port that is no number
            return known
        if address:
            known[semconv.SERVER_ADDRESS] = address
            if port is not None:
                known[semconv.SERVER_PORT] = port
        return known


def client_of(client: Any, instead: str) -> Client:
    """What is to be said of a model client. Never raises.

    Args:
        client: the framework's object.
        instead: the framework's client that the wire shim sees.
    """
    name = _name_of(type(client))
    places = [client, *(_read(client, key) for key in _SETTINGS)]
    urls = (_text(_read(place, key)) for key in _URLS for place in places)
    url = next((text for text in urls if "//" in text), "")
    return Client(name, url, _fix(client, name, instead))


def _text(value: Any) -> str:
    try:
        return str(value or "")
    except Exception:  # the app's object makes what it likes of it
        return ""


def _fix(client: Any, name: str, instead: str) -> str:
    if "litellm" in name.lower() or _read(client, "is_litellm") is True:
        return 'name its model "openai/…": LiteLLM then uses the OpenAI SDK, which lightspan sees'
    return f"use {instead} in its place"


def _name_of(kind: type) -> str:
    """The class as it is imported: from its package, where that has it."""
    package = kind.__module__.partition(".")[0]
    is_public = getattr(sys.modules.get(package), kind.__name__, None) is kind
    return f"{package if is_public else kind.__module__}.{kind.__qualname__}"


def _read(place: Any, name: str) -> Any:
    """A setting of a client, or of a mapping of them; None where it has none."""
    try:
        return place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
    except Exception:  # a property of the app's may do anything
        return None


def is_at_gateway(client: Client | None, gateway_url: str | None) -> bool:
    """Whether it asks the attempt's own endpoint, which records the call itself."""
    return (
        client is not None and bool(gateway_url) and f"{client.url}/".startswith(f"{gateway_url}/")
    )


class NestedCalls:
    """The model calls inside a framework's model call that somebody else records. Thread-safe.

    A client may try another URL or client where one fails: the framework's call is recorded only if
    no call inside it is under way or brought the answer.
    """

    def __init__(self) -> None:
        self._ends: list[list[bool]] = []
        """Of each call, whether it was answered, once it has ended."""

    def start(self) -> CallEnd:
        """Note that a call begins; return what is to be called with whether it was answered."""
        ends: list[bool] = []
        self._ends.append(ends)
        return ends.append

    def needs_record(self, *, is_ok: bool) -> bool:
        """Return whether the framework's call is the adapter's to record.

        Args:
            is_ok: the framework's call was answered.
        """
        if not self._ends:
            return True
        return is_ok and all(ends and not ends[0] for ends in self._ends)

    @staticmethod
    def start_in(calls: Iterable[NestedCalls]) -> CallEnd | None:
        """Note one call in several framework calls, as a `CallListener`; None if there are none."""
        ends = [nested.start() for nested in calls]
        if len(ends) < 2:
            return ends[0] if ends else None

        def ended(is_answered: bool) -> None:
            for end in ends:
                end(is_answered)

        return ended


def record_call(
    context: AgentContext,
    request: Mapping[str, Any],
    answer: Mapping[str, Any],
    end: SpanEnd = SUCCEEDED,
    *,
    start_ns: int,
    client: Any = None,
    native: str = "",
) -> None:
    """Record a model call, ended now, of a client that uses neither OpenAI's nor Anthropic's SDK.

    A call to the attempt's own gateway is left out, which records it itself.

    Args:
        context: who asked.
        request: what is known of it, as the body of an OpenAI request.
        answer: what is known of it, as an OpenAI completion or response; empty if there is none.
        end: how it ended.
        start_ns: when it began, nanoseconds since the epoch.
        client: the framework's object that asked, if it is known.
        native: the framework's client that uses OpenAI's SDK, to be named as the remedy.
    """
    known = None if client is None else client_of(client, native)
    if is_at_gateway(known, context.scope.gateway_url):
        return
    error_type = end.attributes.get(semconv.ERROR_TYPE)
    span = bypassing_call(
        context,
        request,
        answer,
        start_ns=start_ns,
        status=end.status,
        message=end.message or ("error" if end.status is SpanStatus.ERROR else ""),
        attributes=error_attributes(end.attributes),
        outcome=CallOutcome.CANCELLED if error_type in _CANCELLED else None,
        client=known,
    )
    context.scope.recorder.add(span)


_CANCELLED: Final = ("CancelledError", "GeneratorExit")
_OUTCOMES = {SpanStatus.OK: CallOutcome.OK, SpanStatus.ERROR: CallOutcome.ERROR}


def bypassing_call(
    acting: AgentContext,
    request: Mapping[str, Any],
    answer: Mapping[str, Any],
    *,
    start_ns: int,
    status: SpanStatus = SpanStatus.OK,
    message: str = "",
    attributes: Mapping[str, Any] | None = None,
    outcome: CallOutcome | None = None,
    client: Client | None = None,
) -> Span:
    """The LLM span of a call that the wire shim could not see, which has ended now.

    Args:
        acting: who asked.
        request: what is known of it, as the body of an OpenAI request.
        answer: what is known of it, as an OpenAI completion or response; empty if there is none.
        start_ns: when it began, nanoseconds since the epoch.
        status: how it ended; UNSET if it was left.
        message: of an error.
        attributes: more of them, such as those of an error.
        outcome: if the status does not say it.
        client: who asked for it, where the framework tells.
    """
    known = _attributes(request, answer, outcome or _outcome_of(status))
    if client is not None:
        known |= client.attributes()
    return make_span(
        acting,
        f"chat {request.get('model') or ''}".rstrip(),
        SpanKind.LLM,
        {**known, **(attributes or {})},
        start_ns=start_ns,
        end_ns=now_ns(),
        status=status,
        status_message=message,
    )


def _attributes(
    request: Mapping[str, Any], answer: Mapping[str, Any], outcome: CallOutcome
) -> Attributes:
    """The attributes of such a call, with a call id of its own."""
    return {
        semconv.CALL_ID: new_id("call"),
        semconv.ROUTE: Route.APP.value,
        semconv.CALL_OUTCOME: outcome.value,
        **request_attributes(request),
        **answer_attributes(answer),
    }


def _outcome_of(status: SpanStatus) -> CallOutcome:
    """What became of a call whose span has this status."""
    return _OUTCOMES.get(status, CallOutcome.CANCELLED)


__all__ = ["Client", "NestedCalls", "bypassing_call", "client_of", "is_at_gateway", "record_call"]
