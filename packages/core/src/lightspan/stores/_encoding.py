"""What a store keeps of rollouts, spans and token records: bytes, with few columns to search by.

Packing happens before any lock or transaction is taken, so that these stay short, and rejects what
cannot be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lightspan.errors import DataError
from lightspan.schema.records import AttemptRef, Peer, Rollout
from lightspan.schema.semconv import CALL_ID, CALL_OUTCOME
from lightspan.schema.spans import Span, decode_span, encode_span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores._validation import check_integer
from lightspan.stores.protocol import StoredCall

_replace = msgspec.structs.replace
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_rollout_decoder = msgspec.msgpack.Decoder(Rollout)
_record_decoder = msgspec.msgpack.Decoder(TokenRecord)


class PackedRollout(NamedTuple):
    rollout: Rollout
    body: bytes
    """Its canonical bytes: equal for equal rollouts."""

    @property
    def size(self) -> int:
        return len(self.body)


class PackedSpan(NamedTuple):
    attempt_id: str
    epoch: int
    span_id: str
    call_id: str
    late: bool
    """True if it was late before it came here (copied from another store)."""
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body)


class PackedRecord(NamedTuple):
    call_id: str
    choice: int
    sequence_start: int
    late: bool
    head: bytes
    """Everything but the arrays."""
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


def pack_rollout(rollout: Rollout) -> PackedRollout:
    """Raises `DataError` if the task is no JSON, or a number is none that a store can keep."""
    what = f"rollout {rollout.rollout_id!r:.100}"
    check_integer(f"{what}: step", rollout.step)
    check_integer(f"{what}: max_infrastructure_tries", rollout.max_infrastructure_tries)
    return PackedRollout(rollout, _encode(f"the task of rollout {rollout.rollout_id!r}", rollout))


def unpack_rollout(body: bytes) -> Rollout:
    """A fresh copy: what an app does to its task stays with the app."""
    return _rollout_decoder.decode(body)


def pack_span(attempt: AttemptRef, span: Span) -> PackedSpan:
    """Raises `DataError`."""
    if span.attempt_id != attempt.attempt_id:
        _check_owner(span.attempt_id, f"span {span.span_id!r}", attempt.attempt_id)
    check_integer("epoch", attempt.epoch)
    try:
        body = encode_span(span)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unstorable(f"span {span.span_id!r} ({span.name})", error) from error
    call_id = str(span.attributes.get(CALL_ID, ""))
    return PackedSpan(attempt.attempt_id, attempt.epoch, span.span_id, call_id, span.late, body)


def pack_call(call: StoredCall) -> PackedCall:
    """Raises `DataError`."""
    attempt = AttemptRef(call.span.attempt_id, call.epoch)
    return PackedCall(
        pack_span(attempt, call.span),
        [pack_record(attempt.attempt_id, record) for record in call.records],
    )


def pack_record(attempt_id: str, record: TokenRecord) -> PackedRecord:
    """Raises `DataError`."""
    _check_owner(record.attempt_id, f"token record {record.call_id!r}", attempt_id)
    check_integer("choice", record.choice)
    check_integer("sequence_start", record.sequence_start)
    head = _replace(record, prompt=b"", response=b"", logprob_data=b"")
    return PackedRecord(
        record.call_id,
        record.choice,
        record.sequence_start,
        record.late,
        _encode(f"token record {record.call_id!r}", head),
        record.prompt,
        record.response,
        record.logprob_data,
    )


def pack_peer(peer: Peer) -> bytes:
    """JSON with field names: peers of other versions read it."""
    return msgspec.json.encode(peer)


def unpack_peer(body: bytes, silent_s: float) -> Peer:
    """The peer as it spoke, and how long ago."""
    return _replace(msgspec.json.decode(body, type=Peer), silent_s=max(0.0, silent_s))


def supersedes(new: PackedSpan, new_late: bool, old: bytes, old_late: bool) -> bool:
    """Whether a call that is written again replaces what was written first.

    It does if the first try was cancelled or failed and this one ended later: a retry went on. And
    what is late never keeps out what is in time: whoever may send spans could have taken its id.
    """
    if old_late and not new_late:
        return True
    if new.body == old or (new_late and not old_late):
        return False
    before, after = decode_span(old), decode_span(new.body)
    unfinished = before.attributes.get(CALL_OUTCOME) in (CallOutcome.CANCELLED, CallOutcome.ERROR)
    return unfinished and (after.sequence_end or 0) > (before.sequence_end or 0)


def unpack_span(body: bytes, late: bool, outcome: str | None) -> Span:
    """The span as written, with what the store learnt since."""
    span = decode_span(body)
    if outcome is not None:
        span = span.replace(attributes={**span.attributes, CALL_OUTCOME: str(outcome)})
    return span.replace(late=True) if late and not span.late else span


def unpack_record(
    head: bytes, arrays: Sequence[bytes], late: bool, outcome: str | None
) -> TokenRecord:
    """The record as written, with what the store learnt since."""
    prompt, response, logprobs = arrays
    changes: dict[str, Any] = {"prompt": prompt, "response": response, "logprob_data": logprobs}
    if late:
        changes["late"] = True
    if outcome is not None:
        changes["outcome"] = CallOutcome(outcome)
    return _replace(_record_decoder.decode(head), **changes)


def _check_owner(owner: str, what: str, attempt_id: str) -> None:
    """Raise `DataError` where something is written to one attempt and names another."""
    if owner not in ("", attempt_id):
        raise DataError(f"{what} belongs to attempt {owner!r} but was written to {attempt_id!r}")


def _encode(what: str, value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unstorable(what, error) from error


def _unstorable(what: str, error: Exception) -> DataError:
    return DataError(f"{what} cannot be stored: {error}")
