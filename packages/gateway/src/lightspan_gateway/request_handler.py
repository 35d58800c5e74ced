"""Conversion of HTTP requests to calls: authentication, routing, parsing, prompt and grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast
from urllib.parse import unquote

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError, DataError, NotFoundError
from lightspan.protocols.engine import ChatTokenizer, ImageTokenizer, TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.images import Image, with_data
from lightspan.schema.llm import LLM
from lightspan.schema.media import digests_in
from lightspan.schema.records import Mode, new_id
from lightspan.schema.routing import BASE_POLICY, Route, Target, join_path
from lightspan.schema.spans import new_trace_id, now_ns
from lightspan.schema.token_records import CallOutcome, Sampling, TokenRecord
from lightspan_gateway import request_body
from lightspan_gateway.access_policy import AccessPolicy
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, bad_request, no_model
from lightspan_gateway.calls import (
    TRACEPARENT,
    CallerSession,
    CallInfo,
    RecordedCall,
    ServedCall,
)
from lightspan_gateway.dialects import Parse
from lightspan_gateway.dialects.anthropic import parse_message
from lightspan_gateway.dialects.base import Conversation, ModelRequest, Prompt, cannot_honour
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.dialects.image_parts import IMAGE_TYPES
from lightspan_gateway.dialects.openai_responses import ID_PREFIX, recorded_conversation
from lightspan_gateway.forks import Role
from lightspan_gateway.generated_call import GeneratedCall
from lightspan_gateway.grammars import GrammarCache
from lightspan_gateway.images import ImageReader, refused_image, with_bytes
from lightspan_gateway.limits import GatewayLimits
from lightspan_gateway.openai_engine import OpenAIEngine
from lightspan_gateway.prompt_rules import agent_of_prompt
from lightspan_gateway.proxied_call import ProxiedCall

TINY_CONTEXT: Final = 512
"""Context of `lightspan_testing.tiny_model` by default; models of apps have longer ones."""
_TINY_ADVICE: Final = ", or build the tiny model with tiny_model(…, context=4096)"
_RETRIES: Final = "x-stainless-retry-count"
MAX_NAME_LENGTH: Final = 1_000
"""Maximum characters of a model's name, which is matched with the patterns of agents."""
_ANSWERED: Final = (CallOutcome.OK, CallOutcome.UNDELIVERED)


class RequestHandler:
    """Convert HTTP requests to model calls.

    A request that repeats an earlier one gets the call of the earlier one.

    Args:
        access: authenticates callers, and routes and records their calls.
        engine: the engine that serves the trained policies; None if an endpoint serves every agent.
        limits: limits and times.
    """

    def __init__(
        self, access: AccessPolicy, engine: TokenEngine | None, limits: GatewayLimits
    ) -> None:
        self._access = access
        self._engine = engine
        self._endpoints: dict[bytes, OpenAIEngine] = {}
        self._relayed_s = limits.relayed_s
        self._grammars = GrammarCache(limits.compile_timeout_s)
        self._images = ImageReader(limits.images)

    async def close(self) -> None:
        """Close the connections to endpoints. Idempotent."""
        self._grammars.close()
        await self._images.close()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._endpoints.clear()

    def check_engine(self) -> None:
        """Raise `EngineError` if the engine has failed."""
        if self._engine is not None:
            self._engine.usage()

    def policies(self) -> dict[str, int]:
        """Return the engine's policies and their versions."""
        return self._engine.policies() if self._engine is not None else {}

    async def call(self, parse: Parse, request: web.Request) -> ServedCall:
        """Return the call of a request: a new call, or the call that the request retries.

        A refused call is recorded too.

        Raises:
            ApiError: the request is refused.
        """
        session = await self._access.authenticate(request)
        agent, body = _agent_path(request), request_body.EMPTY
        try:
            body = await request_body.read_body(request)
            session = await self._access.assign(session, request, body)
            path, target = self._route(session, agent, body)
        except ApiError as error:
            path = c.UNNAMED_AGENT if agent is None else agent
            info = self._call_info(request, session, body, path, self._access.target(session, path))
            await self._access.log.record_refusal(info, error)
            raise
        info = self._call_info(request, session, body, path, target)
        try:
            await _await_turn(info)
            return await self._find_or_create(info, parse)
        except ApiError as error:
            if info.call_id not in session.calls:
                await self._access.log.record_refusal(info, error)
            raise
        except asyncio.CancelledError:
            if info.call_id not in session.calls:
                gone = ApiError(CLIENT_LEFT, "the client disconnected before the model was called")
                self._access.log.background(self._access.log.record_refusal(info, gone))
            raise
        except Exception as error:  # an error of the gateway: record the call all the same
            failure = ApiError(500, f"the gateway failed: {type(error).__name__}")
            await self._access.log.record_refusal(info, failure)
            raise

    async def count(self, api: str, parse: Parse, request: web.Request) -> int:
        """Count the tokens of a request's prompt; nothing is generated or recorded.

        Args:
            api: path of the API after `/v1/`.
            parse: parser of its requests.
            request: the request.

        Raises:
            ApiError: the request is refused.
        """
        session = await self._access.authenticate(request)
        body = await request_body.read_body(request)
        if api == "messages":  # where a call must have a limit, and a count has none
            body = body._replace(fields={**body.fields, "max_tokens": 1})
        path, target = self._route(session, _agent_path(request), body)
        if target.route is Route.ENDPOINT:
            raise bad_request(f"agent {path!r} is frozen to an endpoint, which counts no tokens")
        info = self._call_info(request, session, body, path, target)
        info.api = api
        engine = self._engine_for(info)
        tokenizer, images = _tokenizer(engine, info.policy), await self._read_images(info, engine)
        _, prompts = await request_body.to_thread_if_large(
            _rendered_size(info), _prepare, info, parse, tokenizer, None, images
        )
        return sum(len(prompt.ids) for prompt in prompts)

    def _route(
        self, session: CallerSession, agent: str | None, body: request_body.Body
    ) -> tuple[str, Target]:
        """Return the path and the target of the calling agent.

        Args:
            session: session of the request's sender.
            agent: the agent's path; None to find the agent by the system prompt or the model name
                in `body`.
            body: body of the request.
        """
        agent = agent_of_prompt(session.routing, body.fields) if agent is None else agent
        if agent is not None:
            return agent, self._access.target(session, agent)
        model = body.fields.get("model") or ""
        if not isinstance(model, str) or len(model) > MAX_NAME_LENGTH:
            raise bad_request(
                f"'model' must be a text of at most {MAX_NAME_LENGTH} letters", "model"
            )
        return self._access.target_of_model(session, model, self.policies())

    async def _find_or_create(self, info: CallInfo, parse: Parse) -> ServedCall:
        session, call_id = info.session, info.call_id
        if call_id not in session.calls:
            recorded = session.recorded.get(call_id)
            if recorded is not None and recorded.body_hash != info.body_hash:
                raise _another_request(call_id)
            is_proxied = info.target.route is Route.ENDPOINT
            create = self._proxied_call if is_proxied else self._generated_call
            if info.repeats is not None:
                _check_answer(info, info.repeats, is_proxied=is_proxied)
            call = await create(info, parse, recorded)
            if call_id not in session.calls:  # else a retry created it during the await above
                number = None if recorded is None else recorded.span.sequence_start
                info.sequence_start = info.sequence_start or number or session.next_sequence()
                if not self._access.log.needs_bodies:
                    ignored = [key for key, (_, used) in call.overrides.items() if used is None]
                    info.body, call.overrides = {}, dict.fromkeys(ignored)
                if info.repeats is not None:
                    await self._record_replay(call)
                session.add(call)
        call = session.calls[call_id]
        if call.info.body_hash != info.body_hash:
            raise _another_request(call_id)
        return call

    async def _record_replay(self, call: ServedCall) -> None:
        """Record a replayed call.

        Raises:
            ApiError: 400 if the store lacks a part of the recorded answer.
        """
        if not call.answered:  # nothing is sampled where an answer is to be repeated
            raise _depart(call.info, "its answer is not complete in the store")
        await self._access.log.record(call, CallOutcome.REPLAYED)
        call.forget_request()

    async def _generated_call(
        self, info: CallInfo, parse: Parse, recorded: RecordedCall | None
    ) -> ServedCall:
        engine = self._engine_for(info)
        tokenizer = _tokenizer(engine, info.policy)
        images = await self._read_images(info, engine, recorded)
        request, prompts = await request_body.to_thread_if_large(
            _rendered_size(info), _prepare, info, parse, tokenizer, recorded, images
        )
        grammar = ""
        if request.constraint is not None:
            grammar = await self._grammars.grammar(
                request.constraint, engine, info.policy, tokenizer.tool_parser
            )
        sampling = self._sampling(info, request, prompts, engine, tokenizer)
        shortened = _shortened(request, sampling.max_tokens, _room(prompts, tokenizer))
        overrides = {**request.overrides, **shortened}
        request = replace(request, sampling=sampling, grammar=grammar, overrides=overrides)
        call = GeneratedCall(info, request, prompts, engine, tokenizer, self._access.log)
        if recorded is not None:
            call.restore(recorded)
        return call

    async def _read_images(
        self, info: CallInfo, engine: TokenEngine, recorded: RecordedCall | None = None
    ) -> Mapping[str, Image]:
        """Read the images of a request whose policy takes images, and put them into its body.

        Args:
            info: the call.
            engine: the engine that serves the policy.
            recorded: the call's record in the store; None if it is not in the store.

        Returns:
            Digest → image, of the request and of the recorded calls that it repeats or continues.

        Raises:
            ApiError: an image is refused.
        """
        kind = IMAGE_TYPES.get(info.api)
        if kind is None or info.policy not in engine.capabilities.images:
            return {}
        same = recorded or info.equal
        known = _prompt_images(same.records) if same is not None else []
        earlier = _recorded_response(info.session, info.body.get("previous_response_id"))
        continued = set() if earlier is None else digests_in(earlier.span.attributes)
        stored: Mapping[str, Image] = {}
        if wanted := {*known, *continued}:
            stored = await self._access.images(wanted)
        last = [stored[digest] for digest in known if digest in stored]
        read = await self._images.read(info.body, kind, last if len(last) == len(known) else ())
        info.images = {**stored, **{image.digest: image for _, image in read}}
        for field, image in read:
            info.image_fields.setdefault(image.digest, field)
        return info.images

    async def _proxied_call(
        self, info: CallInfo, parse: Parse, recorded: RecordedCall | None
    ) -> ServedCall:
        llm = info.target.endpoint
        assert llm is not None
        if parse is not parse_chat:
            raise _chat_only(info, llm, parse)
        key = msgspec.json.encode(llm)
        if key not in self._endpoints:
            engine = OpenAIEngine(llm)
            try:
                await engine.start()
            except ConfigError as error:
                raise ApiError(500, str(error)) from error
            self._endpoints[key] = engine
        call = ProxiedCall(info, self._endpoints[key], llm.base_url, self._access.log)
        if recorded is not None and recorded.span.attributes.get(c.CALL_OUTCOME) in _ANSWERED:
            if recorded.span.attributes.get(c.KEYS_REPLACED):
                raise ApiError(
                    409,
                    "the answer to this call held a key and was not stored: send the request as a "
                    "new call",
                )
            call.restore(recorded.span)
        return call

    def _engine_for(self, info: CallInfo) -> TokenEngine:
        if info.target.route is Route.APP:
            raise self._access.unserved_agent(info.agent_path)
        if self._engine is None:
            raise ApiError(404, f"this gateway serves no policy {info.policy!r}: it has no engine")
        return self._engine

    def _sampling(
        self,
        info: CallInfo,
        request: ModelRequest,
        prompts: Sequence[Prompt],
        engine: TokenEngine,
        tokenizer: ChatTokenizer,
    ) -> Sampling:
        """Return the sampling parameters, with `max_tokens` set.

        It is at most the rest of the context and, also in evaluations, the algorithm's limit.
        Where neither the request nor the algorithm limits the answer, the access policy does.

        Raises:
            ApiError: 400 if a prompt is too long, or the engine does not support an option.
        """
        sampling, capabilities = request.sampling, engine.capabilities
        for key, is_set, is_supported in (
            ("stop", bool(sampling.stop), capabilities.stop_strings),
            ("top_p", sampling.top_p < 1, capabilities.top_p),
            ("top_k", sampling.top_k > 0, capabilities.top_k),
        ):
            if is_set and not is_supported:
                value = getattr(sampling, key)
                error_type = None if key == "stop" else c.UNSUPPORTED_PARAMETER
                raise cannot_honour(key, list(value) if key == "stop" else value, error_type)
        context = tokenizer.context_length
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest >= context:
            raise bad_request(
                f"the prompt has {longest} tokens, the model's context holds {context}; "
                f"shorten the {request.prompt_field}{_TINY_ADVICE * (context <= TINY_CONTEXT)}",
                request.prompt_field,
                c.CONTEXT_OVERFLOW,
            )
        room, limit, forced = _room(prompts, tokenizer), sampling.max_tokens, info.target.sampling
        if forced is not None and forced.max_tokens is not None:
            limit = min(limit or forced.max_tokens, forced.max_tokens)
        else:
            cache = getattr(engine, "cache_tokens", lambda policy: None)(info.policy)
            limit = self._access.answer_limit(limit, room, context, cache)
        return msgspec.structs.replace(sampling, max_tokens=min(limit or room, room))

    def _call_info(
        self,
        request: web.Request,
        session: CallerSession,
        body: request_body.Body,
        path: str,
        target: Target,
    ) -> CallInfo:
        call_id = request.headers.get(c.HEADER_CALL_ID)
        if not call_id and request.headers.get(_RETRIES, "0") != "0":
            # an SDK's own retry, without lightspan's header
            call_id = session.undelivered(body.digest)
        call_id = call_id or new_id("call")
        traceparent = TRACEPARENT.fullmatch(request.headers.get(c.HEADER_PARENT, ""))
        trace_id, parent_id = traceparent.groups() if traceparent else (new_trace_id(), c.NO_PARENT)
        is_relayed = c.HEADER_RELAYED in request.headers
        return CallInfo(
            session=session,
            call_id=call_id,
            agent_path=path,
            target=target,
            body=body.fields,
            body_hash=body.digest,
            size=body.size,
            policy=BASE_POLICY if target.route is Route.BASE else target.policy,
            span_id=_span_id(session, call_id),
            parent_id=None if parent_id == c.NO_PARENT else parent_id,
            trace_id=trace_id,
            start_ns=now_ns(),
            api=request.rel_url.raw_path.rpartition("/v1/")[2],
            grace_s=self._relayed_s if is_relayed and not session.shared else 0.0,
        )


def _room(prompts: Sequence[Prompt], tokenizer: ChatTokenizer) -> int:
    """Return the number of tokens that the shortest prompt leaves in the context.

    The engine stops the answers to longer prompts sooner.
    """
    return tokenizer.context_length - min(len(prompt.ids) for prompt in prompts)


def _shortened(request: ModelRequest, used: int | None, room: int) -> dict[str, tuple[Any, Any]]:
    """Return the override of the answer's limit; empty if the request's limit or context counts.

    Args:
        request: the request.
        used: limit of the answer in tokens; None for none.
        room: tokens that the prompt leaves in the context.
    """
    limit = request.sampling.max_tokens
    is_less = used is not None and used < min(room if limit is None else limit, room)
    return {request.limit_field: (limit, used)} if is_less else {}


# --- requests -------------------------------------------------------------------
def _agent_path(request: web.Request) -> str | None:
    """Return the path of the agent that makes the call.

    It is in lightspan's header, or else in the URL. The result is None if it is in neither.
    """
    names = request.headers.get(c.HEADER_AGENT)
    if names is None and "agent" in request.match_info:
        raw = request.rel_url.raw_path  # still encoded: a name may contain a slash
        names = raw.removeprefix("/agents/").rpartition("/v1/")[0]
    return None if names is None else join_path(unquote(part) for part in names.split("/"))


def _rendered_size(info: CallInfo) -> int:
    """Return the bytes of a call's prompt, at least: images, and a conversation, have any size."""
    is_larger = bool(info.images) or "previous_response_id" in info.body
    return request_body.SMALL + 1 if is_larger else info.size


def _prompt_images(records: Sequence[TokenRecord]) -> list[str]:
    """Return the digests of the images in a recorded prompt, in order."""
    images = records[0].images if records else ()
    return [image.digest for image in images if not image.first]


def _forced(target: Target, mode: Mode) -> Sampling | None:
    """Return the sampling parameters that replace the app's; None keeps the app's.

    Args:
        target: destination of the call.
        mode: purpose of the rollout. For `Mode.VAL` only the `temperature` of the result counts.
    """
    if not target.selected or mode is not Mode.VAL:
        return target.sampling if target.selected else None
    if target.validate_temperature is None:
        return None
    return Sampling(temperature=target.validate_temperature)


def _prepare(
    info: CallInfo,
    parse: Parse,
    tokenizer: ChatTokenizer,
    recorded: RecordedCall | None,
    images: Mapping[str, Image],
) -> tuple[ModelRequest, list[Prompt]]:
    """Parse a request, and return it with its prompts.

    The prompts of a recorded call are taken from its record. Otherwise they are rendered.

    Args:
        info: the call.
        parse: parser of the request's body.
        tokenizer: tokenizer of the policy.
        recorded: the call's record in the store; None if it is not in the store.
        images: digest → image of recorded calls.
    """
    mode = info.session.claim.rollout.mode
    request = parse(info.body, mode=mode, forced=_forced(info.target, mode))
    if request.previous is not None:
        request = request.after(_conversation(info.session, request.previous, images))
    records = [] if recorded is None else recorded.records
    prompts = {
        record.choice // request.n: Prompt(
            record.prompt_ids, with_data(record.images, images) or record.images
        )
        for record in records
    }
    if len(prompts) == request.count:
        return request, [prompts[number] for number in range(request.count)]
    try:
        return request, request.prompts(tokenizer)
    except ApiError as error:
        if not isinstance(error.__cause__, DataError):
            raise
        vision = cast(ImageTokenizer, tokenizer)
        raise refused_image(info.images, info.image_fields, vision) or error from error.__cause__


def _recorded_response(session: CallerSession, response_id: object) -> RecordedCall | None:
    """Return the record of an earlier response; None if the session has its call, or no record."""
    call_id = str(response_id or "").removeprefix(ID_PREFIX)
    return None if call_id in session.calls else session.recorded.get(call_id)


def _conversation(
    session: CallerSession, response_id: str, images: Mapping[str, Image]
) -> Conversation:
    """Return the messages up to and including the response `response_id`.

    Raises:
        ApiError: 400 if the session has no response with this id, or the response is not complete.
    """
    call_id = response_id.removeprefix(ID_PREFIX)
    call, recorded = session.calls.get(call_id), _recorded_response(session, response_id)
    conversation = None
    if call is not None:
        conversation = call.conversation()
    elif recorded is not None:
        conversation = with_bytes(recorded_conversation(recorded.span), images)
        if conversation is None:
            raise bad_request(
                "an image of the conversation up to the response that 'previous_response_id' names "
                "is not in the store: send the whole conversation as 'input'",
                "previous_response_id",
                "previous_response_not_found",
            )
    if conversation is None:
        raise bad_request(
            f"there is no answered response {response_id!r} in this attempt",
            "previous_response_id",
            "previous_response_not_found",
        )
    return conversation


async def _await_turn(info: CallInfo) -> None:
    """Find out what a request of a forked attempt repeats, and wait until it may be answered.

    Requests of other attempts are left unchanged.

    Raises:
        ApiError: 400 if the attempt departed from the recorded one.
    """
    session, replay = info.session, info.session.replay
    if replay is None or info.call_id in session.calls:
        return
    start = session.next_sequence()  # before the wait: calls that overlapped shall overlap again
    placement = await replay.place(info.call_id, info.agent_path, info.body_hash, info.body)
    info.is_fork = placement.role is Role.FORK
    info.equal = replay.calls.get(placement.call_id)
    if placement.role is Role.PREFIX:
        recorded = session.recorded[placement.call_id] = replay.calls[placement.call_id]
        info.request_id, info.call_id = info.call_id, placement.call_id
        info.span_id = _span_id(session, info.call_id)
        info.repeats, info.sequence_start = recorded, start


def _check_answer(info: CallInfo, recorded: RecordedCall, *, is_proxied: bool) -> None:
    """Raise `ApiError` unless the store has the answer of a call that is to be replayed."""
    values = recorded.span.attributes
    if values.get(c.CALL_OUTCOME) not in (*_ANSWERED, CallOutcome.RESAMPLED):
        raise _depart(info, "its recorded answer did not reach the app, or is gone from the store")
    if is_proxied and values.get(c.KEYS_REPLACED):
        raise _depart(info, "its recorded answer held a key and was not stored")


def _depart(info: CallInfo, reason: str) -> ApiError:
    """End the replay at a call whose answer cannot be given; return the error of all its calls."""
    replay = info.session.replay
    assert replay is not None
    number = replay.script.number(info.call_id)
    return replay.depart(f"call {number}, of {info.agent_path!r}, cannot be answered: {reason}")


def _span_id(session: CallerSession, call_id: str) -> str:
    """Return a call's span id, the same for every retry, so that recording it is idempotent."""
    return request_body.digest_of(f"{session.attempt_id}/{call_id}".encode(), 8)


def _another_request(call_id: str) -> ApiError:
    return bad_request(f"call id {call_id} was used for another request")


def _chat_only(info: CallInfo, llm: LLM, parse: Parse) -> ApiError:
    """Return the HTTP error 400 for a call in an API that an endpoint does not support.

    The endpoint `llm` answers the calls of this agent, which is not trained. Endpoints get chat
    completions only; the error describes how the app can use them.

    Args:
        info: the refused call.
        llm: the endpoint.
        parse: parser of the API that the app used.
    """
    hint = (
        'freeze it to a policy instead (frozen="base")'
        if parse is parse_message
        else "use those (LangChain: ChatOpenAI(use_responses_api=False); OpenAI Agents SDK: "
        'set_default_openai_api("chat_completions"))'
    )
    return bad_request(
        f"agent {info.agent_path!r} is frozen to {llm.base_url}, which gets chat completions only: "
        f"{hint}",
        code=c.CHAT_ONLY,
    )


def _tokenizer(engine: TokenEngine, policy: str) -> ChatTokenizer:
    try:
        return engine.tokenizer(policy)
    except NotFoundError as error:
        raise no_model(str(error)) from error
