"""Read what an evaluation cost: calls, tokens, and seconds in which calls were answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from lightspan.algorithms.recorded_attempts import is_of
from lightspan.lightning.episode import Call, Episode
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync
from lightspan.training.collector import read_episodes
from lightspan.training.results import Evaluation
from lightspan_tools.compression.recorded import Tokens


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What the app did on the held-out tasks, with one endpoint or model."""

    evaluation: Evaluation
    tokens: Tokens
    """The tokens of the answered calls of the chosen agents."""
    seconds: float
    """Seconds in which at least one of these calls was being answered."""

    @property
    def seconds_per_call(self) -> float:
        """Seconds of the machine per call: calls that are answered together share them."""
        return self.seconds / max(1, self.tokens.calls)


def read_measurement(url: str, evaluation: Evaluation, agents: Sequence[str]) -> Measurement:
    """Read the calls of an evaluation from the store of its run.

    Args:
        url: URL of the store.
        evaluation: the evaluation.
        agents: names or globs on paths of the agents whose calls count; empty for all agents.
    """

    async def read() -> list[Episode]:
        async with open_existing(url, read_only=True) as store:
            return await read_episodes(store, await store.rollouts(mode=Mode.VAL))

    answered = [
        call
        for episode in run_sync(read())
        for call in episode.calls
        if call.outcome is CallOutcome.OK and is_of(call, agents)
    ]
    return Measurement(
        evaluation=evaluation,
        tokens=Tokens.of(answered),
        seconds=busy_seconds(answered),
    )


def busy_seconds(calls: Iterable[Call]) -> float:
    """Return for how many seconds at least one of the calls was being answered.

    Calls without a span are left out.
    """
    spans = [call.span for call in calls if call.span is not None]
    end, total = 0, 0
    for start_ns, end_ns in sorted((span.start_ns, span.end_ns) for span in spans):
        total += max(0, end_ns - max(start_ns, end))
        end = max(end, end_ns)
    return total / 1e9
