"""Connect an app to the policies that it trained: `lightspan.connect("http://127.0.0.1:8000")`.

`lightspan serve` answers at one endpoint. An app whose agents share a client says with one line
that the calls of each agent go there, as they did in training: whoever makes a model call is known
by the same adapters and `with lightspan.agent(…)`. Agents that the server does not answer keep the
endpoint that the app gave them. Nothing is recorded, and nothing of the app's own client (its key,
headers, query) is sent along.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec

from lightspan.capture import context, sdk_instrumentation, sdks
from lightspan.capture.context import AgentContext, AttemptContext
from lightspan.capture.recorder import NullRecorder
from lightspan.errors import ConfigError
from lightspan.schema import semconv
from lightspan.schema.records import Mode
from lightspan.schema.redaction import add_key_variable
from lightspan.schema.routing import Routing
from lightspan.schema.semconv import ROUTING_PATH

ENDPOINT_VARIABLE: Final = "LIGHTSPAN_ENDPOINT"
KEY_VARIABLE: Final = "LIGHTSPAN_API_KEY"

_TIMEOUT_S: Final = 10.0


class Connection:
    """What `connect` returns; as a context manager it ends with the block."""

    def __init__(self, url: str | None, acting: AgentContext | None) -> None:
        self.url = url
        """The server's origin; None if there is no connection."""
        self._acting = acting
        if acting is not None:
            context.connect(acting)

    def close(self) -> None:
        """Let model calls go where the app points them again. Idempotent."""
        if self._acting is not None:
            context.disconnect(self._acting)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(url: str | None = None, *, api_key_env: str | None = None) -> Connection:
    """Send each agent's model calls to the policy that it trained, for the whole process.

    The agents are named as in training, by the framework's adapter (`instrument()`) or by
    `with lightspan.agent(…)`. Inside a runner's scope it changes nothing.

    Args:
        url: of a `lightspan serve`; None for `LIGHTSPAN_ENDPOINT`, and if that is not set nothing
            is connected, so that the line can stay in the app.
        api_key_env: the variable with the server's key; None for `LIGHTSPAN_API_KEY`, if it is set.

    Raises:
        ConfigError: nobody serves there, the key is wrong, the versions differ, or there is no
            client of OpenAI or Anthropic to connect.
    """
    chosen = url or os.environ.get(ENDPOINT_VARIABLE)
    if not chosen:
        return Connection(None, None)
    origin, key = _origin(chosen), _key(api_key_env)
    routing = _routing(origin, key)
    if not sdks.any_installed():
        raise ConfigError(
            "there is no client of OpenAI or Anthropic in this environment whose calls could be "
            "connected: pip install openai"
        )
    sdk_instrumentation.install()
    served = AttemptContext(
        rollout_id="",
        attempt_id="",
        mode=Mode.VAL,
        gateway_url=origin,
        call_token=key,
        routing=routing,
        recorder=NullRecorder(),
        is_outside=True,
    )
    return Connection(origin, AgentContext(served))


def _origin(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(f"{url!r} is no endpoint: give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key(name: str | None) -> str:
    if name is None:
        return os.environ.get(KEY_VARIABLE, "")
    add_key_variable(name)
    if not os.environ.get(name):
        raise ConfigError(f"api_key_env={name!r}: that variable is not set")
    return os.environ[name]


def _routing(origin: str, key: str) -> Routing:
    """What the server answers."""
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
        raise ConfigError(f"{origin} says of its agents what cannot be read: {error}") from error


def _fetch(origin: str, key: str) -> dict[str, Any]:
    from urllib import error as refused, request

    class NoRedirect(request.HTTPRedirectHandler):
        """The key goes where it was meant to, or nowhere."""

        def redirect_request(self, *args: Any) -> None:
            return None

    opener = request.build_opener(request.ProxyHandler({}), NoRedirect())
    asked = request.Request(origin + ROUTING_PATH, headers={"Authorization": f"Bearer {key}"})
    try:
        with opener.open(asked, timeout=_TIMEOUT_S) as response:
            answer = msgspec.json.decode(response.read())
    except refused.HTTPError as error:
        with error:
            raise ConfigError(_refusal(origin, error.code)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"nobody serves at {origin} ({reason}): start it with `lightspan serve runs/NAME`, or "
            "leave connect() out"
        ) from error
    if not isinstance(answer, dict):
        raise ConfigError(_refusal(origin, 200))
    return answer


def _refusal(origin: str, status: int) -> str:
    if status == 401:
        return f"{origin} wants another key: set {KEY_VARIABLE}, or give api_key_env="
    if status == 403:
        return f"{origin} refuses this machine (403)"
    return f"{origin} is no `lightspan serve` of this version (it answered {status})"


__all__ = ["Connection", "connect"]
