"""The operations of a served store: one table for client and server.

An operation is a method of `stores.protocol.Store`. Its arguments (a map by name) and its answer
are encoded as MessagePack, and checked against the types of the method when they are decoded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from lightspan.errors import DataError
from lightspan.schema.records import AttemptRef, Claim, Rollout, new_id
from lightspan.schema.spans import Span
from lightspan.stores._encoding import pack_call, pack_rollout, pack_span
from lightspan.stores.protocol import Store, StoredCall
from lightspan_gateway.remote_store.roles import Role

PATH: Final = "/store/v1"
"""Path of the greeting (GET) and of batches (POST); a single operation is at `PATH/name`."""
MAX_BATCH: Final = 64
"""Maximum number of operations in one request."""
POLL_S: Final = 20.0
"""Maximum seconds for which one request waits for a change; longer waits need several requests."""
CONTENT_TYPE: Final = "application/msgpack"

Arguments = dict[str, Any]
T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
_batch_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes]])

_TRAINERS: Final = frozenset({Role.ADMIN, Role.TRAINER})
_RUNNERS: Final = _TRAINERS | {Role.RUNNER}
_READERS: Final = _TRAINERS | {Role.READER}
_ALL: Final = _RUNNERS | _READERS
_OTHER_READS: Final = ("await_work", "claim_of_token")
"""Operations that change nothing, but that a reader's key may not call."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The server's description of itself, which a client reads first.

    New fields need a default, because the versions of client and server may differ.
    """

    protocol: int
    """`semconv.PROTOCOL_VERSION` of the server."""
    lightspan: str
    """Version of the server's lightspan."""
    power_loss: bool = False
    """`StoreCapabilities.power_loss` of the store."""


class Operation:
    """A method of a store that can be called over HTTP.

    Args:
        method: the method of `Store`.
        roles: roles that may call the operation.
        batch: whether the operation may share a request with other operations. They are answered
            together, when the slowest one is done.
    """

    def __init__(
        self,
        method: Callable[..., Coroutine[Any, Any, Any]],
        roles: frozenset[Role],
        *,
        batch: bool = False,
    ) -> None:
        self.name = method.__name__
        self.roles = roles
        self.is_batchable = batch
        hints, signature = get_type_hints(method), inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        self.signature = signature.replace(parameters=parameters)
        """Signature of the method without `self`."""
        fields: list[Any] = [
            (p.name, hints[p.name], *([] if p.default is p.empty else [p.default]))
            for p in parameters
        ]
        # an argument of a newer version is an error: ignored, it would change the operation
        arguments = msgspec.defstruct(
            f"arguments of {self.name}", fields, kw_only=True, forbid_unknown_fields=True
        )
        self._arguments: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(arguments)
        self._answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(hints["return"])

    @property
    def only_reads(self) -> bool:
        """Whether the operation changes nothing."""
        return Role.READER in self.roles or self.name in _OTHER_READS

    @property
    def is_long_poll(self) -> bool:
        """Whether the operation waits for a change, for at most its argument `timeout_s`."""
        return "timeout_s" in self.signature.parameters

    def bind(self, *args: Any, **named: Any) -> Arguments:
        """Return the arguments of a call as a map by parameter name.

        Adds a `request_id` (idempotency key) if there is none, because requests may be sent again.
        """
        arguments = dict(self.signature.bind(*args, **named).arguments)
        if "request_id" in self.signature.parameters and arguments.get("request_id") is None:
            arguments["request_id"] = new_id("request")
        return arguments

    def encode(self, arguments: Arguments) -> bytes:
        """Encode arguments for a request.

        Raises:
            DataError: an argument cannot be encoded. If it is a list of records, the message names
                the record.
        """
        try:
            return encode(arguments)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            for value in arguments.values():
                for record in value if isinstance(value, Iterable) else ():
                    _check_storable(record)
            raise DataError(f"the arguments of {self.name} cannot be stored: {error}") from error

    def read_arguments(self, body: bytes) -> Arguments:
        """Decode the arguments of a call. Raises `DataError` if `body` is malformed."""
        arguments = decode(self._arguments, body, f"the arguments of {self.name}")
        return {name: getattr(arguments, name) for name in arguments.__struct_fields__}

    def read_answer(self, body: bytes) -> Any:
        """Decode the answer to a call. Raises `DataError` if `body` is malformed."""
        return decode(self._answer, body, f"the answer to {self.name}")


def _check_storable(record: object) -> None:
    match record:
        case Rollout():
            pack_rollout(record)
        case Claim():
            pack_rollout(record.rollout)
        case Span():
            pack_span(AttemptRef(record.attempt_id, 0), record)
        case StoredCall():
            pack_call(record)


def read_batch(body: bytes) -> list[tuple[str, bytes]]:
    """Decode a batch: (name of the operation, encoded arguments) of each operation.

    Raises:
        DataError: `body` is malformed, or the batch has more than `MAX_BATCH` operations.
    """
    batch = decode(_batch_decoder, body, "a batch of operations")
    if len(batch) > MAX_BATCH:
        raise DataError(f"{len(batch)} operations in one request: {MAX_BATCH} at most")
    return batch


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, subject: str) -> T:
    """Decode `body`. Raises `DataError` if it is malformed; `subject` names it in the message."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: not UTF-8
        raise DataError(f"{subject} cannot be read: {error}") from error


OPERATIONS: Final[Mapping[str, Operation]] = {
    operation.name: operation
    for operation in (
        Operation(Store.put_resources, _TRAINERS),
        Operation(Store.get_resources, _ALL),
        Operation(Store.allot_version, _TRAINERS),
        Operation(Store.policy_versions, _READERS),
        Operation(Store.enqueue, _TRAINERS),
        Operation(Store.start, _TRAINERS),
        Operation(Store.claim, _RUNNERS, batch=True),
        Operation(Store.await_work, _RUNNERS),
        Operation(Store.heartbeat, _RUNNERS),
        Operation(Store.report, _RUNNERS, batch=True),
        Operation(Store.finish, _RUNNERS, batch=True),
        Operation(Store.expire, _TRAINERS),
        Operation(Store.cancel, _TRAINERS),
        Operation(Store.prune, frozenset({Role.ADMIN})),
        Operation(Store.rollouts, _ALL),
        Operation(Store.summaries, _READERS),
        Operation(Store.search, _READERS),
        Operation(Store.watch, _READERS),
        Operation(Store.count, _READERS),
        Operation(Store.announce, _RUNNERS),
        Operation(Store.withdraw, _RUNNERS),
        Operation(Store.peers, _ALL),
        Operation(Store.attempts, _ALL),
        Operation(Store.attempt, _READERS),
        Operation(Store.claim_of_token, _TRAINERS, batch=True),
        Operation(Store.mark_damaged, _TRAINERS, batch=True),
        Operation(Store.add_spans, _RUNNERS, batch=True),
        Operation(Store.add_calls, _TRAINERS, batch=True),
        Operation(Store.add_images, _RUNNERS, batch=True),
        Operation(Store.images, _READERS),
        Operation(Store.mark_call, _TRAINERS, batch=True),
        Operation(Store.spans, _READERS),
        Operation(Store.token_records, _READERS),
    )
}
"""Operations by name."""
