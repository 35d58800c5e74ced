"""What an app gets back of a model call, watched as it passes: never changed, never consumed.

Clients that Stainless generates (OpenAI's, Anthropic's) answer in three forms. An object of the
SDK is read at once. A `Stream` hands out chunks, which pass through an iterator of ours. Of a raw
response (`with_raw_response`, `with_streaming_response`) an app may read bytes, text or lines, or
have a `Stream` made of it by `parse()`: its body passes through a stream of ours.

Whichever way an app leaves a stream, its response is closed, and a response closes its stream:
there it is noticed, because the SDKs' own helpers close nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from lightspan.errors import EngineError
from lightspan.schema.genai_attributes import ANSWER_FIELDS


class Chunks(Protocol):
    """Puts the chunks of a streamed answer together again."""

    def add(self, chunk: Any) -> None:
        """Add one: a model of the SDK or a mapping."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all that matters has come: who leaves now has the answer."""
        ...

    def answer(self) -> Mapping[str, Any]:
        """The answer as if it had not been streamed, as far as it came."""
        ...


class Asked(Protocol):
    """A call that was made, and is told of its answer."""

    @property
    def recorded_there(self) -> bool:
        """Whether somebody else records a whole answer."""
        ...

    def chunks(self) -> Chunks:
        """What a stream of its answer is gathered in."""
        ...

    def answered(self, answer: Mapping[str, Any]) -> None:
        """It has its answer, at once; empty where somebody else records it."""
        ...

    def expect(self, give_up: Callable[[], None], response: Any) -> None:
        """Its answer is under way: `give_up` is for when the attempt is over, or `response`, which
        it comes from, is gone."""
        ...

    def ended(self, answer: Mapping[str, Any], error: BaseException | None) -> None:
        """Its answer ended, by this error if there is one; only the first time counts."""
        ...

    def guarded(self, note: Callable[..., None], *values: Any) -> None:
        """Call `note`; what fails never reaches the app."""
        ...


def observe(call: Asked, result: Any, *, streamed: bool) -> Any:
    """The result, watched.

    Args:
        call: is told of it.
        result: what the SDK returns to the app.
        streamed: whether a stream was asked for.
    """
    if not streamed and hasattr(type(result), "model_dump"):  # asked first: a model takes long to
        call.guarded(_observe_whole, call, result)  # say that it lacks an attribute
    elif hasattr(result, "http_response"):
        call.guarded(_observe_raw, call, result, streamed)
    elif streamed:
        call.guarded(_observe_stream, call, result)
    else:
        call.guarded(_observe_whole, call, result)
    return result


def as_mapping(result: Any, fields: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """An answer of the SDK's as JSON; empty for anything else.

    Args:
        result: the SDK's object.
        fields: those that are wanted, as pydantic's `include`; None: all.
    """
    dump: Callable[..., Mapping[str, Any]] | None = getattr(result, "model_dump", None)
    if dump is None:
        return {}
    return dump(mode="json", include=fields, exclude_unset=True, warnings=False)


def _observe_whole(call: Asked, result: Any) -> None:
    call.answered({} if call.recorded_there else as_mapping(result, ANSWER_FIELDS))


def _observe_stream(call: Asked, stream: Any) -> None:
    if not hasattr(stream, "_iterator"):
        call.answered({})
        return
    answer = _PassingAnswer(call)
    answer.expect(stream.response)
    stream.response.stream = _PassingBytes(stream.response.stream, answer)
    stream._iterator = _PassingChunks(stream._iterator, answer)


def _observe_raw(call: Asked, raw: Any, streamed: bool) -> None:
    response = raw.http_response
    is_read = response.is_stream_consumed  # nothing will pass any more
    if is_read and not streamed:
        call.answered({} if call.recorded_there else _object_in(response.content))
        return
    body = _Body(raw, call.chunks if streamed else None)
    answer = _PassingAnswer(call, body)
    answer.expect(response)
    if is_read:  # a transport that answers from memory, as in tests
        body.fill(response.content)
        answer.end()
        return
    response.stream = _PassingBytes(response.stream, answer)
    if streamed:
        raw.parse = partial(_parse, raw.parse, answer)


def _parse(parse: Callable[..., Any], answer: _PassingAnswer, *args: Any, **options: Any) -> Any:
    """A raw response's `parse`: the chunks of the stream that it makes tell more than bytes do."""
    made = parse(*args, **options)
    return _parsed_later(made, answer) if inspect.isawaitable(made) else _parsed(made, answer)


async def _parsed_later(made: Any, answer: _PassingAnswer) -> Any:
    return _parsed(await made, answer)


def _parsed(made: Any, answer: _PassingAnswer) -> Any:
    iterator = getattr(made, "_iterator", None)
    if iterator is not None and not isinstance(iterator, _PassingChunks):  # parsed twice is one
        made._iterator = _PassingChunks(iterator, answer)
    return made


# --- one answer -----------------------------------------------------------------------------
class _PassingAnswer:
    """One answer while the app takes it; how it ended is told once."""

    def __init__(self, call: Asked, body: _Body | None = None) -> None:
        self.body = body
        """Gathers the bytes; None: it passes as chunks."""
        self._call = call
        self._chunks = call.chunks()
        self._taker: object = None
        """Who waits for more of it now."""

    def expect(self, response: Any) -> None:
        """It is under way."""
        self._call.expect(partial(self.end, GeneratorExit()), response)

    def add(self, chunk: Any) -> None:
        """A chunk has passed."""
        self._call.guarded(self._chunks.add, chunk)

    def taking(self) -> None:
        """Somebody waits for a chunk."""
        self.body = None  # not before: whoever parsed may read the lines all the same
        self._taker = _flow()

    def taken(self) -> None:
        """Nobody waits any more."""
        self._taker = None

    def end(self, error: BaseException | None = None) -> None:
        """It ended, by this error if there is one; GeneratorExit: the app left it."""
        self._call.guarded(self._end, error)

    def leave(self) -> None:
        """Its response is closed: by the app, unless the SDK does it at the end of the chunks."""
        if self._taker is None or self._taker is not _flow():
            self.end(GeneratorExit())

    def _end(self, error: BaseException | None) -> None:
        if self.body is None:
            read = _Read(self._chunks.answer(), self._chunks.complete)
        else:
            read = self.body.read(is_cut=error is not None)
        if read.complete and isinstance(error, GeneratorExit):
            error = None  # what was left is the end of the protocol
        self._call.ended(read.answer, read.failure or error)


def _flow() -> object:
    """The task or the thread that runs."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs
        return threading.current_thread()


class _Passing:
    """Stands in for an iterator or a stream, and is otherwise what that one is."""

    def __init__(self, inner: Any, answer: _PassingAnswer) -> None:
        self._inner = inner
        self._answer = answer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inner)  # httpx checks it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --- its chunks -----------------------------------------------------------------------------
class _PassingChunks(_Passing):
    """The chunks of a `Stream`."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        answer = self._answer
        answer.taking()
        try:
            chunk = next(self._inner)
        except StopIteration:
            answer.end()
            raise
        except BaseException as error:
            answer.end(error)
            raise
        finally:
            answer.taken()
        answer.add(chunk)
        return chunk

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        answer = self._answer
        answer.taking()
        try:
            chunk = await anext(self._inner)
        except StopAsyncIteration:
            answer.end()
            raise
        except BaseException as error:
            answer.end(error)
            raise
        finally:
            answer.taken()
        answer.add(chunk)
        return chunk


# --- its bytes ------------------------------------------------------------------------------
class _PassingBytes(_Passing):
    """The stream of an HTTP response."""

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
            if hasattr(parts, "aclose"):  # now, not when the garbage collector finds it
                await parts.aclose()
        self._answer.end()

    def close(self) -> None:
        self._answer.leave()
        self._inner.close()

    async def aclose(self) -> None:
        self._answer.leave()
        await self._inner.aclose()


class _Read(NamedTuple):
    """What a body says."""

    answer: Mapping[str, Any]
    complete: bool
    """Whether all that matters has come."""
    failure: Exception | None = None
    """What the endpoint says went wrong, in a stream."""


class _Body:
    """The bytes of a body that have passed.

    Args:
        raw: the SDK's response.
        chunks: makes what its events are gathered in; None: it is one JSON value.
    """

    def __init__(self, raw: Any, chunks: Callable[[], Chunks] | None) -> None:
        self.parts: list[bytes] = []
        """As they came, compressed if the endpoint does that."""
        self._chunks = chunks
        self._kind = type(raw.http_response)
        self._headers = raw.http_response.headers
        self._make_decoder = raw._client._make_sse_decoder  # the SDK's own

    def fill(self, content: bytes) -> None:
        """Take the whole body, which is decompressed."""
        self.parts, self._headers = [content], {}

    def read(self, *, is_cut: bool) -> _Read:
        """What it says, as far as it came.

        Args:
            is_cut: the rest of it never came.
        """
        if self._chunks is None:
            return self._read_whole()
        chunks, failure = self._chunks(), None
        try:
            for event in self._make_decoder().iter_bytes(self._unpacked()):
                if event.data.startswith("[DONE]"):
                    break
                data = _object_in(event.data)
                if data:
                    failure = failure or _failure(data)
                    chunks.add(data)
        except Exception:
            if not is_cut:  # else in the middle of a character, or of a compressed block
                raise
        return _Read(chunks.answer(), chunks.complete, failure)

    def _read_whole(self) -> _Read:
        try:
            content = b"".join(self._unpacked())
        except Exception:  # cut in the middle of a compressed block
            return _Read({}, complete=False)
        answer = _object_in(content)
        return _Read(answer, complete=bool(answer))

    def _unpacked(self) -> Iterator[bytes]:
        copy = self._kind(200, headers=self._headers, content=iter(self.parts))
        return copy.iter_bytes()  # type: ignore[no-any-return]


def _object_in(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object; empty if it is none, such as a ping or a page of a proxy."""
    try:
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _failure(event: Mapping[str, Any]) -> Exception | None:
    """The error that a stream's event tells of."""
    said = event.get("error") or (event if event.get("type") == "error" else None)
    if not said:
        return None
    message = said.get("message") if isinstance(said, Mapping) else said
    return EngineError(f"the endpoint broke off: {message}")


__all__ = ["Asked", "Chunks", "as_mapping", "observe"]
