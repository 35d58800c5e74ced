"""The sections of a report, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from lightspan.algorithms.protocol import Reflections
from lightspan.reports.forecast import RunSize


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and largest of some numbers."""

    mean: float
    max: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread | None:
        """Mean and largest of these; None where there are none."""
        numbers = list(values)
        if not numbers:
            return None
        return cls(mean=math.fsum(numbers) / len(numbers), max=max(numbers))


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why calls would be rejected."""

    code: str
    """A value of `lightspan.lightning.Rejection`."""
    text: str
    calls: int


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of an agent that went past the gateway, by one client."""

    client: str
    """Its class; empty where no framework tells."""
    host: str
    """Where it asked; empty where that is not known."""
    calls: int
    fix: str
    """What to do so that they can be trained; empty where no adapter says."""


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
    unseen: list[ClientReport] = []
    """Calls that went past the gateway, whatever the agent trains."""
    acted: bool = False
    """Whether it was seen to act, calls or not."""
    tokens_estimated: bool = False
    """Whether tokens were counted with the tokenizer to train, not by who answered."""


class DetourReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of an agent to a model that went past the OpenAI and Anthropic SDKs."""

    agent: str
    client: str
    """The package that called the HTTP client."""
    model: str
    """Empty where the request named none."""
    url: str
    """Without a query."""
    requests: int
    """Tries of one call included."""
    asked: str
    """What was asked, where and by whom, for people."""
    selected: bool
    """Whether the agent would be trained; else nothing has to change."""
    fix: str
    """What to change so that they can be trained."""


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
    """Standard deviation with ddof 0: it describes these rewards, and estimates no others."""
    varies: bool
    """Whether its rewards differ, so that an estimator that compares them learns from it."""


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
    """Rollouts on which the app failed, scored or not."""
    lost: int
    """Rollouts on which the infrastructure failed."""
    damaged: int
    """Rollouts with a capture error: they are never trained."""
    mean: float | None
    std: float | None
    groups: list[GroupReport]
    by_batch: bool = False
    """Whether rollouts are compared with the batch or a critic, not inside their group: groups need
    not vary then, and may be of one."""
    failures: list[str]
    """What went wrong, each once."""
    air: AIRReport | None = None
    """None: the algorithm has no `air`."""

    @property
    def varying(self) -> int:
        return sum(group.varies for group in self.groups)

    @property
    def teaching(self) -> int:
        """Groups that `fit` would learn from."""
        return len(self.groups) if self.by_batch else self.varying


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
    """Cause → how many of the broken calls it explains."""
    row_tokens: int
    """What the learner computes."""
    call_tokens: int
    """What it would compute if nothing merged."""
    longest_row: int
    trained_tokens: int
    """Tokens of the rows that were sampled, so that they bear loss."""
    breaks: list[BreakReport]


class ToolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one tool."""

    name: str
    calls: int
    calls_per_rollout: float
    expected_calls: float
    """How many there would be in a whole `fit`."""
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
    """How many there would be in a whole `fit`."""
    expected_prompt_tokens: float | None
    expected_response_tokens: float | None


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `fit` would call outside."""

    size: RunSize
    rollouts: int
    """Rollouts of `fit`, evaluations included."""
    tools: list[ToolReport]
    endpoints: list[EndpointReport]
    expected_frozen_calls: float
    max_frozen_calls: int | None
    reflections: list[Reflections] = []
    """What a search for prompts would ask."""
