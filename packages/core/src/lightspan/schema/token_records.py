"""The tokens of a model call: how they were sampled, which they are, how it ended."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from lightspan.errors import DataError


class CallOutcome(StrEnum):
    """What became of one model call."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client left; nobody got the answer."""
    UNDELIVERED = "undelivered"
    """Answered, but the answer did not arrive and no retry fetched it."""
    RESAMPLED = "resampled"
    """Sampled anew after a cancelled try whose tokens are gone: biased, so never trained."""
    ERROR = "error"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Log-probabilities are of this distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no truncation."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True if nothing is truncated, so that the log-probabilities serve policy gradients."""
        return self.top_p >= 1.0 and self.top_k == 0 and self.temperature > 0


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The exact tokens of one choice of one call: (attempt, call id, choice index).

    Arrays are little-endian binary: ids int32, log-probabilities float32.
    """

    attempt_id: str
    call_id: str
    choice: int
    policy: str
    """The policy that sampled; empty when a frozen endpoint did."""
    prompt: bytes
    response: bytes
    logprob_data: bytes
    """float32 per response token, of the distribution sampled from."""
    versions: list[tuple[int, int]]
    """Run-length encoded policy versions of the response tokens: (version, number of tokens)."""
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = FinishReason.STOP
    span_id: str = ""
    agent_path: str = ""
    sequence_start: int = 0
    sequence_end: int = 0
    outcome: CallOutcome = CallOutcome.OK
    grammar: str = ""
    """The grammar that it was sampled under (`lightspan_torch.engine.grammars`); empty for none."""
    grammar_library: str = ""
    """Name and version of what compiled the grammar."""
    late: bool = False

    @classmethod
    def create(
        cls,
        *,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Iterable[tuple[int, int]],
        **fields: Any,
    ) -> TokenRecord:
        """Build from plain sequences.

        Raises:
            DataError: lengths differ, a version run is not positive, or a log-probability is not
                a finite number <= 0 (within 1e-3).
        """
        runs = [(int(version), int(count)) for version, count in versions]
        if len(logprobs) != len(response_ids):
            raise DataError(f"{len(response_ids)} response ids but {len(logprobs)} log-probs")
        if sum(count for _, count in runs) != len(response_ids) or any(n <= 0 for _, n in runs):
            raise DataError(f"versions {runs} do not cover {len(response_ids)} response tokens")
        if any(not math.isfinite(value) or value > 1e-3 for value in logprobs):
            raise DataError("log-probabilities must be finite and at most 0")
        return cls(
            prompt=pack_ids(prompt_ids),
            response=pack_ids(response_ids),
            logprob_data=pack_floats(logprobs),
            versions=runs,
            **fields,
        )

    @property
    def constrained(self) -> bool:
        """Sampled under a grammar: a response format, or strict or forced tools."""
        return bool(self.grammar)

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)

    @property
    def response_ids(self) -> list[int]:
        return unpack_ids(self.response)

    @property
    def logprobs(self) -> list[float]:
        return unpack_floats(self.logprob_data)


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32 little-endian."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return array("i", data).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """float32 little-endian."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """The inverse of `pack_floats`."""
    return array("f", data).tolist()
