"""Read a search that has not ended: its candidates and proposals so far.

They are read from the search's log and from `proposals.jsonl`, which both grow while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lightspan.training.jsonl_log import read
from lightspan_prompts.search.candidates import (
    CANDIDATES,
    JOURNAL,
    PROPOSALS,
    Candidate,
    Proposal,
    search_places,
)
from lightspan_prompts.search.evaluator import FailureReward
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.search_log import LINE, REFUSED, Evaluation, Header, Reflection

LOGS: Final = ("gepa.jsonl", "apo.jsonl")
"""Names of the logs of searches in the folder `JOURNAL`."""


class RunningSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search that has not ended."""

    candidates: list[Candidate]
    """Prompts that were compared on the selection split, in the order of their first result."""
    proposals: list[Proposal]
    """Every proposed text so far, dropped ones too."""
    rollouts: int
    reflections: int
    tokens: int
    cost: float | None = None
    """Cost at the last proposal; None without prices, or before the first proposal."""


def read_running_searches(
    run: Path, failure_reward: FailureReward = "lowest"
) -> dict[str, RunningSearch]:
    """Read the searches of a run that have no result yet.

    The keys are those of `read_searches`. A search that was stopped has no result either.

    Args:
        run: folder of the run.
        failure_reward: reward of failures in comparisons.

    Raises:
        ConfigError: a file is damaged.
    """
    searches = {}
    for name, place in search_places(run).items():
        if not (place / JOURNAL / CANDIDATES).exists():
            search = read_running_search(place, failure_reward)
            if search is not None:
                searches[name] = search
    return searches


def read_running_search(
    place: Path, failure_reward: FailureReward = "lowest"
) -> RunningSearch | None:
    """Read a search that has not ended; None if no search began.

    Args:
        place: folder of the search, which is the run's folder for a run with one search.
        failure_reward: reward of failures in comparisons.

    Raises:
        ConfigError: a file is damaged.
    """
    log = next((path for name in LOGS if (path := place / JOURNAL / name).exists()), None)
    if log is None:
        return None
    entries = [entry for entry in read(log, LINE) if not isinstance(entry, Header)]
    evaluations = [entry for entry in entries if isinstance(entry, Evaluation)]
    answers = [e for e in entries if isinstance(e, Reflection) and e.finish_reason != REFUSED]
    proposals = read(place / PROPOSALS, Proposal)
    seen = [evidence for evaluation in evaluations for evidence in evaluation.seen]
    return RunningSearch(
        candidates=candidates_of(evaluations, proposals, failure_reward),
        proposals=proposals,
        rollouts=len(seen),
        reflections=len(answers),
        tokens=sum(evidence.tokens for evidence in seen)
        + sum(answer.input_tokens + answer.output_tokens for answer in answers),
        cost=proposals[-1].cost if proposals else None,
    )


def candidates_of(
    evaluations: Sequence[Evaluation], proposals: Sequence[Proposal], failure_reward: FailureReward
) -> list[Candidate]:
    """Return the prompts that were compared on the selection split, with their rewards so far.

    Args:
        evaluations: evaluations of the log, in its order.
        proposals: proposals, which have the parents of candidates.
        failure_reward: reward of failures in comparisons.
    """
    parents = {each.candidate: each.parents for each in proposals if each.candidate is not None}
    value = _failure_value(evaluations, failure_reward)
    runs: dict[tuple[tuple[str, str], ...], list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.split == "selection":
            runs.setdefault(tuple(sorted(evaluation.candidate.items())), []).append(evaluation)
    whole = max((len(each.seen) for group in runs.values() for each in group), default=0)
    candidates, rollouts = [], 0
    for number, group in enumerate(runs.values()):
        rollouts += sum(len(each.seen) for each in group)
        rewards = [_rewards(each.seen, value) for each in _counted(group)]
        values = [value if reward is None else reward for run in rewards for reward in run.values()]
        candidates.append(
            Candidate(
                templates=group[0].candidate,
                parents=parents.get(number, []),
                rewards=rewards[0],
                again=rewards[1] if len(rewards) > 1 else {},
                mean=math.fsum(values) / len(values) if values else math.nan,
                rollouts=rollouts,
                is_whole=len(rewards[0]) == whole,
            )
        )
    return candidates


def _counted(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations of a candidate that count, of all on the selection split.

    A finalist of GEPA is run on the same tasks again. APO compares on batches of the tasks, of
    which the last counts, unless all tasks were run.
    """
    counted: list[Evaluation] = []
    for each in evaluations:
        tasks = {one.task_id for one in each.seen}
        is_again = bool(counted) and tasks == {one.task_id for one in counted[0].seen}
        if is_again:
            counted.append(each)
        elif not counted or len(each.seen) >= len(counted[0].seen):
            counted = [each]
    return counted


def _rewards(seen: Sequence[Evidence], failure_value: float) -> dict[str, float | None]:
    return {one.task_id: failure_value if one.is_failure else one.reward for one in seen}


def _failure_value(evaluations: Sequence[Evaluation], failure_reward: FailureReward) -> float:
    if not isinstance(failure_reward, str):
        return failure_reward
    rewards = [
        one.reward
        for evaluation in evaluations
        for one in evaluation.seen
        if one.reward is not None and not one.is_failure
    ]
    return min([0.0, *rewards])
