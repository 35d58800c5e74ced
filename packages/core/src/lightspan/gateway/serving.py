"""Serving: the same endpoint without attempts. It answers whoever may call, and records nothing.

Who asks is known as in training: by the shim's header, the URL (`/agents/{name}/v1`) or the model's
name, which is a policy's or an agent's. Sampling is what the request says; what cannot be honoured
is refused, but for `STEERING`, which is set aside and counted.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from lightspan import conventions as c
from lightspan.connecting import ROUTING_PATH
from lightspan.engines import ChatTokenizer, TokenEngine
from lightspan.errors import ConfigError
from lightspan.gateway.calls import Call, CallInfo, Run
from lightspan.gateway.capture import Records
from lightspan.gateway.dialects import ModelRequest
from lightspan.gateway.errors import ApiError, bad_request
from lightspan.gateway.server import Gateway, Parse, guard, json_response, named_agent, named_model
from lightspan.gateway.sessions import Admission, Session
from lightspan.llm import LLM
from lightspan.records import Attempt, CallOutcome, Claim, Mode, Rollout, Sampling
from lightspan.routing import BASE_POLICY, Route, Routing, Rule, Target
from lightspan.store import StoredCall

log: Final = logging.getLogger(__name__)

USAGE_PATH: Final = "/lightspan/usage"
REMEMBERED: Final = 256
"""Answered calls that a retry under the same call id is answered from."""
MAX_NAMES: Final = 1000
"""Agents that usage is counted by; a request may name any."""
SHUTDOWN_S: Final = 10.0
"""How long calls under way may go on when the server stops."""


class Use(NamedTuple):
    """What calls are counted by."""

    agent: str
    policy: str
    """Of an endpoint: its URL."""


@dataclass(slots=True)
class _OneForAll(Session):
    """Everybody's calls. A retry is known by its call id alone: equal bodies may be of two."""

    def undelivered(self, body_hash: str) -> str | None:
        return None


class Doorkeeper(Admission):
    """Lets in who has the key, if there is one.

    Args:
        routing: of every call.
        key: None lets everybody in.
    """

    def __init__(self, routing: Routing, key: str | None = None) -> None:
        rollout = Rollout(rollout_id="serve", task=None, task_id="", mode=Mode.VAL)
        attempt = Attempt(attempt_id="serve", rollout_id="serve", number=1, epoch=0)
        self.session_of_all = _OneForAll(Claim(rollout=rollout, attempt=attempt), routing, 0.0)
        self._key = key

    async def session(self, token: str, attempt_id: str | None) -> Session:
        """The one session.

        Raises:
            ApiError: 401.
        """
        if self._key is not None and not hmac.compare_digest(token.encode(), self._key.encode()):
            raise ApiError(401, "wrong API key, or none", code="invalid_api_key")
        return self.session_of_all

    def calls(self) -> list[Call]:
        """Every call that is remembered."""
        return list(self.session_of_all.calls.values())


class Tally(Records):
    """Counts calls, and keeps nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Use] = Counter()
        """Answered calls."""
        self.failed = 0
        self.set_aside: Counter[str] = Counter()
        """Fields of requests that only one provider's models have, by calls."""

    async def record(self, session: Session, call: Call, outcome: CallOutcome) -> None:
        """Count it."""
        if outcome is CallOutcome.ERROR:
            self.failed += 1
        elif outcome is not CallOutcome.CANCELLED:
            self.calls[self._use(call.info)] += 1
        if isinstance(call, Run):
            self._set_aside(call.request.overrides)

    def _set_aside(self, fields: Mapping[str, Any]) -> None:
        if new := sorted(fields.keys() - self.set_aside.keys()):
            log.warning("set aside, since only one provider's models have it: %s", ", ".join(new))
        self.set_aside.update(fields.keys())

    def _use(self, info: CallInfo) -> Use:
        endpoint = info.target.endpoint
        use = Use(info.agent_path, info.policy if endpoint is None else endpoint.base_url)
        known = use in self.calls or len(self.calls) < MAX_NAMES
        return use if known else use._replace(agent="…")

    async def write(self, session: Session, stored: StoredCall) -> None:
        """A refusal."""
        self.failed += 1

    async def mark(self, session: Session, call_id: str, outcome: CallOutcome) -> None:
        """Nothing is kept, so nothing changes."""

    def summary(self) -> dict[str, dict[str, int]]:
        """Agent → policy → answered calls."""
        found: dict[str, dict[str, int]] = {}
        for use, count in sorted(self.calls.items()):
            found.setdefault(use.agent, {})[use.policy] = count
        return found


class ServingGateway(Gateway):
    """Serves policies without recording.

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
        self._door = Doorkeeper(routing, key)
        self._tally = Tally()
        super().__init__(
            None,
            engine,
            host=host,
            port=port,
            admission=self._door,
            records=self._tally,
            shutdown_s=SHUTDOWN_S,
        )
        self._routing = routing
        self._is_open = key is None
        self._max_tokens = max_tokens
        self._upstream = upstream

    @property
    def usage(self) -> Tally:
        """Who was answered by which policy."""
        return self._tally

    def _routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get(ROUTING_PATH, guard(self._tell_routing)),
            web.get(USAGE_PATH, guard(self._tell_usage)),
            *super()._routes(),
        ]

    # --- small endpoints ------------------------------------------------------------------
    async def _tell_routing(self, request: web.Request) -> web.StreamResponse:
        """For `lightspan.connect`: what of an app's calls is ours to answer."""
        await self._session(request)
        known = {"protocol": c.PROTOCOL_VERSION, "routing": msgspec.to_builtins(self._public())}
        return json_response(known)

    def _public(self) -> Routing:
        """The routing without what is nobody's business: endpoints, sampling."""
        return Routing(
            rules=[
                msgspec.structs.replace(rule, target=_public(rule.target))
                for rule in self._routing.rules
            ],
            default=_public(self._routing.default),
        )

    async def _tell_usage(self, request: web.Request) -> web.StreamResponse:
        await self._session(request)
        tally = self._tally
        known = {"agents": tally.summary(), "failed": tally.failed}
        return json_response({**known, "set_aside": dict(tally.set_aside)})

    def _model_names(self) -> list[str]:
        return [*super()._model_names(), *self._agents()]

    def _agents(self) -> list[str]:
        """Agents that are ours to answer and that have a name, not a pattern."""
        policies = self._policies()
        return [
            rule.pattern
            for rule in self._routing.rules
            if is_name(rule) and _ours(rule.target) and rule.pattern not in policies
        ]

    # --- model calls ----------------------------------------------------------------------
    async def _session(self, request: web.Request) -> Session:
        if self._is_open:
            _check_local(request)
        return await super()._session(request)

    def _who(
        self, request: web.Request, session: Session, body: Mapping[str, Any]
    ) -> tuple[str, Target]:
        path = named_agent(request)
        if path is not None:
            return path, self._ours_or_upstream(session.routing.target(path))
        model = named_model(body)
        if model in self._policies():
            route = Route.BASE if model == BASE_POLICY else Route.POLICY
            return c.UNNAMED_AGENT, Target(route=route, policy=model)
        named = [rule for rule in session.routing.rules if rule.pattern not in ("*", "**")]
        if any(rule.matches(model) for rule in named):
            return model, self._ours_or_upstream(session.routing.target(model))
        if self._upstream is not None:
            return c.UNNAMED_AGENT, self._ours_or_upstream(Target(route=Route.APP))
        raise self._unknown(model)

    def _ours_or_upstream(self, target: Target) -> Target:
        if target.route is not Route.APP or self._upstream is None:
            return target
        return Target(route=Route.ENDPOINT, endpoint=self._upstream)

    def _unknown(self, model: str) -> ApiError:
        known = {"policies": sorted(self._policies()), "agents": self._agents()}
        listed = "; ".join(f"{what} {', '.join(names)}" for what, names in known.items() if names)
        what = f"unknown model {model!r}" if model else "the request names no model"
        return ApiError(
            404,
            f"{what}; this endpoint has the {listed}. An agent can also be named "
            "in the URL, /agents/{name}/v1",
            param="model",
            code="model_not_found",
        )

    def _engine_for(self, info: CallInfo) -> TokenEngine:
        if info.target.route is Route.APP:
            raise bad_request(
                f"agent {info.agent_path!r} is not answered here: in training its calls went where "
                "the app points them. Point it at its own endpoint, or start the server with "
                "--upstream URL"
            )
        return super()._engine_for(info)

    async def _call(self, session: Session, info: CallInfo, parse: Parse) -> Call:
        _forget(session.calls)
        return await super()._call(session, info, parse)

    def _limited(
        self, asked: ModelRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer
    ) -> Sampling:
        sampling = super()._limited(asked, prompts, tokenizer)
        if self._max_tokens is None or asked.sampling.max_tokens is not None:
            return sampling
        limit = min(self._max_tokens, sampling.max_tokens or self._max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=limit)


def _forget(calls: dict[str, Call]) -> None:
    """Drop the oldest answered calls beyond those that are remembered."""
    excess = len(calls) - REMEMBERED + 1
    if excess <= 0:
        return
    over = [name for name, call in islice(calls.items(), 2 * excess) if not call.active]
    for name in over[:excess]:
        del calls[name]


def is_name(rule: Rule) -> bool:
    """Whether the rule is of one agent name, not of a pattern."""
    return "*" not in rule.pattern and "/" not in rule.pattern and not rule.regex


def _ours(target: Target) -> bool:
    return target.route is not Route.APP


def _public(target: Target) -> Target:
    return Target(route=target.route, policy=target.policy)


def is_loopback(host: str) -> bool:
    """Whether only this machine is behind that name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_open(host: str, key: str | None) -> None:
    """Raise `ConfigError` if others could reach the endpoint without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} lets other machines in, and without a key anybody there could use the "
            "model: name the variable that holds a key (--api-key-env NAME), or stay on 127.0.0.1"
        )
    if key is not None and not key.strip():
        raise ConfigError("the API key is empty: set its variable to a long random text")


def _check_local(request: web.Request) -> None:
    """Without a key: no web page of elsewhere that a browser on this machine has open."""
    for url in (f"//{request.host}", request.headers.get("Origin")):
        if url is not None and not is_loopback(_host_of(url)):
            raise ApiError(
                403,
                f"a request for or from {_host_of(url)!r} is refused: without a key this endpoint "
                "is for programs of this machine (start it with --api-key-env NAME)",
            )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


__all__ = ["Doorkeeper", "ServingGateway", "Tally", "Use", "check_open", "is_loopback", "is_name"]
