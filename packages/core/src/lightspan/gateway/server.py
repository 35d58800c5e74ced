"""The gateway: an OpenAI-compatible HTTP endpoint between apps and engines."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import unquote

import msgspec
from aiohttp import web

from lightspan import conventions as c
from lightspan.engines import ChatTokenizer, EngineCapabilities, PromptRefused, TokenEngine
from lightspan.engines.openai import OpenAIEngine
from lightspan.errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    LightspanError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.gateway import completions, dialects, responses
from lightspan.gateway.calls import Call, CallInfo, Recording, Run
from lightspan.gateway.capture import Capture, Records, call_span
from lightspan.gateway.dialects import ModelRequest
from lightspan.gateway.errors import CONTEXT_OVERFLOW, ApiError, bad_request
from lightspan.gateway.forwards import Forward
from lightspan.gateway.sessions import (
    Admission,
    Past,
    Session,
    Sessions,
    bearer,
    check_protocol,
)
from lightspan.llm import LLM
from lightspan.records import CallOutcome, Sampling, TokenRecord, new_id
from lightspan.routing import BASE_POLICY, Route, Target, join_path
from lightspan.spans import new_trace_id, now_ns
from lightspan.store import StoredCall

if TYPE_CHECKING:
    from lightspan.store import Store

log = logging.getLogger(__name__)

Parse = Callable[..., ModelRequest]
"""From a request's body to what it asks; see `dialects.parse_chat`."""

MAX_BODY: Final = 16 * 2**20
_DIALECTS: Final[Mapping[str, Parse]] = {
    "chat/completions": dialects.parse_chat,
    "completions": completions.parse_completion,
    "responses": responses.parse_response,
}


class Gateway:
    """Serves trained and frozen policies to apps, and records every call.

    Args:
        store: where calls are recorded and call tokens are known; None with `admission` and
            `records`.
        engine: serves the policies; None if every agent is served by an endpoint.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        patience_s: how long an answer waits for the store (`Capture`).
        shutdown_s: how long calls under way may go on when it closes.
        admission: who may call; None for who has a call token that the store knows.
        records: what is written of calls; None for the store's spans and token records.
    """

    def __init__(
        self,
        store: Store | None,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
        patience_s: float = 10.0,
        shutdown_s: float = 0.5,
        admission: Admission | None = None,
        records: Records | None = None,
    ) -> None:
        self._engine = engine
        self._host = host
        self._port = port
        self._max_body = max_body
        self._shutdown_s = shutdown_s
        self._sessions: Admission
        self._capture: Records
        if store is not None:
            self._sessions, self._capture = Sessions(store), Capture(store, patience_s=patience_s)
        else:
            assert admission is not None
            assert records is not None
            self._sessions, self._capture = admission, records
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
            app, handler_cancellation=True, access_log=None, shutdown_timeout=self._shutdown_s
        )
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise _cannot_listen(self._host, self._port, error) from error
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
                web.get(f"{prefix}/models", guard(self._models)),
                web.get(f"{prefix}/models/{{model:.+}}", guard(self._one_model)),
                *(
                    web.post(f"{prefix}/{name}", guard(partial(self._ask, parse)))
                    for name, parse in _DIALECTS.items()
                ),
            ]
        routes.append(web.route("*", "/{path:.*}", guard(self._not_found)))
        return routes

    # --- small endpoints ------------------------------------------------------------------
    async def _health(self, request: web.Request) -> web.Response:
        policies = self._policies()
        return json_response({"status": "ok", "protocol": c.PROTOCOL_VERSION, "policies": policies})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self._session(request)
        models = [_model(name) for name in self._model_names()]
        return json_response({"object": "list", "data": models})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        await self._session(request)
        name = request.match_info["model"]
        if name not in self._model_names():
            known = ", ".join(self._model_names())
            raise _no_model(f"unknown model {name!r}; this endpoint has {known}")
        return json_response(_model(name))

    def _model_names(self) -> list[str]:
        """What a request may give as its model."""
        return sorted(self._policies())

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")

    # --- model calls ----------------------------------------------------------------------
    async def _ask(self, parse: Parse, request: web.Request) -> web.StreamResponse:
        check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        session = await self._session(request)
        body: dict[str, Any] = {}
        try:
            body = await _body(request)
            path, target = self._who(request, session, body)
        except ApiError as error:
            await self._record_unread(request, session, body, error)
            raise
        info = self._call_info(request, session, body, path, target)
        try:
            call = await self._call(session, info, parse)
        except ApiError as error:
            if info.call_id not in session.calls:
                await self._record_refusal(session, info, error)
            raise
        return await self._answer(request, session, call)

    async def _session(self, request: web.Request) -> Session:
        token = bearer(request.headers.get("Authorization"))
        return await self._sessions.session(token, request.headers.get(c.HEADER_ATTEMPT))

    def _who(
        self, request: web.Request, session: Session, body: Mapping[str, Any]
    ) -> tuple[str, Target]:
        """Who calls and where that goes: by the shim's header, the URL, or the model's name."""
        path = named_agent(request)
        if path is None:
            path = self._agent_of_model(session, named_model(body))
        return path, session.routing.target(path)

    def _agent_of_model(self, session: Session, model: str) -> str:
        routing, policies = session.routing, self._policies()
        named = [rule for rule in routing.rules if rule.pattern not in ("*", "**")]
        if any(rule.matches(model) for rule in named):
            return model
        anything = len(named) < len(routing.rules) or routing.default.route is not Route.APP
        if anything or model in policies:
            return c.UNNAMED_AGENT
        known = sorted({*policies, *(rule.pattern for rule in named)})
        what = f"unknown model {model!r}" if model else "the request names no model"
        raise _no_model(f"{what}: use the name of a policy or agent ({', '.join(known)})")

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

    async def _call(self, session: Session, info: CallInfo, parse: Parse) -> Call:
        """The call with this id: the one that runs or is finished, or a new one."""
        llm = info.target.endpoint if info.target.route is Route.ENDPOINT else None
        if llm is not None and parse is not dialects.parse_chat:
            raise bad_request(
                f"agent {info.agent_path!r} is frozen to {llm.base_url}, which is asked for chat "
                "completions only: use those (LangChain: ChatOpenAI(use_responses_api=False); "
                'OpenAI Agents SDK: set_default_openai_api("chat_completions"))'
            )
        endpoint = None if llm is None else await self._endpoint(llm)
        if info.call_id not in session.calls:
            if endpoint is None:
                session.calls[info.call_id] = self._run(session, info, parse)
            else:
                session.calls[info.call_id] = self._forward(session, info, endpoint)
        call = session.calls[info.call_id]
        if call.info.body_hash != info.body_hash:
            raise bad_request(f"call id {info.call_id} was used for another request")
        return call

    def _run(self, session: Session, info: CallInfo, parse: Parse) -> Run:
        engine = self._engine_for(info)
        forced = info.target.sampling if info.target.selected else None
        mode = session.claim.rollout.mode
        asked = parse(info.body, mode=mode, forced=forced)
        if isinstance(asked, responses.ResponseRequest) and asked.previous is not None:
            asked = asked.after(_conversation(session, asked.previous))
        _check_supported(asked.sampling, engine.capabilities)
        tokenizer = _tokenizer(engine, info.policy)
        past = _past_of(session, info)
        records = past.records if past is not None else []
        prompts = _known_prompts(records, asked) or asked.prompts(tokenizer)
        run = Run(
            self._started(session, info, prompts),
            replace(asked, sampling=self._limited(asked, prompts, tokenizer)),
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
        forced = info.target.sampling  # of a dry run; frozen agents have none
        name, record = engine.llm.base_url, self._recorder(session)
        call = Forward(started, engine, name, record, forced=forced)
        if past is not None and past.span.attributes.get(c.CALL_OUTCOME) in _ANSWERED:
            call.restore(past.span)
        return call

    def _limited(
        self, asked: ModelRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer
    ) -> Sampling:
        """The sampling with `max_tokens` set: to what the context leaves, or less."""
        return _within_context(asked, prompts, tokenizer)

    def _started(
        self, session: Session, info: CallInfo, prompts: Sequence[list[int]] = ()
    ) -> CallInfo:
        past = session.past.get(info.call_id)
        known = past.span.sequence_start if past is not None else None
        return info.starting(known or session.next_sequence(), prompts)

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
        """Record a refusal of what could not be read: it is a call of the attempt too."""
        try:
            path, target = self._who(request, session, body)
        except ApiError:
            path = c.UNNAMED_AGENT
            target = session.routing.target(path)
        info = self._call_info(request, session, body, path, target)
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
        except ConnectionError:  # the client left while we wrote: no failure of ours
            self._capture.background(self._left(session, call))
            return web.Response(status=_CLIENT_LEFT)
        except asyncio.CancelledError:
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
_CLIENT_LEFT: Final = 499
"""Nobody reads it."""
_EVENT_STREAM: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_RETRIES: Final = "x-stainless-retry-count"
_TRACEPARENT: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_ANSWERED: Final = (CallOutcome.OK, CallOutcome.UNDELIVERED)


def guard(handler: Any) -> Any:
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
        body = msgspec.json.encode(call.request.body(await call.wait()))
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
        await response.write(_data(refused.body()))
    await response.write_eof()
    return response


async def _run_events(run: Run) -> AsyncIterator[bytes]:
    """The events of a generated answer. The last ones leave when the store acknowledged it."""
    model = run.request.model or run.info.policy
    asked = run.request
    base = dialects.head(run.response_id, run.created, model, asked.chunk_object)
    written = _NumberedEvents() if asked.is_numbered else _Events()
    opening = written.of(
        chunk for choice in run.choices for chunk in asked.opening(base, choice.index)
    )
    begun: set[int] = set()
    async for delta in run.follow():
        if delta.index not in begun:
            begun.add(delta.index)
            opening += written.of(asked.begin_text(base, delta.index))
        yield opening + written.of([asked.delta(base, delta.index, delta.text)])
        opening = b""
    assert run.answer is not None
    yield opening + written.of(asked.last(run.answer, base)) + written.end


async def _forward_events(call: Forward) -> AsyncIterator[bytes]:
    async for payload in call.follow():
        yield _data(payload)
    yield _DONE


_DONE: Final = b"data: [DONE]\n\n"


def _data(payload: bytes) -> bytes:
    """One event. Clients split lines where Unicode does, so JSON's raw line ends are escaped."""
    for raw, escaped in _LINE_ENDS.items():
        payload = payload.replace(raw, escaped)
    return b"data: " + payload + b"\n\n"


_LINE_ENDS: Final = {
    character.encode(): f"\\u{ord(character):04x}".encode()
    for character in ("\u0085", "\u2028", "\u2029")
}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightspan"}


def named_model(body: Mapping[str, Any]) -> str:
    """The model that a request asks for; empty if it asks for none."""
    model = body.get("model")
    return "" if model is None else str(model)


def _no_model(message: str) -> ApiError:
    return ApiError(404, message, param="model", code="model_not_found")


def check_port(host: str, port: int) -> None:
    """Whether one could listen there now.

    Raises:
        ConfigError: the port cannot be taken.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {_reason(error)}; give another port, or 0 for a free one"
    )


class _Events:
    """A stream of nameless events."""

    end = _DONE

    def of(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        """The chunks as they are sent."""
        return b"".join(map(self._event, chunks))

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        return _data(msgspec.json.encode(chunk))


class _NumberedEvents(_Events):
    """A stream of events that have a type and a number, as in the Responses API."""

    end = b""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def _event(self, chunk: Mapping[str, Any]) -> bytes:
        numbered = {**chunk, "sequence_number": next(self._numbers)}
        return b"event: " + str(chunk["type"]).encode() + b"\n" + super()._event(numbered)


def json_response(body: Any) -> web.Response:
    """The body as JSON."""
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


def _reason(error: OSError) -> str:
    """Why a port cannot be taken: asyncio repeats the address in what the system says."""
    return (error.strerror or str(error)).rpartition(": ")[2]


def _conversation(session: Session, response_id: str) -> responses.Conversation:
    """What was said up to a response of this attempt, the answer included."""
    call_id = response_id.removeprefix(responses.ID_PREFIX)
    call = session.calls.get(call_id)
    if isinstance(call, Run) and isinstance(call.request, responses.ResponseRequest):
        if call.answer is not None:
            return call.request.conversation(call.answer)
    elif call_id in session.past:
        return responses.recorded_conversation(session.past[call_id].span)
    raise bad_request(
        f"there is no answered response {response_id!r} in this attempt",
        "previous_response_id",
        "previous_response_not_found",
    )


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


def _known_prompts(records: Sequence[TokenRecord], asked: ModelRequest) -> list[list[int]]:
    """The prompts as they were recorded; empty if one of them was not."""
    known = {record.choice // asked.n: record.prompt_ids for record in records}
    return [known[number] for number in range(asked.count)] if len(known) == asked.count else []


def _within_context(
    asked: ModelRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer
) -> Sampling:
    context, limit = tokenizer.context_length, asked.sampling.max_tokens
    longest = max(map(len, prompts))
    if longest >= context:
        raise bad_request(
            f"the prompt has {longest} tokens, the model's context holds {context}; "
            f"shorten the {asked.asks_with}",
            asked.asks_with,
            CONTEXT_OVERFLOW,
        )
    left = context - min(map(len, prompts))  # the engine stops a longer prompt's answer sooner
    return msgspec.structs.replace(
        asked.sampling, max_tokens=left if limit is None else min(limit, left)
    )


def named_agent(request: web.Request) -> str | None:
    """The path of the agent that the shim's header or the URL names."""
    names = request.headers.get(c.HEADER_AGENT)
    if names is None and "agent" in request.match_info:
        raw = request.rel_url.raw_path  # still encoded: a name may hold a slash
        names = raw.removeprefix("/agents/").rpartition("/v1/")[0]
    if names is None:
        return None
    return join_path(unquote(part) for part in names.split("/"))


def _api_error(error: LightspanError) -> ApiError:
    match error:
        case ContextOverflowError():
            return bad_request(str(error), "messages", CONTEXT_OVERFLOW)
        case PromptRefused():
            return bad_request(str(error), "prompt")
        case UnsupportedError():
            return bad_request(str(error))
        case NotFoundError():
            return ApiError(404, str(error), code="model_not_found")
        case EngineClosedError():
            return ApiError(503, str(error))
        case _:
            return ApiError(500, str(error))
