"""`lightspan import`: store the traces of a file.

A file is read in pieces: lines, or OTLP messages. Each trace becomes a production attempt (a
recorded run of an app outside of a training), as with `POST /v1/traces`. The ids of the attempt are
derived from the trace, so importing a file again adds nothing twice, even after an interruption. A
malformed line is reported with its number, and the other lines are stored.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Final, NamedTuple, cast

from lightspan.errors import DataError
from lightspan.production.options import SERVICE_NAME, UNNAMED_SERVICE
from lightspan.schema.images import Image
from lightspan.schema.media import images_into
from lightspan.schema.records import AttemptStatus
from lightspan.schema.redaction import bounded_text
from lightspan.stores.protocol import Store
from lightspan_otel import export_formats
from lightspan_otel.ingest import attempts_of, store_spans, trace_of
from lightspan_otel.normalize import normalized_arrival
from lightspan_otel.otlp import Decoded, ReceivedSpan, decode_object, decode_protobuf

MAX_CONCURRENT: Final = 512
"""Number of spans after which they are written to the store.

Adjacent spans often belong to one trace, so many are written at once.
"""
STDIN: Final = "-"
"""Path of standard input."""
MAX_ERROR_LENGTH: Final = 500
"""Maximum characters of an error message, because it may quote the file."""
_GZIP: Final = b"\x1f\x8b"
_UNSUPPORTED: Final = {
    b"PAR1": "Parquet: write JSON lines of the data frame, "
    "`frame.reset_index().to_json(path, orient='records', lines=True, date_format='iso')`",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first, `zstd -d`",
    b"PK\x03\x04": "a zip file: unpack it first",
}
"""Magic bytes of unsupported formats → hint."""
_PREFIX: Final = 4
"""Size in bytes of the big-endian length before each message of a collector's file."""
_TRACES_DATA: Final = b"\x0a"
"""First byte of a file that is one message without a length before it."""
_SNIFFED_BYTES: Final = 4096
_BINARY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Bytes that occur in OTLP's protobuf near the start, and never in text."""
_NOT_TRACES: Final = (
    "it has no spans: neither OTLP JSON (resourceSpans), nor a span of Phoenix (context), nor a "
    "trace or an observation of Langfuse (observations; traceId, type)"
)


class Portion(NamedTuple):
    """The spans in one piece of a file, and the errors in it. A piece is a line or a message."""

    place: str
    """Position for messages, such as `line 7`."""
    arrivals: list[ReceivedSpan]
    errors: list[str]
    """Reason for each rejected span, or for the whole piece."""
    scores: int
    """Number of Langfuse's scores, which are not imported."""
    size: int = 0
    """Bytes of the file that were read for the piece."""


class Imported(NamedTuple):
    """Result of an import."""

    spans: int
    """Number of spans now in the store, written by this or an earlier import."""
    attempts: int
    """Number of attempts to which the spans belong."""
    unfinished: int
    """Number of attempts with status `running`, because their entry spans are not in the store."""
    errors: int
    """Number of rejected pieces and spans."""
    scores: int
    refused: int = 0
    """Number of spans that were read but that the store rejects; counted in `errors` too."""
    earlier: int = 0
    """Number of the attempts that were in the store before."""


# --- into a store ---------------------------------------------------------------------------
async def import_file(
    store: Store,
    path: str | os.PathLike[str],
    *,
    service: str | None = None,
    refuse: Callable[[str], None],
    advance: Callable[[int], None] = lambda size: None,
) -> Imported:
    """Store the traces of a file as production attempts. Idempotent.

    OTLP needs the package `opentelemetry-proto`.

    Args:
        store: an open store.
        path: the file: OTLP as JSON or protobuf, or a JSON export of Phoenix or Langfuse; gzip is
            supported. `-` is standard input. Standard input and pipes are read to the end first.
        service: service name of traces that have none; None for a default.
        refuse: called with a message for each rejected piece or span; the message contains no API
            key.
        advance: called after each piece with the number of bytes read since the last call.

    Raises:
        DataError: nothing of the file can be read.
        StoreError: the store cannot be written; what was stored before remains.
    """

    def report(text: str) -> None:
        refuse(bounded_text(text, MAX_ERROR_LENGTH))

    writer = _Writer(store, report)
    errors = scores = read = 0
    try:
        for portion in read_file(path, service=service):
            read += 1
            for error in portion.errors:
                report(f"{portion.place}: {error}")
            errors += len(portion.errors)
            scores += portion.scores
            await writer.add(portion)
            advance(portion.size)
    except DataError as broken:  # such as a truncated gzip file
        if not read:
            raise DataError(bounded_text(str(broken), MAX_ERROR_LENGTH)) from broken
        report(str(broken))
        errors += 1
    await writer.write()
    cut = [trace for trace, is_whole in writer.traces.items() if not is_whole]
    statuses = [attempt.status for attempt in await attempts_of(store, cut)]
    return Imported(
        spans=writer.spans,
        attempts=len(writer.traces) + len(writer.named),
        earlier=writer.earlier + len(writer.named),
        unfinished=statuses.count(AttemptStatus.RUNNING),
        errors=errors + writer.refused,
        scores=scores,
        refused=writer.refused,
    )


class _Writer:
    """Write spans to the store in batches."""

    def __init__(self, store: Store, refuse: Callable[[str], None]) -> None:
        self.spans = self.refused = self.earlier = 0
        self.traces: dict[tuple[str, str], bool] = {}
        """Service and trace → whether its entry span was imported."""
        self.named: set[str] = set()
        """Ids of existing attempts that spans name."""
        self._store = store
        self._refuse = refuse
        self._waiting: list[ReceivedSpan] = []
        self._places: list[str] = []

    async def add(self, portion: Portion) -> None:
        if portion.arrivals:
            self._waiting += portion.arrivals
            self._places.append(portion.place)
        if len(self._waiting) >= MAX_CONCURRENT:
            await self.write()

    async def write(self) -> None:
        waiting, places = self._waiting, self._places
        self._waiting, self._places = [], []
        if not waiting:
            return
        new = {trace for each in waiting if (trace := trace_of(each.span)) not in self.traces}
        self.earlier += len(await attempts_of(self._store, [trace for trace in new if trace]))
        where = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        rejected = await store_spans(self._store, waiting, may_reward=True)
        for refusal in rejected:
            self._refuse(f"{where}: {refusal.reason}")
        left_out = {id(refusal.span) for refusal in rejected}
        self.refused += len(rejected)
        for arrival in waiting:
            if id(arrival.span) not in left_out:
                self._count(arrival)

    def _count(self, arrival: ReceivedSpan) -> None:
        self.spans += 1
        trace = trace_of(arrival.span)
        if trace is None:
            self.named.add(arrival.span.attempt_id)
        else:
            self.traces[trace] = self.traces.get(trace, False) or arrival.is_entry


# --- out of a file --------------------------------------------------------------------------
def read_file(path: str | os.PathLike[str], *, service: str | None = None) -> Iterator[Portion]:
    """Yield the pieces of a file with normalized spans.

    Args:
        path: the file; `-` is standard input.
        service: service name of traces that have none; None for a default.

    Raises:
        DataError: nothing can be read; the message names the format if known.
    """
    try:
        with _opened(path) as raw:
            begin = raw.read(_PREFIX)
            raw.seek(0)
            if begin in _UNSUPPORTED:
                raise DataError(f"{name_of(path)} is {_UNSUPPORTED[begin]}")
            is_packed = begin[:2] == _GZIP
            read = 0
            with gzip.GzipFile(fileobj=raw) if is_packed else raw as file:
                pieces = _pieces(cast("IO[bytes]", file), path, service or UNNAMED_SERVICE)
                for portion in pieces:
                    at = raw.tell()  # position in the compressed file
                    yield portion._replace(size=at - read)
                    read = at
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name_of(path)} cannot be read: {error}") from error


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open the file; copy a pipe, because its beginning is inspected before it is read."""
    source: Any = sys.stdin.buffer if os.fspath(path) == STDIN else path
    with contextlib.nullcontext(source) if source is not path else open(path, "rb") as raw:
        if raw.seekable():
            yield raw
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(raw, copy)
            copy.seek(0)
            yield copy


def name_of(path: str | os.PathLike[str]) -> str:
    """Return a file's name for messages."""
    return "standard input" if os.fspath(path) == STDIN else os.fspath(path)


def _pieces(file: IO[bytes], path: str | os.PathLike[str], service: str) -> Iterator[Portion]:
    begin = file.read(_SNIFFED_BYTES)
    file.seek(0)
    is_binary = _BINARY.search(begin) is not None
    if is_binary and begin.startswith((_TRACES_DATA, b"\x00", b"\x01")):
        yield from _messages(file, service)
        return
    if not begin.strip():
        raise DataError(f"{name_of(path)} is empty: there are no traces in it")
    if is_binary or begin.lstrip()[:1] not in (b"{", b"["):
        raise DataError(
            f"{name_of(path)} is neither JSON (lines) nor OTLP's protobuf: it begins with "
            f"{begin[:20]!r}; see docs/guides/traces-in.md for what can be imported"
        )
    if _loads(file.readline()) is None:  # one document of several lines, or a bad line
        file.seek(0)
        document = _loads(file.read())
        if document is not None:
            yield _portion("the file", document, service)
            return
    file.seek(0)
    yield from _lines(file, service)


def _lines(file: IO[bytes], service: str) -> Iterator[Portion]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.strip())
        except (ValueError, RecursionError) as error:
            # not the first line of the file
            why = str(error).replace(": line 1 column ", ": column ")
            yield Portion(f"line {number}", [], [f"no JSON: {why}"], 0)
            continue
        yield _portion(f"line {number}", value, service)


def _loads(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _messages(file: IO[bytes], service: str) -> Iterator[Portion]:
    """Read OTLP's protobuf: one message, or many prefixed with their lengths."""
    prefix = file.read(_PREFIX)
    if prefix.startswith(_TRACES_DATA):
        yield _message("the file", prefix + file.read(), service)
        return
    number = 0
    while prefix:
        number += 1
        place, size = f"message {number}", int.from_bytes(prefix, "big")
        message = file.read(size)
        if len(message) < size or len(prefix) < _PREFIX:
            yield Portion(place, [], [f"the file ends in it: {size:,} bytes were to come"], 0)
            return
        yield _message(place, message, service)
        prefix = file.read(_PREFIX)


def _message(place: str, data: bytes, service: str) -> Portion:
    try:
        return _normalized_portion(place, decode_protobuf(data), service)
    except DataError as error:
        return Portion(place, [], [str(error)], 0)


def _portion(place: str, value: Any, service: str) -> Portion:
    arrivals: list[ReceivedSpan] = []
    errors: list[str] = []
    scores = 0
    for record in _records(value):
        try:
            if isinstance(record, dict):
                scores += _scores(record)
            decoded = _decoded(record, service)
        except (DataError, ValueError) as error:
            errors.append(str(error))
            continue
        arrivals += decoded.arrivals
        errors += decoded.refused
    return _normalized_portion(place, Decoded(arrivals, errors), service)._replace(scores=scores)


def _records(value: Any) -> Iterator[Any]:
    """Yield the records of `value`, which is a list, a page of an API or a single record."""
    inner = value
    if isinstance(value, dict) and not export_formats.is_phoenix_span(value):
        inner = next((value[key] for key in ("data", "spans") if key in value), value)
    if isinstance(inner, list):
        for item in inner:
            if isinstance(item, list):
                yield from _records(item)
            elif isinstance(item, dict) and isinstance(item.get("spans"), list):
                yield from item["spans"]  # a trace of Phoenix
            else:
                yield item
    else:
        yield inner


def _scores(record: Mapping[str, Any]) -> int:
    scores = record.get("scores") if export_formats.is_langfuse_trace(record) else None
    return len(scores) if isinstance(scores, list) else 0


def _decoded(record: Any, service: str) -> Decoded:
    """Decode the spans of a record, which is in OTLP's, Phoenix's or Langfuse's JSON.

    Raises:
        DataError: the record contains no spans in any of these forms.
    """
    if not isinstance(record, dict):
        raise DataError(f"{_NOT_TRACES}; it is of {type(record).__name__}")
    if "resourceSpans" in record or "resource_spans" in record:
        return decode_object(record)
    if export_formats.is_phoenix_span(record):
        return _read_records([record], export_formats.phoenix_span, service)
    if export_formats.is_langfuse_trace(record):
        observations = [*export_formats.langfuse_observations(record)]
        return _read_records(observations, export_formats.langfuse_span, service)
    if export_formats.is_langfuse_observation(record):
        return _read_records([record], export_formats.langfuse_span, service)
    if "spanId" in record or "span_id" in record:  # a single OTLP span
        return decode_object({"resourceSpans": [{"scopeSpans": [{"spans": [record]}]}]})
    raise DataError(f"{_NOT_TRACES}; it has {', '.join(map(str, list(record)[:8])) or 'nothing'}")


def _read_records(
    records: list[Any], read: Callable[[Mapping[str, Any], str], ReceivedSpan], service: str
) -> Decoded:
    decoded = Decoded([], [])
    for record in records:
        try:
            if read is export_formats.langfuse_span and not export_formats.is_langfuse_observation(
                record
            ):
                raise DataError(f"its type is {record.get('type')!r:.40}, which is not known")
            found: dict[str, Image] = {}
            with images_into(found):
                arrival = read(record, service)
            decoded.arrivals.append(arrival._replace(images=tuple(found.values())))
        except (DataError, ValueError) as error:
            decoded.refused.append(f"span {str(record.get('name'))[:80]!r}: {error}")
    return decoded


def _normalized_portion(place: str, decoded: Decoded, service: str) -> Portion:
    arrivals = []
    for arrival in decoded.arrivals:
        arrival = normalized_arrival(arrival)
        span = arrival.span
        if not span.resource.get(SERVICE_NAME):
            span = span.replace(resource={**span.resource, SERVICE_NAME: service})
        arrivals.append(arrival._replace(span=span))
    return Portion(place, arrivals, decoded.refused, 0)
