"""Parse requests and format answers of OpenAI's and Anthropic's APIs.

A dialect is the code for one API. It parses a request's body into a `ModelRequest`, and the
`ModelRequest` formats the answer: as one JSON body, or as the chunks of a stream. Nothing here does
I/O.

`chat` (chat completions), `completions`, `openai_responses` and `anthropic` (Messages) are the
dialects. `base` has their shared parts, `constraints` parses response formats and tool choices,
`sse` formats server-sent events.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightspan_gateway.api_errors import ApiError, openai_error
from lightspan_gateway.dialects.anthropic import message_error, message_error_event, parse_message
from lightspan_gateway.dialects.base import ModelRequest
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.dialects.completions import parse_completion
from lightspan_gateway.dialects.openai_responses import parse_response
from lightspan_gateway.dialects.sse import event_of

Parse = Callable[..., ModelRequest]
"""Function that parses a request's body; see `parse_chat`."""


class Dialect(NamedTuple):
    """The parser and the error formats of one API."""

    parse: Parse
    format_error: Callable[[ApiError, str | None], bytes] = openai_error
    """Function that formats an error; its second argument is the request's id."""
    error_event: Callable[[bytes], bytes] = event_of
    """Function that formats the JSON of an error as an event of a stream."""


DIALECTS: Final[Mapping[str, Dialect]] = {
    "chat/completions": Dialect(parse_chat),
    "completions": Dialect(parse_completion),
    "responses": Dialect(parse_response),
    "messages": Dialect(parse_message, message_error, message_error_event),
}
"""Path after `/v1/` → dialect."""
COUNTS: Final[Mapping[str, str]] = {"messages": "count_tokens", "responses": "input_tokens"}
"""Path of an API after `/v1/` → last part of the path at which it counts a prompt's tokens."""

__all__ = ["COUNTS", "DIALECTS", "Dialect", "Parse"]
