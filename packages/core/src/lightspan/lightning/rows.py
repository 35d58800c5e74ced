"""Row: one training sequence, and exact prefix merging of transitions into rows.

A transition *extends* a row if the row's ids (prompts and responses so far) are an exact prefix of
the transition's prompt. Both must have the same rollout and policy. If it could extend several
rows, it extends the longest, so interleaved sub-agents A1 B1 A2 B2 make two rows. If it extends
none, it begins a new row. Merging compares token ids and images; nothing is tokenised again.

Worked example, prompts and responses as letters (lower case is sampled):

    A1  P       a        row 0: P a
    B1  Q       b        row 1: Q b
    A2  PaX     c        extends row 0: P a X c       mask 0 1 0 1
    B2  Qb      d        extends row 1: Q b d         mask 0 1 1    (no new prompt tokens)
    A3  PXX     e        no row is a prefix of it: row 2

The rows that can still be extended are kept in the order of their ids, so that a transition is
compared only with rows that begin with the same token.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter, ne
from typing import NamedTuple

from lightspan.lightning.selection import Rejection
from lightspan.lightning.transitions import Transition, TransitionKey
from lightspan.schema.images import PromptImage

_WIDTH = 4
"""Size of a packed token id in bytes."""


class Response(NamedTuple):
    """Position in a row of the tokens that one call sampled."""

    start: int
    """Index of the first token; the token before it is the last one of the call's prompt."""
    length: int


class Constraint(NamedTuple):
    """Position in a row of tokens that were sampled under a grammar."""

    start: int
    """Index of the first token."""
    length: int
    grammar: str
    """Grammar as text (see `lightspan_torch.engine.grammars`); it applies from `start` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence: one or more transitions, each an exact prefix of the next.

    A transition is a trained call. Each list has one entry per token of `ids`. A row has tokens of
    one attempt and one policy only.
    """

    rollout_id: str
    policy: str
    ids: list[int]
    mask: list[bool]
    """True if the token was sampled by the policy and is trained."""
    advantages: list[float]
    weights: list[float]
    """Weight of the token; the learner minimises the sum of weight · loss."""
    logprobs: list[float]
    """Behaviour log-probabilities, 0.0 where the mask is False."""
    versions: list[int]
    """Policy version that sampled the token; 0 where the mask is False."""
    temperatures: list[float]
    """Sampling temperature of the token; 1.0 where the mask is False."""
    call_ids: tuple[tuple[str, int], ...] = ()
    """(call id, choice) of each transition in the row, in order."""
    responses: tuple[Response, ...] = ()
    """Positions of the sampled tokens of each transition, in order; empty if unknown. The mask does
    not show where a response ends if the next prompt adds no token to it.
    """
    constraints: tuple[Constraint, ...] = ()
    """Positions of the tokens of each transition that was sampled under a grammar, in order."""
    value_targets: tuple[float, ...] = ()
    """The critic's target at the prompt of each transition, in order: its reward-to-go, or NaN for
    no target. Empty without a critic.
    """
    images: tuple[PromptImage, ...] = ()
    """The images whose placeholders are among `ids`, with their bytes, in order."""


class RowBuild(NamedTuple):
    """The rows that were built, and the transitions (trained calls) without a row.

    `rejected` maps (attempt id, call id, choice) to the reason.
    """

    rows: list[Row]
    rejected: dict[TransitionKey, Rejection]


def usable_transitions(
    transitions: Sequence[Transition], max_length: int | None = None
) -> tuple[list[Transition], dict[TransitionKey, Rejection]]:
    """Return the transitions (trained calls) that a learner accepts, and why others are rejected.

    Transitions that are too long are rejected, never cut. The second dictionary maps (attempt id,
    call id, choice) to the reason.

    Args:
        transitions: transitions of any rollouts.
        max_length: maximum tokens of prompt and response together; None for no limit.
    """
    rejected: dict[TransitionKey, Rejection] = {}
    for transition in transitions:
        record = transition.record
        if max_length is not None and transition.length > max_length:
            rejected[transition.key] = Rejection.OUT_OF_CONTEXT
        elif any(not image.data for image in record.images):
            rejected[transition.key] = Rejection.NO_IMAGE
        elif not transition.tokens:
            rejected[transition.key] = Rejection.EMPTY_RESPONSE
        elif len(record.logprob_data) != len(record.response) or not all(
            map(math.isfinite, record.logprobs)
        ):
            rejected[transition.key] = Rejection.NO_LOGPROBS
    return [t for t in transitions if t.key not in rejected], rejected


def build_rows(
    transitions: Sequence[Transition],
    *,
    advantages: Sequence[float] | None = None,
    token_weights: Sequence[float] | None = None,
    value_targets: Sequence[float] | None = None,
    max_length: int | None = None,
) -> RowBuild:
    """Return the rows of the transitions, which are trained calls.

    A transition extends a row if the row's tokens are an exact prefix of its prompt; else it begins
    a new row.

    Args:
        transitions: transitions of any rollouts, in causal order within each rollout.
        advantages: advantage of each transition; None for 1.0 (SFT).
        token_weights: per transition, the weight of each of its tokens; None for 1.0.
        value_targets: the critic's target of each transition, NaN for no target; None for rows
            without targets.
        max_length: maximum tokens of prompt and response together; None for no limit.
    """
    ones = [1.0] * len(transitions)
    numbers = zip(
        ones if advantages is None else advantages,
        ones if token_weights is None else token_weights,
        ones if value_targets is None else value_targets,
        strict=True,
    )
    values = {t.key: each for t, each in zip(transitions, numbers, strict=True)}
    usable, rejected = usable_transitions(transitions, max_length)
    rows = [_row(chain, values, with_targets=value_targets is not None) for chain in merge(usable)]
    return RowBuild(rows, rejected)


def merge(transitions: Sequence[Transition]) -> list[list[Transition]]:
    """Group transitions into rows, by exact prefixes of token ids and images.

    A transition joins a row of the same attempt and policy whose tokens are a prefix of its prompt.
    If there are several, it joins the longest.

    Returns:
        The transitions of each row, in order; rows are ordered by their first transition.
    """
    chains: list[list[Transition]] = []
    by_owner: dict[tuple[str, str, str], _OpenRows] = defaultdict(_OpenRows)
    for transition in transitions:
        open_rows = by_owner[transition.rollout_id, transition.attempt_id, transition.policy]
        record = transition.record
        # a row is extended once: a later equal prompt opens another row
        prompt = record.prompt_key
        place = open_rows.pop_longest(prompt)
        if place is None:
            place = len(chains)
            chains.append([])
        chains[place].append(transition)
        open_rows.add(prompt + record.response, place)
    return chains


def row_shares(transitions: Sequence[Transition]) -> dict[str, list[float]]:
    """Return how much of each agent's sessions is in one row.

    A session is the calls of an agent in an attempt. Those of a single call are left out.

    Returns:
        Agent path → per session, the calls in its largest row divided by all of its calls.
    """
    sizes = Counter((t.agent_path, t.attempt_id) for t in transitions)
    largest: Counter[tuple[str, str]] = Counter()
    for chain in merge(transitions):
        largest |= Counter((t.agent_path, t.attempt_id) for t in chain)  # the maximum of each
    shares: dict[str, list[float]] = defaultdict(list)
    for (path, attempt_id), size in sorted(sizes.items()):
        if size > 1:
            shares[path].append(largest[path, attempt_id] / size)
    return dict(shares)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    size = min(len(first), len(second))
    if first[:size] == second[:size]:
        return size
    return next(place for place, differs in enumerate(map(ne, first, second)) if differs)


# --- one row ----------------------------------------------------------------------------------


def _row(
    chain: Sequence[Transition],
    values: Mapping[TransitionKey, tuple[float, float, float]],
    *,
    with_targets: bool,
) -> Row:
    """Return the row of `chain`.

    Args:
        chain: transitions, each of which is an exact prefix of the next.
        values: (attempt id, call id, choice) → (advantage, token weight, value target).
        with_targets: whether the row gets value targets.
    """
    last = chain[-1]
    ids = last.record.prompt_ids + last.record.response_ids
    spans = [Response(t.length - t.tokens, t.tokens) for t in chain]
    row = Row(
        rollout_id=last.rollout_id,
        policy=last.policy,
        ids=ids,
        mask=[False] * len(ids),
        advantages=[0.0] * len(ids),
        weights=[0.0] * len(ids),
        logprobs=[0.0] * len(ids),
        versions=[0] * len(ids),
        temperatures=[1.0] * len(ids),
        call_ids=tuple(t.call_key for t in chain),
        responses=tuple(spans),
        constraints=tuple(
            Constraint(*span, t.record.grammar)
            for t, span in zip(chain, spans, strict=True)
            if t.record.grammar
        ),
        value_targets=tuple(values[t.key][2] for t in chain) if with_targets else (),
        images=last.record.images,
    )
    for t, (start, count) in zip(chain, spans, strict=True):
        span = slice(start, start + count)
        advantage, weight, _ = values[t.key]
        row.mask[span] = [True] * count
        row.advantages[span] = [advantage] * count
        row.weights[span] = [weight] * count
        row.logprobs[span] = t.record.logprobs
        row.versions[span] = t.versions
        row.temperatures[span] = [t.record.sampling.temperature] * count
    return row


# --- the open rows ----------------------------------------------------------------------------


class _OpenRows:
    """The rows that a later transition may extend, sorted by their keys (`schema.images`)."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int]] = []

    def pop_longest(self, prompt: bytes) -> int | None:
        """Remove the longest row that is an exact prefix of `prompt`, and return its number.

        None if there is no such row.

        Args:
            prompt: key of the prompt.
        """
        # A prefix stands before what it begins, and a shorter prefix before a longer one.
        end = bisect_right(self._rows, prompt, key=itemgetter(0))
        for index in reversed(range(end)):
            ids, place = self._rows[index]
            if prompt.startswith(ids):
                del self._rows[index]
                return place
            if ids[:_WIDTH] != prompt[:_WIDTH]:
                break
        return None

    def add(self, ids: bytes, place: int) -> None:
        """Add row number `place` with the key `ids`."""
        insort(self._rows, (ids, place), key=itemgetter(0))


def keep_recorded(
    rows: Sequence[Row], scores: Sequence[Sequence[float]], versions: Mapping[str, int]
) -> list[list[float]]:
    """Return `scores` with the recorded log-probabilities for calls that older weights sampled.

    For such a call, the ratio of score and record measures what was learned since, not how engine
    and learner differ. A mask or an importance weight would remove what the weights have learned.
    With the recorded ones both are 1, and the loss's ratio is to the weights that sampled the call.

    Args:
        rows: the rows.
        scores: per row, the learner's log-probabilities of its tokens.
        versions: policy → version of the current weights.
    """
    results = [list(values) for values in scores]
    for row, values in zip(rows, results, strict=True):
        for start, length in row.responses:
            call = slice(start, start + length)
            sampled_by = set(compress(row.versions[call], row.mask[call]))
            if sampled_by - {versions.get(row.policy)}:
                values[call] = row.logprobs[call]
    return results
