"""Name where model calls go in `fit`: to a trained policy or to an endpoint."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from lightspan.lightning.episode import Call
from lightspan.schema import semconv as c
from lightspan.schema.routing import Route, Routing, Target

PAID: Final = (Route.APP, Route.ENDPOINT)
"""Routes of calls to endpoints, which may charge for them."""


def target_of(call: Call, routing: Routing) -> Target:
    """Return the target of a call's agent, or the app's own endpoint if the call went there.

    A call of any agent goes there if its client is not redirected, such as a judge's in an agent of
    Agent Lightning.
    """
    target = routing.target(call.agent_path)
    return Target(route=Route.APP) if call.route is Route.APP else target


def destination(call: Call, routing: Routing) -> str:
    """Describe where `fit` would send the call, such as `policy NAME` or `model at host`."""
    target = target_of(call, routing)
    names = {
        Route.POLICY: f"policy {target.policy}",
        Route.BASE: "the starting weights",
        Route.SHARED: f"policy {target.policy}, untrained",
    }
    return names.get(target.route) or endpoint_of(call, target)


def endpoint_of(call: Call, target: Target) -> str:
    """Return the endpoint of a call as `model at host`.

    The endpoint is that of `target`. If `target` has none, it is the endpoint in the call's span.
    """
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
