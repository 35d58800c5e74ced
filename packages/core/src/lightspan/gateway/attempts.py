"""Training at the gateway: a call token opens one attempt's model calls, and nothing else."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from aiohttp import web

from lightspan.errors import StoreError
from lightspan.gateway.calls import Account, Past
from lightspan.gateway.refusal import ApiError, bad_request, no_model
from lightspan.gateway.server import MAX_BODY, Server
from lightspan.gateway.store_log import PATIENCE_S, StoreLog
from lightspan.gateway.terms import Terms, token_of
from lightspan.schema import conventions as c
from lightspan.schema.records import Claim
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import Span
from lightspan.schema.tokens import TokenRecord

if TYPE_CHECKING:
    from lightspan.engines.protocol import TokenEngine
    from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)


class Attempts(Terms):
    """The terms of training: an attempt's call token opens its model calls, all of them stored.

    Args:
        store: where tokens are known and calls are written.
        patience_s: how long an answer waits for the store (`StoreLog`).
        recheck_s: seconds after which a token is looked up again (an attempt may have ended).
        forget_s: seconds without a call after which an attempt is forgotten; the store knows what
            is needed to open it again.
    """

    def __init__(
        self,
        store: Store,
        *,
        patience_s: float = PATIENCE_S,
        recheck_s: float = 1.0,
        forget_s: float = 60.0,
    ) -> None:
        super().__init__(StoreLog(store, patience_s=patience_s))
        self._store = store
        self._recheck_s = recheck_s
        self._forget_s = forget_s
        self._open: OrderedDict[str, Account] = OrderedDict()
        """By call token, the oldest look-up first."""

    # --- who may call ---------------------------------------------------------------------
    async def admit(self, request: web.Request) -> Account:
        """The account of the attempt that a call token opens.

        Raises:
            ApiError: 401 for an unknown token, 403 for another attempt's or an ended attempt's,
                503 where the store cannot say.
        """
        token = token_of(request)
        if not token:
            raise ApiError(401, "a call token is missing", code="invalid_api_key")
        account = self._open.get(token)
        if account is None:
            account = await self._look_up(token)
        elif time.monotonic() - account.checked_at > self._recheck_s:
            await self._recheck(token, account)
        attempt_id = request.headers.get(c.HEADER_ATTEMPT)
        if attempt_id is not None and attempt_id != account.attempt_id:
            raise ApiError(403, f"the call token belongs to another attempt than {attempt_id}")
        if account.claim.attempt.sealed:
            status = account.claim.attempt.status
            raise ApiError(403, f"attempt {account.attempt_id} has ended ({status})")
        return account

    def accounts(self) -> list[Account]:
        return list(self._open.values())

    async def _look_up(self, token: str) -> Account:
        try:
            claim = await self._store.claim_of_token(token)
            if claim is None:
                raise ApiError(401, "unknown call token", code="invalid_api_key")
            if claim.attempt.sealed:
                return Account(claim, Routing())
            fresh = await self._read(claim)
        except StoreError as error:
            raise ApiError(503, f"the store cannot look the call token up: {error}") from error
        self._forget()
        # another request of the same attempt may have been faster while we waited
        return self._open.setdefault(token, fresh)

    async def _recheck(self, token: str, account: Account) -> None:
        """See whether the attempt goes on. While we ask, others trust what we know."""
        account.checked_at = time.monotonic()
        self._open.move_to_end(token)
        try:
            claim = await self._store.claim_of_token(token)
        except StoreError as error:
            log.warning("attempt %s cannot be looked up: %s", account.attempt_id, error)
            return
        if claim is not None:
            account.claim = claim
        if account.claim.attempt.sealed and not account.is_busy:
            self._open.pop(token, None)
        self._forget()

    def _forget(self) -> None:
        """Forget attempts, oldest look-up first, that had no call for a while."""
        now = time.monotonic()
        for token, oldest in list(self._open.items()):
            if now - oldest.checked_at <= self._forget_s:
                return
            if not oldest.is_busy:
                del self._open[token]

    async def _read(self, claim: Claim) -> Account:
        resources_id = claim.rollout.resources_id
        routing = routing_of(await self._store.get_resources(resources_id) if resources_id else {})
        attempt_id = claim.attempt.attempt_id
        spans = (await self._store.spans([attempt_id])).get(attempt_id, [])
        sequence = max((span.sequence_end or 0 for span in spans), default=0)
        account = Account(claim, routing, time.monotonic(), sequence)
        if sequence:
            records = (await self._store.token_records([attempt_id])).get(attempt_id, [])
            account.past = _past(spans, records)
        return account

    # --- where a call goes ----------------------------------------------------------------
    def by_model(
        self, account: Account, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        routing, named = account.routing, account.naming_rules
        if any(rule.matches(model) for rule in named):
            return model, self.target(account, model)
        anything = len(named) < len(routing.rules) or routing.default.route is not Route.APP
        if anything or model in policies:
            return c.UNNAMED_AGENT, self.target(account, c.UNNAMED_AGENT)
        known = ", ".join(sorted({*policies, *(rule.pattern for rule in named)}))
        what = f"unknown model {model!r}" if model else "the request names no model"
        raise no_model(f"{what}: use the name of a policy or agent ({known})")

    def not_ours(self, path: str) -> ApiError:
        return bad_request(
            f"agent {path!r} is not served here: it is neither optimised nor frozen "
            "to a model of ours; add it to optimize= or frozen="
        )


def _past(spans: list[Span], records: list[TokenRecord]) -> dict[str, Past]:
    past = {
        str(span.attributes[c.CALL_ID]): Past(span)
        for span in spans
        if span.sequence_end is not None and c.CALL_ID in span.attributes
    }
    for record in records:
        if record.call_id in past:
            past[record.call_id].records.append(record)
    return past


class Gateway(Server):
    """The gateway of a training run: the attempts of a store may call, on its `Attempts` terms.

    Args:
        store: where call tokens are known and calls are written.
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
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(
            Attempts(store, patience_s=patience_s),
            engine,
            host=host,
            port=port,
            max_body=max_body,
        )
