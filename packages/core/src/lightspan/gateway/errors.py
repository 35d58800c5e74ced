"""Refusals in OpenAI's error format."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A refusal: HTTP status, message, and what OpenAI's clients look at."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """HTTP 400 naming the field."""
    return ApiError(400, message, param=param, code=code)


CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit; runners read it to tell the outcome."""
