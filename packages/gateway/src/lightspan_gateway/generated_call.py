"""Calls that the engine answers: tokens, their text, and the answer in the API's format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from lightspan.protocols.decoding import IncrementalDecoder, StopWatcher
from lightspan.protocols.engine import ChatTokenizer, GenerationRequest, TokenChunk, TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import answer_attributes
from lightspan.schema.images import PromptImage
from lightspan.schema.spans import Attributes
from lightspan.schema.token_records import CallOutcome, FinishReason, TokenRecord
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.calls import CallInfo, CallLog, RecordedCall, ServedCall
from lightspan_gateway.dialects.base import Answer, Choice, ModelRequest, Prompt, head
from lightspan_gateway.images import without_data
from lightspan_gateway.request_body import digest_of
from lightspan_gateway.tools import THINK_OPEN, ParsedCall, tool_parser

_THINK_TOKENS: Final = 16
"""Number of the prompt's last tokens that may contain `<think>`, which is no token everywhere."""


@dataclass(slots=True)
class ChoiceRun:
    """A choice that is being generated: its exact tokens and their text."""

    index: int
    prompt_ids: list[int]
    images: tuple[PromptImage, ...]
    decoder: IncrementalDecoder
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run lengths: (policy version, number of tokens)."""
    finish: FinishReason | None = None
    text: str = ""
    stop: str | None = None
    """The stop string that ended the choice; None if there is none."""
    message: dict[str, Any] | None = None
    """The finished choice as an OpenAI message."""
    streamed: int = 0
    """Number of characters of `text` that were emitted as deltas."""

    def extend(self, chunk: TokenChunk) -> None:
        """Append the tokens of `chunk`, their log-probabilities and their text.

        The text may extend beyond a stop string; it is trimmed when the choice ends.
        """
        self.text += self.decoder.push(chunk.ids)
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.ids:
            continues = self.versions and self.versions[-1][0] == chunk.version
            count = self.versions.pop()[1] if continues else 0
            self.versions.append((chunk.version, count + len(chunk.ids)))

    def truncate(self, length: int) -> None:
        """Truncate the choice to `length` tokens."""
        del self.ids[length:], self.logprobs[length:]
        versions: list[tuple[int, int]] = []
        for version, count in self.versions:
            if length > 0:
                versions.append((version, min(count, length)))
            length -= count
        self.versions = versions


class GeneratedCall(ServedCall):
    """A call whose answer the engine generates.

    Args:
        info: the call.
        request: the parsed request, with `max_tokens` set.
        prompts: the prompts; a chat has one.
        engine: the engine that generates the answer.
        tokenizer: the policy's tokenizer.
        log: the log that records the call.
    """

    def __init__(
        self,
        info: CallInfo,
        request: ModelRequest,
        prompts: Sequence[Prompt],
        engine: TokenEngine,
        tokenizer: ChatTokenizer,
        log: CallLog,
    ) -> None:
        super().__init__(info, log)
        self.request = replace(request.without_prompt(), overrides={})
        self.overrides = request.overrides
        self.choices = [
            ChoiceRun(number * request.n + index, *prompt, IncrementalDecoder(tokenizer))
            for number, prompt in enumerate(prompts)
            for index in range(request.n)
        ]
        self.created = int(time.time())
        self.response_id = f"{request.id_prefix}{info.call_id}"
        name_of = info.session.answer_model
        self.model = name_of(info.policy) if name_of else request.model or info.policy
        self.resampled = False
        """Whether a choice was sampled again after a try whose tokens were lost."""
        self.deltas: list[tuple[int, str]] = []
        """(index of the choice, new text) in the order in which a streamed answer contains them."""
        self._prompts = [prompt.ids for prompt in prompts]
        self._engine = engine
        self._tokenizer = tokenizer
        self._tools = tool_parser(tokenizer.tool_parser) if request.parse_tools else None
        self._thinking = ""
        """What the prompt ends with if the answer begins in the model's thoughts."""
        if self._tools is not None:
            end = tokenizer.decode(prompts[0].ids[-_THINK_TOKENS:], skip_special_tokens=False)
            self._thinking = THINK_OPEN if end.rstrip().endswith(THINK_OPEN) else ""

    @property
    def outcome(self) -> CallOutcome:
        is_resampled = self.resampled and self.info.repeats is None
        return CallOutcome.RESAMPLED if is_resampled else super().outcome

    def forget_request(self) -> None:
        super().forget_request()
        for choice in self.choices:
            choice.images = without_data(choice.images)

    def restore(self, recorded: RecordedCall) -> None:
        """Load the recorded tokens of a call from the store.

        They may be only the beginning of the answer; then the rest is generated.

        Raises:
            ApiError: 409 if the rest cannot be generated, because the store lacks an image.
        """
        self.tries = 1
        self.resampled = bool(recorded.span.attributes.get(c.CALL_RESAMPLED))
        for record in recorded.records:
            self.is_undelivered |= record.outcome is CallOutcome.UNDELIVERED
            choice = self.choices[record.choice]
            choice.ids, choice.logprobs = record.response_ids, record.logprobs
            choice.versions = [(version, count) for version, count in record.versions]
            choice.text = choice.decoder.push(choice.ids)
            if record.finish_reason is not FinishReason.CANCELLED:
                self._finish(choice, record.finish_reason)
            self._emit(choice)
        self.answered = all(choice.finish is not None for choice in self.choices)
        if not self.answered and any(not i.data for each in self.choices for i in each.images):
            raise ApiError(
                409,
                "an image of this call is not in the store any more: send the request as a new "
                "call",
            )

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
        request, watcher = self._generation_request(choice), self._stop_watcher(choice)
        if request is None:
            self._finish(choice, FinishReason.LENGTH)
            return
        chunks = self._engine.generate(request, stream=self.streamed)
        async with aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                choice.extend(chunk)
                stop = None if watcher is None else watcher.complete(chunk.ids)
                if stop is not None:
                    choice.truncate(len(choice.ids) - len(chunk.ids) + stop)
                finish = chunk.finish_reason if stop is None else FinishReason.STOP
                if finish is not None:
                    self._finish(choice, finish)
                self._emit(choice)
                if stop is not None:
                    return

    def _generation_request(self, choice: ChoiceRun) -> GenerationRequest | None:
        """Return the engine's request for the tokens that a choice lacks.

        The result is None if the choice already has `max_tokens` tokens.
        """
        sampling = self.request.sampling
        if sampling.max_tokens is not None and choice.ids:
            remaining = sampling.max_tokens - len(choice.ids)
            if remaining <= 0:
                return None
            sampling = msgspec.structs.replace(sampling, max_tokens=remaining)
        return GenerationRequest(
            request_id=f"{self.info.call_id}-{choice.index}-{self.tries}",
            policy=self.info.policy,
            prompt_ids=[*choice.prompt_ids, *choice.ids],
            sampling=sampling,
            grammar=self.request.grammar,
            answered=len(choice.ids),
            images=choice.images,
            rollout="" if self.info.session.shared else self.info.session.attempt_id,
        )

    def _stop_watcher(self, choice: ChoiceRun) -> StopWatcher | None:
        """Return a watcher for stop strings that begin in tokens of an earlier, cancelled try.

        The engine finds only stop strings in the tokens that it generates now. The result is None
        if there was no earlier try, or if the request has no stop strings.
        """
        if not choice.ids or not self.request.sampling.stop:
            return None
        watcher = StopWatcher(self._tokenizer, self.request.sampling.stop)
        watcher.complete(choice.ids)
        return watcher

    def _finish(self, choice: ChoiceRun, finish: FinishReason) -> None:
        choice.text, choice.stop = self._trim(choice.text + choice.decoder.flush())
        choice.finish = finish
        choice.message = self._message(choice)

    # --- text -----------------------------------------------------------------------------
    # The ids of an engine end with the token that completes a stop string. Only the functions below
    # decide where the text ends, and how much of it is streamed before the end is certain.
    def _trim(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first stop string, and that stop string.

        Without a stop string, return the whole text and None.
        """
        stops = [(text.find(stop), stop) for stop in self.request.sampling.stop if stop in text]
        position, stop = min(stops, default=(len(text), None))
        return text[:position], stop

    def _emit(self, choice: ChoiceRun) -> None:
        if not self.streamed:
            return
        end = self._visible_length(choice)
        if end > choice.streamed:
            message = choice.message
            text = choice.text if message is None else str(message["content"])
            self.deltas.append((choice.index, text[choice.streamed : end]))
            choice.streamed = end
            self._notify()

    def _visible_length(self, choice: ChoiceRun) -> int:
        """Return how many characters of the choice's text may be sent to a streaming client now.

        The characters after these are held back, because they may begin a stop string or a tool
        call.
        """
        if choice.message is not None:  # tool calls are no text, unless they are malformed
            return len(choice.message["content"] or "")
        text, _ = self._trim(choice.text)
        held = max((len(stop) for stop in self.request.sampling.stop), default=1) - 1
        text = text[: max(0, len(choice.text) - held)]
        if self._tools is None:
            return len(text)
        before = self._thinking
        return max(0, self._tools.visible_length(before + text) - len(before))

    def _message(self, choice: ChoiceRun) -> dict[str, Any]:
        """Return the choice as an OpenAI message."""
        before = self._thinking
        parsed = None if self._tools is None else self._tools.parse(before + choice.text)
        if parsed is None or not parsed.calls or not self._are_offered(parsed.calls):
            return {"role": "assistant", "content": choice.text}
        name = f"{self.info.call_id}/{choice.index}"
        calls = [
            {
                # the same for every replay; OpenAI refuses more than 40 characters
                "id": "call_" + digest_of(f"{name}/{number}".encode(), 12),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
        content = (parsed.content or "").removeprefix(before) or None
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def _are_offered(self, calls: Sequence[ParsedCall]) -> bool:
        """Return whether the request has the tools that `calls` name.

        Without a response format the result is always True. With one, text in that format may look
        like a call, but it is a call only if it names a tool of the request.
        """
        constraint = self.request.constraint
        if constraint is None or constraint.format is None:
            return True
        return {call.name for call in calls} <= {tool.name for tool in constraint.tools}

    def _answer(self) -> Answer:
        return Answer(
            response_id=self.response_id,
            created=self.created,
            model=self.model,
            choices=tuple(self._choice(choice) for choice in self.choices),
            prompts=self._prompts,
        )

    def _choice(self, choice: ChoiceRun) -> Choice:
        message = choice.message or self._message(choice)
        reason = "length" if choice.finish is FinishReason.LENGTH else "stop"
        octets, offsets = (
            token_octets(self._tokenizer, choice.ids) if self.request.logprobs else ((), ())
        )
        return Choice(
            index=choice.index,
            message=message,
            finish_reason="tool_calls" if "tool_calls" in message else reason,
            stop=choice.stop,
            token_ids=choice.ids,
            token_bytes=octets,
            logprobs=choice.logprobs,
            text_offsets=offsets,
        )

    # --- answer -----------------------------------------------------------------
    async def events(self) -> AsyncGenerator[bytes, None]:
        request = self.request
        base = head(self.response_id, self.created, self.model, request.chunk_object)
        events = request.framing()
        opening = events.of(
            chunk
            for choice in self.choices
            for chunk in request.opening(base, choice.index, choice.prompt_ids)
        )
        begun: set[int] = set()
        async for index, text in self._follow(lambda: self.deltas):
            if index not in begun:
                begun.add(index)
                opening += events.of(request.begin_text(base, index))
            yield opening + events.of([request.delta(base, index, text)])
            opening = b""
        yield opening + events.of(request.last(self._answer(), base)) + events.end

    async def body(self) -> bytes:
        await self._wait()
        return msgspec.json.encode(self.request.body(self._answer()))

    # --- record -------------------------------------------------------------
    def conversation(self) -> list[dict[str, Any]] | None:
        return self.request.conversation(self._answer()) if self.answered else None

    def attributes(self) -> Attributes:
        choices = [
            {
                "message": choice.message or self._message(choice),
                "finish_reason": "cancelled" if choice.finish is None else choice.finish.value,
            }
            for choice in self.choices
        ]
        usage = {
            "prompt_tokens": sum(map(len, self._prompts)),
            "completion_tokens": sum(len(choice.ids) for choice in self.choices),
        }
        answer = {"id": self.response_id, "model": self.info.policy, "choices": choices}
        attributes = {c.POLICY: self.info.policy, **answer_attributes({**answer, "usage": usage})}
        attributes |= self.request.attributes()
        if self.resampled:
            attributes[c.CALL_RESAMPLED] = True
        return attributes

    def token_records(self, outcome: CallOutcome, sequence_end: int) -> list[TokenRecord]:
        info, grammar = self.info, self.request.grammar
        return [
            TokenRecord.create(
                prompt_ids=choice.prompt_ids,
                response_ids=choice.ids,
                logprobs=choice.logprobs,
                versions=choice.versions,
                attempt_id=info.session.attempt_id,
                call_id=info.call_id,
                choice=choice.index,
                policy=info.policy,
                sampling=self.request.sampling,
                finish_reason=choice.finish or FinishReason.CANCELLED,
                span_id=info.span_id,
                agent_path=info.agent_path,
                sequence_start=info.sequence_start,
                sequence_end=sequence_end,
                outcome=outcome,
                images=without_data(choice.images),
                grammar=grammar,
                grammar_library=self._engine.capabilities.grammars if grammar else "",
            )
            for choice in self.choices
            if choice.ids
        ]


def token_octets(tokenizer: ChatTokenizer, ids: Sequence[int]) -> tuple[list[bytes], list[int]]:
    """Return for each token its bytes, and where in the answer's text its text begins.

    All bytes together are the text's, and those of special tokens, which the text leaves out.
    """
    decoder, octets, offsets, length = IncrementalDecoder(tokenizer), [], [], 0
    text = parts = b""  # of the latest tokens that may have a part of a character
    for token in ids:
        offsets.append(length)
        delta, own = decoder.push([token]), tokenizer.token_bytes(token)
        length += len(delta)
        if "\N{REPLACEMENT CHARACTER}" in own.decode(errors="replace"):
            octets.append(own)
            text, parts = text + delta.encode(), parts + own
            continue
        # its text may depend on the token before it, as a space at its start does
        octets.append(delta.encode() if delta and text == parts else own)
        if delta:
            text = parts = b""
    return octets, offsets
