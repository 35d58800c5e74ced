"""What a client may speak: OpenAI's chat completions, text completions and Responses, Anthropic's
Messages.

A dialect parses a request's body into a `ModelRequest` and words the answer or its chunks; nothing
here waits. `chat`, `completions`, `responses` and `messages` are the dialects, `shared` has what
they have in common, `constraints` reads what an answer has to be, `events` puts chunks into a
stream.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightspan.gateway.api_errors import ApiError, openai_refusal
from lightspan.gateway.dialects.anthropic import (
    message_error_event,
    message_refusal,
    parse_message,
)
from lightspan.gateway.dialects.base import ModelRequest
from lightspan.gateway.dialects.chat import parse_chat
from lightspan.gateway.dialects.completions import parse_completion
from lightspan.gateway.dialects.openai_responses import parse_response
from lightspan.gateway.dialects.sse import event_of

Parse = Callable[..., ModelRequest]
"""From a request's body to what it asks; see `parse_chat`."""


class Dialect(NamedTuple):
    """One of them."""

    parse: Parse
    refusal: Callable[[ApiError, str | None], bytes] = openai_refusal
    """The body of a refusal; the second argument is the request's id."""
    error_event: Callable[[bytes], bytes] = event_of
    """How the body of a refusal stands in a stream."""


DIALECTS: Final[Mapping[str, Dialect]] = {
    "chat/completions": Dialect(parse_chat),
    "completions": Dialect(parse_completion),
    "responses": Dialect(parse_response),
    "messages": Dialect(parse_message, message_refusal, message_error_event),
}
"""By the path after `/v1/`."""

__all__ = ["DIALECTS", "Dialect", "Parse"]
