"""The gateway: an OpenAI-compatible HTTP endpoint between apps and engines."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote

import msgspec
from aiohttp import web

from lightspan import conventions as c
from lightspan.engines import ChatTokenizer, EngineCapabilities, TokenEngine
from lightspan.engines.openai import OpenAIEngine
from lightspan.errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    LightspanError,
    ModelError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.gateway import dialects
from lightspan.gateway.calls import Call, CallInfo, Recording, Run
from lightspan.gateway.capture import Capture, call_span
from lightspan.gateway.dialects import ChatRequest
from lightspan.gateway.errors import CONTEXT_OVERFLOW, ApiError, bad_request
from lightspan.gateway.forwards import Forward
from lightspan.gateway.sessions import Past, Session, Sessions, bearer, check_protocol
from lightspan.llm import LLM
from lightspan.records import CallOutcome, Sampling, new_id
from lightspan.routing import BASE_POLICY, Route, Target, join_path, matches
from lightspan.spans import new_trace_id, now_ns
from lightspan.store import StoredCall

if TYPE_CHECKING:
    from lightspan.store import Store

log = logging.getLogger(__name__)

MAX_BODY: Final = 16 * 2**20
_SHUTDOWN_S: Final = 0.5
"""How long calls under way may go on when the gateway closes."""
_OTHER_DIALECTS: Final = {
    "completions": "use chat completions",
    "responses": "LangChain: ChatOpenAI(use_responses_api=False). OpenAI Agents SDK: "
    'set_default_openai_api("chat_completions")',
}
"""Dialects of model calls that are refused → the setting that avoids them."""


class Gateway:
    """Serves trained and frozen policies to apps, and records every call.

    Args:
        store: where calls are recorded and call tokens are known.
        engine: serves the policies; None if every agent is served by an endpoint.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        patience_s: how long an answer waits for the store (`Capture`).
    """

    def __init__(
        self,
        store: Store,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
        patience_s: float = 10.0,
    ) -> None:
        self._store = store
        self._engine = engine
        self._host = host
        self._port = port
        self._max_body = max_body
        self._sessions = Sessions(store)
        self._capture = Capture(store, patience_s=patience_s)
        self._endpoints: dict[bytes, OpenAIEngine] = {}
        self._app_runner: web.AppRunner | None = None

    # --- life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be taken.
        """
        app = web.Application(client_max_size=self._max_body)
        app.add_routes(self._routes())
        # a client that leaves cancels its handler, and so its generation
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"the gateway cannot listen on {self._host}:{self._port}: {error.strerror}; "
                "give another port, or 0 for a free one"
            ) from error
        self._app_runner = runner
        self._port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, cancel generations, write what is left. Idempotent."""
        runner, self._app_runner = self._app_runner, None
        if runner is not None:
            await runner.cleanup()
        await asyncio.gather(*(call.settled() for call in self._sessions.calls()))
        await self._capture.drain()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._endpoints.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The origin, such as `http://127.0.0.1:8123`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def _routes(self) -> list[web.AbstractRouteDef]:
        routes: list[web.AbstractRouteDef] = [web.get("/health", self._health)]
        for prefix in ("/v1", "/agents/{agent:.+}/v1"):
            routes += [
                web.get(f"{prefix}/models", _guard(self._models)),
                web.post(f"{prefix}/chat/completions", _guard(self._chat)),
                *(
                    web.post(f"{prefix}/{{dialect:{name}}}", _guard(self._other_dialect))
                    for name in _OTHER_DIALECTS
                ),
            ]
        routes.append(web.route("*", "/{path:.*}", _guard(self._not_found)))
        return routes

    # --- small endpoints ------------------------------------------------------------------
    async def _health(self, request: web.Request) -> web.Response:
        policies = self._policies()
        return _json({"status": "ok", "protocol": c.PROTOCOL_VERSION, "policies": policies})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self._session(request)
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "lightspan"}
            for name in sorted(self._policies())
        ]
        return _json({"object": "list", "data": models})

    async def _other_dialect(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        dialect = request.match_info["dialect"]
        refused = bad_request(
            f"this endpoint speaks /v1/chat/completions, not /v1/{dialect}. "
            f"{_OTHER_DIALECTS[dialect]}",
            code="unsupported_endpoint",
        )
        await self._record_unread(request, session, await _body(request), refused)
        raise refused

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")

    # --- chat completions -----------------------------------------------------------------
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        session = await self._session(request)
        body: dict[str, Any] = {}
        try:
            body = await _body(request)
            path = self._agent_path(request, session, body)
        except ApiError as error:
            await self._record_unread(request, session, body, error)
            raise
        info = self._call_info(request, session, body, path, session.routing.target(path))
        try:
            call = await self._call(session, info)
        except ApiError as error:
            if info.call_id not in session.calls:
                await self._record_refusal(session, info, error)
            raise
        return await self._answer(request, session, call)

    async def _session(self, request: web.Request) -> Session:
        token = bearer(request.headers.get("Authorization"))
        return await self._sessions.session(token, request.headers.get(c.HEADER_ATTEMPT))

    def _agent_path(self, request: web.Request, session: Session, body: Mapping[str, Any]) -> str:
        """Who calls: the shim's header, else the URL, else the model's name."""
        names = request.headers.get(c.HEADER_AGENT)
        if names is None and "agent" in request.match_info:
            raw = request.rel_url.raw_path  # still encoded: a name may hold a slash
            names = raw.removeprefix("/agents/").rpartition("/v1/")[0]
        if names is not None:
            return join_path(unquote(part) for part in names.split("/"))
        return self._agent_of_model(session, str(body.get("model", "")))

    def _agent_of_model(self, session: Session, model: str) -> str:
        routing, policies = session.routing, self._policies()
        named = [rule for rule in routing.rules if rule.pattern not in ("*", "**")]
        if any(matches(rule.pattern, model) for rule in named):
            return model
        anything = len(named) < len(routing.rules) or routing.default.route is not Route.APP
        if anything or model in policies:
            return c.UNNAMED_AGENT
        known = sorted({*policies, *(rule.pattern for rule in named)})
        raise ApiError(
            404,
            f"unknown model {model!r}: use the name of a policy or agent ({', '.join(known)})",
            param="model",
            code="model_not_found",
        )

    def _call_info(
        self,
        request: web.Request,
        session: Session,
        body: dict[str, Any],
        path: str,
        target: Target,
    ) -> CallInfo:
        trace_id, parent_id = _parent(request.headers.get(c.HEADER_PARENT))
        body_hash = _hash(body)
        call_id = request.headers.get(c.HEADER_CALL_ID)
        if not call_id and request.headers.get(_RETRIES, "0") != "0":
            call_id = session.undelivered(body_hash)  # without the shim
        call_id = call_id or new_id("call")
        return CallInfo(
            call_id=call_id,
            agent_path=path,
            target=target,
            body=body,
            body_hash=body_hash,
            policy=BASE_POLICY if target.route is Route.BASE else target.policy,
            span_id=_span_id(session.attempt_id, call_id),
            parent_id=parent_id,
            trace_id=trace_id,
            start_ns=now_ns(),
        )

    async def _call(self, session: Session, info: CallInfo) -> Call:
        """The call with this id: the one that runs or is finished, or a new one."""
        llm = info.target.endpoint if info.target.route is Route.ENDPOINT else None
        endpoint = None if llm is None else await self._endpoint(llm)
        if info.call_id not in session.calls:
            if endpoint is None:
                session.calls[info.call_id] = self._run(session, info)
            else:
                session.calls[info.call_id] = self._forward(session, info, endpoint)
        call = session.calls[info.call_id]
        if call.info.body_hash != info.body_hash:
            raise bad_request(f"call id {info.call_id} was used for another request")
        return call

    def _run(self, session: Session, info: CallInfo) -> Run:
        engine = self._engine_for(info)
        forced = info.target.sampling if info.target.selected else None
        mode = session.claim.rollout.mode
        chat = dialects.parse_chat(info.body, mode=mode, forced=forced)
        _check_supported(chat.sampling, engine.capabilities)
        tokenizer = _tokenizer(engine, info.policy)
        past = _past_of(session, info)
        records = past.records if past is not None else []
        prompt_ids = records[0].prompt_ids if records else _render(tokenizer, chat)
        chat = replace(chat, sampling=_limited(chat.sampling, prompt_ids, tokenizer))
        run = Run(
            self._started(session, info, prompt_ids),
            chat,
            engine,
            tokenizer,
            self._recorder(session),
        )
        if past is not None:
            resampled = bool(past.span.attributes.get(c.CALL_RESAMPLED))
            run.restore(records, resampled=resampled)
        return run

    def _engine_for(self, info: CallInfo) -> TokenEngine:
        if info.target.route is Route.APP:
            raise bad_request(
                f"agent {info.agent_path!r} is not served here: it is neither optimised nor frozen "
                "to a model of ours; add it to optimize= or frozen="
            )
        if self._engine is None:
            raise ApiError(404, f"this gateway serves no policy {info.policy!r}: it has no engine")
        return self._engine

    def _forward(self, session: Session, info: CallInfo, engine: OpenAIEngine) -> Forward:
        past = _past_of(session, info)
        started = self._started(session, info)
        call = Forward(started, engine, engine.llm.base_url, self._recorder(session))
        if past is not None and past.span.attributes.get(c.CALL_OUTCOME) in _ANSWERED:
            call.restore(past.span)
        return call

    def _started(
        self, session: Session, info: CallInfo, prompt_ids: Sequence[int] = ()
    ) -> CallInfo:
        past = session.past.get(info.call_id)
        known = past.span.sequence_start if past is not None else None
        return info.starting(known or session.next_sequence(), prompt_ids)

    def _recorder(self, session: Session) -> Recording:
        async def record(call: Call, outcome: CallOutcome) -> None:
            await self._capture.record(session, call, outcome)

        return record

    def _policies(self) -> dict[str, int]:
        return self._engine.policies() if self._engine is not None else {}

    async def _endpoint(self, llm: LLM) -> OpenAIEngine:
        key = msgspec.json.encode(llm)
        if key not in self._endpoints:
            engine = OpenAIEngine(llm)
            try:
                await engine.start()
            except ConfigError as error:
                raise ApiError(500, str(error)) from error
            self._endpoints[key] = engine
        return self._endpoints[key]

    async def _record_unread(
        self, request: web.Request, session: Session, body: dict[str, Any], error: ApiError
    ) -> None:
        """Record a refusal of what could not be read as a chat: it is a call of the attempt too."""
        try:
            path = self._agent_path(request, session, body)
        except ApiError:
            path = c.UNNAMED_AGENT
        info = self._call_info(request, session, body, path, session.routing.target(path))
        await self._record_refusal(session, info, error)

    async def _record_refusal(self, session: Session, info: CallInfo, error: ApiError) -> None:
        info = info.starting(session.next_sequence())
        span = call_span(
            session,
            info,
            CallOutcome.ERROR,
            sequence_end=session.next_sequence(),
            attributes={c.ERROR_TYPE: error.code or str(error.status)},
            message=error.message,
        )
        epoch = session.claim.attempt.epoch
        await self._capture.write(session, StoredCall(span=span, records=[], epoch=epoch))

    # --- answering ------------------------------------------------------------------------
    async def _answer(
        self, request: web.Request, session: Session, call: Call
    ) -> web.StreamResponse:
        """Deliver the answer, and note if that fails."""
        call.join()
        try:
            response = await _deliver(request, call)
        except (ConnectionError, asyncio.CancelledError):
            self._capture.background(self._left(session, call))
            raise
        except LightspanError as error:
            raise _api_error(error) from error
        finally:
            call.leave()
        if call.answered:
            await self._arrived(session, call)
        return response

    async def _left(self, session: Session, call: Call) -> None:
        """A client left. If it was the last one and there is an answer, nobody got that."""
        await call.settled()
        if call.answered and call.deserted and not call.delivered and not call.lost:
            call.lost = True
            await self._capture.mark(session, call.info.call_id, CallOutcome.UNDELIVERED)

    async def _arrived(self, session: Session, call: Call) -> None:
        call.delivered = True
        if call.lost:  # an earlier delivery failed, this retry fetched the answer
            call.lost = False
            await self._capture.mark(session, call.info.call_id, call.outcome)


# --- helpers --------------------------------------------------------------------------------
_EVENT_STREAM: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_RETRIES: Final = "x-stainless-retry-count"
_TRACEPARENT: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_ANSWERED: Final = (CallOutcome.OK, CallOutcome.UNDELIVERED)


def _guard(handler: Any) -> Any:
    """Answer refusals in OpenAI's format; an error of ours never shows a traceback."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except ApiError as error:
            refused = error
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("the gateway failed")
            refused = ApiError(500, f"the gateway failed: {type(error).__name__}")
        return web.Response(
            body=refused.body(), status=refused.status, content_type="application/json"
        )

    return guarded


async def _deliver(request: web.Request, call: Call) -> web.StreamResponse:
    """Write the answer to the client, all of it."""
    if isinstance(call, Run):
        if call.request.stream:
            return await _send_events(request, _run_events(call))
        body = msgspec.json.encode(dialects.completion(call.request, await call.wait()))
    else:
        assert isinstance(call, Forward)
        if call.streamed:
            return await _send_events(request, _forward_events(call))
        body = await call.wait()
    response = web.Response(body=body, content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_events(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    """A stream; an error before its first event is an ordinary refusal."""
    response = web.StreamResponse(headers=_EVENT_STREAM)
    try:
        async with aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
    except (LightspanError, ApiError) as error:
        if not response.prepared:
            raise
        refused = error if isinstance(error, ApiError) else _api_error(error)
        await response.write(b"data: " + refused.body() + b"\n\n")
    await response.write_eof()
    return response


async def _run_events(run: Run) -> AsyncIterator[bytes]:
    """The events of a generated answer. The last ones leave when the store acknowledged it."""
    model = run.request.model or run.info.policy
    base = dialects.head(run.info.response_id, run.created, model, "chat.completion.chunk")
    role = {"role": "assistant", "content": ""}
    opening = b"".join(
        _event(dialects.delta_chunk(base, choice.index, role)) for choice in run.choices
    )
    async for delta in run.follow():
        chunk = dialects.delta_chunk(base, delta.index, {"content": delta.text})
        yield opening + _event(chunk)
        opening = b""
    assert run.answer is not None
    last = dialects.last_chunks(run.request, run.answer, base)
    yield opening + b"".join(map(_event, last)) + _DONE


async def _forward_events(call: Forward) -> AsyncIterator[bytes]:
    async for payload in call.follow():
        yield b"data: " + payload + b"\n\n"
    yield _DONE


_DONE: Final = b"data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(413, f"the request body is too large: {error.text}") from error
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    return body


def _hash(body: Mapping[str, Any]) -> str:
    data = msgspec.json.encode(body, order="sorted")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _span_id(attempt_id: str, call_id: str) -> str:
    """The same for every try of a call: writing it again changes nothing."""
    return hashlib.blake2b(f"{attempt_id}/{call_id}".encode(), digest_size=8).hexdigest()


def _parent(header: str | None) -> tuple[str, str | None]:
    """(trace id, parent span id) of a `traceparent`."""
    found = _TRACEPARENT.fullmatch(header or "")
    if found is None:
        return new_trace_id(), None
    trace_id, parent_id = found.groups()
    return trace_id, None if parent_id == c.NO_PARENT else parent_id


def _past_of(session: Session, info: CallInfo) -> Past | None:
    """What the store knows of this call, if it is the same request."""
    past = session.past.get(info.call_id)
    if past is None:
        return None
    if past.span.attributes.get(c.REQUEST_HASH) != info.body_hash:
        raise bad_request(f"call id {info.call_id} was used for another request")
    return past


def _tokenizer(engine: TokenEngine, policy: str) -> ChatTokenizer:
    try:
        return engine.tokenizer(policy)
    except NotFoundError as error:
        raise ApiError(404, str(error), param="model", code="model_not_found") from error


def _check_supported(sampling: Sampling, capabilities: EngineCapabilities) -> None:
    """Refuse what the engine does not declare."""
    asked = {
        "stop": (bool(sampling.stop), capabilities.stop_strings, list(sampling.stop)),
        "top_p": (sampling.top_p < 1, capabilities.top_p, sampling.top_p),
        "top_k": (sampling.top_k > 0, capabilities.top_k, sampling.top_k),
    }
    for key, (wanted, honoured, value) in asked.items():
        if wanted and not honoured:
            raise dialects.cannot_honour(key, value)


def _render(tokenizer: ChatTokenizer, chat: ChatRequest) -> list[int]:
    try:
        return tokenizer.render(
            chat.messages, chat.tools, template_options=chat.template_options or None
        )
    except ModelError as error:
        raise bad_request(str(error), "messages") from error


def _limited(sampling: Sampling, prompt_ids: Sequence[int], tokenizer: ChatTokenizer) -> Sampling:
    """The sampling with `max_tokens` set to what the context leaves, or less."""
    left = tokenizer.context_length - len(prompt_ids)
    if left <= 0:
        raise bad_request(
            f"the prompt has {len(prompt_ids)} tokens, the model's context holds "
            f"{tokenizer.context_length}; shorten the messages",
            "messages",
            CONTEXT_OVERFLOW,
        )
    asked = sampling.max_tokens
    return msgspec.structs.replace(sampling, max_tokens=left if asked is None else min(asked, left))


def _api_error(error: LightspanError) -> ApiError:
    match error:
        case ContextOverflowError():
            return bad_request(str(error), "messages", CONTEXT_OVERFLOW)
        case UnsupportedError():
            return bad_request(str(error))
        case NotFoundError():
            return ApiError(404, str(error), code="model_not_found")
        case EngineClosedError():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, str(error))
