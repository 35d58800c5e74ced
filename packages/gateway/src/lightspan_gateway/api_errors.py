"""Error responses, and their JSON in OpenAI's format."""

from __future__ import annotations

from typing import Final

import msgspec

from lightspan import errors
from lightspan.protocols.engine import PromptRefused
from lightspan.schema import semconv as c

CLIENT_LEFT: Final = 499
"""Status of a request whose client disconnected (nginx's 499)."""
MAX_MESSAGE_LENGTH: Final = 4_000


class ApiError(Exception):
    """An error response: HTTP status, message, and OpenAI's `param` and `code`.

    `error_type` is the error recorded in the span of the call. None for `code`, or for the status
    if there is no code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        error_type: str | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_LENGTH:  # a message may quote a field of any size
            message = f"{message[:MAX_MESSAGE_LENGTH]}…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.error_type = error_type or code or str(status)


def openai_error(error: ApiError, request_id: str | None = None) -> bytes:
    """Return the JSON of an error in OpenAI's format.

    `request_id` is ignored, because the format has no field for it.
    """
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": details})


def call_token_error(token: str) -> ApiError:
    """Return the HTTP 401 error for a request whose call token is missing or unknown.

    A call token is the key with which an attempt authenticates its model calls.

    Args:
        token: the token in the request; empty if it has none.
    """
    problem = "unknown call token" if token else "a call token is missing"
    return ApiError(
        401,
        f"{problem}: the key must be the attempt's own. A program that `Command` starts reads it "
        "from OPENAI_API_KEY or ANTHROPIC_API_KEY. In Python, give the client "
        "api_key=llm.api_key, of the app's argument `llm` (OPENAI_API_KEY is a placeholder there), "
        "or use the OpenAI SDK inside the rollout. For a framework, call its adapter's "
        "instrument() first, such as lightspan_autogen.instrument()",
        code="invalid_api_key",
    )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an HTTP 400 error.

    Args:
        message: the error message.
        param: request field at fault; None for the whole request.
        code: error code for programs, as in OpenAI's API; None for none.
    """
    return ApiError(400, message, param=param, code=code)


def no_model(message: str) -> ApiError:
    """Return an HTTP 404 for an unknown model."""
    return ApiError(404, message, param="model", code="model_not_found")


def to_api_error(error: errors.LightspanError) -> ApiError:
    """Convert the error of a failed call to an error response with the fitting HTTP status."""
    match error:
        case errors.ContextOverflowError():
            return bad_request(str(error), "messages", c.CONTEXT_OVERFLOW)
        case PromptRefused():
            return bad_request(str(error), "prompt")
        case errors.UnsupportedError():
            return bad_request(str(error))
        case errors.NotFoundError():
            return ApiError(404, str(error), code="model_not_found")
        case errors.EngineClosedError():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, str(error))
