"""What a gateway must do, as a table in which no cell is left out.

{unstreamed, streamed} × {text, one tool call, parallel tool calls, malformed tool call} × {n = 1,
n = 3} × {finished, stopped, length, cancelled, retried}: asked by the official client over HTTP.
The same for text completions, with {a text, several texts, token ids} as the prompt.
Subclass `GatewaySuite` and say which store records:

    class TestTable(GatewaySuite):
        @pytest.fixture
        async def store(self): ...
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import openai
import pytest

from lightspan import conventions as c
from lightspan.engines.chat import TransformersTokenizer
from lightspan.gateway import Gateway
from lightspan.gateway.sessions import Session, Sessions
from lightspan.records import (
    Attempt,
    CallOutcome,
    FinishReason,
    Mode,
    Rollout,
    TokenRecord,
)
from lightspan.routing import Route, Routing, Rule, Target
from lightspan.spans import Span, SpanStatus
from lightspan.store import Store
from lightspan.testing.scripted_engine import (
    Gate,
    Say,
    ScriptedEngine,
    TokenScript,
    logprob_of,
    tiny_chat_tokenizer,
)

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


@dataclass(frozen=True, slots=True)
class Shape:
    """What one choice says, and what a client is to make of it."""

    text: str
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        return "tool_calls" if self.calls else "stop"


def _tool(expression: str) -> str:
    arguments = f'{{"expression": "{expression}"}}'
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


SHAPES: Final[Mapping[str, Callable[[int], Shape]]] = {
    "text": lambda i: Shape(f"The answer is {33 + i}.", f"The answer is {33 + i}."),
    "one call": lambda i: Shape(
        f"Let me see.\n{_tool(f'12 + {i}')}",
        "Let me see.",
        (("calculator", f'{{"expression": "12 + {i}"}}'),),
    ),
    "parallel calls": lambda i: Shape(
        f"{_tool(f'7 * {i}')}\n{_tool('3')}",
        None,
        (
            ("calculator", f'{{"expression": "7 * {i}"}}'),
            ("calculator", '{"expression": "3"}'),
        ),
    ),
    "malformed call": lambda i: Shape(
        f'Hm {i}: <tool_call>\n{{"name": "calculator", "arguments": {{"expression"\n</tool_call>',
        f'Hm {i}: <tool_call>\n{{"name": "calculator", "arguments": {{"expression"\n</tool_call>',
    ),
}
LENGTH: Final = 8
"""`max_tokens` of the cells whose length is over."""
HELD: Final = 3
"""Tokens that are sampled before a cell's generation is held."""


@dataclass(slots=True)
class Answered:
    """What a client got for one choice."""

    content: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    """Of a text completion."""


@dataclass(slots=True)
class Reading:
    """What a client got."""

    response_id: str = ""
    content_of: str = ""
    """A text completion's `object`."""
    choices: dict[int, Answered] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    prompt_ids: list[int] = field(default_factory=list)

    def choice(self, index: int) -> Answered:
        return self.choices.setdefault(index, Answered())


class Rig:
    """A gateway with a scripted engine, and one attempt that may call it."""

    def __init__(
        self, store: Store, engine: ScriptedEngine, tokenizer: TransformersTokenizer
    ) -> None:
        self.store = store
        self.engine = engine
        self.tokenizer = tokenizer
        self.gateway = Gateway(store, engine)
        self.attempt = Attempt(attempt_id="", rollout_id="", number=0, epoch=0)

    async def start(self, routing: Routing | None = None, mode: Mode = Mode.VAL) -> None:
        """Listen, and claim an attempt."""
        await self.gateway.start()
        self.attempt = await self.claim(routing or Routing(default=POLICY), mode)

    async def claim(self, routing: Routing, mode: Mode = Mode.VAL) -> Attempt:
        """An attempt of a fresh rollout."""
        resources = await self.store.put_resources({"routing": routing})
        name = f"ro-{id(routing)}-{len(await self.store.rollouts())}"
        rollout = Rollout(rollout_id=name, task={}, task_id="t", resources_id=resources, mode=mode)
        await self.store.enqueue([rollout])
        [claim] = await self.store.claim("runner", 1, 600)
        return claim.attempt

    async def restart(self) -> None:
        """A new gateway on the same store and engine, which remembers nothing."""
        await self.gateway.close()
        self.gateway = Gateway(self.store, self.engine)
        await self.gateway.start()

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """The official client, as the shim would make it."""
        defaults = {
            "api_key": self.attempt.call_token,
            "base_url": f"{self.gateway.url}/v1",
            "max_retries": 0,
        }
        async with openai.AsyncOpenAI(**{**defaults, **options}) as client:
            yield client

    def headers(self, call_id: str, agent: str = "team/writer") -> dict[str, str]:
        """What the shim sends."""
        return {
            c.HEADER_CALL_ID: call_id,
            c.HEADER_ATTEMPT: self.attempt.attempt_id,
            c.HEADER_AGENT: agent,
            c.HEADER_PARENT: f"00-{TRACE}-{PARENT}-01",
            c.HEADER_PROTOCOL: "1",
        }

    async def ask(self, call_id: str = "call-a", **body: Any) -> Reading:
        """Ask, and read all of the answer."""
        request = {
            "model": "m",
            "messages": MESSAGES,
            "extra_headers": self.headers(call_id),
            **body,
        }
        async with self.client() as client:
            answer = await client.chat.completions.create(**request)
            if body.get("stream"):
                async with answer:
                    return await _read_stream(answer)
            return _read(answer)

    async def ask_text(self, call_id: str = "call-a", **body: Any) -> Reading:
        """Ask for a text completion, and read all of the answer."""
        request = {"model": "m", "extra_headers": self.headers(call_id), **body}
        async with self.client() as client:
            answer = await client.completions.create(**request)
            if not body.get("stream"):
                return _read_texts([answer])
            async with answer:
                return _read_texts([chunk async for chunk in answer])

    async def records(self) -> list[TokenRecord]:
        """The attempt's token records."""
        attempt_id = self.attempt.attempt_id
        return (await self.store.token_records([attempt_id]))[attempt_id]

    async def spans(self) -> list[Span]:
        """The attempt's spans."""
        attempt_id = self.attempt.attempt_id
        return (await self.store.spans([attempt_id]))[attempt_id]

    def session(self) -> Session:
        """The only session of the gateway."""
        sessions = self.gateway._sessions
        assert isinstance(sessions, Sessions)
        [session] = sessions._known.values()
        return session

    def prompt(self, tools: Sequence[Any] | None = TOOLS) -> list[int]:
        """The ids of the prompt."""
        return self.tokenizer.render(MESSAGES, tools)


@asynccontextmanager
async def make_rig(
    store: Store,
    script: TokenScript,
    *,
    routing: Routing | None = None,
    mode: Mode = Mode.VAL,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A started rig."""
    tokenizer = shared_tokenizer()
    rig = Rig(store, ScriptedEngine(tokenizer, script, **options), tokenizer)
    await rig.start(routing, mode)
    try:
        yield rig
    finally:
        await rig.gateway.close()


@functools.cache
def shared_tokenizer() -> TransformersTokenizer:
    """Made once: it is only read."""
    return tiny_chat_tokenizer()


def rules(**targets: Target) -> Routing:
    """A routing table by agent name."""
    return Routing(rules=[Rule(pattern, target) for pattern, target in targets.items()])


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds (pytest's time limit ends a wait in vain)."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)


def _read(answer: Any) -> Reading:
    reading = Reading(answer.id, usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens))
    reading.prompt_ids = answer.model_extra.get("prompt_token_ids", [])
    for choice in answer.choices:
        got = reading.choice(choice.index)
        got.content, got.reason = choice.message.content, choice.finish_reason
        for call in choice.message.tool_calls or ():
            got.calls.append((call.function.name, call.function.arguments))
            got.call_ids.append(call.id)
        _read_tokens(got, choice)
    return reading


async def _read_stream(stream: Any) -> Reading:
    reading = Reading()
    async for chunk in stream:
        reading.response_id = chunk.id
        reading.prompt_ids = chunk.model_extra.get("prompt_token_ids", reading.prompt_ids)
        if chunk.usage is not None:
            reading.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            got = reading.choice(choice.index)
            if choice.delta.content:
                got.content = (got.content or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                got.calls.append((call.function.name, call.function.arguments))
                got.call_ids.append(call.id)
            got.reason = choice.finish_reason or got.reason
            _read_tokens(got, choice)
    return reading


def _read_texts(parts: Sequence[Any]) -> Reading:
    """Of a text completion, or of its chunks."""
    reading = Reading(content_of=parts[0].object)
    for part in parts:
        reading.response_id = part.id
        if part.usage is not None:
            reading.usage = (part.usage.prompt_tokens, part.usage.completion_tokens)
        for choice in part.choices:
            got = reading.choice(choice.index)
            got.content = (got.content or "") + choice.text
            got.reason = choice.finish_reason or got.reason
            got.token_ids += choice.model_extra.get("token_ids", [])
            got.prompt_ids += choice.model_extra.get("prompt_token_ids", [])
            if choice.logprobs is not None:
                got.logprobs += choice.logprobs.token_logprobs
    return reading


def _read_tokens(got: Answered, choice: Any) -> None:
    got.token_ids += choice.model_extra.get("token_ids", [])
    if choice.logprobs is not None:
        got.logprobs += [token.logprob for token in choice.logprobs.content]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    stream: bool
    shape: str
    n: int
    ending: str

    def __str__(self) -> str:
        form = "streamed" if self.stream else "unstreamed"
        return f"{form}-{self.shape}-n{self.n}-{self.ending}".replace(" ", "_")

    def said(self, index: int) -> Shape:
        return SHAPES[self.shape](index)

    def text(self, index: int) -> str:
        """What the engine is scripted to say."""
        text = self.said(index).text
        return f"{text} STOP and more" if self.ending == "stopped" else text

    def body(self) -> dict[str, Any]:
        """The request."""
        body: dict[str, Any] = {
            "n": self.n,
            "tools": TOOLS,
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        }
        if self.ending == "stopped":
            body["stop"] = ["never", "STOP"]
        if self.ending == "length":
            body["max_tokens"] = LENGTH
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def ids(self, rig: Rig, index: int) -> list[int]:
        """The token ids that the answer consists of."""
        ids = rig.engine.ids(self.text(index))
        if self.ending == "length":
            return ids[:LENGTH]
        if self.ending == "stopped":
            lengths = range(1, len(ids) + 1)
            return ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
        return ids

    def expected(self, rig: Rig, index: int) -> Answered:
        """What a client is to get for a choice, but for the ids of its tool calls."""
        said, ids = self.said(index), self.ids(rig, index)
        answered = Answered(said.content, list(said.calls), [], said.reason)
        if self.ending == "length":
            answered = Answered(rig.tokenizer.decode(ids), [], [], "length")
        elif self.ending == "stopped" and not said.calls:
            answered.content = f"{said.content} "
        answered.token_ids, answered.logprobs = ids, [logprob_of(token) for token in ids]
        return answered


CELLS: Final = [
    Cell(*values)
    for values in itertools.product(
        (False, True), SHAPES, (1, 3), ("finished", "stopped", "length", "cancelled", "retried")
    )
]


TEXT_PROMPTS: Final[Mapping[str, Sequence[str]]] = {
    "text": ["SELECT name"],
    "texts": ["SELECT name", "How many singers are there?"],
    "ids": ["The answer is"],
}


@dataclass(frozen=True, slots=True)
class TextCell:
    """One cell of the text completions' table."""

    stream: bool
    prompt: str
    n: int
    ending: str

    def __str__(self) -> str:
        return (
            f"{'streamed' if self.stream else 'unstreamed'}-{self.prompt}-n{self.n}-{self.ending}"
        )

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt ids of each choice."""
        texts = TEXT_PROMPTS[self.prompt]
        return [shared_tokenizer().encode(text) for text in texts for _ in range(self.n)]

    def text(self, index: int) -> str:
        """What the engine is scripted to say."""
        return f" tool_call {index} 12 + 7" + (" STOP more" if self.ending == "stopped" else "")

    def body(self) -> dict[str, Any]:
        """The request."""
        texts = list(TEXT_PROMPTS[self.prompt])
        prompts: Any = {"text": texts[0], "texts": texts, "ids": self.prompts[0]}
        body: dict[str, Any] = {
            "prompt": prompts[self.prompt],
            "n": self.n,
            "logprobs": 0,
            "max_tokens": LENGTH if self.ending == "length" else 100,
            "extra_body": {"return_token_ids": True},
        }
        if self.ending == "stopped":
            body["stop"] = "STOP"
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def expected(self, rig: Rig, index: int) -> Answered:
        """What a client is to get for a choice."""
        ids = rig.engine.ids(self.text(index))
        if self.ending == "length":
            ids = ids[:LENGTH]
        if self.ending == "stopped":
            lengths = range(1, len(ids) + 1)
            ids = ids[: next(k for k in lengths if "STOP" in rig.tokenizer.decode(ids[:k]))]
        return Answered(
            content=rig.tokenizer.decode(ids).partition("STOP")[0],
            reason="length" if self.ending == "length" else "stop",
            token_ids=ids,
            logprobs=[logprob_of(token) for token in ids],
            prompt_ids=self.prompts[index],
        )


TEXT_CELLS: Final = [
    TextCell(*values)
    for values in itertools.product(
        (False, True),
        TEXT_PROMPTS,
        (1, 3),
        ("finished", "stopped", "length", "cancelled", "retried"),
    )
]


HELD_ENDINGS: Final = ("cancelled", "retried")
"""They need an answer that waits in its middle."""


def _gated(cell: Cell | TextCell, count: int) -> tuple[Callable[[Any], Say], list[Gate]]:
    """What the engine says in a cell, and the gate in the middle of each choice."""
    gates = [Gate() for _ in range(count)]
    if cell.ending not in HELD_ENDINGS:
        for gate in gates:
            gate.open()

    def script(request: Any) -> Say:
        index = int(request.request_id.split("-")[-2])
        return Say(text=cell.text(index), gates={HELD: gates[index]})

    return script, gates


class GatewaySuite:
    """See the module. Needs a fixture `store`: an open, empty store."""

    @pytest.mark.parametrize("cell", CELLS, ids=str)
    async def test_table(self, store: Store, cell: Cell) -> None:
        script, gates = _gated(cell, cell.n)
        async with make_rig(store, script) as rig:
            match cell.ending:
                case "cancelled":
                    reading, outcome = await self._cancelled(rig, cell, gates)
                case "retried":
                    reading, outcome = await self._retried(rig, cell, gates)
                case _:
                    reading, outcome = await rig.ask(**cell.body()), CallOutcome.OK
                    assert len(rig.engine.requests) == cell.n
            self._check_answer(rig, cell, reading)
            await self._check_store(rig, cell, outcome)

    async def _cancelled(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """The client leaves in mid-generation and comes again later."""
        task = asyncio.create_task(rig.ask(**cell.body()))
        for gate in gates:
            await gate.reached.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(rig.engine.cancelled) == cell.n)
        session = rig.session()
        await session.calls["call-a"].settled()
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "cancelled"
        assert (span.sequence_start, span.sequence_end) == (1, 2)
        partial = [cell.ids(rig, index)[:HELD] for index in range(cell.n)]
        records = await rig.records()
        kept = partial if cell.stream else []
        assert [record.response_ids for record in records] == kept
        assert {record.outcome for record in records} <= {CallOutcome.CANCELLED}
        assert {record.finish_reason for record in records} <= {FinishReason.CANCELLED}
        for gate in gates:
            gate.open()
        reading = await rig.ask(**cell.body())
        prompt, again = rig.prompt(), rig.engine.requests[cell.n :]
        starts = [[*prompt, *ids] if cell.stream else prompt for ids in partial]
        assert [request.prompt_ids for request in again] == starts
        return reading, CallOutcome.OK if cell.stream else CallOutcome.RESAMPLED

    async def _retried(
        self, rig: Rig, cell: Cell, gates: Sequence[Gate]
    ) -> tuple[Reading, CallOutcome]:
        """The same call three times: twice at once, and once more when it is finished."""
        first = asyncio.create_task(rig.ask(**cell.body()))
        for gate in gates:
            await gate.reached.wait()
        second = asyncio.create_task(rig.ask(**cell.body()))
        session = rig.session()
        [call] = session.calls.values()
        await until(lambda: call._clients == 2)
        for gate in gates:
            gate.open()
        readings = [await first, await second, await rig.ask(**cell.body())]
        assert len(rig.engine.requests) == cell.n
        assert readings[0] == readings[1] == readings[2]
        return readings[0], CallOutcome.OK

    def _check_answer(self, rig: Rig, cell: Cell, reading: Reading) -> None:
        assert reading.response_id == "chatcmpl-call-a"
        assert reading.prompt_ids == rig.prompt()
        sampled = sum(len(cell.ids(rig, index)) for index in range(cell.n))
        assert reading.usage == (len(rig.prompt()), sampled)
        call_ids = [name for got in reading.choices.values() for name in got.call_ids]
        assert len(set(call_ids)) == len(call_ids)
        for got in reading.choices.values():
            assert len(got.call_ids) == len(got.calls)
            got.call_ids = []
        expected = {index: cell.expected(rig, index) for index in range(cell.n)}
        assert reading.choices == expected

    async def _check_store(self, rig: Rig, cell: Cell, outcome: CallOutcome) -> None:
        [span] = await rig.spans()
        end = 3 if cell.ending == "cancelled" else 2
        assert (span.sequence_start, span.sequence_end) == (1, end)
        assert (span.trace_id, span.parent_id, span.name) == (TRACE, PARENT, "chat m")
        assert (span.status, span.status_message, span.late) == (SpanStatus.OK, "", False)
        finish = "length" if cell.ending == "length" else "stop"
        known = span.attributes
        assert (known[c.AGENT_PATH], known[c.AGENT_NAME]) == ("team/writer", "writer")
        assert (known[c.CALL_ID], known[c.CALL_OUTCOME]) == ("call-a", outcome)
        assert (known[c.SELECTED], known[c.POLICY]) == (True, "policy")
        assert known[c.FINISH_REASONS] == [finish] * cell.n
        records = await rig.records()
        assert [record.choice for record in records] == list(range(cell.n))
        for record in records:
            ids = cell.ids(rig, record.choice)
            assert record.prompt_ids == rig.prompt()
            assert record.response_ids == ids
            assert record.logprobs == [logprob_of(token) for token in ids]
            assert record.versions == [(1, len(ids))]
            assert (record.finish_reason, record.outcome) == (finish, outcome)
            assert (record.sequence_start, record.sequence_end) == (1, end)
            assert (record.call_id, record.agent_path) == ("call-a", "team/writer")
            assert (record.policy, record.span_id) == ("policy", span.span_id)
        attempt = await rig.store.attempt(rig.attempt.attempt_id)
        assert attempt.damage == []

    @pytest.mark.parametrize("cell", TEXT_CELLS, ids=str)
    async def test_text_table(self, store: Store, cell: TextCell) -> None:
        count = len(cell.prompts)
        script, gates = _gated(cell, count)
        async with make_rig(store, script) as rig:
            if cell.ending in HELD_ENDINGS:
                first = asyncio.create_task(rig.ask_text(**cell.body()))
                for gate in gates:
                    await gate.reached.wait()
                if cell.ending == "cancelled":
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                    await until(lambda: len(rig.engine.cancelled) == count)
                    await rig.session().calls["call-a"].settled()
                for gate in gates:
                    gate.open()
            reading = await rig.ask_text(**cell.body())
            if cell.ending == "retried":
                assert await first == reading
                await rig.restart()
                assert await rig.ask_text(**cell.body()) == reading
                assert len(rig.engine.requests) == count
            expected = {index: cell.expected(rig, index) for index in range(count)}
            assert reading.choices == expected
            sampled = sum(len(got.token_ids) for got in expected.values())
            asked = sum(map(len, cell.prompts[:: cell.n]))
            assert (reading.usage, reading.content_of) == ((asked, sampled), "text_completion")
            await self._check_texts(rig, cell, expected)

    async def _check_texts(
        self, rig: Rig, cell: TextCell, expected: Mapping[int, Answered]
    ) -> None:
        resampled = cell.ending == "cancelled" and not cell.stream
        outcome = CallOutcome.RESAMPLED if resampled else CallOutcome.OK
        [span] = await rig.spans()
        known = span.attributes
        assert (span.name, known[c.OPERATION_NAME]) == ("text_completion m", "text_completion")
        assert (known[c.AGENT_PATH], known[c.CALL_OUTCOME]) == ("team/writer", outcome)
        records = await rig.records()
        assert [record.choice for record in records] == list(range(len(cell.prompts)))
        for record in records:
            got = expected[record.choice]
            assert record.prompt_ids == got.prompt_ids
            assert (record.response_ids, record.logprobs) == (got.token_ids, got.logprobs)
            assert (record.finish_reason, record.outcome) == (got.reason, outcome)

    # --- a gateway that starts again ------------------------------------------------------
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_finished_call_is_replayed_after_a_restart(
        self, store: Store, stream: bool
    ) -> None:
        """The answer was recorded and may not have arrived: the retry samples nothing."""
        async with make_rig(store, [SHAPES["one call"](0).text]) as rig:
            body = Cell(stream, "one call", 1, "finished").body()
            first = await rig.ask(**body)
            spans, records = await rig.spans(), await rig.records()
            await rig.restart()
            assert await rig.ask(**body) == first
            assert len(rig.engine.requests) == 1
            assert (await rig.spans(), await rig.records()) == (spans, records)

    @pytest.mark.parametrize("n", [1, 3])
    async def test_a_cancelled_call_goes_on_after_a_restart(self, store: Store, n: int) -> None:
        gates = [Gate() for _ in range(n)]

        def script(request: Any) -> Say:
            index = int(request.request_id.split("-")[-2])
            return Say(text=f"The answer is {index}.", gates={HELD: gates[index]})

        async with make_rig(store, script) as rig:
            task = asyncio.create_task(rig.ask(stream=True, n=n))
            for gate in gates:
                await gate.reached.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rig.restart()
            for gate in gates:
                gate.open()
            reading = await rig.ask(stream=True, n=n)
            texts = {index: got.content for index, got in reading.choices.items()}
            assert texts == {index: f"The answer is {index}." for index in range(n)}
            records = await rig.records()
            assert [record.response_ids for record in records] == [
                rig.engine.ids(f"The answer is {index}.") for index in range(n)
            ]
            assert {record.outcome for record in records} == {CallOutcome.OK}
            [span] = await rig.spans()
            assert (span.sequence_start, span.sequence_end) == (1, 3)

    async def test_a_call_whose_tokens_are_gone_is_resampled_after_a_restart(
        self, store: Store
    ) -> None:
        gate = Gate()
        async with make_rig(store, [Say(text="one", gates={2: gate}), "two"]) as rig:
            task = asyncio.create_task(rig.ask())
            await gate.reached.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rig.restart()
            assert (await rig.ask()).choices[0].content == "two"
            [record] = await rig.records()
            assert record.outcome is CallOutcome.RESAMPLED


__all__ = [
    "CELLS",
    "MESSAGES",
    "TEXT_CELLS",
    "TOOLS",
    "Cell",
    "GatewaySuite",
    "Reading",
    "Rig",
    "TextCell",
    "make_rig",
    "rules",
    "until",
]
