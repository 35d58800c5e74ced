"""What rank 0 and the others tell each other: plain data, as MessagePack. No pickle."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lightspan import errors
from lightspan.errors import LightspanError
from lightspan.learners.protocol import Critic, LoRA, Optimizer, PolicyLoss, SFTLoss, Which
from lightspan.lightning.rows import Row


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a learner, and keep it under a number."""

    learner: int
    models: dict[str, str]
    device: str
    threads: int
    """Of torch on the CPU."""
    optimizer: Optimizer
    lora: dict[str, LoRA | None]
    dtype: str | None
    token_budget: int | None
    seed: int
    share_prefixes: bool
    critic: Critic | None


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take part in an update with these rows; there may be none."""

    learner: int
    rows: list[Row]
    loss_of_policy: PolicyLoss | None
    """None: `SFTLoss`."""
    old_logprobs: list[list[float]] | None
    fresh: dict[str, int | None]
    """See `TorchLearner.take_steps`."""

    @property
    def loss(self) -> PolicyLoss | SFTLoss:
        return self.loss_of_policy or SFTLoss()


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say the log-probabilities of these rows, the states at which their calls begin, or both."""

    learner: int
    rows: list[Row]
    which: Which | None
    """None: no log-probabilities."""
    states: bool


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on from a checkpoint on this machine."""

    learner: int
    folder: str


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a learner."""

    learner: int


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is nothing more to do; it is not answered."""


Order = Setup | Update | Score | Load | Drop | End


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ours on another rank."""

    kind: str
    text: str

    @staticmethod
    def of(error: LightspanError) -> Failure:
        """That of an error."""
        return Failure(kind=type(error).__name__, text=str(error))

    def error(self, where: str = "") -> LightspanError:
        """The same error here.

        Args:
            where: the rank that it was raised on, in words; empty if it is not one's.
        """
        kind: type[LightspanError] = getattr(errors, self.kind, LightspanError)
        return kind(f"{where}: {self.text}" if where else self.text)


class States(msgspec.Struct, frozen=True, kw_only=True):
    """[C, hidden] states of calls, as float32, and what was to be expected there."""

    data: bytes = b""
    hidden: int = 0
    targets: list[float] = []
    """[C], or empty."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank to one order."""

    failure: Failure | None = None
    cpu_s: float = 0.0
    """What its learner has used so far."""
    grad_norms: dict[str, float] = {}
    """By policy. They are equal on all ranks, or the ranks have come apart."""
    scores: list[list[float]] = []
    states: dict[str, States] = {}
    """By policy."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks tell each other in the middle of an update, before gradients are added."""

    failure: Failure | None = None
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    having: list[bool] = []
    """Which parameters have a gradient."""


orders: Final = msgspec.msgpack.Decoder(Order)
answers: Final = msgspec.msgpack.Decoder(Answer)
sayings: Final = msgspec.msgpack.Decoder(Said)


def packed(message: Any) -> bytes:
    """A message on its way."""
    return msgspec.msgpack.encode(message)
