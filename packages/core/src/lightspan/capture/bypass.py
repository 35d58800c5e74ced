"""Calls of model clients that use no SDK of `sdks`: recorded as structure, without tokens.

The wire shim sees every call of those. A client of another kind (Ollama, LiteLLM, one of the
user's own) asks past it: such a call goes where it went, and an adapter that knows of it
records what it was, so that it shows in the coverage as a call that cannot be trained. So it does
with an answer that came from a framework's cache, which adapters switch off where `is_routed`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from lightspan.capture.scope import Acting, CallEnd, make_span
from lightspan.schema import conventions
from lightspan.schema.call_attributes import answer_attributes, request_attributes
from lightspan.schema.records import Mode, new_id
from lightspan.schema.routing import Route
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanStatus, now_ns
from lightspan.schema.tokens import CallOutcome

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
        known: Attributes = {conventions.CLIENT: self.name, conventions.CLIENT_FIX: self.fix}
        try:
            address, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        except ValueError:  # a port that is no number
            return known
        if address:
            known[conventions.SERVER_ADDRESS] = address
            if port is not None:
                known[conventions.SERVER_PORT] = port
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


def running(kind: type) -> Any:
    """The innermost object of this class whose method is running; None where there is none.

    For frameworks that tell of a call from inside the client's method, but not of the client.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind):
                return owner
        frame = frame.f_back
    return None


def is_at_gateway(client: Client | None, gateway_url: str | None) -> bool:
    """Whether it asks the attempt's own endpoint, which records the call itself."""
    return (
        client is not None and bool(gateway_url) and f"{client.url}/".startswith(f"{gateway_url}/")
    )


class CallsInside:
    """Of a framework's model call: those inside it that somebody else records. Thread-safe.

    A client may try another way where one of them fails (another URL, another client); only what
    brought the answer may be recorded as having done so, and once.
    """

    def __init__(self) -> None:
        self._ends: list[list[bool]] = []
        """Of each call, how it ended, once it has."""

    def begins(self) -> CallEnd:
        """One begins; what is returned is to be told whether it brought an answer."""
        ends: list[bool] = []
        self._ends.append(ends)
        return ends.append

    def leave(self, *, is_ok: bool) -> bool:
        """Whether the call around them is nobody's but the framework's to record.

        Args:
            is_ok: it has an answer.
        """
        if not self._ends:
            return True
        return is_ok and all(ends and not ends[0] for ends in self._ends)


_OUTCOMES = {SpanStatus.OK: CallOutcome.OK, SpanStatus.ERROR: CallOutcome.ERROR}


def bypassing_call(
    acting: Acting,
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
    known = bypassing_attributes(request, answer, outcome or outcome_of(status))
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


def bypassing_attributes(
    request: Mapping[str, Any], answer: Mapping[str, Any], outcome: CallOutcome
) -> Attributes:
    """The attributes of such a call, with a call id of its own."""
    return {
        conventions.CALL_ID: new_id("call"),
        conventions.ROUTE: Route.APP.value,
        conventions.CALL_OUTCOME: outcome.value,
        **request_attributes(request),
        **answer_attributes(answer),
    }


def outcome_of(status: SpanStatus) -> CallOutcome:
    """What became of a call whose span has this status."""
    return _OUTCOMES.get(status, CallOutcome.CANCELLED)


def is_routed(acting: Acting) -> bool:
    """Whether a call made now is one that the gateway answers in a rollout, or one of an agent
    whose instructions are learned.

    Then no cache of the app's may answer it: that is no sample of the policy, and in a validation
    one of an older policy, or the answer to other instructions. What is said stays out of the
    cache, too.
    """
    scope = acting.scope
    if scope.mode is Mode.PRODUCTION:
        return False
    if scope.instructions is not None and scope.instructions.concerns(acting.path):
        return True
    if scope.gateway_url is None:
        return False
    return scope.routing.target(acting.path).route is not Route.APP


__all__ = [
    "CallsInside",
    "Client",
    "bypassing_attributes",
    "bypassing_call",
    "client_of",
    "is_at_gateway",
    "is_routed",
    "outcome_of",
    "running",
]
