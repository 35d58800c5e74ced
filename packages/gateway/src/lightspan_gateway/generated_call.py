"""Calls that the engine generates: tokens, their text, and the answer in the client's dialect."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from lightspan.protocols.decoding import IncrementalDecoder, StopWatcher
from lightspan.protocols.engine import ChatTokenizer, GenerationRequest, TokenChunk, TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import answer_attributes
from lightspan.schema.spans import Attributes
from lightspan.schema.token_records import CallOutcome, FinishReason, TokenRecord
from lightspan_gateway.calls import CallInfo, CallLog, ServedCall
from lightspan_gateway.dialects.base import Answer, Choice, ModelRequest, head
from lightspan_gateway.token_collector import TokenCollector
from lightspan_gateway.tools import ParsedCall, tool_parser


class ParsedChoice(NamedTuple):
    """A finished choice as an OpenAI message."""

    message: dict[str, Any]
    calls_tools: bool


@dataclass(slots=True)
class ChoiceRun(TokenCollector):
    """A choice while it is generated: its tokens and their text."""

    decoder: IncrementalDecoder = field(kw_only=True)
    text: str = ""
    stop: str | None = None
    """The stop string that ended it."""
    parsed: ParsedChoice | None = None
    """Set when the choice is finished."""
    streamed: int = 0
    """Characters of `text` that were emitted as deltas."""

    def extend(self, chunk: TokenChunk) -> None:
        """Append the tokens of a chunk and their text, which is trimmed at the end."""
        self.add(chunk)
        self.text += self.decoder.push(chunk.ids)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a choice."""

    index: int
    text: str


class GeneratedCall(ServedCall):
    """A call that the engine generates.

    Args:
        info: the call.
        request: parsed, with `max_tokens` set.
        prompts: token ids of each prompt; a chat has one.
        engine: generates.
        tokenizer: of the policy.
        log: records the call.
    """

    def __init__(
        self,
        info: CallInfo,
        request: ModelRequest,
        prompts: Sequence[list[int]],
        engine: TokenEngine,
        tokenizer: ChatTokenizer,
        log: CallLog,
    ) -> None:
        super().__init__(info, log)
        self.request = replace(request.without_prompt(), overrides={})
        self.overrides = request.overrides
        self.choices = [
            ChoiceRun(number * request.n + index, prompt, decoder=IncrementalDecoder(tokenizer))
            for number, prompt in enumerate(prompts)
            for index in range(request.n)
        ]
        self.created = int(time.time())
        self.resampled = False
        """Whether it was sampled again after a try whose tokens are lost."""
        self.deltas: list[Delta] = []
        self._prompts = prompts
        self._engine = engine
        self._tokenizer = tokenizer
        self._tools = tool_parser(tokenizer.tool_parser) if request.parse_tools else None

    @property
    def response_id(self) -> str:
        """The id in the answer."""
        return f"{self.request.id_prefix}{self.info.call_id}"

    @property
    def model(self) -> str:
        """The model in the answer."""
        return self.request.model or self.info.policy

    @property
    def outcome(self) -> CallOutcome:
        return CallOutcome.RESAMPLED if self.resampled else CallOutcome.OK

    def restore(self, records: Sequence[TokenRecord], *, resampled: bool) -> None:
        """Restore a recorded answer, or the recorded part of one."""
        self.tries = 1
        self.resampled = resampled
        self.lost = any(record.outcome is CallOutcome.UNDELIVERED for record in records)
        for record in records:
            choice = self.choices[record.choice]
            choice.restore(record)
            choice.text = choice.decoder.push(choice.ids)
            if record.finish_reason is not FinishReason.CANCELLED:
                self._end(choice, record.finish_reason)
            self._emit(choice)
        self.answered = all(choice.finish is not None for choice in self.choices)

    # --- sampling -------------------------------------------------------------------------
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
        request, watcher = self._generation(choice), self._watcher(choice)
        if request is None:
            self._end(choice, FinishReason.LENGTH)
            return
        chunks = self._engine.generate(request, stream=self.streamed)
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                choice.extend(chunk)
                stop = None if watcher is None else watcher.complete(chunk.ids)
                if stop is not None:
                    choice.cut(len(choice.ids) - len(chunk.ids) + stop)
                finish = chunk.finish_reason if stop is None else FinishReason.STOP
                if finish is not None:
                    self._end(choice, finish)
                self._emit(choice)
                if stop is not None:
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
            grammar=self.request.grammar,
            answered=len(choice.ids),
            rollout="" if self.info.session.shared else self.info.session.attempt_id,
        )

    def _watcher(self, choice: ChoiceRun) -> StopWatcher | None:
        """Return a watcher for a stop string that began before the choice was interrupted.

        The engine ends at stop strings itself, but sees only what it samples in this try.
        """
        if not choice.ids or not self.request.sampling.stop:
            return None
        watcher = StopWatcher(self._tokenizer, self.request.sampling.stop)
        watcher.complete(choice.ids)
        return watcher

    def _end(self, choice: ChoiceRun, finish: FinishReason) -> None:
        choice.text, choice.stop = self._trim(choice.text + choice.decoder.flush())
        choice.finish = finish
        choice.parsed = self._read(choice)

    # --- text -----------------------------------------------------------------------------
    # An engine ends the ids with the token that completes a stop string. Where the text ends, and
    # how much of it may be shown before that is known, is decided here alone.
    def _trim(self, text: str) -> tuple[str, str | None]:
        """Return the text up to the first stop string, and that string."""
        found = [(text.find(stop), stop) for stop in self.request.sampling.stop if stop in text]
        position, stop = min(found, default=(len(text), None))
        return text[:position], stop

    def _emit(self, choice: ChoiceRun) -> None:
        if not self.streamed:
            return
        end = self._visible(choice)
        if end > choice.streamed:
            self.deltas.append(Delta(choice.index, choice.text[choice.streamed : end]))
            choice.streamed = end
            self._beat()

    def _visible(self, choice: ChoiceRun) -> int:
        if choice.parsed is not None:
            # a tool call never shows as text; a malformed one does, as the model wrote it
            message, calls_tools = choice.parsed
            return len(message["content"] or "") if calls_tools else len(choice.text)
        text, _ = self._trim(choice.text)
        held = max((len(stop) for stop in self.request.sampling.stop), default=1) - 1
        text = text[: max(0, len(choice.text) - held)]
        return len(text) if self._tools is None else self._tools.visible_length(text)

    def _read(self, choice: ChoiceRun) -> ParsedChoice:
        """Return the choice as an OpenAI message."""
        parsed = None if self._tools is None else self._tools.parse(choice.text)
        if parsed is None or not parsed.calls or not self._are_offered(parsed.calls):
            return ParsedChoice({"role": "assistant", "content": choice.text}, calls_tools=False)
        calls = [
            {
                "id": _tool_call_id(self.info.call_id, choice.index, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
        message = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
        return ParsedChoice(message, calls_tools=True)

    def _are_offered(self, calls: Sequence[ParsedCall]) -> bool:
        """Return whether the names are tools; beside a format, another name is an answer's."""
        constraint = self.request.constraint
        if constraint is None or constraint.format is None:
            return True
        return {call.name for call in calls} <= {tool.name for tool in constraint.tools}

    def _answer(self) -> Answer:
        """Return the finished answer."""
        return Answer(
            response_id=self.response_id,
            created=self.created,
            model=self.model,
            choices=tuple(self._choice(choice) for choice in self.choices),
            prompts=self._prompts,
        )

    def _choice(self, choice: ChoiceRun) -> Choice:
        message, calls_tools = choice.parsed or self._read(choice)
        reason = "length" if choice.finish is FinishReason.LENGTH else "stop"
        wanted = self.request.logprobs
        return Choice(
            index=choice.index,
            message=message,
            finish_reason="tool_calls" if calls_tools else reason,
            stop=choice.stop,
            token_ids=choice.ids,
            token_texts=[self._tokenizer.token_text(i) for i in choice.ids] if wanted else (),
            logprobs=choice.logprobs,
            text_offsets=self._offsets(choice.ids) if wanted else (),
        )

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """Return where the text of each token begins."""
        decoder, offsets, length = IncrementalDecoder(self._tokenizer), [], 0
        for token in ids:
            offsets.append(length)
            length += len(decoder.push([token]))
        return offsets

    # --- answer -----------------------------------------------------------------
    async def events(self) -> AsyncGenerator[bytes, None]:
        asked = self.request
        base = head(self.response_id, self.created, self.model, asked.chunk_object)
        events = asked.framing()
        opening = events.of(
            chunk
            for choice in self.choices
            for chunk in asked.opening(base, choice.index, choice.prompt_ids)
        )
        begun: set[int] = set()
        async for delta in self._follow(lambda: self.deltas):
            if delta.index not in begun:
                begun.add(delta.index)
                opening += events.of(asked.begin_text(base, delta.index))
            yield opening + events.of([asked.delta(base, delta.index, delta.text)])
            opening = b""
        yield opening + events.of(asked.last(self._answer(), base)) + events.end

    async def body(self) -> bytes:
        await self._wait()
        return msgspec.json.encode(self.request.body(self._answer()))

    # --- record -------------------------------------------------------------
    def conversation(self) -> list[dict[str, Any]] | None:
        return self.request.conversation(self._answer()) if self.answered else None

    def attributes(self) -> Attributes:
        choices = [
            {
                "message": (choice.parsed or self._read(choice)).message,
                "finish_reason": "cancelled" if choice.finish is None else choice.finish.value,
            }
            for choice in self.choices
        ]
        usage = {
            "prompt_tokens": sum(map(len, self._prompts)),
            "completion_tokens": sum(len(choice.ids) for choice in self.choices),
        }
        answer = {"id": self.response_id, "model": self.info.policy, "choices": choices}
        known = {c.POLICY: self.info.policy, **answer_attributes({**answer, "usage": usage})}
        known |= self.request.attributes()
        if self.resampled:
            known[c.CALL_RESAMPLED] = True
        return known

    def token_records(self, outcome: CallOutcome, sequence_end: int) -> list[TokenRecord]:
        library = self._engine.capabilities.grammars if self.request.grammar else ""
        return [
            choice.record(
                self.info,
                self.request.sampling,
                outcome,
                sequence_end,
                grammar=self.request.grammar,
                grammar_library=library,
            )
            for choice in self.choices
            if choice.ids
        ]


def _tool_call_id(call_id: str, choice: int, number: int) -> str:
    """Return an id that every replay has; OpenAI refuses more than 40 characters."""
    name = f"{call_id}/{choice}/{number}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()
