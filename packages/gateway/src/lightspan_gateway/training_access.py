"""Access policy of a training: a call token authenticates the model calls of one attempt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, Final

from aiohttp import web
from msgspec.structs import replace

from lightspan.errors import StoreError
from lightspan.progress import plural
from lightspan.protocols.engine import TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import Claim
from lightspan.schema.redaction import clean_text
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import Span
from lightspan.schema.token_records import TokenRecord
from lightspan.stores.protocol import Store
from lightspan_gateway.access_policy import AccessPolicy, token_of
from lightspan_gateway.answer_limit import default_max_tokens
from lightspan_gateway.api_errors import ApiError, bad_request, call_token_error, no_model
from lightspan_gateway.call_recorder import CallRecorder
from lightspan_gateway.calls import CallerSession, RecordedCall
from lightspan_gateway.dialects.base import is_refused
from lightspan_gateway.forks import make_replay, restore_script
from lightspan_gateway.limits import GatewayLimits
from lightspan_gateway.server import Server

log = logging.getLogger(__name__)

RECHECK_S: Final = 1.0
"""Seconds after which a call token is looked up again, because its attempt may have ended."""
PARENTS_KEPT: Final = 32
"""Maximum number of attempts whose calls are kept in memory because others repeat them."""
ROUTINGS: Final = 64
"""Number of routings that are kept; a training has one for each version of its prompts."""
MAX_AGENT_LENGTH: Final = 80
"""Maximum characters of a `User-Agent` header in a message."""
EVICT_AFTER_S: Final = 60.0
"""Seconds without a call after which a session is evicted; a later call restores it."""


class TrainingAccess(AccessPolicy):
    """Authenticate clients by call tokens, and record every model call in the store.

    A call token is the key of one attempt (one run of the app) for model calls.

    Args:
        store: the store with the call tokens, which records the calls.
        store_timeout_s: seconds for which an answer waits for the store (see `CallRecorder`).
        replay_wait_s: seconds for which a call of a forked attempt waits (see `GatewayLimits`).
    """

    def __init__(self, store: Store, *, store_timeout_s: float, replay_wait_s: float) -> None:
        recorder = CallRecorder(store, store_timeout_s=store_timeout_s)
        super().__init__(recorder)
        self.damaged = recorder.damaged
        self._store = store
        self._store_timeout_s = store_timeout_s
        self._open: OrderedDict[str, CallerSession] = OrderedDict()
        """Call token → session, in the order of the last look-up."""
        self._replay_wait_s = replay_wait_s
        self._parents: OrderedDict[str, dict[str, RecordedCall]] = OrderedDict()
        """Id of an attempt that others repeat → its calls, the latest read last."""
        self._reading = asyncio.Lock()
        self._wrong_keys = 0
        self._first_wrong = ""
        """The first request whose key is missing or unknown; empty before it."""
        self._routings: OrderedDict[str, Routing] = OrderedDict()
        """Id of resources → their routing, in the order of the last use; an id is a hash of the
        content, so it never changes."""

    def answer_limit(
        self, limit: int | None, room: int, context: int, cache: int | None
    ) -> int | None:
        """Return the maximum tokens of an answer (see `AccessPolicy.answer_limit`).

        A limit beyond the context limits nothing. Without one, a policy that does not end its
        answers would write to the end of the context in each call.
        """
        is_limited = limit is not None and limit <= room
        return limit if is_limited else default_max_tokens(context, cache)

    # --- authentication ---------------------------------------------------------------------
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Return the session of the call token's attempt.

        Raises:
            ApiError: 401 for an unknown token, 403 if the token's attempt has ended or is not the
                attempt in the request's header, 503 if the store fails.
        """
        token = token_of(request)
        if not token:
            raise self._wrong_key(request, token)
        session = self._open.get(token)
        if session is None:
            session = await self._look_up(request, token)
        elif time.monotonic() - session.checked_at > RECHECK_S:
            await self._recheck(token, session)
        attempt_id = request.headers.get(c.HEADER_ATTEMPT)
        if attempt_id is not None and attempt_id != session.attempt_id:
            raise ApiError(403, f"the call token belongs to another attempt than {attempt_id}")
        if session.claim.attempt.sealed:
            status = session.claim.attempt.status
            raise ApiError(403, f"attempt {session.attempt_id} has ended ({status})")
        return session

    async def images(self, digests: Collection[str]) -> Mapping[str, Image]:
        return await self._store.images(sorted(digests))

    def sessions(self) -> list[CallerSession]:
        return list(self._open.values())

    def _wrong_key(self, request: web.Request, token: str) -> ApiError:
        """Count a request whose key is missing or unknown, and return its error.

        No attempt's record shows the request, because its key names no attempt.
        """
        self._wrong_keys += 1
        if not self._first_wrong:
            agent = clean_text(request.headers.get("User-Agent", "an unnamed client"))
            key = "another key" if token else "no key"
            path = clean_text(request.path)
            self._first_wrong = f"{request.method} {path} of {agent[:MAX_AGENT_LENGTH]}, with {key}"
            log.warning("%s", self.wrong_keys())
        return call_token_error(token)

    def wrong_keys(self) -> str:
        """Return a warning with the number of requests with a wrong key; "" if there were none."""
        if not self._wrong_keys:
            return ""
        return (
            f"The gateway refused {plural(self._wrong_keys, 'request')} without the attempt's key "
            f"(HTTP 401; the first: {self._first_wrong}). A program finds its key in "
            "OPENAI_API_KEY, and in ANTHROPIC_API_KEY for Anthropic's clients: let its "
            "configuration read that variable. In Python, give the client api_key=llm.api_key"
        )

    async def _look_up(self, request: web.Request, token: str) -> CallerSession:
        try:
            # The trainer's store may wait for its server for much longer.
            async with asyncio.timeout(self._store_timeout_s):
                claim = await self._store.claim_of_token(token)
                if claim is None:
                    raise self._wrong_key(request, token)
                if claim.attempt.sealed:
                    return CallerSession(claim, Routing())
                fresh = await self._read(claim)
        except (StoreError, TimeoutError) as error:
            reason = self._reason(error)
            raise ApiError(503, f"the store cannot look the call token up: {reason}") from error
        self._evict()
        # a concurrent request of the same attempt may have stored its session first
        return self._open.setdefault(token, fresh)

    async def _recheck(self, token: str, session: CallerSession) -> None:
        """Read the attempt of `session` from the store again; forget the session if it has ended.

        Requests that arrive meanwhile use the state that was read before.

        Args:
            token: call token of the attempt.
            session: session of the attempt.
        """
        session.checked_at = time.monotonic()
        self._open.move_to_end(token)
        try:
            async with asyncio.timeout(self._store_timeout_s):
                claim = await self._store.claim_of_token(token)
        except (StoreError, TimeoutError) as error:
            reason = self._reason(error)
            log.warning("attempt %s cannot be looked up: %s", session.attempt_id, reason)
            return
        if claim is not None:
            session.claim = claim
        if session.claim.attempt.sealed and not session.is_busy:
            self._open.pop(token, None)
        self._evict()

    def _reason(self, error: Exception) -> str:
        return str(error) or f"no answer within {self._store_timeout_s:g} s"

    def _evict(self) -> None:
        """Evict the sessions that received no call for `EVICT_AFTER_S` seconds."""
        before = time.monotonic() - EVICT_AFTER_S
        # no copy of all sessions: each first call of an attempt comes here
        old = list(takewhile(lambda item: item[1].checked_at < before, self._open.items()))
        for token, session in old:
            if not session.is_busy:
                del self._open[token]

    async def _read(self, claim: Claim) -> CallerSession:
        routing = await self._routing(claim.rollout.resources_id)
        attempt_id = claim.attempt.attempt_id
        spans = (await self._store.spans([attempt_id])).get(attempt_id, [])
        sequence = max((span.sequence_end or 0 for span in spans), default=0)
        session = CallerSession(claim, routing, time.monotonic(), sequence)
        if sequence:
            records = (await self._store.token_records([attempt_id])).get(attempt_id, [])
            session.recorded = _recorded_calls(spans, records)
        fork = claim.rollout.fork
        if fork is not None:
            async with self._reading:  # the forks of one attempt begin at once
                calls = await self._parent(fork.attempt_id)
            session.replay = make_replay(fork, calls, self._replay_wait_s)
            restore_script(session.replay.script, spans)
            session.recorded |= {
                call_id: calls[call_id]
                for call_id, call in session.recorded.items()
                if c.REPLAYED_FROM in call.span.attributes and call_id in calls
            }
        return session

    async def _parent(self, attempt_id: str) -> dict[str, RecordedCall]:
        """Return the calls of an attempt that others repeat.

        A call that was itself replayed gets the answer of the call that it repeated.
        """
        if attempt_id not in self._parents:
            spans = (await self._store.spans([attempt_id])).get(attempt_id, [])
            records = (await self._store.token_records([attempt_id])).get(attempt_id, [])
            calls = _recorded_calls([span for span in spans if not span.late], records)
            for call_id, call in list(calls.items()):
                origin = call.span.attributes.get(c.REPLAYED_FROM)
                source = (await self._parent(str(origin))).get(call_id) if origin else None
                if source is not None:
                    start, end = call.span.sequence_start, call.span.sequence_end
                    span = replace(source.span, sequence_start=start, sequence_end=end)
                    calls[call_id] = RecordedCall(span, source.records)
            self._parents[attempt_id] = calls
        self._parents.move_to_end(attempt_id)
        while len(self._parents) > PARENTS_KEPT:
            self._parents.popitem(last=False)
        return self._parents[attempt_id]

    # --- routing ----------------------------------------------------------------
    async def _routing(self, resources_id: str) -> Routing:
        """Return the routing of resources; the default routing if the id is empty.

        A rollout's first call would otherwise wait for two more changes of threads.
        """
        if resources_id not in self._routings:
            resources = await self._store.get_resources(resources_id) if resources_id else {}
            self._routings[resources_id] = routing_of(resources)
        self._routings.move_to_end(resources_id)
        while len(self._routings) > ROUTINGS:
            self._routings.popitem(last=False)
        return self._routings[resources_id]

    def target_of_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        routing, rules = session.routing, session.naming_rules
        if any(rule.matches(model) for rule in rules):
            return model, self.target(session, model)
        serves_all = len(rules) < len(routing.rules) or routing.default.route is not Route.APP
        if serves_all or model in policies:
            return c.UNNAMED_AGENT, self.target(session, c.UNNAMED_AGENT)
        names = ", ".join(sorted({*policies, *(rule.pattern for rule in rules)}))
        reason = f"unknown model {model!r}" if model else "the request names no model"
        raise no_model(f"{reason}: use the name of a policy or agent ({names})")

    def unserved_agent(self, path: str) -> ApiError:
        return bad_request(
            f"agent {path!r} is not served here: it is neither optimised nor frozen to a model; "
            "add it to optimize= or frozen="
        )


def _recorded_calls(spans: list[Span], records: list[TokenRecord]) -> dict[str, RecordedCall]:
    calls = {
        str(span.attributes[c.CALL_ID]): RecordedCall(span)
        for span in spans
        if span.sequence_end is not None and c.CALL_ID in span.attributes
    }
    for record in records:
        if record.call_id in calls:
            calls[record.call_id].records.append(record)
    return calls


class Gateway(Server):
    """Answer and record the model calls of a training's attempts.

    Args:
        store: the store with the call tokens, which records the calls.
        engine: serves the policies; None if an endpoint serves every agent.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        limits: limits and times; None for the defaults.
        image_hosts: hosts from which images are fetched (`ImageLimits.hosts`).

    Raises:
        ConfigError: a host is none.
    """

    is_refused: ClassVar[Callable[[str, Any], bool]] = staticmethod(is_refused)
    """Return whether evaluations refuse an unsupported field, from its name and value. Training
    sets it aside."""

    def __init__(
        self,
        store: Store,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: GatewayLimits | None = None,
        image_hosts: Sequence[str] = (),
    ) -> None:
        limits = (limits or GatewayLimits()).with_hosts(image_hosts)
        access = TrainingAccess(
            store, store_timeout_s=limits.store_timeout_s, replay_wait_s=limits.replay_wait_s
        )
        super().__init__(access, engine, host=host, port=port, limits=limits)
        self._training_access = access

    @property
    def wrong_keys(self) -> str:
        """Warning with the number of requests with a wrong key; "" if there were none."""
        return self._training_access.wrong_keys()

    @property
    def damaged(self) -> Mapping[str, tuple[str, ...]]:
        """Attempt id → why it is damaged, also if the store has no mark yet (`CallRecorder`)."""
        return self._training_access.damaged
