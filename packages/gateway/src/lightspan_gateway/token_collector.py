"""Collects the exact tokens of a choice while they are sampled, and makes its token record."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightspan.protocols.engine import TokenChunk
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling, TokenRecord
from lightspan_gateway.calls import CallInfo


@dataclass(slots=True)
class TokenCollector:
    """The tokens of one choice, streamed or not."""

    index: int
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run lengths: (policy version, number of tokens)."""
    finish: FinishReason | None = None

    def add(self, chunk: TokenChunk) -> None:
        """Append the tokens of a chunk."""
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        if not chunk.ids:
            return
        latest, count = self.versions[-1] if self.versions else (None, 0)
        if latest == chunk.version:
            self.versions[-1] = (chunk.version, count + len(chunk.ids))
        else:
            self.versions.append((chunk.version, len(chunk.ids)))

    def cut(self, length: int) -> None:
        """Truncate to `length` tokens."""
        del self.ids[length:], self.logprobs[length:]
        kept: list[tuple[int, int]] = []
        for version, count in self.versions:
            taken = min(count, length)
            if taken > 0:
                kept.append((version, taken))
            length -= taken
        self.versions = kept

    def restore(self, record: TokenRecord) -> None:
        """Restore the tokens of a stored record."""
        self.ids, self.logprobs = record.response_ids, record.logprobs
        self.versions = [(version, count) for version, count in record.versions]

    def record(
        self,
        info: CallInfo,
        sampling: Sampling,
        outcome: CallOutcome,
        sequence_end: int,
        **constrained: str,
    ) -> TokenRecord:
        """Return the token record.

        Args:
            constrained: `grammar` and `grammar_library` of the record.

        Raises:
            DataError: they are unusable, such as a log-probability that is not finite.
        """
        return TokenRecord.create(
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            logprobs=self.logprobs,
            versions=self.versions,
            attempt_id=info.session.attempt_id,
            call_id=info.call_id,
            choice=self.index,
            policy=info.policy,
            sampling=sampling,
            finish_reason=self.finish or FinishReason.CANCELLED,
            span_id=info.span_id,
            agent_path=info.agent_path,
            sequence_start=info.sequence_start,
            sequence_end=sequence_end,
            outcome=outcome,
            **constrained,
        )
