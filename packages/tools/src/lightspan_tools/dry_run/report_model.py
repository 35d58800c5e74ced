"""DevReport: what a dry run showed, as data, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from lightspan.algorithms.protocol import Reflections
from lightspan.errors import DataError
from lightspan.lightning.selection import Rejection
from lightspan.progress import print_line
from lightspan_tools.dry_run.rendering import render

STDOUT: Final = Path("-")
"""As a path of the JSON: print it in place of the text."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and maximum of some numbers."""

    mean: float
    max: int


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why calls would be rejected."""

    code: str
    """A value of `lightspan.lightning.Rejection`."""
    text: str
    calls: int


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """An agent. Every call is in exactly one of `trained`, `frozen` and `rejected`."""

    path: str
    policy: str | None
    """What it trains; None: it is frozen."""
    route: str
    """What answers its calls in `fit`: `policy`, `base`, `shared`, `endpoint` or `app`."""
    goes_to: list[str]
    """The policy, or `model at host` of each endpoint."""
    calls: int
    calls_per_rollout: float
    prompt_tokens: Spread | None
    """None: unknown."""
    response_tokens: Spread | None
    trained: int
    frozen: int
    rejected: list[Reason]
    unseen: list[str] = []
    """Calls that bypassed the gateway, by client, each with its remedy."""
    acted: bool = False
    """Whether a span of it was recorded, with or without calls."""


class UncapturedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Model requests of an agent that bypassed the OpenAI and Anthropic SDKs."""

    agent: str
    request: str
    """Model, host and client."""
    requests: int
    """Retries included."""
    selected: bool
    """Whether the agent would be trained; if not, nothing has to change."""
    fix: str


class OverrideReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request field that training sets otherwise than the app."""

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
    varies: bool
    """Whether its rewards differ."""


class RewardReport(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of all rollouts."""

    rollouts: int
    scored: int
    failed: int
    """Rollouts on which the app failed, scored or not."""
    lost: int
    """Rollouts on which the infrastructure failed."""
    damaged: int
    """Rollouts with a capture error: they are never trained."""
    mean: float | None
    groups: list[GroupReport]
    by_batch: bool
    """Whether rollouts are compared with the batch or a critic, not with their group."""
    failures: list[str]

    @property
    def unscored(self) -> int:
        return self.rollouts - self.scored

    @property
    def varying(self) -> int:
        return sum(group.varies for group in self.groups)

    @property
    def teaching(self) -> int:
        """Groups that `fit` would learn from."""
        return len(self.groups) if self.by_batch else self.varying


class RowReport(msgspec.Struct, frozen=True, kw_only=True):
    """How calls become rows. `merged + new + branch + broken = calls`."""

    calls: int
    rows: int
    merged: int
    """Calls that extend a row."""
    new: int
    """Calls that begin a conversation."""
    branch: int
    """Calls that continue a call which another call continues already."""
    broken: int
    causes: dict[str, int]
    """Cause → broken calls."""
    row_tokens: int
    """Tokens that the learner computes."""
    call_tokens: int
    """Tokens that it would compute if nothing merged."""
    longest_row: int
    breaks: list[str]
    """Examples of broken calls, each with the first token that differs."""


class ToolReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of a tool."""

    name: str
    calls: int
    expected_calls: float
    """In a whole `fit`."""


class EndpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of frozen agents to an endpoint that is not ours."""

    name: str
    """`model at host`."""
    agents: list[str]
    calls: int
    expected_calls: float
    """In a whole `fit`, as the tokens."""
    expected_prompt_tokens: float | None
    """None: unknown."""
    expected_response_tokens: float | None


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `fit` would call outside."""

    rollouts: int
    """Rollouts of `fit`, evaluations included."""
    plan: str
    """How that number comes about."""
    tools: list[ToolReport]
    endpoints: list[EndpointReport]
    max_frozen_calls: int | None
    reflections: list[Reflections] = []
    """What a prompt search would ask."""

    @property
    def expected_frozen_calls(self) -> float:
        return sum(endpoint.expected_calls for endpoint in self.endpoints)


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of what `fit` holds, over all devices. Activations and logits come on top."""

    parts: dict[str, int]
    """Part → bytes."""
    free_bytes: int | None
    """Free now on the trainer's device; None where that is unknown, or not all parts are on it."""
    peak_bytes: int | None = None
    """Measured: the peak of the dry run's own process."""
    runner_bytes: int | None = None
    """Measured: what all runner processes held."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        return None if self.free_bytes is None else self.total_bytes <= self.free_bytes


class TimeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds, and the estimate for a whole `fit` that follows from them."""

    rollout_s: float
    """Wall time of all rollouts, divided by their number."""
    token_s: float
    """Time of an update per token of its rows."""
    rollouts_s: float
    """Of all rollouts of `fit`."""
    updates_s: float
    """Of all updates of `fit`."""

    @property
    def total_s(self) -> float:
        return self.rollouts_s + self.updates_s


class DevReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run showed."""

    lightspan: str
    app: str
    algorithm: str
    models: dict[str, str]
    """Policy → its starting weights."""
    answered_by: Literal["local", "endpoint", "app"]
    """`app`: the app's own endpoints alone, since no policy would be trained."""
    endpoint: str | None
    """`model at host` that answered for the agents that would be trained."""
    tasks: int
    group_size: int
    rollouts: int
    seconds: float
    """Wall time of the rollouts."""
    warnings: list[str]
    choices: list[str]
    """Settings that the algorithm chose itself, and why."""
    agents: list[AgentReport]
    uncaptured: list[UncapturedReport]
    overrides: list[OverrideReport]
    rewards: RewardReport
    rows: RowReport | None
    costs: CostReport
    memory: MemoryReport | None
    time: TimeReport | None
    missing: list[str]
    """What is unknown, and why."""
    folder: str | None
    """Where the rollouts are kept for `lightspan inspect`."""

    @property
    def failure(self) -> str:
        """Why the dry run shows nothing: every rollout failed, or every call of the agents that
        would be trained. Empty otherwise."""
        rewards = self.rewards
        if rewards.failed + rewards.lost == rewards.rollouts:
            first = f", the first: {rewards.failures[0]}" if rewards.failures else ""
            return f"all {rewards.rollouts} rollouts failed{first}"
        selected = [agent for agent in self.agents if agent.policy is not None]
        calls = sum(agent.calls for agent in selected)
        errors = [
            reason
            for agent in selected
            for reason in agent.rejected
            if reason.code in (Rejection.ERROR, Rejection.REFUSED)
        ]
        if calls and calls == sum(reason.calls for reason in errors):
            return f"all {calls} calls of the agents that would be trained failed: {errors[0].text}"
        return ""

    def text(self) -> str:
        """Return the report for people: warnings first, then a section for each question."""
        return render(self)

    def json(self) -> dict[str, Any]:
        """Return the report for programs, as plain values that `json.dumps` takes."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if self.memory is not None:
            plain["memory"] |= {"total_bytes": self.memory.total_bytes, "fits": self.memory.fits}
        if self.time is not None:
            plain["time"]["total_s"] = self.time.total_s
        return plain

    def write(self, path: Path | None) -> str:
        """Write the JSON and return what to print: the text, or the JSON for `STDOUT`.

        Raises:
            DataError: the file cannot be written. The text is printed first: it took minutes.
        """
        if path == STDOUT:
            # ASCII: a terminal may know no more. DEL is ASCII too, and would be written out.
            return json.dumps(self.json(), indent=2).replace("\x7f", "\\u007f")
        if path is not None:
            try:
                text = json.dumps(self.json(), indent=2, ensure_ascii=False)
                path.write_text(f"{text}\n", encoding="utf-8")
            except (OSError, UnicodeError) as error:
                print_line(self.text())
                reason = getattr(error, "strerror", None) or str(error)
                raise DataError(
                    f"--json {path} cannot be written: {reason}; give another path"
                ) from error
        return self.text()
