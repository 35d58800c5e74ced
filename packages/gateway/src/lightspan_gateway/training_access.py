"""Access to the gateway of a training: a call token permits one attempt's model calls only."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from aiohttp import web

from lightspan.errors import StoreError
from lightspan.schema import semconv as c
from lightspan.schema.records import Claim
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import Span
from lightspan.schema.token_records import TokenRecord
from lightspan_gateway.access_policy import AccessPolicy, token_of
from lightspan_gateway.api_errors import ApiError, bad_request, no_model
from lightspan_gateway.call_recorder import RETRY_TIMEOUT_S, CallRecorder
from lightspan_gateway.calls import CallerSession, RecordedCall
from lightspan_gateway.server import MAX_BODY, Server

if TYPE_CHECKING:
    from lightspan.protocols.engine import TokenEngine
    from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)


class TrainingAccess(AccessPolicy):
    """Authenticate by the call token of an attempt, and record every call in the store.

    Args:
        store: has the call tokens, and records the calls.
        patience_s: how long an answer waits for the store (see `CallRecorder`).
        recheck_s: seconds after which a token is looked up again, since an attempt may have ended.
        forget_s: seconds without a call after which a session is evicted; it is restored from the
            store.
    """

    def __init__(
        self,
        store: Store,
        *,
        patience_s: float = RETRY_TIMEOUT_S,
        recheck_s: float = 1.0,
        forget_s: float = 60.0,
    ) -> None:
        super().__init__(CallRecorder(store, patience_s=patience_s))
        self._store = store
        self._recheck_s = recheck_s
        self._forget_s = forget_s
        self._open: OrderedDict[str, CallerSession] = OrderedDict()
        """By call token, in order of the last look-up."""

    # --- authentication ---------------------------------------------------------------------
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Return the session of the call token's attempt.

        Raises:
            ApiError: 401 for an unknown token, 403 for another attempt's or an ended attempt's,
                503 where the store cannot say.
        """
        token = token_of(request)
        if not token:
            raise ApiError(401, "a call token is missing", code="invalid_api_key")
        session = self._open.get(token)
        if session is None:
            session = await self._look_up(token)
        elif time.monotonic() - session.checked_at > self._recheck_s:
            await self._recheck(token, session)
        attempt_id = request.headers.get(c.HEADER_ATTEMPT)
        if attempt_id is not None and attempt_id != session.attempt_id:
            raise ApiError(403, f"the call token belongs to another attempt than {attempt_id}")
        if session.claim.attempt.sealed:
            status = session.claim.attempt.status
            raise ApiError(403, f"attempt {session.attempt_id} has ended ({status})")
        return session

    def sessions(self) -> list[CallerSession]:
        return list(self._open.values())

    async def _look_up(self, token: str) -> CallerSession:
        try:
            claim = await self._store.claim_of_token(token)
            if claim is None:
                raise ApiError(401, "unknown call token", code="invalid_api_key")
            if claim.attempt.sealed:
                return CallerSession(claim, Routing())
            fresh = await self._read(claim)
        except StoreError as error:
            raise ApiError(503, f"the store cannot look the call token up: {error}") from error
        self._evict()
        # a concurrent request of the same attempt may have been faster
        return self._open.setdefault(token, fresh)

    async def _recheck(self, token: str, session: CallerSession) -> None:
        """Look the token up again; concurrent requests use the known state meanwhile."""
        session.checked_at = time.monotonic()
        self._open.move_to_end(token)
        try:
            claim = await self._store.claim_of_token(token)
        except StoreError as error:
            log.warning("attempt %s cannot be looked up: %s", session.attempt_id, error)
            return
        if claim is not None:
            session.claim = claim
        if session.claim.attempt.sealed and not session.is_busy:
            self._open.pop(token, None)
        self._evict()

    def _evict(self) -> None:
        """Evict the sessions that had no call for `forget_s`."""
        now = time.monotonic()
        for token, oldest in list(self._open.items()):
            if now - oldest.checked_at <= self._forget_s:
                return
            if not oldest.is_busy:
                del self._open[token]

    async def _read(self, claim: Claim) -> CallerSession:
        resources_id = claim.rollout.resources_id
        routing = routing_of(await self._store.get_resources(resources_id) if resources_id else {})
        attempt_id = claim.attempt.attempt_id
        spans = (await self._store.spans([attempt_id])).get(attempt_id, [])
        sequence = max((span.sequence_end or 0 for span in spans), default=0)
        session = CallerSession(claim, routing, time.monotonic(), sequence)
        if sequence:
            records = (await self._store.token_records([attempt_id])).get(attempt_id, [])
            session.past = _past(spans, records)
        return session

    # --- routing ----------------------------------------------------------------
    def by_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        routing, named = session.routing, session.naming_rules
        if any(rule.matches(model) for rule in named):
            return model, self.target(session, model)
        anything = len(named) < len(routing.rules) or routing.default.route is not Route.APP
        if anything or model in policies:
            return c.UNNAMED_AGENT, self.target(session, c.UNNAMED_AGENT)
        known = ", ".join(sorted({*policies, *(rule.pattern for rule in named)}))
        what = f"unknown model {model!r}" if model else "the request names no model"
        raise no_model(f"{what}: use the name of a policy or agent ({known})")

    def not_ours(self, path: str) -> ApiError:
        return bad_request(
            f"agent {path!r} is not served here: it is neither optimised nor frozen "
            "to a model of ours; add it to optimize= or frozen="
        )


def _past(spans: list[Span], records: list[TokenRecord]) -> dict[str, RecordedCall]:
    past = {
        str(span.attributes[c.CALL_ID]): RecordedCall(span)
        for span in spans
        if span.sequence_end is not None and c.CALL_ID in span.attributes
    }
    for record in records:
        if record.call_id in past:
            past[record.call_id].records.append(record)
    return past


class Gateway(Server):
    """Serve the attempts of a training.

    Args:
        store: has the call tokens, and records the calls.
        engine: serves the policies; None if every agent is served by an endpoint.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        patience_s: how long an answer waits for the store.
    """

    def __init__(
        self,
        store: Store,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
        patience_s: float = RETRY_TIMEOUT_S,
    ) -> None:
        super().__init__(
            TrainingAccess(store, patience_s=patience_s),
            engine,
            host=host,
            port=port,
            max_body=max_body,
        )
