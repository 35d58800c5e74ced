"""Tell failures of the gateway, and of other model servers, from the app's own errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from lightspan.schema.semconv import HEADER_AGENT

_MODEL_CLIENTS: Final = frozenset({"openai", "anthropic"})
_REFUSALS: Final = frozenset({401, 403, 408, 429})
"""Status codes of an endpoint that no text of a policy causes: the key, a limit, an overload."""


def error_code(error: BaseException) -> Any:
    """Return the error code that an endpoint sent, in OpenAI's or Anthropic's format.

    None if there is no code.
    """
    code = getattr(error, "code", None)
    return _body_field(error, "details", "error_code") if code is None else code


def _body_field(error: BaseException, *names: str) -> Any:
    """Return a field of the JSON object "error" in the body of an API client's exception.

    None if there is no such field.

    Args:
        names: keys of the nested objects, the field's key last.
    """
    value = getattr(error, "body", None)
    for name in ("error", *names):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def is_unreachable(error: BaseException, gateway_url: str | None) -> bool:
    """Return whether a request to the gateway or another model server failed without an answer.

    That is a connection error, a status of 500 or above, or a stream that broke off. For another
    model server it is also a refusal because of the key or a limit (`_REFUSALS`).
    """
    try:
        url = str(error.request.url)  # type: ignore[attr-defined]
    except Exception:  # most exceptions have no request, and httpx raises where it knows none
        return False
    # the HTTP client's exception, from which the SDK's was raised, has its status in the response
    sources = (error, getattr(error, "response", None))
    status = next((s for x in sources if (s := getattr(x, "status_code", None)) is not None), None)
    is_gateway = gateway_url is not None and url.startswith(f"{gateway_url}/")
    if not is_gateway and type(error).__module__.partition(".")[0] not in _MODEL_CLIENTS:
        return False
    # Anthropic's client gives a stream that broke off the status with which the stream began
    broken = _body_field(error, "type") if status is not None and status < 400 else None
    return (
        status is None
        or status >= 500
        or broken in ("api_error", "overloaded_error")
        or (not is_gateway and status in _REFUSALS)
    )


def describe_request(error: BaseException, gateway_url: str | None, caller: str) -> str:
    """Return where the request of an `is_unreachable` error went, and which agent made it.

    Args:
        error: the exception.
        gateway_url: base URL of the gateway; None without a gateway.
        caller: path of the agent whose call failed last; empty if unknown.
    """
    request = error.request  # type: ignore[attr-defined]
    parts = urlsplit(str(request.url))  # keys may be in its query, or before the host
    url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    agent = unquote(str(request.headers.get(HEADER_AGENT, ""))) or caller
    whose = "the training's gateway" if url.startswith(f"{gateway_url}/") else "the app's endpoint"
    return f"{whose}, {url}{f', called by {agent}' if agent else ''}"
