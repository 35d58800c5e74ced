"""Warnings: what in the sections of a report a person should hear of first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightspan.lightning.health import FAILURE_WARNING
from lightspan.progress import many
from lightspan.reports.dry_run.sections import (
    AgentReport,
    CostReport,
    DetourReport,
    RewardReport,
    RowReport,
)
from lightspan.reports.forecast import MemoryForecast
from lightspan.schema.conventions import UNNAMED_AGENT


def warnings_of(
    rewards: RewardReport,
    agents: Sequence[AgentReport],
    rows: RowReport | None,
    costs: CostReport,
    memory: MemoryForecast | None,
    *,
    would_stop: bool,
    trains: bool = True,
    detours: Sequence[DetourReport] = (),
) -> list[str]:
    """What the sections say that would hinder training, the worst first.

    Args:
        would_stop: whether `fit` would stop over the calls that it saw, which is said already.
        detours: requests past the SDKs.
        trains: whether policies are trained. If not, no call has to be, and no group has to vary.
    """
    return [
        *_of_rewards(rewards, trains=trains),
        *([] if would_stop or not trains else _of_calls(agents)),
        *([] if would_stop or not trains else _of_detours(detours)),
        *_of_names(agents),
        *_of_rows(rows),
        *_of_costs(costs),
        *_of_memory(memory),
    ]


def _of_rewards(rewards: RewardReport, *, trains: bool) -> list[str]:
    """Failures, missing rewards, groups that teach nothing."""
    warnings = []
    ended = {"failed": rewards.failed, "were lost": rewards.lost, "are damaged": rewards.damaged}
    for what, count in ended.items():
        if count > FAILURE_WARNING * rewards.rollouts:
            why = f", first of all: {rewards.failures[0]}" if rewards.failures else ""
            warnings.append(f"{count} of {rewards.rollouts} rollouts {what}{why}")
    if rewards.unscored:
        warnings.append(
            f"{rewards.unscored} of {rewards.rollouts} rollouts have no usable reward: they are "
            "left out, which is not a reward of zero"
        )
    if not rewards.by_batch and trains:
        warnings += _of_groups(rewards)
    if rewards.air is not None and rewards.air.idle:
        warnings.append(f"AIR: {rewards.air.idle}: air= would change nothing")
    return warnings


def _of_groups(rewards: RewardReport) -> list[str]:
    """Groups that could not be compared inside."""
    groups, size = len(rewards.groups), max((len(g.rewards) for g in rewards.groups), default=0)
    if size == 1:
        return ["one rollout per task compares nothing: use group_size=2 or more"]
    if groups and not rewards.varying:
        return [
            f"no reward varies inside a group ({groups} groups): there is nothing to learn from. "
            "The tasks may be too easy or too hard, or the reward too coarse"
        ]
    if rewards.varying < groups / 2:
        return [f"rewards vary inside {rewards.varying} of {groups} groups only"]
    return []


def _of_calls(agents: Sequence[AgentReport]) -> list[str]:
    """Calls of selected agents that would not be trained."""
    selected = [agent for agent in agents if agent.policy is not None]
    trained = sum(agent.trained for agent in selected)
    rejected: Counter[str] = Counter()
    for agent in selected:
        for reason in agent.rejected:
            rejected[f"{reason.code}: {reason.text}"] += reason.calls
    why = "; ".join(f"{count} {text}" for text, count in rejected.most_common(3))
    if not trained:
        return [f"no call would be trained ({why or 'no selected agent called a model'})"]
    total = trained + sum(rejected.values())
    return [f"{total - trained} of {total} calls would be rejected ({why})"] if why else []


def _of_detours(detours: Sequence[DetourReport]) -> list[str]:
    """Requests of selected agents past the SDKs."""
    selected = [detour for detour in detours if detour.selected]
    if not selected:
        return []
    count, agents = sum(one.requests for one in selected), {one.agent: None for one in selected}
    return [
        f"{many(count, 'request')} of agents that would be trained ({', '.join(agents)}) went past "
        "the OpenAI and Anthropic SDKs, and cannot be trained: see below for what to change"
    ]


def _of_names(agents: Sequence[AgentReport]) -> list[str]:
    """Calls without an agent in an app that has agents."""
    unnamed = sum(agent.calls for agent in agents if agent.path == UNNAMED_AGENT)
    total = sum(agent.calls for agent in agents)
    if unnamed in (0, total):
        return []
    return [
        f"{unnamed} of {total} calls were made outside every agent (their path is "
        f'`{UNNAMED_AGENT}`): if one is an agent\'s, name it by `with lightspan.agent("name"):` '
        "around the call, or as the README of your framework's adapter says"
    ]


def _of_rows(rows: RowReport | None) -> list[str]:
    """Conversations that break."""
    if rows is None or not rows.broken:
        return []
    causes = ", ".join(f"{count} {cause}" for cause, count in rows.causes.items() if count)
    return [
        f"{rows.broken} of {rows.broken + rows.merged} calls that go on with a conversation begin "
        f"a new row ({causes}): the learner computes their history again"
    ]


def _of_costs(costs: CostReport) -> list[str]:
    """A limit that `fit` would reach."""
    limit = costs.max_frozen_calls
    if limit is None or costs.expected_frozen_calls <= limit:
        return []
    return [
        f"fit would make about {costs.expected_frozen_calls:,.0f} calls to endpoints and stop at "
        f"max_frozen_calls={limit:,}"
    ]


def _of_memory(memory: MemoryForecast | None) -> list[str]:
    """A forecast that exceeds what is free."""
    if memory is None or memory.fits is not False:
        return []
    return ["the memory that fit would need is more than is free: see below"]
