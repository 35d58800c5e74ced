"""Calls that are forwarded to an OpenAI-compatible endpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from lightspan.errors import EngineError
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.genai_attributes import (
    CUT,
    END,
    StreamedAnswer,
    answer_attributes,
    problem_of,
    requested_choices,
)
from lightspan.schema.spans import Attributes, Span
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.calls import CallInfo, CallLog, ServedCall
from lightspan_gateway.chat_engine import ChatEngine, EndpointRefused
from lightspan_gateway.dialects.sse import DONE, event_of
from lightspan_gateway.half_characters import decode_object, encode_object
from lightspan_gateway.stream_repair import StreamRepair

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class ProxiedCall(ServedCall):
    """A call that is forwarded to an endpoint.

    Args:
        info: the call.
        engine: client of the endpoint.
        name: name of the endpoint in error messages.
        log: the log that records the call.
    """

    def __init__(self, info: CallInfo, engine: ChatEngine, name: str, log: CallLog) -> None:
        super().__init__(info, log)
        self._request: Mapping[str, Any] = info.body
        self._engine = engine
        self._name = name
        self._body = b""
        """The unstreamed answer."""
        self._payloads: list[bytes] = []
        """The payloads of a streamed answer's events."""
        self._answer: Mapping[str, Any] = {}

    def forget_request(self) -> None:
        super().forget_request()
        self._request = {}

    def restore(self, span: Span) -> None:
        """Restore the answer of a recorded call."""
        completion = _completion(span)
        self._body, self._answer = _encode(completion), completion
        options = self.info.body.get("stream_options") or {}
        usage = bool(options.get("include_usage"))
        self._payloads = [_encode(chunk) for chunk in _chunks(completion, include_usage=usage)]
        self.answered = True

    async def events(self) -> AsyncGenerator[bytes, None]:
        await self._wait_for_new_try()
        async for payload in self._follow(lambda: self._payloads):
            yield event_of(payload)
        yield DONE

    async def body(self) -> bytes:
        await self._wait_for_new_try()
        await self._wait()
        return self._body

    async def _wait_for_new_try(self) -> None:
        """Wait until an earlier try of this call, which was cancelled, is recorded.

        Otherwise its chunks would be mixed with those of the next try.
        """
        while self.active and not self._cancellable:
            await self._changed.wait()

    async def _work(self) -> None:
        self._payloads, self._answer = [], {}
        if self.streamed:
            await self._work_streamed()
            return
        answer = await self._engine.chat(self._request)
        if answer.status != 200:
            raise self._api_error(answer.status, answer.body)
        decoded, is_valid = self._decode(answer.body)
        if problem := problem_of(decoded):
            raise EngineError(f"{self._name}: {problem}")
        if not is_valid:
            decoded, _ = self._decode(encode_object(decoded))
        self._answer = StreamRepair().repaired_answer(decoded)
        self._body = answer.body
        if self._answer is not decoded or not is_valid:
            _warn_of_repair(self._name)
            self._body = _encode(self._answer)

    async def _work_streamed(self) -> None:
        streamed, repair = StreamedAnswer(requested_choices(self._request)), StreamRepair()
        try:
            async for payload in self._engine.stream(self._request):
                if payload.startswith(END.encode()):
                    streamed.is_done = True
                    continue
                chunk, is_valid = self._decode(payload)
                if chunk.get("error"):
                    raise EngineError(f"{self._name} aborted: {_error_text(payload)}")
                repaired = repair.repaired(chunk)
                if not is_valid:
                    repaired, _ = self._decode(encode_object(repaired))
                streamed.add(repaired)
                if repaired is not chunk:
                    _warn_of_repair(self._name)
                    payload = _encode(repaired)
                self._payloads.append(payload)
                self._notify()
            if not streamed.complete:
                raise EngineError(f"{self._name} aborted: {CUT}")
        except EndpointRefused as error:
            raise self._api_error(error.status, str(error).encode()) from error
        finally:
            self._answer = streamed.answer()

    def _api_error(self, status: int, body: bytes) -> ApiError:
        return ApiError(status, f"{self._name} answered {status}: {_error_text(body)}")

    def _decode(self, body: bytes) -> tuple[Mapping[str, Any], bool]:
        """Return a JSON object, and whether it is valid JSON (`decode_object`)."""
        try:
            return decode_object(body)
        except ValueError as error:
            raise EngineError(
                f"{self._name} answered with no JSON object: {body[:200]!r}"
            ) from error

    def attributes(self) -> Attributes:
        return answer_attributes(self._answer)


@functools.cache
def _warn_of_repair(name: str) -> None:
    """Log a warning that the endpoint `name` sends malformed answers, once for each endpoint."""
    log.warning(
        "%s answers in a form that clients of OpenAI's API read in different ways; it is repaired "
        "before the app gets it",
        name,
    )


def _completion(span: Span) -> dict[str, Any]:
    """Rebuild an endpoint's chat completion from the span that recorded it."""
    attributes: Mapping[str, Any] = span.attributes
    answers = genai_messages.output_messages_of(attributes)
    reasons = attributes.get(c.FINISH_REASONS, ())
    choices = [
        {"index": index, "message": message, "finish_reason": reason or None}
        for index, (message, reason) in enumerate(
            zip_longest(answers, reasons[: len(answers)], fillvalue=None)
        )
    ]
    prompt, answer = attributes.get(c.INPUT_TOKENS, 0), attributes.get(c.OUTPUT_TOKENS, 0)
    return {
        "id": attributes.get(c.RESPONSE_ID, ""),
        "object": "chat.completion",
        "created": span.start_ns // 1_000_000_000,
        "model": attributes.get(c.RESPONSE_MODEL, ""),
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
