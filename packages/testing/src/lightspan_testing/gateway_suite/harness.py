"""A gateway with a scripted engine, a store and an attempt, for tests."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import openai

from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import Span
from lightspan.schema.token_records import TokenRecord
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_gateway.calls import CallerSession
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.scripted_engine import ScriptedEngine, TokenScript, tiny_chat_tokenizer

if TYPE_CHECKING:
    from lightspan_torch.engine.tokenizer import TransformersTokenizer

MESSAGES: Final[list[Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 12 + 7 * 3?"},
]
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
POLICY: Final = Target(route=Route.POLICY, policy="policy")
TRACE: Final = "0123456789abcdef0123456789abcdef"
PARENT: Final = "00000000000000aa"


@dataclass(slots=True)
class Answered:
    """The content of one choice of the gateway's answer."""

    content: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    """Token ids of the prompt; empty except for text completions."""


@dataclass(slots=True)
class Reading:
    """The content of the gateway's whole answer."""

    response_id: str = ""
    content_of: str = ""
    """The answer's `object`."""
    choices: dict[int, Answered] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    prompt_ids: list[int] = field(default_factory=list)

    def choice(self, index: int) -> Answered:
        return self.choices.setdefault(index, Answered())


class Rig:
    """A gateway with a scripted engine, and an attempt whose calls it accepts."""

    def __init__(
        self,
        store: Store,
        engine: ScriptedEngine,
        tokenizer: ChatTokenizer,
        limits: GatewayLimits | None = None,
    ) -> None:
        self.store = store
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.gateway = Gateway(store, engine, limits=limits)
        self.attempt = Attempt(attempt_id="", rollout_id="", number=0, epoch=0)

    async def start(self, routing: Routing | None = None, mode: Mode = Mode.VAL) -> None:
        """Start the gateway, and create the attempt that the tests use."""
        await self.gateway.start()
        self.attempt = await self.claim(routing or Routing(default=POLICY), mode)

    async def claim(self, routing: Routing, mode: Mode = Mode.VAL) -> Attempt:
        """Create a rollout with this routing; return its attempt, which may call the gateway."""
        resources = await self.store.put_resources({"routing": routing})
        name = f"ro-{id(routing)}-{len(await self.store.rollouts())}"
        rollout = Rollout(rollout_id=name, task={}, task_id="t", resources_id=resources, mode=mode)
        await self.store.enqueue([rollout])
        [claim] = await self.store.claim("runner", 1, 600)
        return claim.attempt

    async def restart(self) -> None:
        """Restart the gateway with the same store and engine. What it had in memory is lost."""
        await self.gateway.close()
        self.gateway = Gateway(self.store, self.engine, limits=self.limits)
        await self.gateway.start()

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """Yield OpenAI's client, with the settings that the SDK patch gives to it."""
        defaults = {
            "api_key": self.attempt.call_token,
            "base_url": f"{self.gateway.url}/v1",
            "max_retries": 0,
        }
        async with openai.AsyncOpenAI(**{**defaults, **options}) as client:
            yield client

    def headers(self, call_id: str, agent: str = "team/writer") -> dict[str, str]:
        """Return the headers that the SDK patch sends with a call."""
        return {
            c.HEADER_CALL_ID: call_id,
            c.HEADER_ATTEMPT: self.attempt.attempt_id,
            c.HEADER_AGENT: agent,
            c.HEADER_PARENT: f"00-{TRACE}-{PARENT}-01",
            c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION),
        }

    async def ask(self, call_id: str = "call-a", **body: Any) -> Reading:
        """Make a chat call and read the whole answer."""
        async with self.client() as client:
            request = {"messages": MESSAGES, **body}
            return await self._ask(client.chat.completions.create, call_id, request)

    async def ask_text(self, call_id: str = "call-a", **body: Any) -> Reading:
        """Make a call for a text completion and read the whole answer."""
        async with self.client() as client:
            return await self._ask(client.completions.create, call_id, body)

    async def _ask(self, create: Any, call_id: str, body: Mapping[str, Any]) -> Reading:
        answer = await create(**{"model": "m", "extra_headers": self.headers(call_id), **body})
        if not body.get("stream"):
            return _read([answer])
        async with answer:
            return _read([chunk async for chunk in answer])

    async def records(self) -> list[TokenRecord]:
        """Return the attempt's token records."""
        attempt_id = self.attempt.attempt_id
        return (await self.store.token_records([attempt_id]))[attempt_id]

    async def spans(self) -> list[Span]:
        """Return the attempt's spans."""
        attempt_id = self.attempt.attempt_id
        return (await self.store.spans([attempt_id]))[attempt_id]

    def session(self) -> CallerSession:
        """Return the calls of the only attempt that the gateway knows."""
        [session] = self.gateway.access.sessions()
        return session

    def prompt(self, tools: Sequence[Any] | None = TOOLS) -> list[int]:
        """Return the token ids of the prompt of a call with `MESSAGES` and `tools`."""
        return self.tokenizer.render(MESSAGES, tools)


@asynccontextmanager
async def make_rig(
    store: Store,
    script: TokenScript,
    *,
    routing: Routing | None = None,
    mode: Mode = Mode.VAL,
    limits: GatewayLimits | None = None,
    tokenizer: ChatTokenizer | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Start a `Rig` (a gateway with an engine and an attempt), and close it at the end.

    Args:
        store: store of the gateway.
        script: script of the engine.
        routing: routing of the attempt; None to send every agent's calls to the policy.
        mode: mode of the attempt.
        limits: limits of the gateway; None for the defaults.
        tokenizer: tokenizer of the policy; None for `shared_tokenizer`.
        options: further arguments of `ScriptedEngine`.
    """
    tokenizer = tokenizer or shared_tokenizer()
    rig = Rig(store, ScriptedEngine(tokenizer, script, **options), tokenizer, limits)
    await rig.start(routing, mode)
    try:
        yield rig
    finally:
        await rig.gateway.close()


@functools.cache
def shared_tokenizer() -> TransformersTokenizer:
    """Return the tokenizer that all tests share, so it must not be changed."""
    return tiny_chat_tokenizer()


# --- reading answers ------------------------------------------------------------------------
def _read(parts: Sequence[Any]) -> Reading:
    """Merge the content of an answer.

    `parts` is a list with the whole answer, or the chunks of a streamed answer.
    """
    reading = Reading(parts[0].id, parts[0].object)
    for part in parts:
        reading.prompt_ids = part.model_extra.get("prompt_token_ids", reading.prompt_ids)
        if part.usage is not None:
            reading.usage = (part.usage.prompt_tokens, part.usage.completion_tokens)
        for choice in part.choices:
            _read_choice(reading.choice(choice.index), choice)
    return reading


def _read_choice(content: Answered, choice: Any) -> None:
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    text = choice.text if message is None else message.content
    if text:
        content.content = (content.content or "") + text
    for call in getattr(message, "tool_calls", None) or ():
        content.calls.append((call.function.name, call.function.arguments))
        content.call_ids.append(call.id)
    content.reason = choice.finish_reason or content.reason
    content.token_ids += choice.model_extra.get("token_ids", [])
    content.prompt_ids += choice.model_extra.get("prompt_token_ids", [])
    if choice.logprobs is not None and message is None:
        content.logprobs += choice.logprobs.token_logprobs
    elif choice.logprobs is not None:
        content.logprobs += [token.logprob for token in choice.logprobs.content]
