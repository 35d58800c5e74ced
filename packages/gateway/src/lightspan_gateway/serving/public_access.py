"""Those who use what was trained: whoever may call is answered, and nothing is kept but counts.

Who asks is known as in training: by the shim's header, the URL (`/agents/{name}/v1`) or the model's
name, which is a policy's or an agent's. Sampling is what the request says; what cannot be honoured
is refused, but for `STEERING`, which is set aside and counted.
"""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Attempt, Claim, Mode, Rollout
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Rule, Target
from lightspan.schema.semconv import ROUTING_PATH
from lightspan.schema.token_records import CallOutcome
from lightspan_gateway.access_policy import AccessPolicy, token_of
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, bad_request, no_model
from lightspan_gateway.calls import CallerSession, CallInfo, CallLog, ServedCall
from lightspan_gateway.server import Server
from lightspan_gateway.serving.loopback import check_local, is_loopback

log: Final = logging.getLogger(__name__)

USAGE_PATH: Final = "/lightspan/usage"
REMEMBERED: Final = 64
"""Calls that a retry under the same call id is answered from."""
MAX_NAMES: Final = 1000
"""Agents that usage is counted by; a request may name any."""


class Use(NamedTuple):
    """What calls are counted by."""

    agent: str
    policy: str
    """Of an endpoint: its URL."""


class UsageCounter(CallLog):
    """Counts calls, and keeps nothing of them."""

    needs_bodies = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Use] = Counter()
        """Answered calls."""
        self.failed = 0
        self.set_aside: Counter[str] = Counter()
        """Fields of requests that only one provider's models have, by calls."""

    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        if outcome is CallOutcome.ERROR:
            self.failed += 1
        elif outcome is not CallOutcome.CANCELLED:
            self.calls[self._use(call.info)] += 1
        if new := sorted(call.overrides.keys() - self.set_aside.keys()):
            log.warning("set aside, since only one provider's models have it: %s", ", ".join(new))
        self.set_aside.update(call.overrides.keys())

    def _use(self, info: CallInfo) -> Use:
        endpoint = info.target.endpoint
        use = Use(info.agent_path, info.policy if endpoint is None else endpoint.base_url)
        known = use in self.calls or len(self.calls) < MAX_NAMES
        return use if known else use._replace(agent="…")

    async def refuse(self, info: CallInfo, error: ApiError) -> None:
        self.failed += error.status != CLIENT_LEFT

    async def mark(self, info: CallInfo, outcome: CallOutcome) -> None:
        """Nothing is kept, so nothing changes."""

    def summary(self) -> dict[str, dict[str, int]]:
        """Agent → policy → answered calls."""
        agents: dict[str, dict[str, int]] = {}
        for use, count in sorted(self.calls.items()):
            agents.setdefault(use.agent, {})[use.policy] = count
        return agents

    def as_document(self) -> dict[str, Any]:
        """What is told of it at `USAGE_PATH`."""
        return {
            "agents": self.summary(),
            "failed": self.failed,
            "set_aside": dict(self.set_aside),
        }


class PublicAccess(AccessPolicy):
    """The terms of serving: who has the key, if there is one, shares one session.

    Args:
        routing: which agent's calls go where, as in training.
        key: what callers must send; None lets in every program of this machine.
        max_tokens: of an answer, where a chat request does not say.
        upstream: where the calls go that are not ours to answer; None refuses them.
    """

    shutdown_s = 10.0

    def __init__(
        self,
        routing: Routing,
        *,
        key: str | None = None,
        max_tokens: int | None = None,
        upstream: LLM | None = None,
    ) -> None:
        self.tally = UsageCounter()
        super().__init__(self.tally)
        self.max_tokens = max_tokens
        rollout = Rollout(rollout_id="serve", task=None, task_id="", mode=Mode.VAL)
        attempt = Attempt(attempt_id="serve", rollout_id="serve", number=1, epoch=0)
        claim = Claim(rollout=rollout, attempt=attempt)
        self._session = CallerSession(claim, routing, shared=True, most_calls=REMEMBERED)
        self._routing = routing
        self._key = key
        self._upstream = upstream

    # --- who may call ---------------------------------------------------------------------
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Everybody's session.

        Raises:
            ApiError: 401 for a wrong key, 403 for a web page of elsewhere where there is no key.
        """
        if self._key is None:
            check_local(request, "start it with --api-key-env NAME")
        elif not hmac.compare_digest(token_of(request).encode(), self._key.encode()):
            raise ApiError(401, "wrong API key, or none", code="invalid_api_key")
        return self._session

    def sessions(self) -> list[CallerSession]:
        return [self._session]

    # --- where a call goes ----------------------------------------------------------------
    def target(self, session: CallerSession, path: str) -> Target:
        return self._ours_or_upstream(super().target(session, path))

    def by_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        if model in policies:
            route = Route.BASE if model == BASE_POLICY else Route.POLICY
            return c.UNNAMED_AGENT, Target(route=route, policy=model)
        if any(rule.matches(model) for rule in session.naming_rules):
            return model, self.target(session, model)
        if self._upstream is not None:
            return c.UNNAMED_AGENT, self._ours_or_upstream(Target(route=Route.APP))
        known = {"policies": sorted(policies), "agents": self._agents(policies)}
        listed = "; ".join(f"{what} {', '.join(names)}" for what, names in known.items() if names)
        what = f"unknown model {model!r}" if model else "the request names no model"
        raise no_model(
            f"{what}; this endpoint has the {listed}. An agent can also be named "
            "in the URL, /agents/{name}/v1"
        )

    def _ours_or_upstream(self, target: Target) -> Target:
        if target.route is not Route.APP or self._upstream is None:
            return target
        return Target(route=Route.ENDPOINT, endpoint=self._upstream)

    def not_ours(self, path: str) -> ApiError:
        return bad_request(
            f"agent {path!r} is not answered here: in training its calls went where "
            "the app points them. Point it at its own endpoint, or start the server with "
            "--upstream URL"
        )

    # --- what is told ---------------------------------------------------------------------
    def models(self, policies: Collection[str]) -> list[str]:
        return [*super().models(policies), *self._agents(policies)]

    def _agents(self, policies: Collection[str]) -> list[str]:
        """Agents that are ours to answer and that have a name, not a pattern."""
        return [
            rule.pattern
            for rule in self._routing.rules
            if is_name(rule) and rule.target.route is not Route.APP and rule.pattern not in policies
        ]

    def documents(self) -> Mapping[str, Callable[[], Any]]:
        return {ROUTING_PATH: self._public_routing, USAGE_PATH: self.tally.as_document}

    def _public_routing(self) -> dict[str, Any]:
        """For `lightspan.connect`: what of an app's calls is ours to answer.

        Without what is nobody's business: endpoints, sampling.
        """
        routing = Routing(
            rules=[
                msgspec.structs.replace(rule, target=_public(rule.target))
                for rule in self._routing.rules
            ],
            default=_public(self._routing.default),
        )
        return {"protocol": c.PROTOCOL_VERSION, "routing": msgspec.to_builtins(routing)}


class ServingGateway(Server):
    """Serves policies without recording, on the terms of `PublicAccess`.

    Args:
        engine: serves the policies, and the starting weights as `base` where an agent needs them.
        routing: which agent's calls go where, as in training.
        key: what callers must send as their API key; None lets everybody in who can reach us.
        host: interface.
        port: 0 takes a free one.
        max_tokens: of an answer, where a chat request does not say; None for the context's rest.
        upstream: where the calls of agents go that are not ours to answer, and calls that ask for a
            model that we do not have; None refuses them. With an empty `model` it is asked for the
            request's.

    Raises:
        ConfigError: others could reach the endpoint and there is no key.
    """

    def __init__(
        self,
        engine: TokenEngine,
        routing: Routing,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_tokens: int | None = None,
        upstream: LLM | None = None,
    ) -> None:
        check_open(host, key)
        visitors = PublicAccess(routing, key=key, max_tokens=max_tokens, upstream=upstream)
        super().__init__(visitors, engine, host=host, port=port)
        self.usage = visitors.tally
        """Who was answered by which policy."""


def is_name(rule: Rule) -> bool:
    """Whether the rule is of one agent name, not of a pattern."""
    return "*" not in rule.pattern and "/" not in rule.pattern


def _public(target: Target) -> Target:
    return Target(route=target.route, policy=target.policy)


def check_open(host: str, key: str | None) -> None:
    """Raise `ConfigError` if others could reach the endpoint without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} lets other machines in, and without a key anybody there could use the "
            "model: name the variable that holds a key (--api-key-env NAME), or stay on 127.0.0.1"
        )
    if key is not None and not key.strip():
        raise ConfigError("the API key is empty: set its variable to a long random text")


__all__ = [
    "PublicAccess",
    "ServingGateway",
    "UsageCounter",
    "Use",
    "check_open",
    "is_loopback",
    "is_name",
]
