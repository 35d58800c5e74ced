"""The operations of a store, as they are asked over HTTP: one table for client and server.

An operation is a method of `stores.protocol.Store`, with the types of its arguments and of its
answer. Both travel as MessagePack, a mapping of arguments by name and an answer, and are
checked against these types when they are read. What is not in the table cannot be asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints

import msgspec

from lightspan.errors import DataError
from lightspan.schema.records import AttemptRef, new_id
from lightspan.stores._encoding import pack_call, pack_rollout, pack_span
from lightspan.stores._idempotency import check_id
from lightspan.stores.protocol import Store
from lightspan_gateway.remote_store.roles import Role

PATH: Final = "/store/v1"
"""Where a server greets and takes several operations at once; one is at `PATH/its_name`."""
MAX_BATCH: Final = 64
"""Operations of one request."""
POLL_S: Final = 20.0
"""How long one request may wait for a change (`Store.watch`); whoever waits longer asks again."""
CONTENT_TYPE: Final = "application/msgpack"

Arguments = dict[str, Any]
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes]])

EVERY_ROLE: Final = frozenset({Role.ADMIN, Role.TRAINER, Role.RUNNER})
"""Who may ask a store at all."""
NO_RUNNER: Final = frozenset({Role.ADMIN, Role.TRAINER})


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself. Fields are only ever added, with a default."""

    protocol: int
    """`conventions.PROTOCOL_VERSION` of its lightspan."""
    lightspan: str
    """The version of its lightspan."""
    power_loss: bool = False
    """`StoreCapabilities.power_loss` of its store."""


@dataclass(frozen=True)
class Operation:
    """One thing that a store can be asked."""

    name: str
    roles: frozenset[Role]
    """Who may ask it."""
    joins: bool
    """Whether it may share a request with others, whose answers wait for its own."""
    signature: inspect.Signature
    """Of the store's method, `self` left out."""
    _arguments: msgspec.msgpack.Decoder[Any]
    _answer: msgspec.msgpack.Decoder[Any]
    _check: Callable[[Arguments], object] | None
    """Raises the `DataError` that names what of the arguments cannot be kept."""

    @property
    def waits(self) -> bool:
        """Whether its answer may take as long as the caller likes."""
        return "timeout_s" in self.signature.parameters

    def bind(self, *args: Any, **named: Any) -> Arguments:
        """The arguments of a call by their names.

        One that may be repeated under an id gets an id: every request may be sent again.

        Raises `DataError`.
        """
        arguments = dict(self.signature.bind(*args, **named).arguments)
        if "request_id" in self.signature.parameters:
            if arguments.get("request_id") is None:
                arguments["request_id"] = new_id("request")
            check_id(arguments["request_id"])
        return arguments

    def encode(self, arguments: Arguments) -> bytes:
        """The body of a request. Raises `DataError`."""
        try:
            return _encoder.encode(arguments)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if self._check is not None:
                self._check(arguments)
            raise DataError(f"what {self.name} was given cannot be stored: {error}") from error

    def read_arguments(self, body: bytes) -> Arguments:
        """The arguments by their names. Raises `DataError`."""
        read = decoded(self._arguments, body, f"the arguments of {self.name}")
        return {name: getattr(read, name) for name in read.__struct_fields__}

    def encode_answer(self, answer: Any) -> bytes:
        """The body of a response."""
        return _encoder.encode(answer)

    def read_answer(self, body: bytes) -> Any:
        """Raises `DataError`."""
        return decoded(self._answer, body, f"the answer to {self.name}")


def encode_batch(items: Sequence[tuple[str, bytes]] | Sequence[tuple[int, bytes]]) -> bytes:
    """Encode operations (name, arguments), or their answers (status, body)."""
    return _encoder.encode(items)


def read_batch(body: bytes) -> list[tuple[str, bytes]]:
    """Decode the operations of one request. Raises `DataError`."""
    batch = decoded(_batch_decoder, body, "a batch of operations")
    if len(batch) > MAX_BATCH:
        raise DataError(f"{len(batch)} operations in one request: {MAX_BATCH} at most")
    return batch


def decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes, what: str) -> T:
    """What a body says. Raises `DataError`: msgspec has its own errors for what does not fit, and
    leaves Python's as they are for letters that are no UTF-8 and for what is nested too deep."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{what} cannot be read: {error}") from error


def _operation(
    method: Callable[..., Coroutine[Any, Any, Any]],
    roles: frozenset[Role],
    check: Callable[[Arguments], object] | None = None,
    *,
    joins: bool = False,
) -> Operation:
    hints = get_type_hints(method)
    signature = inspect.signature(method)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    fields: list[Any] = [
        (name, hints[name])
        if parameter.default is parameter.empty
        else (name, hints[name], parameter.default)
        for name, parameter in signature.parameters.items()
    ]
    # an argument that this version does not know is an error: passed over, it would do something
    # else than was asked
    arguments = msgspec.defstruct(
        f"arguments of {method.__name__}", fields, kw_only=True, forbid_unknown_fields=True
    )
    return Operation(
        method.__name__,
        roles,
        joins,
        signature,
        msgspec.msgpack.Decoder(arguments),
        msgspec.msgpack.Decoder(hints["return"]),
        check,
    )


def _check_rollouts(arguments: Arguments) -> None:
    for rollout in arguments["rollouts"]:
        pack_rollout(rollout)


def _check_claims(arguments: Arguments) -> None:
    for claim in arguments["claims"]:
        pack_rollout(claim.rollout)


def _check_spans(arguments: Arguments) -> None:
    for span in arguments["spans"]:
        pack_span(arguments["attempt"], span)


def _check_finished(arguments: Arguments) -> None:
    report = arguments["report"]
    for span in arguments["spans"]:
        pack_span(AttemptRef(report.attempt_id, report.epoch), span)


def _check_calls(arguments: Arguments) -> None:
    for call in arguments["calls"]:
        pack_call(call)


OPERATIONS: Final[Mapping[str, Operation]] = {
    operation.name: operation
    for operation in (
        _operation(Store.put_resources, NO_RUNNER),
        _operation(Store.get_resources, EVERY_ROLE),
        _operation(Store.allot_version, NO_RUNNER),
        _operation(Store.policy_versions, NO_RUNNER),
        _operation(Store.enqueue, NO_RUNNER, _check_rollouts),
        _operation(Store.start, NO_RUNNER, _check_claims),
        _operation(Store.claim, EVERY_ROLE, joins=True),
        _operation(Store.await_work, EVERY_ROLE),
        _operation(Store.heartbeat, EVERY_ROLE),
        _operation(Store.report, EVERY_ROLE, joins=True),
        _operation(Store.finish, EVERY_ROLE, _check_finished, joins=True),
        _operation(Store.expire, NO_RUNNER),
        _operation(Store.cancel, NO_RUNNER),
        _operation(Store.prune, frozenset({Role.ADMIN})),
        _operation(Store.rollouts, EVERY_ROLE),
        _operation(Store.watch, NO_RUNNER),
        _operation(Store.count, NO_RUNNER),
        _operation(Store.announce, EVERY_ROLE),
        _operation(Store.withdraw, EVERY_ROLE),
        _operation(Store.peers, EVERY_ROLE),
        _operation(Store.attempts, EVERY_ROLE),
        _operation(Store.attempt, NO_RUNNER),
        _operation(Store.claim_of_token, NO_RUNNER, joins=True),
        _operation(Store.mark_damaged, NO_RUNNER, joins=True),
        _operation(Store.add_spans, EVERY_ROLE, _check_spans, joins=True),
        _operation(Store.add_calls, NO_RUNNER, _check_calls, joins=True),
        _operation(Store.mark_call, NO_RUNNER, joins=True),
        _operation(Store.spans, NO_RUNNER),
        _operation(Store.token_records, NO_RUNNER),
    )
}
"""By name. A runner claims, reports, records, and looks for attempts of its dead processes."""
