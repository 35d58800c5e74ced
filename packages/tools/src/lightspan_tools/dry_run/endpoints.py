"""Endpoints that answer in place of the models, and endpoints of frozen agents."""

from __future__ import annotations

import asyncio
import os
from typing import Final
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError, EngineError
from lightspan.lightning.episode import Call
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Target

DEFAULT_URL: Final = "https://api.openai.com/v1"
PAID: Final = (Route.APP, Route.ENDPOINT)
"""Routes of calls to endpoints, which may charge for them."""
_CONNECT_TIMEOUT_S: Final = 10.0


# --- in place of our models -------------------------------------------------------------------
def endpoint_routing(routing: Routing, endpoint: LLM) -> Routing:
    """Return the routing with an endpoint in place of every policy and starting model.

    Trained agents keep the sampling of training; routes to other endpoints stay unchanged.
    """

    def routed(target: Target) -> Target:
        if target.route in PAID:
            return target
        sampling = target.sampling if target.selected else None
        return Target(route=Route.ENDPOINT, endpoint=endpoint, sampling=sampling)

    rules = [msgspec.structs.replace(rule, target=routed(rule.target)) for rule in routing.rules]
    return msgspec.structs.replace(routing, rules=rules, default=routed(routing.default))


def environment_endpoint(model: str | None = None) -> LLM | None:
    """Return the endpoint of `OPENAI_BASE_URL` and `OPENAI_API_KEY`; None if neither is set.

    Args:
        model: name of the model; None for `OPENAI_MODEL`, else the model that the app names.
    """
    url = os.environ.get("OPENAI_BASE_URL")
    if url or os.environ.get("OPENAI_API_KEY"):
        return _endpoint_at(url or DEFAULT_URL, model)
    return None


def named_endpoint(base_url: str | None, model: str | None) -> LLM | None:
    """Return the endpoint of `--base-url` and `--endpoint-model`; None if neither is set.

    Raises:
        ConfigError: only the model is set, and the environment names no endpoint.
    """
    if base_url is not None:
        return _endpoint_at(base_url, model)
    if model is None:
        return None
    endpoint = environment_endpoint(model)
    if endpoint is None:
        raise ConfigError(
            f"--endpoint-model {model} names no endpoint: give --base-url, or set OPENAI_BASE_URL "
            "or OPENAI_API_KEY"
        )
    return endpoint


def _endpoint_at(url: str, model: str | None) -> LLM:
    # The variable's name in place of the key, which would end up in the store and in reports.
    return LLM(
        base_url=url,
        model=model or os.environ.get("OPENAI_MODEL", ""),
        api_key_env="OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else None,
    )


async def check_reachable(url: str) -> None:
    """Raise `EngineError` if no server listens at the URL.

    Otherwise every rollout would fail after the retries of the app's client.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        why = getattr(error, "strerror", None) or str(error) or "no answer"
        raise EngineError(
            f"the endpoint {url} cannot be reached ({why}): start it, or name another one"
        ) from error
    writer.close()


def described(endpoint: LLM) -> str:
    """Return the endpoint as `model at host`."""
    return f"{endpoint.model or 'the model that the app names'} at {host_of(endpoint.base_url)}"


# --- destinations of calls --------------------------------------------------------------------
def destination(call: Call, target: Target) -> str:
    """Return the destination of the call in `fit`."""
    names = {
        Route.POLICY: f"policy {target.policy}",
        Route.BASE: "the starting weights",
        Route.SHARED: f"policy {target.policy}, untrained",
    }
    return names.get(target.route) or endpoint_of(call, target)


def endpoint_of(call: Call, target: Target) -> str:
    """Return the endpoint of a frozen call as `model at host`, from its target or its span."""
    attributes = call.span.attributes if call.span is not None else {}
    model = c.model_of(attributes) or "a model"
    if target.endpoint is not None:
        host = host_of(target.endpoint.base_url)
        return f"{target.endpoint.model or model} at {host}"
    host, port = str(attributes.get(c.SERVER_ADDRESS, "")), attributes.get(c.SERVER_PORT)
    return f"{model} at {(f'{host}:{port}' if port else host) or 'an unknown host'}"


def host_of(url: str) -> str:
    """Return host and port of a URL, without credentials."""
    return urlsplit(url).netloc.rpartition("@")[2]
