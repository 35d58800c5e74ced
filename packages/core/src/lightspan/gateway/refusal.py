"""Refusals, and OpenAI's format of them."""

from __future__ import annotations

from typing import Final

import msgspec

from lightspan.engines.protocol import PromptRefused
from lightspan.errors import (
    ContextOverflowError,
    EngineClosedError,
    LightspanError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.schema import conventions as c

CLIENT_LEFT: Final = 499
"""The status of an answer that nobody reads."""

LONGEST_MESSAGE: Final = 4_000
"""Letters of a refusal."""


class ApiError(Exception):
    """A refusal: HTTP status, message, and what clients look at."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:  # it quotes what was asked, whatever its size
            message = f"{message[:LONGEST_MESSAGE]}…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def openai_refusal(error: ApiError, request_id: str | None = None) -> bytes:
    """The JSON body of a refusal, which does not name the request."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": told})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """HTTP 400 naming the field."""
    return ApiError(400, message, param=param, code=code)


def no_model(message: str) -> ApiError:
    """HTTP 404: the request asks for a model that is not here."""
    return ApiError(404, message, param="model", code="model_not_found")


def refusal_of(error: LightspanError) -> ApiError:
    """What a client is told of a call that failed."""
    match error:
        case ContextOverflowError():
            return bad_request(str(error), "messages", c.CONTEXT_OVERFLOW)
        case PromptRefused():
            return bad_request(str(error), "prompt")
        case UnsupportedError():
            return bad_request(str(error))
        case NotFoundError():
            return ApiError(404, str(error), code="model_not_found")
        case EngineClosedError():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, str(error))
