"""Data model of the report of a dry run, with its text and JSON forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import DataError
from lightspan.lightning.selection import Rejection
from lightspan.progress import print_line
from lightspan_tools.dry_run.rendering import render
from lightspan_tools.dry_run.replays import ReplayReport

STOPS: Final = ("fit would stop:", "no call would be trained")
"""How the warnings begin after which `fit` would stop, or would train nothing."""
STDOUT: Final = Path("-")
"""Path that prints the JSON in place of the text."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and maximum of some numbers."""

    mean: float
    max: int


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why calls would not be trained, with the number of calls to which it applies."""

    code: str
    """A value of `lightspan.lightning.Rejection`."""
    text: str
    calls: int


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one agent.

    Each call is counted once, as trained, frozen (answered by a model that is not trained) or
    rejected.
    """

    path: str
    policy: str | None
    """Policy that the agent trains; None if the agent is frozen."""
    route: str
    """Route of its calls in `fit`: `policy`, `base`, `shared`, `endpoint` or `app`."""
    goes_to: list[str]
    """Destinations of its calls: the policy, or `model at host` for each endpoint."""
    calls: int
    calls_per_rollout: float
    prompt_tokens: Spread | None
    """Prompt tokens per call; None if unknown."""
    response_tokens: Spread | None
    trained: int
    frozen: int
    rejected: list[Reason]
    unseen: list[str] = []
    """Calls of a trained agent that bypassed the gateway, by client, each with a hint."""
    retried: int = 0
    """Trained calls inside a block of the agent that ended in an error and was retried."""
    image_calls: int = 0
    """Calls with images in their messages."""
    images: int = 0
    """Number of different images in these calls."""
    image_tokens: Spread | None = None
    """Prompt tokens per image; None if unknown."""
    acted: bool = False
    """Whether a span of the agent was recorded."""
    failed: int = 0
    """Calls that ended in an error, if the agent keeps an endpoint of its own; else 0."""
    error: str = ""
    """The error of such a call."""
    side_calls: list[str] = []
    """Calls of a trained agent with another system prompt than most of its calls in the same
    rollouts, such as titles and summaries; each text has the prompt and advice."""


class UncapturedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of an agent to a model that were not recorded as calls.

    They did not go through the OpenAI or Anthropic SDK.
    """

    agent: str
    request: str
    """Description of the requests: model, host and client."""
    requests: int
    """Number of requests, with retries."""
    selected: bool
    """Whether the agent would be trained; if not, no change is needed."""
    fix: str


class OverrideReport(msgspec.Struct, frozen=True, kw_only=True):
    """A request field whose value from the app is changed in training."""

    agent: str
    field: str
    asked: Any
    used: Any
    """Value that training sends; None if training leaves the field out."""
    calls: int


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of the rollouts of one task."""

    task_id: str
    rewards: list[float | None]
    """Reward of each rollout; None if the rollout is unscored."""
    mean: float | None
    varies: bool
    """Whether the rewards of the group differ."""


class RewardReport(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of all rollouts."""

    rollouts: int
    scored: int
    failed: int
    """Number of rollouts on which the app failed, scored or not."""
    lost: int
    """Number of rollouts on which the infrastructure failed."""
    damaged: int
    """Number of rollouts with a capture error, which are never trained."""
    mean: float | None
    dimensions: dict[str, float]
    """Means of the named rewards."""
    dimension_counts: dict[str, float]
    """Numbers of the rollouts in these means, of those that some scored rollouts lack."""
    groups: list[GroupReport]
    failure_reward: float | str | None
    """Reward of failures: a number, `lowest`, or None if they are unscored."""
    by_batch: bool
    """Whether rollouts are compared with the batch or a critic in place of their group."""
    failures: list[str]
    """Reasons of failed, lost and damaged rollouts, with their numbers; the most frequent first."""
    reasons: dict[str, str] = {}
    """`failed`, `lost` or `damaged` → the most frequent reason, with its number."""

    @property
    def unscored(self) -> int:
        return self.rollouts - self.scored

    @property
    def varying(self) -> int:
        return sum(group.varies for group in self.groups)


class RowReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of calls and of rows (token sequences for training).

    A row contains one or more calls. Each call is counted once, as one of `merged`, `new`, `branch`
    and `broken`.
    """

    calls: int
    rows: int
    merged: int
    """Calls that extend a row."""
    new: int
    """Calls that begin a conversation."""
    branch: int
    """Calls that continue an earlier call whose row another call has already extended."""
    broken: int
    causes: dict[str, int]
    """Cause → number of broken calls."""
    one_row: dict[str, float]
    """Agent path → share of its calls in a rollout that are in one row, as the mean over the
    rollouts with several of its calls."""
    row_tokens: int
    """Number of tokens that the learner computes."""
    call_tokens: int
    """Number of tokens that the learner would compute without merging."""
    longest_row: int
    breaks: list[str]
    """Examples of broken calls with the first differing token."""
    repeated_tokens: int = 0
    """Tokens of rows that the breaks repeat, which the learner computes once more."""


class ToolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a tool."""

    name: str
    calls: int
    expected_calls: float
    """Expected calls in `fit`."""


class EndpointReport(msgspec.Struct, frozen=True, kw_only=True):
    """The calls to one model endpoint by agents that are not trained."""

    name: str
    """`model at host`."""
    agents: list[str]
    calls: int
    expected_calls: float
    """Expected calls in `fit`."""
    expected_prompt_tokens: float | None
    """Expected prompt tokens in `fit`; None if unknown."""
    expected_response_tokens: float | None
    """Expected answer tokens in `fit`; None if unknown."""


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of how often `fit` will call tools and model endpoints."""

    rollouts: int
    """Rollouts of `fit`, evaluations included."""
    plan: str
    """Calculation of `rollouts` as text."""
    tools: list[ToolReport]
    endpoints: list[EndpointReport]
    max_frozen_calls: int | None
    unreached: list[str] = []
    """Agents, or patterns of `frozen=`, whose calls go to an endpoint and that made none."""

    @property
    def expected_frozen_calls(self) -> float:
        return sum(endpoint.expected_calls for endpoint in self.endpoints)


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of the memory of `fit` on all devices together.

    Activations and logits are not included.
    """

    parts: dict[str, int]
    """Part → bytes."""
    free_bytes: int | None
    """Free memory of the trainer's device; None if unknown, or if parts are on other devices."""
    peak_bytes: int | None = None
    """Measured peak of the dry run's process, in bytes."""
    runner_bytes: int | None = None
    """Measured memory of all runner processes, in bytes."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        return None if self.free_bytes is None else self.total_bytes <= self.free_bytes


class DevReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a dry run."""

    lightspan: str
    app: str
    algorithm: str
    models: dict[str, str]
    """Policy → starting weights; empty if no policy would be trained."""
    tasks: int
    group_size: int
    rollouts: int
    seconds: float
    """Wall time of the rollouts, in seconds."""
    warnings: list[str]
    choices: list[str]
    """Settings that the algorithm chose, with reasons."""
    agents: list[AgentReport]
    uncaptured: list[UncapturedReport]
    overrides: list[OverrideReport]
    rewards: RewardReport
    rows: RowReport | None
    costs: CostReport
    memory: MemoryReport | None
    replays: ReplayReport | None
    """What happened when rollouts were repeated; None if none were."""
    missing: list[str]
    """Unknown parts of the report, with reasons."""
    folder: str | None
    """Folder of the rollouts for `lightspan inspect`; None if they were not kept."""

    @property
    def failure(self) -> str:
        """Return why the dry run is of no use; "" if it is of use.

        It is of no use if all rollouts failed, if every call of the agents that would be trained
        failed, or if `fit` would stop or train no call.
        """
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
        return next((text for text in self.warnings if text.startswith(STOPS)), "")

    def text(self) -> str:
        """Return the report as text: warnings first, then the sections."""
        return render(self)

    def __str__(self) -> str:
        return self.text()

    def json(self) -> dict[str, Any]:
        """Return the report as plain values for `json.dumps`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if self.memory is not None:
            plain["memory"] |= {"total_bytes": self.memory.total_bytes, "fits": self.memory.fits}
        return plain

    def write(self, path: Path | None) -> str:
        """Write the report to `path` as JSON, and return the text to print.

        With None, write no file. With `STDOUT`, write no file and return the JSON instead of the
        text.

        Raises:
            DataError: the file cannot be written. The text has been printed before.
        """
        if path == STDOUT:
            # ASCII only, for any terminal; json.dumps does not escape DEL, which is ASCII too.
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
