"""Turns HTTP requests into calls: authentication, routing, parsing, grammar and prompt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError, NotFoundError
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    TokenEngine,
)
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode, new_id
from lightspan.schema.routing import BASE_POLICY, Route, Target, join_path
from lightspan.schema.spans import new_trace_id, now_ns
from lightspan.schema.token_records import CallOutcome, Sampling, TokenRecord
from lightspan_gateway.access_policy import AccessPolicy
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, bad_request, no_model
from lightspan_gateway.calls import CallerSession, CallInfo, RecordedCall, ServedCall
from lightspan_gateway.dialects import Parse
from lightspan_gateway.dialects.anthropic import parse_message
from lightspan_gateway.dialects.base import Conversation, ModelRequest, cannot_honour
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.dialects.openai_responses import ID_PREFIX, recorded_conversation
from lightspan_gateway.generated_call import GeneratedCall
from lightspan_gateway.grammars import GrammarCache
from lightspan_gateway.openai_engine import OpenAIEngine
from lightspan_gateway.proxied_call import ProxiedCall
from lightspan_gateway.request_body import (
    NOTHING,
    SMALL,
    Body,
    digest_of,
    read_body,
    to_thread_if_large,
)

_RETRIES: Final = "x-stainless-retry-count"
_TRACEPARENT: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
MAX_NAME_LENGTH: Final = 1_000
"""Characters of a model's name, which is matched with the patterns of agents."""
RELAYED_S: Final = 30.0
"""How long a call relayed by the store's server goes on without a client: if that server dies, it
is restarted meanwhile, and the retry gets the answer. A cancelled call would be resampled, which
favours short answers and is not trained."""
_ANSWERED: Final = (CallOutcome.OK, CallOutcome.UNDELIVERED)


class _Prepared(NamedTuple):
    """What a generated call needs."""

    asked: ModelRequest
    prompts: list[list[int]]
    engine: TokenEngine
    tokenizer: ChatTokenizer


class RequestHandler:
    """Turn requests into calls.

    Args:
        access: authenticates callers, routes and records their calls.
        engine: serves the policies; None if every agent is served by an endpoint.
    """

    def __init__(self, access: AccessPolicy, engine: TokenEngine | None) -> None:
        self._access = access
        self._engine = engine
        self._endpoints: dict[bytes, OpenAIEngine] = {}
        self._grammars = GrammarCache()

    async def close(self) -> None:
        """Close the connections to endpoints. Idempotent."""
        self._grammars.close()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._endpoints.clear()

    def check_engine(self) -> None:
        """Raise the `EngineError` of an engine that has failed."""
        if self._engine is not None:
            self._engine.usage()

    def policies(self) -> dict[str, int]:
        """Return the engine's policies and their versions."""
        return self._engine.policies() if self._engine is not None else {}

    async def call(self, parse: Parse, request: web.Request) -> ServedCall:
        """Return the call of a request: a new one, or the one that the request retries.

        A refused call is recorded too.

        Raises:
            ApiError: the request is refused.
        """
        _check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        session = await self._access.authenticate(request)
        agent, read = _named_agent(request), NOTHING
        try:
            read = await read_body(request)
            path, target = self._who(session, agent, read.fields)
        except ApiError as error:
            path = c.UNNAMED_AGENT if agent is None else agent
            target = self._access.target(session, path)
            info = _call_info(request, session, read, path, target)
            await self._access.log.refuse(info, error)
            raise
        info = _call_info(request, session, read, path, target)
        try:
            return await self._call(info, parse)
        except ApiError as error:
            if info.call_id not in session.calls:
                await self._access.log.refuse(info, error)
            raise
        except asyncio.CancelledError:
            if info.call_id not in session.calls:
                gone = ApiError(CLIENT_LEFT, "the client left before a model was asked")
                self._access.log.background(self._access.log.refuse(info, gone))
            raise
        except Exception as error:  # ours: the call is seen all the same
            failed = ApiError(500, f"the gateway failed: {type(error).__name__}")
            await self._access.log.refuse(info, failed)
            raise

    async def count(self, parse: Parse, request: web.Request) -> int:
        """Count the tokens of a request's prompt; nothing is generated or recorded.

        Raises:
            ApiError: the request is refused.
        """
        _check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        session = await self._access.authenticate(request)
        read = await read_body(request)
        path, target = self._who(session, _named_agent(request), read.fields)
        info = _call_info(request, session, read, path, target)
        if target.route is Route.ENDPOINT:
            raise bad_request(f"agent {path!r} is frozen to an endpoint, which counts no tokens")
        mode, body = session.claim.rollout.mode, {**read.fields, "max_tokens": 1}
        asked = await self._parsed(parse, body, read.size, mode, target.forced(mode))
        tokenizer = _tokenizer(self._engine_for(info), info.policy)
        prompts = await to_thread_if_large(read.size, asked.prompts, tokenizer)
        return sum(map(len, prompts))

    async def _parsed(
        self,
        parse: Parse,
        body: Mapping[str, Any],
        size: int,
        mode: Mode,
        forced: Sampling | None,
    ) -> ModelRequest:
        return await to_thread_if_large(size, partial(parse, body, mode=mode, forced=forced))

    def _who(
        self, session: CallerSession, agent: str | None, body: Mapping[str, Any]
    ) -> tuple[str, Target]:
        """Return the agent and its target, by the shim's header, the URL, or the model's name."""
        if agent is not None:
            return agent, self._access.target(session, agent)
        model = body.get("model") or ""
        if not isinstance(model, str) or len(model) > MAX_NAME_LENGTH:
            raise bad_request(
                f"'model' must be a text of at most {MAX_NAME_LENGTH} letters", "model"
            )
        return self._access.by_model(session, model, self.policies())

    async def _call(self, info: CallInfo, parse: Parse) -> ServedCall:
        llm = info.target.endpoint if info.target.route is Route.ENDPOINT else None
        if llm is not None and parse is not parse_chat:
            raise _chat_only(info, llm, parse)
        endpoint = None if llm is None else await self._endpoint(llm)
        ready = None
        if endpoint is None and info.call_id not in info.session.calls:
            ready = await self._prepared(info, parse)
        # a retry of the same call may have arrived during the awaits above
        call = info.session.calls.get(info.call_id)
        if call is None:
            if endpoint is not None:
                call = self._forwarded(info, endpoint)
            else:
                assert ready is not None  # no await since the call was looked up
                call = self._generated(info, ready)
            if not self._access.log.needs_bodies:
                info.body, call.overrides = {}, dict.fromkeys(call.overrides)
            info.session.add(call)
        elif call.info.body_hash != info.body_hash:
            raise _another_request(info)
        return call

    # --- calls that our engine generates --------------------------------------------------
    async def _prepared(self, info: CallInfo, parse: Parse) -> _Prepared:
        """Parse the request, compile its grammar and render its prompts."""
        session, engine = info.session, self._engine_for(info)
        mode = session.claim.rollout.mode
        forced = info.target.forced(mode)
        asked, size = await self._parsed(parse, info.body, info.size, mode, forced), info.size
        if asked.previous is not None:
            asked = asked.after(_conversation(session, asked.previous))
            size += SMALL + 1  # the earlier conversation may have any length
        _check_supported(asked.sampling, engine.capabilities)
        tokenizer = _tokenizer(engine, info.policy)
        if asked.constraint is not None:
            parser = tokenizer.tool_parser
            grammar = self._grammars.grammar(asked.constraint, engine, info.policy, parser)
            asked = replace(asked, grammar=await grammar)
        past = _past_of(info)
        prompts = _known_prompts(past.records if past is not None else [], asked)
        prompts = prompts or await to_thread_if_large(size, asked.prompts, tokenizer)
        asked = replace(asked, sampling=self._sampling(asked, prompts, tokenizer))
        return _Prepared(asked, prompts, engine, tokenizer)

    def _generated(self, info: CallInfo, ready: _Prepared) -> GeneratedCall:
        call = GeneratedCall(info, *ready, self._access.log)
        past = _past_of(info)
        _begin(info, past)
        if past is not None:
            resampled = bool(past.span.attributes.get(c.CALL_RESAMPLED))
            call.restore(past.records, resampled=resampled)
        return call

    def _engine_for(self, info: CallInfo) -> TokenEngine:
        if info.target.route is Route.APP:
            raise self._access.not_ours(info.agent_path)
        if self._engine is None:
            raise ApiError(404, f"this gateway serves no policy {info.policy!r}: it has no engine")
        return self._engine

    def _sampling(
        self, asked: ModelRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer
    ) -> Sampling:
        """Return the sampling with `max_tokens` limited to the rest of the context."""
        context = tokenizer.context_length
        longest = max(map(len, prompts))
        if longest >= context:
            raise bad_request(
                f"the prompt has {longest} tokens, the model's context holds {context}; "
                f"shorten the {asked.asks_with}",
                asked.asks_with,
                c.CONTEXT_OVERFLOW,
            )
        left = context - min(map(len, prompts))  # the engine stops a longer prompt's answer sooner
        limit = asked.sampling.max_tokens or self._access.max_tokens or left
        return msgspec.structs.replace(asked.sampling, max_tokens=min(limit, left))

    # --- calls that an endpoint answers ---------------------------------------------------
    def _forwarded(self, info: CallInfo, engine: OpenAIEngine) -> ProxiedCall:
        past = _past_of(info)
        forced = info.target.sampling  # of a dry run; frozen agents have none
        call = ProxiedCall(info, engine, engine.llm.base_url, self._access.log, forced=forced)
        _begin(info, past)
        if past is not None and past.span.attributes.get(c.CALL_OUTCOME) in _ANSWERED:
            if past.span.attributes.get(c.KEYS_REPLACED):
                raise ApiError(409, "the answer to this call held a key, and is not kept: ask anew")
            call.restore(past.span)
        return call

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


# --- headers --------------------------------------------------------------------
def _check_protocol(version: str | None) -> None:
    """Refuse a shim of another protocol version, naming both and the fix."""
    if version is not None and version != str(c.PROTOCOL_VERSION):
        raise ApiError(
            400,
            f"the app's lightspan speaks protocol {version}, this gateway speaks "
            f"{c.PROTOCOL_VERSION}; install the same version of lightspan on both sides",
        )


def _named_agent(request: web.Request) -> str | None:
    """Return the path of the agent that the shim's header or the URL names."""
    names = request.headers.get(c.HEADER_AGENT)
    if names is None and "agent" in request.match_info:
        raw = request.rel_url.raw_path  # still encoded: a name may hold a slash
        names = raw.removeprefix("/agents/").rpartition("/v1/")[0]
    if names is None:
        return None
    return join_path(unquote(part) for part in names.split("/"))


def _call_info(
    request: web.Request, session: CallerSession, read: Body, path: str, target: Target
) -> CallInfo:
    trace_id, parent_id = _parent(request.headers.get(c.HEADER_PARENT))
    call_id = request.headers.get(c.HEADER_CALL_ID)
    if not call_id and request.headers.get(_RETRIES, "0") != "0":
        call_id = session.undelivered(read.digest)  # without the shim
    call_id = call_id or new_id("call")
    return CallInfo(
        session=session,
        call_id=call_id,
        agent_path=path,
        target=target,
        body=read.fields,
        body_hash=read.digest,
        size=read.size,
        policy=BASE_POLICY if target.route is Route.BASE else target.policy,
        # equal for every retry, so that recording it again is idempotent
        span_id=digest_of(f"{session.attempt_id}/{call_id}".encode(), 8),
        parent_id=parent_id,
        trace_id=trace_id,
        start_ns=now_ns(),
        patience_s=RELAYED_S if c.HEADER_RELAYED in request.headers and not session.shared else 0.0,
    )


def _parent(header: str | None) -> tuple[str, str | None]:
    """Return (trace id, parent span id) of a `traceparent`."""
    parts = _TRACEPARENT.fullmatch(header or "")
    if parts is None:
        return new_trace_id(), None
    trace_id, parent_id = parts.groups()
    return trace_id, None if parent_id == c.NO_PARENT else parent_id


# --- earlier calls ----------------------------------------------------------------
def _past_of(info: CallInfo) -> RecordedCall | None:
    """Return this call as the store has it; refuse another request with its id."""
    past = info.session.past.get(info.call_id)
    if past is not None and past.body_hash != info.body_hash:
        raise _another_request(info)
    return past


def _another_request(info: CallInfo) -> ApiError:
    return bad_request(f"call id {info.call_id} was used for another request")


def _begin(info: CallInfo, past: RecordedCall | None) -> None:
    """Number the call; one that is continued keeps its number."""
    known = past.span.sequence_start if past is not None else None
    info.sequence_start = known or info.session.next_sequence()


def _known_prompts(records: Sequence[TokenRecord], asked: ModelRequest) -> list[list[int]]:
    """Return the recorded prompts; empty unless all of them were recorded."""
    known = {record.choice // asked.n: record.prompt_ids for record in records}
    return [known[number] for number in range(asked.count)] if len(known) == asked.count else []


def _conversation(session: CallerSession, response_id: str) -> Conversation:
    """Return the conversation up to a response of this session, its answer included."""
    call_id = response_id.removeprefix(ID_PREFIX)
    said = None
    if call_id in session.calls:
        said = session.calls[call_id].conversation()
    elif call_id in session.past:
        said = recorded_conversation(session.past[call_id].span)
    if said is None:
        raise bad_request(
            f"there is no answered response {response_id!r} in this attempt",
            "previous_response_id",
            "previous_response_not_found",
        )
    return said


def _chat_only(info: CallInfo, llm: LLM, parse: Parse) -> ApiError:
    """Return the refusal of another dialect than chat completions for an endpoint."""
    if info.target.sampling is not None:  # frozen agents have none
        return bad_request(
            f"a dry run asks {llm.base_url} for chat completions only: `dev` with the model on "
            "this machine shows these calls, and `fit` trains them",
            code=c.CHAT_ONLY,
        )
    instead = (
        'give it a model of ours (frozen="base")'
        if parse is parse_message
        else "use those (LangChain: ChatOpenAI(use_responses_api=False); OpenAI Agents SDK: "
        'set_default_openai_api("chat_completions"))'
    )
    return bad_request(
        f"agent {info.agent_path!r} is frozen to {llm.base_url}, which is asked for chat "
        f"completions only: {instead}",
        code=c.CHAT_ONLY,
    )


# --- engines ------------------------------------------------------------------
def _tokenizer(engine: TokenEngine, policy: str) -> ChatTokenizer:
    try:
        return engine.tokenizer(policy)
    except NotFoundError as error:
        raise no_model(str(error)) from error


def _check_supported(sampling: Sampling, capabilities: EngineCapabilities) -> None:
    """Refuse sampling options that the engine does not declare."""
    asked = {
        "stop": (bool(sampling.stop), capabilities.stop_strings, list(sampling.stop)),
        "top_p": (sampling.top_p < 1, capabilities.top_p, sampling.top_p),
        "top_k": (sampling.top_k > 0, capabilities.top_k, sampling.top_k),
    }
    for key, (wanted, honoured, value) in asked.items():
        if wanted and not honoured:
            raise cannot_honour(key, value)
