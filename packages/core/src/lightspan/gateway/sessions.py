"""Who may call: a call token opens one attempt's model calls, and nothing else."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lightspan import conventions as c
from lightspan.errors import StoreError
from lightspan.gateway.errors import ApiError
from lightspan.records import Claim, TokenRecord
from lightspan.resources import routing_of
from lightspan.routing import Routing
from lightspan.spans import Span

if TYPE_CHECKING:
    from lightspan.gateway.calls import Call
    from lightspan.store import Store

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Past:
    """What the store knows of a call that this gateway does not remember."""

    span: Span
    records: list[TokenRecord] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """One attempt as the gateway knows it."""

    claim: Claim
    routing: Routing
    checked_at: float
    sequence: int = 0
    """The latest sequence number given."""
    calls: dict[str, Call] = field(default_factory=dict)
    """Call id → its call: retries join it."""
    past: dict[str, Past] = field(default_factory=dict)
    """Call id → what another gateway process, or this one long ago, recorded of it."""

    @property
    def attempt_id(self) -> str:
        return self.claim.attempt.attempt_id

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def undelivered(self, body_hash: str) -> str | None:
        """The latest call with this body whose answer may not have arrived.

        One that nobody waits for comes first: of two equal calls at once (best-of-n) the retry is
        of the one whose client is gone.
        """
        missed = [
            call_id
            for call_id, call in reversed(self.calls.items())
            if call.info.body_hash == body_hash and not call.delivered
        ]
        if missed:
            return next((name for name in missed if self.calls[name].deserted), missed[0])
        for call_id, past in reversed(self.past.items()):
            if call_id not in self.calls and _hash_of(past.span) == body_hash:
                return call_id
        return None


def _hash_of(span: Span) -> str:
    return str(span.attributes.get(c.REQUEST_HASH, ""))


class Admission(Protocol):
    """Who may call, and what is known of them."""

    async def session(self, token: str, attempt_id: str | None) -> Session:
        """The session that a token opens. Raises `ApiError` if it opens none."""
        ...

    def calls(self) -> list[Call]:
        """Every call that is remembered."""
        ...


class Sessions(Admission):
    """Looks call tokens up in the store and remembers them for a while.

    Args:
        store: where tokens are known.
        recheck_s: seconds after which a token is looked up again (an attempt may have ended).
        forget_s: seconds without a call after which a session is forgotten; the store knows what
            is needed to open it again.
    """

    def __init__(self, store: Store, *, recheck_s: float = 1.0, forget_s: float = 60.0) -> None:
        self._store = store
        self._recheck_s = recheck_s
        self._forget_s = forget_s
        self._known: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    async def session(self, token: str, attempt_id: str | None) -> Session:
        """The session that a token opens.

        Raises:
            ApiError: 401 for an unknown token, 403 for another attempt's or an ended attempt's,
                503 where the store cannot say.
        """
        if not token:
            raise ApiError(401, "a call token is missing", code="invalid_api_key")
        known = self._known.get(token)
        if known is None:
            known = await self._open(token)
        elif time.monotonic() - known.checked_at > self._recheck_s:
            await self._recheck(token, known)
        if attempt_id is not None and attempt_id != known.attempt_id:
            raise ApiError(403, f"the call token belongs to another attempt than {attempt_id}")
        if known.claim.attempt.sealed:
            status = known.claim.attempt.status
            raise ApiError(403, f"attempt {known.attempt_id} has ended ({status})")
        return known

    async def _open(self, token: str) -> Session:
        try:
            claim = await self._store.claim_of_token(token)
            if claim is None:
                raise ApiError(401, "unknown call token", code="invalid_api_key")
            if claim.attempt.sealed:
                return Session(claim, Routing(), time.monotonic())
            fresh = await self._read(claim)
        except StoreError as error:
            raise ApiError(503, f"the store cannot look the call token up: {error}") from error
        self._forget()
        # another request of the same attempt may have been faster while we waited
        return self._known.setdefault(token, fresh)

    async def _recheck(self, token: str, known: Session) -> None:
        """See whether the attempt goes on. While we ask, others trust what we know."""
        known.checked_at = time.monotonic()
        self._known.move_to_end(token)
        try:
            claim = await self._store.claim_of_token(token)
        except StoreError as error:
            log.warning("attempt %s cannot be looked up: %s", known.attempt_id, error)
            return
        if claim is not None:
            known.claim = claim
        if known.claim.attempt.sealed and not _busy(known):
            self._known.pop(token, None)
        self._forget()

    def _forget(self) -> None:
        """Forget sessions, oldest look-up first, that had no call for a while."""
        now = time.monotonic()
        for token, oldest in list(self._known.items()):
            if now - oldest.checked_at <= self._forget_s:
                return
            if not _busy(oldest):
                del self._known[token]

    def calls(self) -> list[Call]:
        """Every call that is remembered."""
        return [call for session in self._known.values() for call in session.calls.values()]

    async def _read(self, claim: Claim) -> Session:
        resources_id = claim.rollout.resources_id
        routing = routing_of(await self._store.get_resources(resources_id) if resources_id else {})
        attempt_id = claim.attempt.attempt_id
        spans = (await self._store.spans([attempt_id])).get(attempt_id, [])
        sequence = max((span.sequence_end or 0 for span in spans), default=0)
        session = Session(claim, routing, time.monotonic(), sequence)
        if sequence:
            known = (await self._store.token_records([attempt_id])).get(attempt_id, [])
            session.past = _past(spans, known)
        return session


def _busy(session: Session) -> bool:
    return any(call.active for call in session.calls.values())


def _past(spans: list[Span], records: list[TokenRecord]) -> dict[str, Past]:
    found = {
        str(span.attributes[c.CALL_ID]): Past(span)
        for span in spans
        if span.sequence_end is not None and c.CALL_ID in span.attributes
    }
    for record in records:
        if record.call_id in found:
            found[record.call_id].records.append(record)
    return found


def bearer(header: str | None) -> str:
    """The token of an `Authorization: Bearer …` header; empty if there is none."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def check_protocol(version: str | None) -> None:
    """Refuse a shim of another protocol version, naming both and the fix."""
    if version is not None and version != str(c.PROTOCOL_VERSION):
        raise ApiError(
            400,
            f"the app's lightspan speaks protocol {version}, this gateway speaks "
            f"{c.PROTOCOL_VERSION}; install the same version of lightspan on both sides",
        )
