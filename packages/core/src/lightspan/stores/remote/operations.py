"""The operations of a store, as they are asked over HTTP: one table, for client and server.

An operation is a method of `stores.protocol.Store`. Its name, the types of its arguments and that
of its answer are the method's own: nothing is spelled a second time. Both travel as MessagePack, a
mapping of arguments by name and an answer, and are checked against these types when they are read.
What is not in the table cannot be asked.
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
from lightspan.stores._requests import check_id
from lightspan.stores.protocol import Store
from lightspan.stores.remote.roles import Role

PATH: Final = "/store/v1"
"""Where a server greets and takes several operations at once; one is at `PATH/its_name`."""
MOST_TOGETHER: Final = 64
"""Operations that travel together."""
POLL_S: Final = 20.0
"""How long one request may wait for a change (`Store.watch`); whoever waits longer asks again."""
LONG: Final = 256
"""Items of an answer beyond which it is encoded beside the server's event loop."""
CONTENT_TYPE: Final = "application/msgpack"

PROOFS: Final = "proofs"
"""Beside the method's own arguments: that the caller has claimed the attempts that it writes to
(`proofs`), in their order."""

Arguments = dict[str, Any]
T = TypeVar("T")

_ARRAY_32: Final = b"\xdd"
"""Of MessagePack: an array whose length follows in four bytes."""
_MAP_32: Final = b"\xdf"
"""Likewise a map."""
_encoder = msgspec.msgpack.Encoder()
_asked_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes]])
_answered_decoder = msgspec.msgpack.Decoder(list[tuple[int, bytes]])

EVERY_ROLE: Final = frozenset({Role.ADMIN, Role.TRAINER, Role.RUNNER})
"""Who may ask a store at all."""
NO_RUNNER: Final = frozenset({Role.ADMIN, Role.TRAINER})


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself. Fields are only ever added, with a default."""

    protocol: int
    """`conventions.PROTOCOL_VERSION` of its lightspan."""
    lightspan: str
    """The version of its lightspan."""
    role: Role
    """Of the key that was sent."""
    power_loss: bool = False
    """`StoreCapabilities.power_loss` of its store."""


@dataclass(frozen=True)
class Operation:
    """One thing that a store can be asked."""

    name: str
    roles: frozenset[Role]
    """Who may ask it."""
    joins: bool
    """Whether it may travel with others, whose answers wait for its own: it is done in little time.
    """
    signature: inspect.Signature
    """Of the store's method, `self` left out."""
    written: Callable[[Arguments], list[str]] | None
    """The attempts that it writes to, for which `PROOFS` travel with the arguments."""
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
        if not is_long(answer):
            return _encoder.encode(answer)
        return _encode_lists(answer) if isinstance(answer, dict) else _encode_items(answer)

    def read_answer(self, body: bytes) -> Any:
        """Raises `DataError`."""
        return decoded(self._answer, body, f"the answer to {self.name}")


def is_long(answer: Any) -> bool:
    """Whether it takes long to encode."""
    if isinstance(answer, dict):
        return sum(len(part) for part in answer.values() if isinstance(part, list)) > LONG
    return isinstance(answer, list) and len(answer) > LONG


def _encode_items(items: Sequence[Any]) -> bytes:
    """A list, item by item: msgspec keeps all of Python to itself while it encodes one thing."""
    body = bytearray(_ARRAY_32 + len(items).to_bytes(4, "big"))
    for item in items:
        _encoder.encode_into(item, body, -1)
    return bytes(body)


def _encode_lists(lists: Mapping[str, Sequence[Any]]) -> bytes:
    """Lists by name, such as the spans of each attempt, likewise item by item."""
    body = bytearray(_MAP_32 + len(lists).to_bytes(4, "big"))
    for name, items in lists.items():
        _encoder.encode_into(name, body, -1)
        body += _encode_items(items)
    return bytes(body)


def encode_together(items: Sequence[tuple[str, bytes]] | Sequence[tuple[int, bytes]]) -> bytes:
    """Operations by name with their bodies; or of each, in order, its status and its answer."""
    return _encoder.encode(items)


def read_asked(body: bytes) -> list[tuple[str, bytes]]:
    """Operations that travelled together. Raises `DataError`."""
    asked = decoded(_asked_decoder, body, "what was asked together")
    if len(asked) > MOST_TOGETHER:
        raise DataError(f"{len(asked)} operations are asked together: {MOST_TOGETHER} at most")
    return asked


def read_answered(body: bytes) -> list[tuple[int, bytes]]:
    """Of each that travelled together its status and its answer. Raises `DataError`."""
    return decoded(_answered_decoder, body, "what was answered together")


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
    written: Callable[[Arguments], list[str]] | None = None,
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
    if written is not None:
        fields.append((PROOFS, list[str], []))
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
        written,
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


def _extended(arguments: Arguments) -> list[str]:
    return [ref.attempt_id for ref in arguments["attempts"]]


def _finished(arguments: Arguments) -> list[str]:
    return [arguments["report"].attempt_id]


def _reported(arguments: Arguments) -> list[str]:
    return [report.attempt_id for report in arguments["reports"]]


def _described(arguments: Arguments) -> list[str]:
    return [arguments["attempt"].attempt_id]


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
        _operation(Store.heartbeat, EVERY_ROLE, joins=True, written=_extended),
        _operation(Store.report, EVERY_ROLE, joins=True, written=_reported),
        _operation(Store.finish, EVERY_ROLE, _check_finished, joins=True, written=_finished),
        _operation(Store.lease_time, NO_RUNNER, joins=True),
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
        _operation(Store.add_spans, EVERY_ROLE, _check_spans, joins=True, written=_described),
        _operation(Store.add_calls, NO_RUNNER, _check_calls, joins=True),
        _operation(Store.mark_call, NO_RUNNER, joins=True),
        _operation(Store.spans, NO_RUNNER),
        _operation(Store.token_records, NO_RUNNER),
    )
}
"""By name. What a runner does (`runners`) is open to it: it claims, reports and records, and looks
for the attempts of its processes that died; within these the server has limits for it."""
