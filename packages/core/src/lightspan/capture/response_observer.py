"""Observe a model call's answer while the app reads it; nothing is changed or consumed.

The clients of OpenAI and Anthropic return one of three forms:

- An object of the SDK. It is complete and is read at once.
- A `Stream`, which yields chunks. Its iterator is wrapped.
- A raw response (`with_raw_response`, `with_streaming_response`). From it an app may read bytes,
  text or lines, or get a `Stream` by `parse()`. The response's stream of bytes is wrapped.

An app may abandon a stream in many ways. Each closes the HTTP response, and a response closes its
stream of bytes. So the end of an answer is detected when its stream of bytes is closed. The helpers
of the SDKs close nothing else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from lightspan.capture.generator_context import current_flow
from lightspan.errors import EngineError
from lightspan.schema.genai_attributes import ANSWER_FIELDS, CUT, END, StreamedAnswer
from lightspan.schema.genai_messages import MAPPING

if TYPE_CHECKING:
    from lightspan.capture.sdk_instrumentation import SdkCall


def observe(call: SdkCall, result: Any, *, streamed: bool) -> Any:
    """Observe the result of a model call, and return the result.

    Args:
        call: the call, which records the answer.
        result: the SDK's result for the app.
        streamed: whether the app requested a stream.
    """
    # Models are checked first, because looking up a missing attribute of one is slow.
    is_model = not streamed and hasattr(type(result), "model_dump")
    if not is_model and hasattr(result, "http_response"):
        call.guarded(_observe_raw, call, result, streamed)
    elif streamed:
        call.guarded(_observe_stream, call, result)
    else:
        call.guarded(_observe_whole, call, result)
    return result


def as_mapping(result: Any, fields: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return an answer as a JSON object; empty if it is none.

    Args:
        result: the SDK's object, a pydantic model. If the app asked for another type (`cast_to`),
            a mapping, a text or an HTTP response.
        fields: fields of a model to include, as for pydantic's `include`; None for all.
    """
    dump: Callable[..., Mapping[str, Any]] | None = getattr(result, "model_dump", None)
    if dump is not None:
        return dump(mode="json", include=fields, exclude_unset=True, warnings=False)
    if isinstance(result, MAPPING):
        return result
    body = getattr(result, "content", result)
    return _object_in(body) if isinstance(body, str | bytes) else {}


def _observe_whole(call: SdkCall, result: Any) -> None:
    call.ended({} if call.is_recorded_elsewhere else as_mapping(result, ANSWER_FIELDS))


def _observe_stream(call: SdkCall, stream: Any) -> None:
    if not hasattr(stream, "_iterator"):
        call.ended({})
        return
    answer = _ObservedAnswer(call)
    answer.register_pending(stream.response)
    stream.response.stream = _ObservedBytes(stream.response.stream, answer)
    _observe_parsed(stream, answer)


def _observe_raw(call: SdkCall, raw: Any, streamed: bool) -> None:
    response = raw.http_response
    is_read = response.is_stream_consumed  # then no byte passes through a stream any more
    if is_read and not streamed:
        call.ended({} if call.is_recorded_elsewhere else _object_in(response.content))
        return
    body = _Body(raw, call.new_answer if streamed else None)
    answer = _ObservedAnswer(call, body)
    answer.register_pending(response)
    if is_read:  # a transport that answers from memory, as in tests
        body.fill(response.content)
        answer.end()
        return
    response.stream = _ObservedBytes(response.stream, answer)
    if streamed:
        raw.parse = partial(_parse, raw.parse, answer)


def _parse(parse: Callable[..., Any], answer: _ObservedAnswer, *args: Any, **options: Any) -> Any:
    """Call `parse` of a raw response, and observe the stream that it returns.

    Args:
        parse: the method of the raw response.
        answer: gets the stream's chunks as the app reads them.
        args: positional arguments of `parse`.
        options: keyword arguments of `parse`.

    Returns:
        The result of `parse`; for an async client, an awaitable of it.
    """
    stream = parse(*args, **options)
    if inspect.isawaitable(stream):
        return _parse_async(stream, answer)
    return _observe_parsed(stream, answer)


async def _parse_async(stream: Any, answer: _ObservedAnswer) -> Any:
    return _observe_parsed(await stream, answer)


def _observe_parsed(stream: Any, answer: _ObservedAnswer) -> Any:
    iterator = getattr(stream, "_iterator", None)
    if iterator is not None and not isinstance(iterator, _ObservedChunks):  # unless parsed before
        stream._iterator = _ObservedChunks(iterator, answer)
        stream._decoder = _ObservedEvents(stream._decoder, answer)
    return stream


# --- one answer -----------------------------------------------------------------------------
class _ObservedAnswer:
    """A model's answer, recorded while the app reads it.

    Use it as a context manager around the app's wait for a chunk. An error in the block ends the
    answer.
    """

    def __init__(self, call: SdkCall, body: _Body | None = None) -> None:
        self.body = body
        """The bytes that the app has read; None if the app reads chunks."""
        self.chunks = call.new_answer()
        """The chunks that the app has read."""
        self._call = call
        self._reader: object = None
        """The task or thread that is waiting for a chunk; None if none is waiting."""

    def register_pending(self, response: Any) -> None:
        """Arrange that the answer counts as abandoned if it is still open when the attempt ends.

        In production, it counts as abandoned when `response` is deleted.
        """
        self._call.register_pending(partial(self.end, GeneratorExit()), response)

    def add(self, chunk: Any) -> None:
        """Add a chunk that the app has read."""
        self._call.guarded(self.chunks.add, chunk)

    def __enter__(self) -> None:
        self.body = None  # not at `parse`, after which the app may still read lines
        self._reader = current_flow()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._reader = None
        if isinstance(error, StopIteration | StopAsyncIteration):
            self.end()
        elif error is not None:
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """Note that the answer has ended, and record it.

        Args:
            error: the error that ended the answer. GeneratorExit if the app abandoned it, None if
                it is complete.
        """
        self._call.guarded(self._end, error)

    def abandon(self) -> None:
        """Record that the app abandoned the answer, because its response is being closed.

        Do nothing if the SDK itself closes the response while this task or thread waits for a
        chunk.
        """
        if self._reader is None or self._reader is not current_flow():
            self.end(GeneratorExit())

    def _end(self, error: BaseException | None) -> None:
        if self.body is None:
            content = _Content.of(self.chunks)
        else:
            content = self.body.read(is_cut=error is not None)
        if content.complete and isinstance(error, GeneratorExit):
            error = None  # only the protocol's end marker was not read
        elif error is None and not content.complete:
            error = EngineError(CUT)
        self._call.ended(content.answer, content.failure or error, content.irregular_field)


class _Proxy:
    """A wrapper that looks like the iterator or stream `inner`: it has its class and attributes."""

    def __init__(self, inner: Any, answer: _ObservedAnswer) -> None:
        self._inner = inner
        self._answer = answer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)  # httpx checks the class

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --- its chunks -----------------------------------------------------------------------------
class _ObservedChunks(_Proxy):
    """An iterator of a `Stream`'s chunks, which also passes each chunk to `answer`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._answer:
            chunk = next(self._inner)
        self._answer.add(chunk)
        return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        with self._answer:
            chunk = await anext(self._inner)
        self._answer.add(chunk)
        return chunk


class _ObservedEvents(_Proxy):
    """A decoder of a `Stream`'s events, which notes the event that marks its end for `answer`."""

    def iter_bytes(self, parts: Iterator[bytes]) -> Iterator[Any]:
        for event in self._inner.iter_bytes(parts):
            self._answer.chunks.is_done |= event.data.startswith(END)
            yield event

    async def aiter_bytes(self, parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for event in self._inner.aiter_bytes(parts):
            self._answer.chunks.is_done |= event.data.startswith(END)
            yield event


# --- its bytes ------------------------------------------------------------------------------
class _ObservedBytes(_Proxy):
    """A stream of an HTTP response's bytes, which also collects the bytes for `answer`."""

    def __iter__(self) -> Iterator[bytes]:
        body = self._answer.body
        return iter(self._inner) if body is None else self._gather(body)

    def __aiter__(self) -> AsyncIterator[bytes]:
        body = self._answer.body
        return aiter(self._inner) if body is None else self._gather_async(body)

    def _gather(self, body: _Body) -> Iterator[bytes]:
        try:
            for part in self._inner:
                body.parts.append(part)
                yield part
        except BaseException as error:
            self._answer.end(error)
            raise
        self._answer.end()

    async def _gather_async(self, body: _Body) -> AsyncIterator[bytes]:
        parts = aiter(self._inner)
        try:
            async for part in parts:
                body.parts.append(part)
                yield part
        except BaseException as error:
            self._answer.end(error)
            raise
        finally:
            if hasattr(parts, "aclose"):  # now, not at its garbage collection
                await parts.aclose()
        self._answer.end()

    def close(self) -> None:
        self._answer.abandon()
        self._inner.close()

    async def aclose(self) -> None:
        self._answer.abandon()
        await self._inner.aclose()


class _Content(NamedTuple):
    """The part of a model's answer that has arrived so far."""

    answer: Mapping[str, Any]
    complete: bool
    """Whether the whole answer has arrived."""
    failure: Exception | None = None
    """The error that the endpoint reported in the stream; None without an error."""
    irregular_field: str = ""

    @classmethod
    def of(cls, chunks: StreamedAnswer, failure: Exception | None = None) -> _Content:
        return cls(chunks.answer(), chunks.complete, failure, chunks.irregular_field)


class _Body:
    """The part of a response body that the app has read so far.

    Args:
        raw: the SDK's raw response.
        new_answer: returns a collector for the events of a stream; None if the body is not a stream
            but one JSON value.
    """

    def __init__(self, raw: Any, new_answer: Callable[[], StreamedAnswer] | None) -> None:
        self.parts: list[bytes] = []
        """Parts of the body as received, compressed if the endpoint compresses."""
        self._new_answer = new_answer
        self._kind = type(raw.http_response)
        self._headers = raw.http_response.headers
        self._make_decoder = raw._client._make_sse_decoder  # the SDK's own

    def fill(self, content: bytes) -> None:
        """Set the whole body, which the app has read in one piece. `content` is not compressed."""
        self.parts, self._headers = [content], {}

    def read(self, *, is_cut: bool) -> _Content:
        """Return the content that has arrived so far.

        Args:
            is_cut: whether the rest of the body will never arrive. Then the last, incomplete part
                is ignored.
        """
        if self._new_answer is None:
            return self._read_json(is_cut=is_cut)
        chunks, failure = self._new_answer(), None
        try:
            for event in self._make_decoder().iter_bytes(self._decompressed()):
                if event.data.startswith(END):
                    chunks.is_done = True
                    break
                data = _object_in(event.data)
                if data:
                    failure = failure or _failure(data)
                    chunks.add(data)
        except Exception:
            if not is_cut:  # a cut may be inside a character or a compressed block
                raise
        return _Content.of(chunks, failure)

    def _read_json(self, *, is_cut: bool) -> _Content:
        try:
            content = b"".join(self._decompressed())
        except Exception:  # cut inside a compressed block
            return _Content({}, complete=False)
        answer = _object_in(content)
        return _Content(answer, complete=bool(answer) or not is_cut)

    def _decompressed(self) -> Iterator[bytes]:
        copy = self._kind(200, headers=self._headers, content=iter(self.parts))
        return copy.iter_bytes()  # type: ignore[no-any-return]


def _object_in(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `data`.

    Empty for anything else, such as a ping or a proxy's error page.
    """
    try:
        decoded = json.loads(data)  # as the SDKs do, which accept half a character
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _failure(event: Mapping[str, Any]) -> Exception | None:
    """Return the error that an event of a stream reports; None if there is none."""
    error = event.get("error") or (event if event.get("type") == "error" else None)
    if not error:
        return None
    message = error.get("message") if isinstance(error, Mapping) else error
    return EngineError(f"the endpoint ended the stream with an error: {message}")
