"""What the learner and verl's processes tell each other: plain data, as MessagePack. No pickle."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from lightspan import errors
from lightspan.errors import LightspanError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA, Optimizer, PolicyLoss, SFTLoss, Which

Kind = Literal["served", "trained"]
"""Weights as an engine takes them, adapters added in, or what is trained alone."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a learner, and keep it under a number."""

    learner: int
    models: dict[str, str]
    threads: int
    optimizer: Optimizer
    lora: dict[str, LoRA | None]
    dtype: str
    token_budget: int
    gradient_checkpointing: bool
    param_offload: bool
    optimizer_offload: bool
    seed: int


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take part in a step of one policy with these rows."""

    learner: int
    policy: str
    rows: list[Row]
    loss_of_policy: PolicyLoss | None
    """None: `SFTLoss`."""
    old_logprobs: list[list[float]] | None
    fresh_version: int | None
    learning_rate: float

    @property
    def loss(self) -> PolicyLoss | SFTLoss:
        return self.loss_of_policy or SFTLoss()


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say the log-probabilities of these rows' tokens."""

    learner: int
    policy: str
    rows: list[Row]
    which: Which


class Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a policy's weights, whole, into a file; the first rank does."""

    learner: int
    policy: str
    kind: Kind
    path: str


class Hash(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say the hash of a policy's weights, or of those that adapters leave alone."""

    learner: int
    policy: str
    frozen: bool


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write this rank's part of a checkpoint."""

    learner: int
    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on from a checkpoint, of however many ranks."""

    learner: int
    folder: str
    steps: dict[str, int]


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a learner."""

    learner: int


Order = Setup | Update | Score | Weights | Hash | Save | Load | Drop


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ours in another process."""

    kind: str
    text: str

    @staticmethod
    def of(error: LightspanError) -> Failure:
        """Return the message of an error."""
        return Failure(kind=type(error).__name__, text=str(error))

    def error(self, where: str = "") -> LightspanError:
        """Return the same error here, with the rank that raised it."""
        kind: type[LightspanError] = getattr(errors, self.kind, LightspanError)
        return kind(f"{where}: {self.text}" if where else self.text)


class Answer(msgspec.Struct, kw_only=True):
    """Of one rank to one order."""

    failure: Failure | None = None
    cpu_s: float = 0.0
    """What the order took."""
    scores: list[list[float]] = []
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    grad_norm: float = 0.0
    aliases: dict[str, str] = {}
    """Name of a tied weight → the name that it is written under."""
    hash: str = ""
    versions: dict[str, str] = {}


# --- with the steward of ranks in Ray -----------------------------------------------------------
class Assembly(msgspec.Struct, frozen=True, kw_only=True):
    """Who is wanted, and where."""

    address: str
    """Of the cluster; empty for one that is started here."""
    ranks: int
    on_gpu: bool
    start_s: float
    folder: str
    """The trainer's, for this team alone."""
    rendezvous: str
    environment: dict[str, str]
    """Of the ranks."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Who has come."""

    failure: Failure | None = None
    """Why nobody has."""
    pids: list[int] = []
    """Of each rank."""
    head: str = ""
    """The address of the cluster's head."""
    ray: str = ""
    """Its version."""


class Broadcast(msgspec.Struct, frozen=True, kw_only=True):
    """An order for each rank, as bytes."""

    orders: list[bytes]
    limit_s: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What came of them."""

    answers: list[bytes] = []
    lost: int | None = None
    """A rank that is; and then `how`."""
    how: str = ""
    late: list[int] = []
    """Ranks that took too long."""


orders: Final = msgspec.msgpack.Decoder(Order)
answers: Final = msgspec.msgpack.Decoder(Answer)
assemblies: Final = msgspec.msgpack.Decoder(Assembly)
rolls: Final = msgspec.msgpack.Decoder(Ready)
rounds: Final = msgspec.msgpack.Decoder(Broadcast)
returns: Final = msgspec.msgpack.Decoder(Results)


def packed(message: Any) -> bytes:
    """A message on its way."""
    return msgspec.msgpack.encode(message)
