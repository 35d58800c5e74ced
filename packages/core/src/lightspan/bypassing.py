"""Calls of model clients that do not use the OpenAI SDK: recorded as structure, without tokens.

The wire shim sees every call of an OpenAI client. A client of another kind (Anthropic, Ollama, one
of the user's own) asks past it: such a call goes where it went, and an adapter that knows of it
records what it was, so that it shows in the coverage as a call that cannot be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightspan import conventions
from lightspan.emit import make_span
from lightspan.records import CallOutcome, new_id
from lightspan.routing import Route
from lightspan.scope import Acting
from lightspan.spans import Attributes, Span, SpanKind, SpanStatus, now_ns
from lightspan.wire import answer_attributes, request_attributes

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
    """
    known = bypassing_attributes(request, answer, outcome or outcome_of(status))
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


__all__ = ["bypassing_attributes", "bypassing_call", "outcome_of"]
