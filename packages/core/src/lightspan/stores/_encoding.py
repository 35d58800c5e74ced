"""Serialise rollouts, spans and token records to bytes, with the columns to search them by.

The `pack` functions raise an error for a value that cannot be stored. Callers pack before they take
a lock or begin a transaction, to keep locks and transactions short.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lightspan.errors import DataError
from lightspan.schema.images import MEDIA_TYPE, Image
from lightspan.schema.records import AttemptRef, Peer, Rollout
from lightspan.schema.reward import reward_of
from lightspan.schema.semconv import CALL_ID, CALL_OUTCOME, REWARD_CALL_ID, is_feedback
from lightspan.schema.spans import Span, decode_span, encode_span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores.protocol import StoredCall

_replace = msgspec.structs.replace
_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="deterministic")
_rollout_decoder = msgspec.msgpack.Decoder(Rollout)
_record_decoder = msgspec.msgpack.Decoder(TokenRecord)


class PackedRollout(NamedTuple):
    rollout: Rollout
    body: bytes
    """MessagePack of the rollout. The keys of the task have the order of the user's data, which an
    app may write into a prompt."""

    @property
    def size(self) -> int:
        return len(self.body)


class PackedSpan(NamedTuple):
    attempt_id: str
    epoch: int
    span_id: str
    call_id: str
    late: bool
    """Whether the span was already marked late, in the store from which it is copied."""
    body: bytes
    feedback: tuple[str, str] | None = None
    """Key and value in `call_outcomes` of the feedback that the span records; None for any other
    span. The key of feedback on the attempt is before that of feedback on a call, which it
    overrides."""

    @property
    def size(self) -> int:
        return len(self.body)


class PackedRecord(NamedTuple):
    call_id: str
    choice: int
    sequence_start: int
    late: bool
    head: bytes
    """MessagePack of all fields except `prompt`, `response` and `logprobs`."""
    prompt: bytes
    response: bytes
    logprobs: bytes

    @property
    def size(self) -> int:
        return len(self.head) + len(self.prompt) + len(self.response) + len(self.logprobs)


class PackedCall(NamedTuple):
    span: PackedSpan
    records: list[PackedRecord]

    @property
    def size(self) -> int:
        return self.span.size + sum(record.size for record in self.records)


class PackedImage(NamedTuple):
    attempt_id: str
    image: Image

    @property
    def size(self) -> int:
        return len(self.image.data)


def pack_rollout(rollout: Rollout) -> PackedRollout:
    """Serialise a rollout.

    Raises:
        DataError: the task is not JSON or has a key that is no text, or a number in the rollout is
            invalid.
    """
    name = f"rollout {rollout.rollout_id!r:.100}"
    return PackedRollout(rollout, _encode(f"the task of {name}", rollout))


def same_rollout(first: bytes, second: bytes) -> bool:
    """Return whether two bodies are equal, except for the order of keys in the task."""
    return len({_canonical.encode(unpack_rollout(body)) for body in (first, second)}) == 1


def unpack_rollout(body: bytes) -> Rollout:
    """Decode a rollout. Each call returns a new object, so an app may change the object's task."""
    return _rollout_decoder.decode(body)


def pack_span(attempt: AttemptRef, span: Span) -> PackedSpan:
    """Serialise a span; raise `DataError` if it names another attempt or cannot be stored."""
    if span.attempt_id != attempt.attempt_id:
        _check_owner(span.attempt_id, f"span {span.span_id!r}", attempt.attempt_id)
    try:
        body = encode_span(span)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"span {span.span_id!r} ({span.name}) cannot be stored: {error}") from error
    call_id = str(span.attributes.get(CALL_ID, ""))
    packed = PackedSpan(attempt.attempt_id, attempt.epoch, span.span_id, call_id, span.late, body)
    if not is_feedback(span):
        return packed
    key = "(feedback, of a call)" if REWARD_CALL_ID in span.attributes else "(feedback)"
    reward = msgspec.json.encode(reward_of(span.attributes)).decode()
    return packed._replace(feedback=(key, reward))


def pack_call(call: StoredCall) -> PackedCall:
    """Serialise a call with its span and token records.

    Raises:
        DataError: a record names another attempt than the span, or a value cannot be stored.
    """
    attempt = AttemptRef(call.span.attempt_id, call.epoch)
    return PackedCall(
        pack_span(attempt, call.span),
        [_pack_record(attempt.attempt_id, record) for record in call.records],
    )


def _pack_record(attempt_id: str, record: TokenRecord) -> PackedRecord:
    name = f"token record {record.call_id!r}"
    _check_owner(record.attempt_id, name, attempt_id)
    head = _encode(name, _replace(record, prompt=b"", response=b"", logprob_data=b""))
    key = (record.call_id, record.choice, record.sequence_start)
    arrays = (record.prompt, record.response, record.logprob_data)
    return PackedRecord(*key, record.late, head, *arrays)


def pack_image(attempt: AttemptRef, image: Image) -> PackedImage:
    """Check an image; raise `DataError` if its digest or its type is wrong."""
    digest, kind = Image.of(image.data, "").digest, image.media_type
    if image.digest != digest or MEDIA_TYPE.fullmatch(kind) is None:
        what = f"image {image.digest!r:.80} of type {kind!r:.80} cannot be stored"
        raise DataError(f"{what}: its SHA-256 digest is {digest}, and types are such as image/png")
    return PackedImage(attempt.attempt_id, image)


def pack_peer(peer: Peer) -> bytes:
    """Serialise a peer (a trainer or runner that uses the store) as JSON with field names.

    Processes with another version of lightspan can read it.
    """
    return msgspec.json.encode(peer)


def unpack_peer(body: bytes, silent_s: float) -> Peer:
    """Return a stored peer (a trainer or runner), last announced `silent_s` seconds ago."""
    return _replace(msgspec.json.decode(body, type=Peer), silent_s=max(0.0, silent_s))


def supersedes(new: PackedSpan, new_late: bool, old: bytes, old_late: bool) -> bool:
    """Return whether the span `new` of a call replaces the stored span `old` of the same call.

    It does in two cases:

    - `old` is late and `new` is not. Another client may have written `old` with the call's id.
    - The call of `old` was cancelled or failed, and `new` is a retry that ended later.

    A late span never replaces a span that is not late.
    """
    if old_late and not new_late:
        return True
    if new.body == old or (new_late and not old_late):
        return False
    before, after = decode_span(old), decode_span(new.body)
    unfinished = before.attributes.get(CALL_OUTCOME) in (CallOutcome.CANCELLED, CallOutcome.ERROR)
    return unfinished and (after.sequence_end or 0) > (before.sequence_end or 0)


def unpack_span(body: bytes, late: bool, outcome: str | None) -> Span:
    """Return a stored span.

    Args:
        body: the span, as `encode_span` returned it.
        late: whether the span was late when it was written.
        outcome: outcome of the span's call, if it has changed since the span was written; else
            None.
    """
    span = decode_span(body)
    if outcome is not None:
        span = span.replace(attributes={**span.attributes, CALL_OUTCOME: str(outcome)})
    return span.replace(late=True) if late and not span.late else span


def search_texts(text: str) -> tuple[bytes, bytes]:
    """Return a text as it is in the body of a span, and as it is in a span's attribute of JSON.

    Raises:
        DataError: the text is empty, or has half of a surrogate pair, which no span has.
    """
    if not text:
        raise DataError("a search needs a text of at least one character")
    try:
        return text.encode(), json.dumps(text, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the text {text!r:.100} cannot be searched for: {error}") from error


def unpack_record(
    head: bytes, arrays: Sequence[bytes], late: bool, outcome: str | None
) -> TokenRecord:
    """Return a stored token record.

    Args:
        head: MessagePack of the fields that are not arrays.
        arrays: the bytes of `prompt`, `response` and `logprob_data`.
        late: whether the record was late when it was written.
        outcome: outcome of the record's call, if it has changed since the record was written; else
            None.
    """
    prompt, response, logprobs = arrays
    changes: dict[str, Any] = {"prompt": prompt, "response": response, "logprob_data": logprobs}
    if late:
        changes["late"] = True
    if outcome is not None:
        changes["outcome"] = CallOutcome(outcome)
    return _replace(_record_decoder.decode(head), **changes)


def _check_owner(owner: str, name: str, attempt_id: str) -> None:
    """Raise `DataError` if an object belongs to another attempt than `attempt_id`.

    Args:
        owner: id of the attempt to which the object belongs; empty if it names none.
        name: description of the object, for the error.
        attempt_id: id of the attempt to which the object is written.
    """
    if owner not in ("", attempt_id):
        raise DataError(f"{name} belongs to attempt {owner!r} but was written to {attempt_id!r}")


def _encode(name: str, value: object) -> bytes:
    try:
        _canonical.encode(value)  # refuses keys that are no text
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{name} cannot be stored: {error}") from error
