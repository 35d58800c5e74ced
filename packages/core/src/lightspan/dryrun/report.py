"""DevReport: what a dry run found, as data. `lightspan.dryrun.text` makes text of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from lightspan.forecast import MemoryForecast, RunSize, TimeForecast
from lightspan.lightning.selection import Rejection

FORMAT: Final = 1
"""Of the JSON form. It changes when a field changes its meaning or goes; fields may be added."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and largest of some numbers."""

    mean: float
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread | None:
        """None of nothing."""
        known = list(values)
        return cls(mean=math.fsum(known) / len(known), max=max(known)) if known else None


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why calls would be rejected."""

    code: str
    """A value of `lightspan.lightning.Rejection`."""
    text: str
    calls: int


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. Every call is in exactly one of `trained`, `frozen` and `rejected`."""

    path: str
    policy: str | None
    """What it trains; None: it is frozen."""
    route: str
    """What answers its calls in `fit`: `policy`, `base`, `shared`, `endpoint` or `app`."""
    goes_to: list[str]
    """Who that is: the policy, or `model at host` of each endpoint that was seen."""
    calls: int
    calls_per_rollout: float
    prompt_tokens: Spread | None
    """None: not known."""
    response_tokens: Spread | None
    trained: int
    frozen: int
    rejected: list[Reason]
    answered_by: list[str] = []
    """Who answered in the dry run: as `goes_to`, or the endpoint in a model's place."""
    tokens_estimated: bool = False
    """Whether tokens were counted with the tokenizer to train, not by who answered."""


class OverrideReport(msgspec.Struct, frozen=True, kw_only=True):
    """A field of requests that training sets otherwise than the app asked."""

    agent: str
    field: str
    asked: Any
    used: Any
    """None: the field is left out."""
    calls: int


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one task."""

    task_id: str
    rewards: list[float | None]
    """None: unscored, which is not zero."""
    mean: float | None
    std: float | None
    """Of the population."""
    varies: bool
    """Whether `fit` would learn from it."""


class AIRReport(msgspec.Struct, frozen=True, kw_only=True):
    """What automatic intermediate rewards would do."""

    seen: dict[str, int]
    """Signal → how many things it saw."""
    idle: str
    """Why nothing would be shaped; empty where something would."""


class RewardReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the app was paid."""

    rollouts: int
    scored: int
    unscored: int
    failed: int
    """Of these rollouts the app failed (scored or not)."""
    lost: int
    """Of these the infrastructure failed."""
    damaged: int
    """These have a capture error, and are never trained."""
    mean: float | None
    std: float | None
    groups: list[GroupReport]
    failures: list[str]
    """What went wrong, each once."""
    air: AIRReport | None = None
    """None: the algorithm has no `air`."""

    @property
    def varying(self) -> int:
        return sum(group.varies for group in self.groups)


class BreakReport(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that went on, but not in its row."""

    rollout_id: str
    agent: str
    previous_call: str
    following_call: str
    cause: Literal["template", "retokenisation", "other"]
    detail: str
    place: int
    """Index of the first token of the following prompt that differs."""
    where: Literal["prompt", "response", "shorter"]
    """Whether it lies in the earlier call's prompt or in its answer; `shorter`: the following
    prompt ends inside them."""
    expected_id: int
    expected_text: str
    """The token that the earlier call had there."""
    got_id: int | None
    got_text: str
    before: str
    """The text just before, the same in both."""


class RowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How calls become rows. `merged + new + branch + broken = calls`."""

    exact: bool
    """False: estimated from the text of answers whose token ids are not known."""
    calls: int
    rows: int
    merged: int
    """Calls that extend a row."""
    new: int
    """Calls that begin a conversation."""
    branch: int
    """Calls that go on from a call which another call went on from already."""
    broken: int
    causes: dict[str, int]
    """Of the broken ones."""
    row_tokens: int
    """What the learner computes."""
    call_tokens: int
    """What it would compute if nothing merged."""
    longest_row: int
    trained_tokens: int
    """Of the rows, those that were sampled."""
    breaks: list[BreakReport]


class ToolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one tool."""

    name: str
    calls: int
    calls_per_rollout: float
    expected_calls: float
    """Of a whole `fit`."""
    failed: int


class EndpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of frozen agents to an endpoint that is not ours."""

    host: str
    """Empty: not known."""
    model: str
    agents: list[str]
    calls: int
    calls_per_rollout: float
    prompt_tokens_per_rollout: float | None
    """None: the endpoint did not say."""
    response_tokens_per_rollout: float | None
    expected_calls: float
    """Of a whole `fit`."""
    expected_prompt_tokens: float | None
    expected_response_tokens: float | None


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `fit` would call outside."""

    size: RunSize
    rollouts: int
    """Of `fit`, evaluations included."""
    tools: list[ToolReport]
    endpoints: list[EndpointReport]
    expected_frozen_calls: float
    max_frozen_calls: int | None


class DevReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run found."""

    format: int = FORMAT
    lightspan: str
    app: str
    algorithm: str
    models: dict[str, str]
    """Policy → its starting weights."""
    answered_by: Literal["local", "endpoint"]
    endpoint: str | None
    """`model at host` that answered for the agents that would be trained."""
    exact: bool
    """Whether token ids were known."""
    tasks: int
    group_size: int
    rollouts: int
    seconds: float
    """Of the rollouts."""
    warnings: list[str]
    agents: list[AgentReport]
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
        if calls and calls == sum(r.calls for r in reasons if r.code == Rejection.ERROR):
            why = next(reason.text for reason in reasons if reason.code == Rejection.ERROR)
            return f"all {calls} calls of the agents that would be trained failed: {why}"
        return ""

    def text(self) -> str:
        """For people: warnings first."""
        from lightspan.dryrun.text import report_text

        return report_text(self)

    def json(self) -> dict[str, Any]:
        """For programs: plain values that `json.dumps` takes."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if self.memory is not None:
            plain["memory"]["fits"] = self.memory.fits
        if self.time is not None:
            plain["time"]["total_s"] = self.time.total_s
        return plain
