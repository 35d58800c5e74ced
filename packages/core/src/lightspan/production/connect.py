"""Connect an app to the policies that it trained: `lightspan.connect("http://127.0.0.1:8000")`.

`lightspan serve` has one endpoint for all policies. `connect` redirects each agent's model calls to
this endpoint, also if the agents share a client. As in training, adapters and `with
lightspan.agent(…)` set the acting agent. Calls of agents for which the server has no route go where
the app sends them. Nothing is recorded, and nothing of the app's own client (key, headers, query)
is sent to the server.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from lightspan.capture import context, context_propagation, sdk_instrumentation, sdks
from lightspan.capture._globals import state
from lightspan.capture.context import AgentContext, AttemptContext
from lightspan.capture.recorder import NullRecorder
from lightspan.errors import ConfigError
from lightspan.production.auto_attempts import unrecorded_attempt
from lightspan.schema import semconv
from lightspan.schema.records import Mode
from lightspan.schema.redaction import add_key_variable
from lightspan.schema.routing import Routing
from lightspan.schema.semconv import ROUTING_PATH

ENDPOINT_VARIABLE: Final = "LIGHTSPAN_ENDPOINT"
KEY_VARIABLE: Final = "LIGHTSPAN_API_KEY"

_TIMEOUT_S: Final = 10.0
"""Seconds to wait for the server's routes."""


class Connection(AbstractContextManager["Connection"]):
    """The result of `connect`. In a `with` statement, the connection ends with the block."""

    def __init__(self, url: str | None, ambient: AgentContext | None) -> None:
        self.url = url
        """Scheme, host and port of the server; None if there is no connection."""
        self._ambient = ambient
        if ambient is not None:
            context.connect(ambient)
            context_propagation.carry(context_propagation.CONNECTION)

    def close(self) -> None:
        """Stop redirecting model calls. Idempotent."""
        if self._ambient is not None:
            context.disconnect(self._ambient)
            if not state.connections:
                context_propagation.stop_carrying(context_propagation.CONNECTION)

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(url: str | None = None, *, api_key_env: str | None = None) -> Connection:
    """Send each agent's model calls to the policy trained for it, in the whole process.

    The agents are named as in training, by the framework's adapter (`instrument()`) or by `with
    lightspan.agent(…)`. Calls in the attempts of a runner are not redirected.

    Args:
        url: URL of a `lightspan serve`; None for the value of the environment variable
            `LIGHTSPAN_ENDPOINT`. If that is not set, nothing is connected.
        api_key_env: environment variable with the server's key; None for `LIGHTSPAN_API_KEY`, or no
            key if that is not set.

    Raises:
        ConfigError: the server does not answer, the key is wrong, the versions differ, or no client
            of OpenAI or Anthropic is installed.
    """
    chosen = url or os.environ.get(ENDPOINT_VARIABLE)
    if not chosen:
        return Connection(None, None)
    origin, key = _origin(chosen), _key(api_key_env)
    routing = _routing(origin, key)
    if not sdks.any_installed():
        raise ConfigError("no client of OpenAI or Anthropic is installed: pip install openai")
    sdk_instrumentation.install()
    served = AttemptContext(
        mode=Mode.VAL,
        gateway_url=origin,
        call_token=key,
        routing=routing,
        recorder=NullRecorder(),
        is_outside=True,
        attempt_factory=unrecorded_attempt,
    )
    return Connection(origin, AgentContext(served))


def _origin(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(f"{url!r} is not an endpoint: give a URL such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key(name: str | None) -> str:
    if name is None:
        return os.environ.get(KEY_VARIABLE, "")
    add_key_variable(name)
    if not os.environ.get(name):
        raise ConfigError(f"api_key_env={name!r}: that variable is not set")
    return os.environ[name]


def _routing(origin: str, key: str) -> Routing:
    """Fetch and return the server's routes; raise `ConfigError` if that fails."""
    answer = _fetch(origin, key)
    protocol = answer.get("protocol")
    if protocol != semconv.PROTOCOL_VERSION:
        raise ConfigError(
            f"{origin} speaks protocol {protocol}, this lightspan speaks "
            f"{semconv.PROTOCOL_VERSION}: install the same version on both sides"
        )
    try:
        return msgspec.convert(answer.get("routing"), Routing)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin} has routes that cannot be read: {error}") from None


def _fetch(origin: str, key: str) -> dict[str, Any]:
    from urllib import error as http_errors, request

    class NoRedirect(request.HTTPRedirectHandler):
        """A handler that refuses redirects, which could leak the key to another server."""

        def redirect_request(self, *args: Any) -> None:
            return None

    opener = request.build_opener(request.ProxyHandler({}), NoRedirect())
    call = request.Request(origin + ROUTING_PATH, headers={"Authorization": f"Bearer {key}"})
    try:
        with opener.open(call, timeout=_TIMEOUT_S) as response:
            answer = msgspec.json.decode(response.read())
    except http_errors.HTTPError as error:
        with error:
            raise ConfigError(_refusal(origin, error.code)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{origin} does not answer ({reason}): start it with `lightspan serve runs/NAME`, or "
            "leave connect() out"
        ) from None
    if not isinstance(answer, dict):
        raise ConfigError(_refusal(origin, 200))
    return answer


def _refusal(origin: str, status: int) -> str:
    if status == 401:
        return f"{origin} rejects the key: set {KEY_VARIABLE}, or give api_key_env="
    if status == 403:
        return f"{origin} refuses this machine (403)"
    return f"{origin} is not a `lightspan serve` of this version (it answered {status})"
