"""The access policy of `lightspan serve`, where all callers share one session.

Calls are counted and not recorded. As in training, lightspan's header or the URL
(`/agents/{name}/v1`) names the agent of a call. Without both, the field `model` names an agent or a
policy. The request sets the sampling parameters. Unsupported fields are refused if they say how to
sample; others are ignored and counted (see `is_refused`).
"""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Attempt, Claim, Mode, Rollout
from lightspan.schema.routing import BASE_POLICY, Route, Routing, Rule, Target, split_path
from lightspan.schema.semconv import ROUTING_PATH
from lightspan.schema.token_records import CallOutcome
from lightspan_gateway.access_policy import AccessPolicy, token_of
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, bad_request, no_model
from lightspan_gateway.calls import CallerSession, CallInfo, CallLog, ServedCall
from lightspan_gateway.limits import GatewayLimits
from lightspan_gateway.server import Server
from lightspan_gateway.serving.loopback import check_local, is_loopback

log: Final = logging.getLogger(__name__)

USAGE_PATH: Final = "/lightspan/usage"
MAX_CALLS: Final = 64
"""Maximum number of calls in memory, which answer retries with the same call id."""
MAX_NAMES: Final = 1000
"""Maximum number of counters; requests may name any agent."""


class UsageCounter(CallLog):
    """A log that counts calls and stores nothing else."""

    needs_bodies = False

    def __init__(self) -> None:
        super().__init__()
        self.answered: Counter[tuple[str, str]] = Counter()
        """(agent, policy or URL of the endpoint) → number of answered calls."""
        self.failed = 0
        """Number of failed or refused calls."""
        self.ignored_fields: Counter[str] = Counter()
        """Ignored field, or tool that is not offered → number of calls with it."""

    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        if outcome is CallOutcome.ERROR:
            self.failed += 1
        elif outcome is not CallOutcome.CANCELLED:
            endpoint = call.info.target.endpoint
            agent, policy = call.info.agent_path, call.info.policy
            key = agent, policy if endpoint is None else endpoint.base_url
            if key not in self.answered and len(self.answered) >= MAX_NAMES:
                key = "…", key[1]
            self.answered[key] += 1
        if new := sorted(call.overrides.keys() - self.ignored_fields.keys()):
            log.warning(
                "ignored, because only one provider's models support it: %s", ", ".join(new)
            )
        self.ignored_fields.update(call.overrides.keys())

    async def record_refusal(self, info: CallInfo, error: ApiError) -> None:
        self.failed += error.status != CLIENT_LEFT

    async def update_outcome(self, info: CallInfo, outcome: CallOutcome) -> None:
        """Do nothing: outcomes are not stored."""

    def summary(self) -> dict[str, dict[str, int]]:
        """Return the numbers of answered calls: agent → policy → number."""
        agents: dict[str, dict[str, int]] = {}
        for (agent, policy), count in sorted(self.answered.items()):
            agents.setdefault(agent, {})[policy] = count
        return agents

    def document(self) -> dict[str, Any]:
        """Return the JSON for `USAGE_PATH`: answered calls, failed calls and ignored fields."""
        ignored = dict(self.ignored_fields)
        return {"agents": self.summary(), "failed": self.failed, "set_aside": ignored}


class PublicAccess(AccessPolicy):
    """Check the key of each request, if there is one; all callers share one session.

    Args:
        routing: the rules by which a policy or an endpoint answered each agent in training.
        key: the key that callers must send; None accepts every program of this machine.
        max_tokens: default limit of a chat's answer in tokens; None for the rest of the context.
        upstream: the endpoint for calls of agents and models that are not served here; None refuses
            these calls.
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
        self.usage = UsageCounter()
        super().__init__(self.usage)
        self.max_tokens = max_tokens
        self._session = shared_session(routing)
        self._routing = routing
        self.key: Final = key
        """The key that callers must send; None if they need none."""
        self._upstream = upstream

    # --- authentication -------------------------------------------------------------------
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Return the session of all callers.

        Raises:
            ApiError: 401 for a wrong key; without a key, 403 for a web page from another host.
        """
        if self.key is None:
            check_local(request, "start it with --api-key-env NAME")
        elif not hmac.compare_digest(token_of(request).encode(), self.key.encode()):
            raise ApiError(401, "the API key is wrong or missing", code="invalid_api_key")
        return self._session

    def sessions(self) -> list[CallerSession]:
        return [self._session]

    # --- routing --------------------------------------------------------------------------
    def target(self, session: CallerSession, path: str) -> Target:
        return self._or_upstream(super().target(session, path))

    def target_of_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        if model in policies:
            route = Route.BASE if model == BASE_POLICY else Route.POLICY
            return c.UNNAMED_AGENT, Target(route=route, policy=model)
        if any(rule.matches(model) for rule in session.naming_rules):
            return model, self.target(session, model)
        if self._upstream is not None:
            return c.UNNAMED_AGENT, self._or_upstream(Target(route=Route.APP))
        models = {"policies": sorted(policies), "agents": self._agents(policies)}
        listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in models.items() if names)
        reason = f"unknown model {model!r}" if model else "the request names no model"
        raise no_model(
            f"{reason}; this endpoint has the {listed}. An agent can also be named "
            "in the URL, /agents/{name}/v1"
        )

    def _or_upstream(self, target: Target) -> Target:
        if target.route is not Route.APP or self._upstream is None:
            return target
        return Target(route=Route.ENDPOINT, endpoint=self._upstream)

    def unserved_agent(self, path: str) -> ApiError:
        nested = "/".join(split_path(path))  # a slash that the URL encodes is part of a name
        if self._routing.target(nested).route is not Route.APP:
            return bad_request(
                f"agent {path!r} is not answered here, and {nested!r} is: write the slash between "
                f"nested agents as it is, /agents/{nested}/v1"
            )
        return bad_request(
            f"agent {path!r} is not answered here: the run leaves its calls where the app points "
            "them. Point it at its own endpoint, or start the server with --upstream URL"
        )

    # --- documents ------------------------------------------------------------------------
    def models(self, policies: Collection[str]) -> list[str]:
        return [*super().models(policies), *self._agents(policies)]

    def _agents(self, policies: Collection[str]) -> list[str]:
        """Return the names of the agents that have a rule of their own and are answered here.

        Names that are also names of policies are left out.

        Args:
            policies: names of the policies.
        """
        return [
            rule.pattern
            for rule in self._routing.rules
            if is_name(rule) and rule.target.route is not Route.APP and rule.pattern not in policies
        ]

    def documents(self) -> Mapping[str, Callable[[], Any]]:
        return {ROUTING_PATH: self._public_routing, USAGE_PATH: self.usage.document}

    def _public_routing(self) -> dict[str, Any]:
        """Return the routing for `lightspan.connect`, without endpoints and sampling."""

        def public(target: Target) -> Target:
            return Target(route=target.route, policy=target.policy)

        routing = Routing(
            rules=[
                msgspec.structs.replace(rule, target=public(rule.target))
                for rule in self._routing.rules
            ],
            default=public(self._routing.default),
        )
        return {"protocol": c.PROTOCOL_VERSION, "routing": msgspec.to_builtins(routing)}


def shared_session(routing: Routing) -> CallerSession:
    """Return a session that several callers share."""
    rollout = Rollout(rollout_id="serve", task=None, task_id="", mode=Mode.VAL)
    attempt = Attempt(attempt_id="serve", rollout_id="serve", number=1, epoch=0)
    claim = Claim(rollout=rollout, attempt=attempt)
    return CallerSession(claim, routing, shared=True, max_calls=MAX_CALLS)


class PublicServer(Server):
    """Serve the calls that a public access policy allows.

    Args:
        engine: serves the policies.
        access: the access policy.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        image_hosts: hosts from which images are fetched (`ImageLimits.hosts`).

    Raises:
        ConfigError: other machines could reach the server and there is no key, or a host is none.
    """

    def __init__(
        self,
        engine: TokenEngine,
        access: PublicAccess,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        image_hosts: Sequence[str] = (),
    ) -> None:
        check_open(host, access.key)
        limits = GatewayLimits().with_hosts(image_hosts)
        super().__init__(access, engine, host=host, port=port, limits=limits)
        self.usage = access.usage


class ServingGateway(PublicServer):
    """Serve the policies of a run; calls are counted but not recorded.

    Args:
        engine: serves the policies. If an agent uses the untrained model, it also serves that
            model, as the policy `base`.
        routing: the rules by which a policy or an endpoint answered each agent in training.
        key: the API key that callers must send; None accepts every program of this machine.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        max_tokens: default limit of a chat's answer in tokens; None for the rest of the context.
        upstream: the endpoint for calls of agents and models that are not served here; None refuses
            these calls. If its `model` is empty, the request's model is used.
        image_hosts: hosts from which images are fetched (`ImageLimits.hosts`).

    Raises:
        ConfigError: other machines could reach the server and there is no key, or a host is none.
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
        image_hosts: Sequence[str] = (),
    ) -> None:
        access = PublicAccess(routing, key=key, max_tokens=max_tokens, upstream=upstream)
        super().__init__(engine, access, host=host, port=port, image_hosts=image_hosts)


def is_name(rule: Rule) -> bool:
    """Return whether the rule is for one agent: its pattern has no `*` and no `/`."""
    return "*" not in rule.pattern and "/" not in rule.pattern


def check_open(host: str, key: str | None) -> None:
    """Raise `ConfigError` if `key` is empty, or is None and other machines can reach `host`."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} is reachable from other machines, and without a key anyone could use "
            "the model: name a variable with a key (--api-key-env NAME), or stay on 127.0.0.1"
        )
    if key is not None and not key.strip():
        raise ConfigError("the API key is empty: set its variable to a long random text")
