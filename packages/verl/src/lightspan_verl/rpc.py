"""Messages between the learner in the trainer and verl's processes, as MessagePack. No pickle.

The processes may have several learners. So each message has the number of its learner.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from lightspan import errors
from lightspan.errors import LightspanError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA, Optimizer, PolicyLoss, SFTLoss, Which

Kind = Literal["served", "trained"]
"""Which weights: `served` for whole weights with merged adapters, `trained` for those that are
trained: the adapters or, without LoRA, the whole weights."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to create a learner, to which later orders refer by the number `learner`."""

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
    """Order to take an optimiser step for one policy."""

    learner: int
    policy: str
    rows: list[Row]
    loss_of_policy: PolicyLoss | None
    """Settings of the policy loss; None for `SFTLoss`."""
    old_logprobs: list[list[float]] | None
    fresh_version: int | None
    """Version at which the current weights were published; None if they were not published."""
    learning_rate: float

    @property
    def loss(self) -> PolicyLoss | SFTLoss:
        return self.loss_of_policy or SFTLoss()


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to return the log-probability of each token of each row."""

    learner: int
    policy: str
    rows: list[Row]
    which: Which


class Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to gather a policy's weights. The first rank writes them into the file `path`."""

    learner: int
    policy: str
    kind: Kind
    path: str


class Hash(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to return the hash of a policy's weights."""

    learner: int
    policy: str
    frozen: bool
    """Whether to hash only the frozen weights under the adapters."""


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to write this rank's part of a checkpoint."""

    learner: int
    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to load a checkpoint, which more or fewer ranks may have written."""

    learner: int
    folder: str
    steps: dict[str, int]
    """Policy → number of its optimiser steps, in the order that the policies have in the
    checkpoint."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to delete a learner."""

    learner: int


Order = Setup | Update | Score | Weights | Hash | Save | Load | Drop


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A lightspan error that an order raised in a rank, in a form that can be sent."""

    kind: str
    """Name of the error's class."""
    text: str

    @staticmethod
    def of(error: LightspanError) -> Failure:
        """Convert an error to a `Failure`."""
        return Failure(kind=type(error).__name__, text=str(error))

    def error(self, where: str) -> LightspanError:
        """Return the error as an object of its original class.

        Args:
            where: name of the rank that failed, with which the message begins.
        """
        kind: type[LightspanError] = getattr(errors, self.kind, LightspanError)
        return kind(f"{where}: {self.text}")


class Answer(msgspec.Struct, kw_only=True):
    """The answer of one rank to one order.

    Fields that the order does not need keep their defaults.
    """

    failure: Failure | None = None
    cpu_s: float = 0.0
    """CPU seconds that the order took."""
    scores: list[list[float]] = []
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    grad_norm: float = 0.0
    aliases: dict[str, str] = {}
    """Name of a tied weight that is not in the file → name of the equal weight that is."""
    hash: str = ""
    versions: dict[str, str] = {}


order_decoder: Final = msgspec.msgpack.Decoder(Order)
answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def packed(message: Any) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)
