"""Calls of frozen agents: an endpoint answers, the gateway records and passes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from lightspan import conventions as c
from lightspan import messages
from lightspan.engines import ChatEngine, EndpointRefused
from lightspan.errors import EngineError
from lightspan.gateway.calls import Call, CallInfo, Recording
from lightspan.gateway.dialects import as_in_training
from lightspan.gateway.errors import ApiError
from lightspan.records import Sampling
from lightspan.spans import Attributes, Span
from lightspan.wire import StreamedAnswer, answer_attributes

_encode = msgspec.json.Encoder().encode


class Forward(Call):
    """A call that an endpoint answers.

    Args:
        info: the call.
        engine: the endpoint.
        name: of the endpoint, for error messages.
        record: writes what became of the call.
        forced: the sampling of training, which a dry run asks of the endpoint.

    Raises:
        ApiError: 400, `forced` is given and the request cannot be understood.
    """

    def __init__(
        self,
        info: CallInfo,
        engine: ChatEngine,
        name: str,
        record: Recording,
        *,
        forced: Sampling | None = None,
    ) -> None:
        super().__init__(info, record)
        self.body = b""
        """The unstreamed answer."""
        self._sent: Mapping[str, Any] = info.body
        self._overrides: Mapping[str, Any] = {}
        if forced is not None:
            self._sent, self._overrides = as_in_training(info.body, forced)
        self._engine = engine
        self._name = name
        self._payloads: list[bytes] = []
        self._answer: Mapping[str, Any] = {}
        self._answered = False

    @property
    def answered(self) -> bool:
        return self._answered

    @property
    def streamed(self) -> bool:
        return bool(self.info.body.get("stream"))

    def restore(self, span: Span) -> None:
        """Take up what the store knows of an answered call."""
        completion = _completion(span)
        self.body, self._answer = _encode(completion), completion
        options = self.info.body.get("stream_options") or {}
        usage = bool(options.get("include_usage"))
        self._payloads = [_encode(chunk) for chunk in _chunks(completion, include_usage=usage)]
        self._settle()

    async def wait(self) -> bytes:
        """The unstreamed answer, recorded.

        Raises:
            ApiError: the endpoint refused.
            EngineError: it cannot be reached, or answered nonsense.
        """
        async for _ in self.follow():
            pass
        return self.body

    async def follow(self) -> AsyncIterator[bytes]:
        """The payloads of the stream as they come; ends when the answer is recorded."""
        while self.active and not self._cancellable:
            await self._pulse.wait()  # an earlier try is being recorded
        position = 0
        while True:
            pulse, payloads = self._pulse, self._payloads
            while position < len(payloads):
                yield payloads[position]
                position += 1
            if self.error is not None:
                raise self.error
            if self._answered and position == len(self._payloads):
                return
            if pulse is self._pulse:
                await pulse.wait()

    async def _work(self) -> None:
        self._payloads, self._answer = [], {}
        if self.streamed:
            await self._work_streamed()
            return
        answer = await self._engine.chat(self._sent)
        if answer.status != 200:
            raise self._refusal(answer.status, answer.body)
        self._answer = self._decoded(answer.body)
        self.body = answer.body

    async def _work_streamed(self) -> None:
        gathered = StreamedAnswer()
        try:
            async for payload in self._engine.stream(self._sent):
                chunk = self._decoded(payload)
                if "error" in chunk:
                    raise EngineError(f"{self._name} broke off: {_error_text(payload)}")
                gathered.add(chunk)
                self._payloads.append(payload)
                self._beat()
        except EndpointRefused as error:
            raise self._refusal(error.status, str(error).encode()) from error
        finally:
            self._answer = gathered.answer()

    def _refusal(self, status: int, body: bytes) -> ApiError:
        return ApiError(status, f"{self._name} answered {status}: {_error_text(body)}")

    def _decoded(self, body: bytes) -> Mapping[str, Any]:
        try:
            decoded = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._name} answered no JSON: {body[:200]!r}") from error
        if not isinstance(decoded, dict):
            raise EngineError(f"{self._name} answered no JSON object: {body[:200]!r}")
        return decoded

    def _settle(self) -> None:
        self._answered = True

    def attributes(self) -> Attributes:
        known = answer_attributes(self._answer)
        if self._overrides:
            known[c.SAMPLING_OVERRIDES] = messages.dump_json(self._overrides)
        return known


def _completion(span: Span) -> dict[str, Any]:
    """The chat completion that a span tells of."""
    known: Mapping[str, Any] = span.attributes
    reasons = known.get(c.FINISH_REASONS, [])
    choices = [
        {"index": index, "message": message, "finish_reason": reason}
        for index, (message, reason) in enumerate(
            zip(messages.answers_of(known), reasons, strict=False)
        )
    ]
    prompt, answer = known.get(c.INPUT_TOKENS, 0), known.get(c.OUTPUT_TOKENS, 0)
    return {
        "id": known.get(c.RESPONSE_ID, ""),
        "object": "chat.completion",
        "created": span.start_ns // 1_000_000_000,
        "model": known.get(c.RESPONSE_MODEL, ""),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        },
    }


def _chunks(completion: Mapping[str, Any], *, include_usage: bool) -> Iterator[dict[str, Any]]:
    head = {**completion, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    for choice in completion["choices"]:
        message = choice["message"]
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        chunk = {"index": choice["index"], "delta": delta, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [chunk]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage}


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
