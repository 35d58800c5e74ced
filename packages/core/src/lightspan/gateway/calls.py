"""One model call: answered once, however often it is asked for.

A `Call` belongs to a call id. Its work starts once; retries with the same call id join it while it
runs and replay it when it is finished. When the last client leaves, the work is cancelled, what was
sampled so far is recorded as cancelled, and a later retry goes on from there.

`Run` generates with our engine, `lightspan.gateway.forwards.Forward` asks an endpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from lightspan import conventions as c
from lightspan.engines import ChatTokenizer, GenerationRequest, TokenChunk, TokenEngine
from lightspan.engines.chat import IncrementalDecoder
from lightspan.errors import EngineError, LightspanError
from lightspan.gateway.dialects import Answer, Choice, ModelRequest
from lightspan.gateway.errors import ApiError
from lightspan.gateway.tools import tool_parser
from lightspan.messages import dump_json
from lightspan.records import CallOutcome, FinishReason, TokenRecord
from lightspan.spans import Attributes
from lightspan.wire import answer_attributes

if TYPE_CHECKING:
    from lightspan.routing import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """What is known of a call before it is answered."""

    call_id: str
    agent_path: str
    target: Target
    body: dict[str, Any]
    body_hash: str
    policy: str
    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    prompts: tuple[list[int], ...] = ()
    """Token ids of each prompt; a chat has one."""
    sequence_start: int = 0

    def starting(self, sequence_start: int, prompts: Sequence[list[int]] = ()) -> CallInfo:
        """The call as it starts."""
        return replace(self, prompts=tuple(prompts), sequence_start=sequence_start)


Recording = Callable[["Call", CallOutcome], Awaitable[None]]
"""Writes what became of a call; returns once the store acknowledged it or the wait is over."""


class Call(ABC):
    """The life of a call: who waits for it, when it works, when it is recorded."""

    def __init__(self, info: CallInfo, record: Recording) -> None:
        self.info = info
        self.error: Exception | None = None
        self.delivered = False
        self.lost = False
        """It was answered and the answer did not arrive."""
        self.tries = 0
        self._record = record
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._cancellable = False
        self._pulse = asyncio.Event()

    @property
    @abstractmethod
    def answered(self) -> bool:
        """Whether the answer is there, recorded."""

    @property
    def outcome(self) -> CallOutcome:
        """What an answered call is recorded as."""
        return CallOutcome.OK

    @property
    def active(self) -> bool:
        """Whether it is being worked on."""
        return self._task is not None

    @property
    def deserted(self) -> bool:
        """Whether nobody waits for it."""
        return self._clients == 0

    @abstractmethod
    async def _work(self) -> None:
        """Get the answer; cancelled when the last client leaves."""

    @abstractmethod
    def _settle(self) -> None:
        """The answer is there and recorded."""

    @abstractmethod
    def attributes(self) -> Attributes:
        """What its span says of the answer, as far as it has come."""

    def join(self) -> None:
        """A client came; the work starts, goes on after a cancellation, or again after an error."""
        self._clients += 1
        if self._task is None and not self.answered:
            self._start()

    def leave(self) -> None:
        """A client left; the last one cancels the work."""
        self._clients -= 1
        if self.deserted and self._task is not None and self._cancellable:
            self._cancellable = False
            self._task.cancel()

    def _start(self) -> None:
        self.error = None
        self._cancellable = True
        self._task = asyncio.create_task(self._run(), name=self.info.call_id)

    async def _run(self) -> None:
        self.tries += 1
        outcome: CallOutcome | None = None
        try:
            await self._work()
        except asyncio.CancelledError:
            outcome = CallOutcome.CANCELLED
        except Exception as error:
            outcome, self.error = CallOutcome.ERROR, _explained(error)
        self._cancellable = False
        try:
            await self._record(self, outcome or self.outcome)
            if outcome is None:
                self._settle()
        except Exception as error:  # whoever waits must not wait for ever
            self.error = _explained(error)
        finally:
            self._task = None
            self._beat()
            if outcome is CallOutcome.CANCELLED and not self.deserted:
                self._start()  # a retry came while this try was being cancelled

    async def settled(self) -> None:
        """Wait until it is not worked on."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _beat(self) -> None:
        """Wake who waits for news."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()


@dataclass(slots=True)
class ChoiceRun:
    """One choice while it is generated."""

    index: int
    prompt_ids: list[int]
    decoder: IncrementalDecoder
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    text: str = ""
    streamed: int = 0
    """Characters of `text` handed out as deltas."""

    def extend(self, chunk: TokenChunk) -> None:
        """Take up a chunk's tokens."""
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.text += self.decoder.push(chunk.ids)
        if not chunk.ids:
            return
        known, count = self.versions[-1] if self.versions else (None, 0)
        if known == chunk.version:
            self.versions[-1] = (chunk.version, count + len(chunk.ids))
        else:
            self.versions.append((chunk.version, len(chunk.ids)))


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice."""

    index: int
    text: str


class Run(Call):
    """A call that our engine generates."""

    def __init__(
        self,
        info: CallInfo,
        request: ModelRequest,
        engine: TokenEngine,
        tokenizer: ChatTokenizer,
        record: Recording,
    ) -> None:
        super().__init__(info, record)
        self.request = request
        self.choices = [
            ChoiceRun(number * request.n + index, prompt, IncrementalDecoder(tokenizer))
            for number, prompt in enumerate(info.prompts)
            for index in range(request.n)
        ]
        self.created = int(time.time())
        self.answer: Answer | None = None
        self.resampled = False
        """Sampled anew after a try whose tokens are gone."""
        self.deltas: list[Delta] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._tools = tool_parser(tokenizer.tool_parser) if request.parse_tools else None

    @property
    def response_id(self) -> str:
        """The id that its client gets."""
        return f"{self.request.id_prefix}{self.info.call_id}"

    @property
    def answered(self) -> bool:
        return self.answer is not None

    @property
    def outcome(self) -> CallOutcome:
        return CallOutcome.RESAMPLED if self.resampled else CallOutcome.OK

    def restore(self, records: Sequence[TokenRecord], *, resampled: bool) -> None:
        """Take up what the store knows of this call: an answer to replay, or a part of one."""
        self.tries = 1
        self.resampled = resampled
        self.lost = any(record.outcome is CallOutcome.UNDELIVERED for record in records)
        for record in records:
            choice = self.choices[record.choice]
            choice.ids, choice.logprobs = record.response_ids, record.logprobs
            choice.versions = [(version, count) for version, count in record.versions]
            choice.text = choice.decoder.push(choice.ids)
            if record.finish_reason is not FinishReason.CANCELLED:
                self._end(choice, record.finish_reason)
            self._hand_out(choice)
        if all(choice.finish is not None for choice in self.choices):
            self._settle()

    async def wait(self) -> Answer:
        """The answer, recorded.

        Raises:
            EngineError: the generation failed.
        """
        async for _ in self.follow():
            pass
        assert self.answer is not None
        return self.answer

    async def follow(self) -> AsyncIterator[Delta]:
        """The text as it comes; ends when the answer is there and recorded."""
        position = 0
        while True:
            pulse = self._pulse
            while position < len(self.deltas):
                yield self.deltas[position]
                position += 1
            if self.error is not None:
                raise self.error
            if self.answer is not None and position == len(self.deltas):
                return
            if pulse is self._pulse:
                await pulse.wait()

    async def _work(self) -> None:
        open_choices = [choice for choice in self.choices if choice.finish is None]
        self.resampled |= self.tries > 1 and any(not choice.ids for choice in open_choices)
        if len(open_choices) == 1:
            await self._sample(open_choices[0])
            return
        async with asyncio.TaskGroup() as group:
            for choice in open_choices:
                group.create_task(self._sample(choice))

    async def _sample(self, choice: ChoiceRun) -> None:
        continued = len(choice.ids)
        request = self._generation(choice)
        if request is None:
            self._end(choice, FinishReason.LENGTH)
            return
        chunks = self._engine.generate(request, stream=self.request.stream)
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                choice.extend(chunk)
                cut = bool(continued) and self._cut(choice, continued)
                finish = FinishReason.STOP if cut else chunk.finish_reason
                if finish is not None:
                    self._end(choice, finish)
                self._hand_out(choice)
                if cut:
                    return

    def _generation(self, choice: ChoiceRun) -> GenerationRequest | None:
        sampling = self.request.sampling
        if sampling.max_tokens is not None and choice.ids:
            left = sampling.max_tokens - len(choice.ids)
            if left <= 0:
                return None
            sampling = msgspec.structs.replace(sampling, max_tokens=left)
        return GenerationRequest(
            request_id=f"{self.info.call_id}-{choice.index}-{self.tries}",
            policy=self.info.policy,
            prompt_ids=[*choice.prompt_ids, *choice.ids],
            sampling=sampling,
        )

    def _cut(self, choice: ChoiceRun, continued: int) -> bool:
        """End a continued choice at a stop string that began before the continuation.

        The engine sees only what it samples itself; the ids end with the token that completes it.
        """
        stops = self.request.sampling.stop
        if not any(stop in choice.text for stop in stops):
            return False
        for end in range(continued + 1, len(choice.ids) + 1):
            text = self._tokenizer.decode(choice.ids[:end])
            if any(stop in text for stop in stops):
                break
        choice.versions = _first(choice.versions, end)
        del choice.ids[end:], choice.logprobs[end:]
        return True

    def _end(self, choice: ChoiceRun, finish: FinishReason) -> None:
        choice.text = self._trim(choice.text + choice.decoder.flush())
        choice.finish = finish

    def _trim(self, text: str) -> str:
        """Cut the text at the first stop string (the ids keep the token that completes it)."""
        found = [text.find(stop) for stop in self.request.sampling.stop]
        cuts = [position for position in found if position >= 0]
        return text[: min(cuts)] if cuts else text

    def _hand_out(self, choice: ChoiceRun) -> None:
        if not self.request.stream:
            return
        end = self._visible(choice)
        if end > choice.streamed:
            self.deltas.append(Delta(choice.index, choice.text[choice.streamed : end]))
            choice.streamed = end
            self._beat()

    def _visible(self, choice: ChoiceRun) -> int:
        if choice.finish is not None:
            # a tool call never shows as text; a malformed one does, as the model wrote it
            message, called = self.message(choice)
            return len(message["content"] or "") if called else len(choice.text)
        text = self._trim(choice.text)
        held = max((len(stop) for stop in self.request.sampling.stop), default=1) - 1
        text = text[: max(0, len(choice.text) - held)]
        return len(text) if self._tools is None else self._tools.visible_length(text)

    def _settle(self) -> None:
        self.answer = Answer(
            response_id=self.response_id,
            created=self.created,
            model=self.request.model or self.info.policy,
            choices=tuple(self._choice(choice) for choice in self.choices),
            prompts=self.info.prompts,
        )

    def _choice(self, choice: ChoiceRun) -> Choice:
        message, called = self.message(choice)
        reason = "length" if choice.finish is FinishReason.LENGTH else "stop"
        wanted = self.request.logprobs
        return Choice(
            index=choice.index,
            message=message,
            finish_reason="tool_calls" if called else reason,
            token_ids=choice.ids,
            token_texts=[self._tokenizer.token_text(i) for i in choice.ids] if wanted else (),
            logprobs=choice.logprobs,
            text_offsets=self._offsets(choice.ids) if wanted else (),
        )

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Where the text of each token begins."""
        decoder, offsets, length = IncrementalDecoder(self._tokenizer), [], 0
        for token in ids:
            offsets.append(length)
            length += len(decoder.push([token]))
        return offsets

    def attributes(self) -> Attributes:
        choices = [
            {"message": self.message(choice)[0], "finish_reason": _finish_text(choice)}
            for choice in self.choices
        ]
        usage = {
            "prompt_tokens": sum(map(len, self.info.prompts)),
            "completion_tokens": sum(len(choice.ids) for choice in self.choices),
        }
        answer = {"id": self.response_id, "model": self.info.policy, "choices": choices}
        known = {c.POLICY: self.info.policy, **answer_attributes({**answer, "usage": usage})}
        known |= self.request.attributes()
        if self.request.overrides:
            known[c.SAMPLING_OVERRIDES] = dump_json(self.request.overrides)
        if self.resampled:
            known[c.CALL_RESAMPLED] = True
        return known

    def message(self, choice: ChoiceRun) -> tuple[dict[str, Any], bool]:
        """The choice as an OpenAI message, and whether it calls tools."""
        parsed = None if self._tools is None else self._tools.parse(choice.text)
        if parsed is None or not parsed.calls:
            return {"role": "assistant", "content": choice.text}, False
        calls = [
            {
                "id": _tool_call_id(self.info.call_id, choice.index, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}, True


def _explained(error: Exception) -> Exception:
    """What a client can be told: an error of ours."""
    first = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, LightspanError | ApiError):
        return first
    failure = EngineError(f"the engine failed: {type(first).__name__}: {first}")
    failure.__cause__ = first
    return failure


def _finish_text(choice: ChoiceRun) -> str:
    return "cancelled" if choice.finish is None else choice.finish.value


def _first(versions: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The run-length encoded versions of the first `length` tokens."""
    kept: list[tuple[int, int]] = []
    for version, count in versions:
        taken = min(count, length)
        if taken > 0:
            kept.append((version, taken))
        length -= taken
    return kept


def _tool_call_id(call_id: str, choice: int, number: int) -> str:
    """The same for every replay, and as long as OpenAI's own (it refuses ids beyond 40)."""
    name = f"{call_id}/{choice}/{number}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()
