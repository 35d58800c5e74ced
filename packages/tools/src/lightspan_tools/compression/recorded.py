"""Read the calls that production recorded: how many there are, their tokens and their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from lightspan.algorithms.recorded_attempts import Query, is_of, read_attempts, score_of
from lightspan.lightning.episode import Call, Episode
from lightspan.schema import semconv as c
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Mean numbers of tokens of calls, as the endpoint counted them."""

    calls: int
    """Number of calls that were answered."""
    uncounted: int
    """Number of these whose answer had no usage; they are in no mean."""
    input: float
    """Mean number of prompt tokens of a call; 0 if no call was counted."""
    output: float
    """Mean number of answer tokens of a call; 0 if no call was counted."""

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Tokens:
        """Return the tokens of the answered calls among `calls`."""
        answered = [call for call in calls if call.outcome is CallOutcome.OK and not call.choice]
        counts = [_usage(call) for call in answered]
        counted = [each for each in counts if each is not None]
        number = max(1, len(counted))
        return cls(
            calls=len(answered),
            uncounted=len(answered) - len(counted),
            input=sum(prompt for prompt, _ in counted) / number,
            output=sum(answer for _, answer in counted) / number,
        )

    def cost_per_1000(self, prices: tuple[float, float]) -> float:
        """Return the cost of 1,000 such calls.

        Args:
            prices: price of a million input tokens, and of a million output tokens.
        """
        return 1000 * (self.input * prices[0] + self.output * prices[1]) / 1_000_000


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a store of production says of the calls of the chosen agents."""

    attempts: int
    agents: dict[str, int]
    """Path of an agent → number of its calls, of all agents."""
    tokens: Tokens
    scores: list[float]
    """Scores of the answered calls that are scored, in ascending order."""


MIDDLE: Final = 0.5
"""A score below it is low, if the scores are from 0 to 1 as those of thumbs."""


def low_scores(scores: Sequence[float | None]) -> str:
    """Return a line that says how many of the calls to imitate scored low; "" if none did.

    A score is low below `MIDDLE`, or on another scale below the middle of the lowest and the
    highest.

    Args:
        scores: the score of each call; None if it has none.
    """
    known = [score for score in scores if score is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    middle = MIDDLE if low >= 0 and high <= 1 else (low + high) / 2
    count = sum(score < middle for score in known)
    if not count:
        return ""
    verb, them = ("has", "it") if count == 1 else ("have", "them")
    return (
        f"{count:,} of the {len(scores):,} chosen calls {verb} a score below {middle:g}: "
        f"--min-reward {middle:g} leaves {them} out"
    )


def read_recorded(url: str, query: Query, agents: Sequence[str]) -> Recorded:
    """Read the recorded calls of a store.

    Args:
        url: URL of the store.
        query: which attempts to read.
        agents: names or globs on agent paths; empty for all agents.

    Raises:
        ConfigError: there is no such store.
    """

    async def read() -> Recorded:
        calls: list[tuple[Episode, Call]] = []
        paths: Counter[str] = Counter()
        attempts = 0
        async with open_existing(url, read_only=True) as store:
            async for _, _, episode in read_attempts(store, query):
                attempts += 1
                paths.update(call.agent_path for call in episode.calls)
                calls += [(episode, call) for call in episode.calls if is_of(call, agents)]
        scores = [
            score_of(episode, call)
            for episode, call in calls
            if call.outcome is CallOutcome.OK and not call.choice
        ]
        return Recorded(
            attempts=attempts,
            agents=dict(paths.most_common()),
            tokens=Tokens.of(call for _, call in calls),
            scores=sorted(score for score in scores if score is not None),
        )

    return run_sync(read())


def _usage(call: Call) -> tuple[int, int] | None:
    """Return the prompt and answer tokens of a call; None if the endpoint did not count them.

    The counts of a call that lightspan's engine answered are in its token record.
    """
    if call.record is not None:
        return len(call.record.prompt) // 4, len(call.record.response) // 4
    attributes = {} if call.span is None else call.span.attributes
    prompt, answer = attributes.get(c.INPUT_TOKENS), attributes.get(c.OUTPUT_TOKENS)
    if not isinstance(prompt, int) or not isinstance(answer, int):
        return None
    return prompt, answer
