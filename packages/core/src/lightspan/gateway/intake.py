"""From an HTTP request to the call that answers it: who asks, where that goes, what is asked."""

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

from lightspan.engines.openai import OpenAIEngine
from lightspan.engines.protocol import (
    ChatTokenizer,
    EngineCapabilities,
    TokenEngine,
)
from lightspan.errors import ConfigError, NotFoundError
from lightspan.gateway.bodies import NOTHING, Body, digest_of, read_body
from lightspan.gateway.calls import Account, CallInfo, Past, ServedCall
from lightspan.gateway.dialects import Parse
from lightspan.gateway.dialects.chat import parse_chat
from lightspan.gateway.dialects.messages import parse_message
from lightspan.gateway.dialects.responses import ID_PREFIX, recorded_conversation
from lightspan.gateway.dialects.shared import Conversation, ModelRequest, cannot_honour
from lightspan.gateway.forwards import ForwardedCall
from lightspan.gateway.generations import GeneratedCall
from lightspan.gateway.preparation import Preparation
from lightspan.gateway.refusal import CLIENT_LEFT, ApiError, bad_request, no_model
from lightspan.gateway.terms import Terms
from lightspan.gateway.workers import SMALL, Workers
from lightspan.schema import conventions as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode, new_id
from lightspan.schema.routing import BASE_POLICY, Route, Target, join_path
from lightspan.schema.spans import new_trace_id, now_ns
from lightspan.schema.tokens import CallOutcome, Sampling, TokenRecord

_RETRIES: Final = "x-stainless-retry-count"
_TRACEPARENT: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
LONGEST_NAME: Final = 1_000
RELAYED_S: Final = 30.0
"""How long a relayed call is worked on when its connection is lost: a server that died is started
again meanwhile, and the retry gets the answer. Cut short it would have to be sampled anew, as only
its end is handed out, and what is sampled anew favours short answers: it is not learned from."""
"""Of a model, in letters: it is compared with the patterns of agents."""
_ANSWERED: Final = (CallOutcome.OK, CallOutcome.UNDELIVERED)


class _Prepared(NamedTuple):
    """A request that only has to be asked."""

    asked: ModelRequest
    prompts: list[list[int]]
    engine: TokenEngine
    tokenizer: ChatTokenizer


class Intake:
    """Turns requests into calls.

    Args:
        terms: who may call, and where a call goes.
        engine: serves the policies; None if every agent is served by an endpoint.
    """

    def __init__(self, terms: Terms, engine: TokenEngine | None) -> None:
        self._terms = terms
        self._engine = engine
        self._endpoints: dict[bytes, OpenAIEngine] = {}
        self._preparation = Preparation()
        self._reading = Workers("requests")

    async def close(self) -> None:
        """Close the connections to endpoints. Idempotent."""
        self._preparation.close()
        self._reading.close()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._endpoints.clear()

    def check_engine(self) -> None:
        """Raise the `EngineError` that the engine has died of."""
        if self._engine is not None:
            self._engine.usage()

    def policies(self) -> dict[str, int]:
        """What the engine serves: policy → version."""
        return self._engine.policies() if self._engine is not None else {}

    async def call(self, parse: Parse, request: web.Request) -> ServedCall:
        """The call that a request asks for: a new one, or the one that it tries again.

        A refusal is a call of the account too, and logged.

        Raises:
            ApiError: the request is refused.
        """
        _check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        account = await self._terms.admit(request)
        agent, read = _named_agent(request), NOTHING
        try:
            read = await read_body(request, self._reading)
            path, target = self._who(account, agent, read.fields)
        except ApiError as error:
            path = c.UNNAMED_AGENT if agent is None else agent
            target = self._terms.target(account, path)
            info = _call_info(request, account, read, path, target)
            await self._terms.log.refuse(info, error)
            raise
        info = _call_info(request, account, read, path, target)
        try:
            return await self._call(info, parse)
        except ApiError as error:
            if info.call_id not in account.calls:
                await self._terms.log.refuse(info, error)
            raise
        except asyncio.CancelledError:
            if info.call_id not in account.calls:
                gone = ApiError(CLIENT_LEFT, "the client left before a model was asked")
                self._terms.log.background(self._terms.log.refuse(info, gone))
            raise
        except Exception as error:  # ours: the call is seen all the same
            failed = ApiError(500, f"the gateway failed: {type(error).__name__}")
            await self._terms.log.refuse(info, failed)
            raise

    async def count(self, parse: Parse, request: web.Request) -> int:
        """How many tokens the prompt of a request has. Nothing is asked of a model, or logged.

        Raises:
            ApiError: the request is refused.
        """
        _check_protocol(request.headers.get(c.HEADER_PROTOCOL))
        account = await self._terms.admit(request)
        read = await read_body(request, self._reading)
        path, target = self._who(account, _named_agent(request), read.fields)
        info = _call_info(request, account, read, path, target)
        if target.route is Route.ENDPOINT:
            raise bad_request(f"agent {path!r} is frozen to an endpoint, which counts no tokens")
        mode, body = account.claim.rollout.mode, {**read.fields, "max_tokens": 1}
        asked = await self._parsed(parse, body, read.size, mode, target.forced(mode))
        tokenizer = _tokenizer(self._engine_for(info), info.policy)
        prompts = await self._preparation.prompts(asked, tokenizer, size=read.size)
        return sum(map(len, prompts))

    async def _parsed(
        self,
        parse: Parse,
        body: Mapping[str, Any],
        size: int,
        mode: Mode,
        forced: Sampling | None,
    ) -> ModelRequest:
        return await self._reading.run(partial(parse, body, mode=mode, forced=forced), size=size)

    def _who(
        self, account: Account, agent: str | None, body: Mapping[str, Any]
    ) -> tuple[str, Target]:
        """Who calls and where that goes: by the shim's header, the URL, or the model's name."""
        if agent is not None:
            return agent, self._terms.target(account, agent)
        model = body.get("model") or ""
        if not isinstance(model, str) or len(model) > LONGEST_NAME:
            raise bad_request(f"'model' must be a text of at most {LONGEST_NAME} letters", "model")
        return self._terms.by_model(account, model, self.policies())

    async def _call(self, info: CallInfo, parse: Parse) -> ServedCall:
        llm = info.target.endpoint if info.target.route is Route.ENDPOINT else None
        if llm is not None and parse is not parse_chat:
            raise _chat_only(info, llm, parse)
        endpoint = None if llm is None else await self._endpoint(llm)
        ready = None
        if endpoint is None and info.call_id not in info.account.calls:
            ready = await self._prepared(info, parse)
        # after the waiting: another try of the same call may have come meanwhile
        call = info.account.calls.get(info.call_id)
        if call is None:
            if endpoint is not None:
                call = self._forwarded(info, endpoint)
            else:
                assert ready is not None  # nothing was waited for since the call was looked for
                call = self._generated(info, ready)
            if not self._terms.log.needs_bodies:
                info.body, call.overrides = {}, dict.fromkeys(call.overrides)
            info.account.add(call)
        elif call.info.body_hash != info.body_hash:
            raise _another_request(info)
        return call

    # --- calls that our engine generates --------------------------------------------------
    async def _prepared(self, info: CallInfo, parse: Parse) -> _Prepared:
        """What is asked, with its grammar, and the ids of its prompts."""
        account, engine = info.account, self._engine_for(info)
        mode = account.claim.rollout.mode
        forced = info.target.forced(mode)
        asked, size = await self._parsed(parse, info.body, info.size, mode, forced), info.size
        if asked.previous is not None:
            asked = asked.after(_conversation(account, asked.previous))
            size += SMALL + 1  # what was said before may be of any length
        _check_supported(asked.sampling, engine.capabilities)
        tokenizer = _tokenizer(engine, info.policy)
        grammar = await self._preparation.grammar(asked, engine, info.policy, tokenizer)
        asked = replace(asked, grammar=grammar)
        past = _past_of(info)
        prompts = _known_prompts(past.records if past is not None else [], asked)
        prompts = prompts or await self._preparation.prompts(asked, tokenizer, size=size)
        asked = replace(asked, sampling=self._sampling(asked, prompts, tokenizer))
        return _Prepared(asked, prompts, engine, tokenizer)

    def _generated(self, info: CallInfo, ready: _Prepared) -> GeneratedCall:
        call = GeneratedCall(info, *ready, self._terms.log)
        past = _past_of(info)
        _begin(info, past)
        if past is not None:
            resampled = bool(past.span.attributes.get(c.CALL_RESAMPLED))
            call.restore(past.records, resampled=resampled)
        return call

    def _engine_for(self, info: CallInfo) -> TokenEngine:
        if info.target.route is Route.APP:
            raise self._terms.not_ours(info.agent_path)
        if self._engine is None:
            raise ApiError(404, f"this gateway serves no policy {info.policy!r}: it has no engine")
        return self._engine

    def _sampling(
        self, asked: ModelRequest, prompts: Sequence[list[int]], tokenizer: ChatTokenizer
    ) -> Sampling:
        """The sampling with `max_tokens` set: to what the context leaves, or less."""
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
        limit = asked.sampling.max_tokens or self._terms.max_tokens or left
        return msgspec.structs.replace(asked.sampling, max_tokens=min(limit, left))

    # --- calls that an endpoint answers ---------------------------------------------------
    def _forwarded(self, info: CallInfo, engine: OpenAIEngine) -> ForwardedCall:
        past = _past_of(info)
        forced = info.target.sampling  # of a dry run; frozen agents have none
        call = ForwardedCall(info, engine, engine.llm.base_url, self._terms.log, forced=forced)
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


# --- what a request says --------------------------------------------------------------------
def _check_protocol(version: str | None) -> None:
    """Refuse a shim of another protocol version, naming both and the fix."""
    if version is not None and version != str(c.PROTOCOL_VERSION):
        raise ApiError(
            400,
            f"the app's lightspan speaks protocol {version}, this gateway speaks "
            f"{c.PROTOCOL_VERSION}; install the same version of lightspan on both sides",
        )


def _named_agent(request: web.Request) -> str | None:
    """The path of the agent that the shim's header or the URL names."""
    names = request.headers.get(c.HEADER_AGENT)
    if names is None and "agent" in request.match_info:
        raw = request.rel_url.raw_path  # still encoded: a name may hold a slash
        names = raw.removeprefix("/agents/").rpartition("/v1/")[0]
    if names is None:
        return None
    return join_path(unquote(part) for part in names.split("/"))


def _call_info(
    request: web.Request, account: Account, read: Body, path: str, target: Target
) -> CallInfo:
    trace_id, parent_id = _parent(request.headers.get(c.HEADER_PARENT))
    call_id = request.headers.get(c.HEADER_CALL_ID)
    if not call_id and request.headers.get(_RETRIES, "0") != "0":
        call_id = account.undelivered(read.digest)  # without the shim
    call_id = call_id or new_id("call")
    return CallInfo(
        account=account,
        call_id=call_id,
        agent_path=path,
        target=target,
        body=read.fields,
        body_hash=read.digest,
        size=read.size,
        policy=BASE_POLICY if target.route is Route.BASE else target.policy,
        # the same for every try of a call: writing it again changes nothing
        span_id=digest_of(f"{account.attempt_id}/{call_id}".encode(), 8),
        parent_id=parent_id,
        trace_id=trace_id,
        start_ns=now_ns(),
        patience_s=RELAYED_S if c.HEADER_RELAYED in request.headers and not account.shared else 0.0,
    )


def _parent(header: str | None) -> tuple[str, str | None]:
    """(trace id, parent span id) of a `traceparent`."""
    parts = _TRACEPARENT.fullmatch(header or "")
    if parts is None:
        return new_trace_id(), None
    trace_id, parent_id = parts.groups()
    return trace_id, None if parent_id == c.NO_PARENT else parent_id


# --- what is known of a call ----------------------------------------------------------------
def _past_of(info: CallInfo) -> Past | None:
    """What the store knows of this call, if it is the same request."""
    past = info.account.past.get(info.call_id)
    if past is not None and past.body_hash != info.body_hash:
        raise _another_request(info)
    return past


def _another_request(info: CallInfo) -> ApiError:
    return bad_request(f"call id {info.call_id} was used for another request")


def _begin(info: CallInfo, past: Past | None) -> None:
    """Number the call; one that goes on keeps its number."""
    known = past.span.sequence_start if past is not None else None
    info.sequence_start = known or info.account.next_sequence()


def _known_prompts(records: Sequence[TokenRecord], asked: ModelRequest) -> list[list[int]]:
    """The prompts as they were recorded; empty if one of them was not."""
    known = {record.choice // asked.n: record.prompt_ids for record in records}
    return [known[number] for number in range(asked.count)] if len(known) == asked.count else []


def _conversation(account: Account, response_id: str) -> Conversation:
    """What was said up to a response of this account, the answer included."""
    call_id = response_id.removeprefix(ID_PREFIX)
    said = None
    if call_id in account.calls:
        said = account.calls[call_id].conversation()
    elif call_id in account.past:
        said = recorded_conversation(account.past[call_id].span)
    if said is None:
        raise bad_request(
            f"there is no answered response {response_id!r} in this attempt",
            "previous_response_id",
            "previous_response_not_found",
        )
    return said


def _chat_only(info: CallInfo, llm: LLM, parse: Parse) -> ApiError:
    """An endpoint is asked for chat completions only, and this is something else."""
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


# --- what an engine can do ------------------------------------------------------------------
def _tokenizer(engine: TokenEngine, policy: str) -> ChatTokenizer:
    try:
        return engine.tokenizer(policy)
    except NotFoundError as error:
        raise no_model(str(error)) from error


def _check_supported(sampling: Sampling, capabilities: EngineCapabilities) -> None:
    """Refuse what the engine does not declare."""
    asked = {
        "stop": (bool(sampling.stop), capabilities.stop_strings, list(sampling.stop)),
        "top_p": (sampling.top_p < 1, capabilities.top_p, sampling.top_p),
        "top_k": (sampling.top_k > 0, capabilities.top_k, sampling.top_k),
    }
    for key, (wanted, honoured, value) in asked.items():
        if wanted and not honoured:
            raise cannot_honour(key, value)
