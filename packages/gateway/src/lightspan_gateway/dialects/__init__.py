"""The APIs that a client may use: OpenAI's chat completions, completions and Responses, Anthropic's
Messages.

A dialect parses a request's body into a `ModelRequest`, which formats the answer and its chunks.
Pure. `chat`, `completions`, `openai_responses` and `anthropic` are the dialects, `base` has what
they share, `constraints` parses response formats and tool choices, `sse` formats events.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightspan_gateway.api_errors import ApiError, openai_refusal
from lightspan_gateway.dialects.anthropic import (
    message_error_event,
    message_refusal,
    parse_message,
)
from lightspan_gateway.dialects.base import ModelRequest
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.dialects.completions import parse_completion
from lightspan_gateway.dialects.openai_responses import parse_response
from lightspan_gateway.dialects.sse import event_of

Parse = Callable[..., ModelRequest]
"""Parses a request's body; see `parse_chat`."""


class Dialect(NamedTuple):
    """An API."""

    parse: Parse
    refusal: Callable[[ApiError, str | None], bytes] = openai_refusal
    """Formats an error; the second argument is the request's id."""
    error_event: Callable[[bytes], bytes] = event_of
    """Formats the body of an error as an event of a stream."""


DIALECTS: Final[Mapping[str, Dialect]] = {
    "chat/completions": Dialect(parse_chat),
    "completions": Dialect(parse_completion),
    "responses": Dialect(parse_response),
    "messages": Dialect(parse_message, message_refusal, message_error_event),
}
"""By the path after `/v1/`."""

__all__ = ["DIALECTS", "Dialect", "Parse"]
