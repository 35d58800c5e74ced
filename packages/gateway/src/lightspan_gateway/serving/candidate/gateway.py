"""The server of `lightspan serve --candidate`, with the URLs for status and decisions."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan_gateway import request_body
from lightspan_gateway.access_policy import token_of
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.server import guarded
from lightspan_gateway.serving.candidate.access import CandidateAccess
from lightspan_gateway.serving.candidate.state import CandidateState, Comparison, Decision
from lightspan_gateway.serving.public_access import PublicServer
from lightspan_gateway.store_server.api_keys import Keys

_T = TypeVar("_T")
CANDIDATE_PATH: Final = "/lightspan/candidate"
ATTEMPTS: Final = "/attempts"
ACTIONS: Final = {"promote": Decision.PROMOTED, "roll-back": Decision.ROLLED_BACK}
"""Action in the URL and on the command line → decision."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison as its server or its file shows it."""

    comparison: Comparison
    begun: dict[str, int]
    """Digest of the weights → number of attempts that began in the comparison."""
    state_errors: int = 0
    """Number of requests that could not be assigned since the server started."""

    @classmethod
    def of(cls, state: CandidateState, state_errors: int = 0) -> Status:
        """Return the status of the latest comparison, without its salt.

        Raises:
            ConfigError: there is no comparison.
        """
        comparison = state.latest()
        return cls(
            comparison=msgspec.structs.replace(comparison, salt=""),  # clients could choose sides
            begun=state.begun(comparison.comparison_id),
            state_errors=state_errors,
        )


class AttemptsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request for the weights of attempts. The answer is key → digest."""

    comparison_id: str
    keys: list[str]
    """What identifies each attempt (`sides.attempt_key`)."""


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request that decides a comparison."""

    comparison_id: str
    """The comparison that was looked at, so that a later one is not decided instead."""
    reason: str = ""
    """Result of the comparison, for people."""


class CandidateGateway(PublicServer):
    """Serve current and candidate weights.

    Args:
        engine: serves the policies of both sides.
        access: chooses the side of each attempt.
        admin: the administrator's key; None permits no decision over HTTP.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        image_hosts: hosts from which images are fetched.

    Raises:
        ConfigError: other machines could reach the server and there is no key.
    """

    def __init__(
        self,
        engine: TokenEngine,
        access: CandidateAccess,
        *,
        admin: Keys | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        image_hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(engine, access, host=host, port=port, image_hosts=image_hosts)
        self._candidate_access = access
        self._admin = admin

    def _routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get(CANDIDATE_PATH, guarded(self._status)),
            web.post(CANDIDATE_PATH + ATTEMPTS, guarded(self._attempts)),
            web.post(CANDIDATE_PATH + "/{action}", guarded(self._decide)),
            *super()._routes(),
        ]

    async def _status(self, request: web.Request) -> web.StreamResponse:
        await self._authenticate(request)
        return await self._answer()

    async def _attempts(self, request: web.Request) -> web.StreamResponse:
        await self._authenticate(request)
        attempts = await _read(request, AttemptsRequest)
        digests = await self._candidate_access.call_state(
            lambda state: state.assigned(attempts.comparison_id, attempts.keys)
        )
        return web.Response(body=msgspec.json.encode(digests), content_type="application/json")

    async def _decide(self, request: web.Request) -> web.StreamResponse:
        action = request.match_info["action"]
        if not await self._authenticate(request):
            raise ApiError(
                403,
                "only the administrator's key can promote or roll back: start the server with "
                "--admin-key-env NAME and send that key, or run `lightspan candidate` on its "
                "machine with its folder",
            )
        if action not in ACTIONS:
            raise ApiError(404, f"unknown action {action!r}: use {' or '.join(ACTIONS)}")
        decision = await _read(request, DecisionRequest)
        try:
            await self._candidate_access.call_state(
                lambda state: state.decide(ACTIONS[action], decision.reason, decision.comparison_id)
            )
        except ConfigError as error:
            raise ApiError(409, str(error)) from error
        except sqlite3.Error as error:
            raise ApiError(500, f"the decision could not be stored: {error}") from error
        return await self._answer()

    async def _answer(self) -> web.StreamResponse:
        errors = self._candidate_access.state_errors
        status = await self._candidate_access.call_state(partial(Status.of, state_errors=errors))
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def _authenticate(self, request: web.Request) -> bool:
        """Return whether a request has the administrator's key, not that of callers.

        Raises:
            ApiError: 401 for another key (`PublicAccess.authenticate`).
        """
        if self._admin is not None and self._admin.role_of(token_of(request)) is not None:
            return True
        await self._candidate_access.authenticate(request)
        return False


async def _read(request: web.Request, type_: type[_T]) -> _T:
    """Return the body of a request.

    Raises:
        ApiError: 400 if it is not of this type.
    """
    body = await request_body.read_body(request)
    try:
        return msgspec.convert(body.fields, type_)
    except msgspec.ValidationError as error:
        raise bad_request(str(error)) from error
