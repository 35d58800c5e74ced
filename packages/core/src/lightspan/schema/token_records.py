"""Token records: the exact tokens of a model call, how they were sampled, and the outcome."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from lightspan.errors import DataError
from lightspan.schema.images import PromptImage, prompt_key


class CallOutcome(StrEnum):
    """The outcome of a model call."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client disconnected before the answer."""
    UNDELIVERED = "undelivered"
    """The answer did not reach the client, and no retry fetched it."""
    RESAMPLED = "resampled"
    """The first try was cancelled and its tokens are lost, so the call was sampled again. This
    biases the sample, so the call is never trained."""
    ERROR = "error"
    REPLAYED = "replayed"
    """Answered as in the attempt that the rollout repeats (`Rollout.fork`). The call has no token
    record and no texts: the other attempt has them."""


class FinishReason(StrEnum):
    """The reason for which a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a model call.

    The log-probabilities recorded of a call are computed after these parameters are applied.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether each token is sampled from the whole distribution, with a temperature above 0.

        Only then can policy gradients use the log-probabilities.
        """
        return self.top_p >= 1.0 and self.top_k == 0 and self.temperature > 0


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The exact tokens of one choice of a model call.

    A record is identified by `attempt_id`, `call_id` and `choice`.
    """

    attempt_id: str
    call_id: str
    choice: int
    policy: str
    """The policy that sampled the tokens; empty for a frozen endpoint."""
    prompt: bytes
    """Prompt token ids, int32 little-endian."""
    response: bytes
    """Response token ids, int32 little-endian."""
    logprob_data: bytes
    """Log-probability of each response token, float32 little-endian."""
    versions: list[tuple[int, int]]
    """Policy versions of the response tokens, run-length encoded: (version, number of tokens)."""
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = FinishReason.STOP
    span_id: str = ""
    agent_path: str = ""
    sequence_start: int = 0
    sequence_end: int = 0
    outcome: CallOutcome = CallOutcome.OK
    grammar: str = ""
    """The grammar of constrained sampling (`lightspan_torch.engine.grammars`); empty for none."""
    grammar_library: str = ""
    """Name and version of the library that compiled the grammar; empty without a grammar."""
    late: bool = False
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, whose placeholders are among its ids; in order."""

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
        """Make a record from token ids and log-probabilities, which it stores as bytes.

        Args:
            prompt_ids: token ids of the prompt.
            response_ids: token ids of the response.
            logprobs: log-probability of each response token.
            versions: pairs (policy version, number of response tokens that it sampled), in the
                order of the tokens.
            fields: the other fields of the record.

        Raises:
            DataError: the numbers of response ids, log-probabilities and tokens in `versions`
                differ; a version has no token; or a log-probability is not finite or is above 1e-3.
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
        """Whether a grammar constrained the sampling: a response format, strict or forced tools."""
        return bool(self.grammar)

    @property
    def prompt_key(self) -> bytes:
        """What identifies the prompt: its ids, and its images in place of their placeholders."""
        return prompt_key(self.prompt, self.images)

    @property
    def prompt_ids(self) -> list[int]:
        return array("i", self.prompt).tolist()

    @property
    def response_ids(self) -> list[int]:
        return array("i", self.response).tolist()

    @property
    def logprobs(self) -> list[float]:
        return array("f", self.logprob_data).tolist()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little-endian."""
    return array("i", ids).tobytes()


def pack_floats(values: Sequence[float]) -> bytes:
    """Return numbers as float32, little-endian."""
    return array("f", values).tobytes()
