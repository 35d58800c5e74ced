"""DevReport: all that a dry run showed, as data, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from lightspan.lightning.selection import Rejection
from lightspan.progress import duration, many
from lightspan.reports.dry_run.sections import (
    AgentReport,
    CostReport,
    DetourReport,
    OverrideReport,
    RewardReport,
    RowReport,
)
from lightspan.reports.dry_run.text import (
    agent_lines,
    cost_lines,
    detour_lines,
    memory_lines,
    missing_lines,
    override_lines,
    reward_lines,
    row_lines,
    time_lines,
)
from lightspan.reports.forecast import MemoryForecast, TimeForecast

FORMAT: Final = 1
"""Version of the JSON form. It changes when a field changes its meaning or goes; fields may be
added."""


class DevReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run showed."""

    format: int = FORMAT
    lightspan: str
    app: str
    algorithm: str
    models: dict[str, str]
    """Policy → its starting weights."""
    answered_by: Literal["local", "endpoint", "app"]
    """`app`: nothing but the app's own endpoints, since no policy would be trained."""
    endpoint: str | None
    """`model at host` that answered for the agents that would be trained."""
    exact: bool
    """Whether token ids were known."""
    tasks: int
    group_size: int
    rollouts: int
    seconds: float
    """Wall time of the rollouts."""
    warnings: list[str]
    choices: list[str] = []
    """Settings that the algorithm chose itself, and why; and what it found to learn."""
    agents: list[AgentReport]
    detours: list[DetourReport] = []
    """Requests to models that no SDK made which lightspan sees, and no adapter tells of."""
    overrides: list[OverrideReport]
    rewards: RewardReport
    rows: RowReport | None
    costs: CostReport
    memory: MemoryForecast | None
    time: TimeForecast | None
    missing: list[str]
    """What could not be found out, and why."""
    folder: str | None
    """Where the rollouts are kept for `lightspan inspect`."""

    @property
    def failure(self) -> str:
        """Why the dry run shows nothing: every rollout failed, or every call of the agents that
        would be trained. Empty where it does."""
        rewards = self.rewards
        if rewards.failed + rewards.lost == rewards.rollouts:
            first = f", the first: {rewards.failures[0]}" if rewards.failures else ""
            return f"all {rewards.rollouts} rollouts failed{first}"
        selected = [agent for agent in self.agents if agent.policy is not None]
        reasons = [reason for agent in selected for reason in agent.rejected]
        calls = sum(agent.calls for agent in selected)
        failed = (Rejection.ERROR, Rejection.REFUSED)
        errors = [reason for reason in reasons if reason.code in failed]
        if calls and calls == sum(reason.calls for reason in errors):
            return f"all {calls} calls of the agents that would be trained failed: {errors[0].text}"
        return ""

    def text(self) -> str:
        """The report for people: warnings first, then a short section for each question."""
        sections = [
            self._head(),
            [f"! {warning}" for warning in self.warnings],
            agent_lines(self.agents),
            detour_lines(self.detours),
            override_lines(self.overrides),
            reward_lines(self.rewards),
            row_lines(self.rows, kept=self.folder is not None),
            cost_lines(self.costs),
            memory_lines(self.memory),
            time_lines(self.time, self.costs),
            missing_lines(self.missing),
        ]
        return "\n\n".join("\n".join(section) for section in map(list, sections) if section)

    def _head(self) -> Iterator[str]:
        models = " and ".join(sorted(set(self.models.values()))) or "no model (none was given)"
        on = "" if self.answered_by == "app" else f" on {models}"
        yield (
            f"dry run of {self.app}: {self.algorithm}{on}, "
            f"{many(self.tasks, 'task')} x {many(self.group_size, 'rollout')}, "
            f"{duration(self.seconds)}; nothing was trained"
        )
        if self.endpoint is not None:
            yield (
                f"answered by {self.endpoint}: token ids are not known, so what depends on them "
                "is estimated"
            )
        yield from self.choices
        if self.folder is not None:
            yield f"rollouts: lightspan inspect {self.folder}"

    def json(self) -> dict[str, Any]:
        """The report for programs: plain values that `json.dumps` takes."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if self.memory is not None:
            plain["memory"]["fits"] = self.memory.fits
        if self.time is not None:
            plain["time"]["total_s"] = self.time.total_s
        return plain
