"""Messages between the learner and verl's processes, as MessagePack. No pickle."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from lightspan import errors
from lightspan.errors import LightspanError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA, Optimizer, PolicyLoss, SFTLoss, Which

Kind = Literal["served", "trained"]
"""`served`: whole weights with merged adapters; `trained`: the trained weights or adapters."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to create the learner with the number `learner`."""

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
    """Order to take a step of one policy with rows."""

    learner: int
    policy: str
    rows: list[Row]
    loss_of_policy: PolicyLoss | None
    """None for `SFTLoss`."""
    old_logprobs: list[list[float]] | None
    fresh_version: int | None
    """Published version of the current weights; None if they are not published."""
    learning_rate: float

    @property
    def loss(self) -> PolicyLoss | SFTLoss:
        return self.loss_of_policy or SFTLoss()


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to return the log-probabilities of the rows' tokens."""

    learner: int
    policy: str
    rows: list[Row]
    which: Which


class Weights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to gather a policy's weights; the first rank writes them into a file."""

    learner: int
    policy: str
    kind: Kind
    path: str


class Hash(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to return the hash of a policy's weights."""

    learner: int
    policy: str
    frozen: bool
    """Whether only the frozen weights under the adapters are hashed."""


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to write the rank's part of a checkpoint."""

    learner: int
    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to restore a checkpoint, written by any number of ranks."""

    learner: int
    folder: str
    steps: dict[str, int]
    """Policy → number of its optimiser steps, in the checkpoint's order of policies."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to delete a learner."""

    learner: int


Order = Setup | Update | Score | Weights | Hash | Save | Load | Drop


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A lightspan error of another process."""

    kind: str
    """Name of the error's class."""
    text: str

    @staticmethod
    def of(error: LightspanError) -> Failure:
        """Encode an error."""
        return Failure(kind=type(error).__name__, text=str(error))

    def error(self, where: str) -> LightspanError:
        """Decode the error; its message begins with `where`, the name of the failed rank."""
        kind: type[LightspanError] = getattr(errors, self.kind, LightspanError)
        return kind(f"{where}: {self.text}")


class Answer(msgspec.Struct, kw_only=True):
    """The answer of one rank to one order."""

    failure: Failure | None = None
    cpu_s: float = 0.0
    """CPU-seconds of the order."""
    scores: list[list[float]] = []
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    grad_norm: float = 0.0
    aliases: dict[str, str] = {}
    """Name of a tied weight → the name of the equal weight in the file."""
    hash: str = ""
    versions: dict[str, str] = {}


order_decoder: Final = msgspec.msgpack.Decoder(Order)
answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def packed(message: Any) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)
