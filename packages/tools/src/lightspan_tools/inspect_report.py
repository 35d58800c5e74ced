"""What `lightspan inspect --json` writes: a run, a store of production, a rollout or calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightspan.algorithms.recorded_attempts import score_of_attempt
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.selection import CallCoverage
from lightspan.lightning.span_tree import walk
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Fork, Mode
from lightspan.schema.spans import Attributes
from lightspan.training.folder import RunFolder
from lightspan_tools.alerts import run_alerts
from lightspan_tools.overview import Overview
from lightspan_tools.pagination import Columns, Page, matching_rows, shown_rows
from lightspan_tools.rollout_view import RolloutView, reward_names
from lightspan_tools.sampling_overrides import overrides_of


class RowReport(Columns, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout of a run, or an attempt of production."""

    id: str
    status: str
    reward: float | None
    calls: dict[str, int]
    """Agent path → number of calls."""


class ListReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of calls, and the rows that the options choose."""

    total: int
    """Number of rollouts or attempts."""
    counted: int
    """Number of them whose calls are in the counts: `total`, unless a store is large."""
    agents: dict[str, int]
    """Agent path → number of calls."""
    calls: dict[str, int]
    """What became of calls → their number; in production their outcomes."""
    matching: int
    """Number of rows that pass the filters."""
    rows: list[RowReport]


class WarningReport(msgspec.Struct, frozen=True):
    """A warning about the training."""

    step: int
    text: str


class RewardReport(msgspec.Struct, frozen=True, kw_only=True):
    """A reward that judges or functions gave in a run."""

    scored: int
    unscored: int
    mean: float | None
    """Mean of the scored rollouts; None if there are none."""


class RunReport(ListReport, frozen=True, kw_only=True):
    """A run."""

    folder: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """Lines of `metrics.jsonl`."""
    warnings: list[WarningReport]
    rewards: dict[str, RewardReport]
    overridden: dict[str, int]
    """Field of the request that training overrode → number of calls."""
    one_row: dict[str, float]
    """Agent path → share of its calls in a rollout that are in one row, as the mean over the
    rollouts with several of its calls."""
    breaks: dict[str, int]
    """Cause → number of calls that continue a conversation but begin a new row."""


class StoreReport(ListReport, frozen=True, kw_only=True):
    """A store of production."""

    url: str
    services: dict[str, int]
    """Service → number of attempts."""
    others: int
    """Number of rollouts of trainings in the store."""


class SpanReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span of a rollout, in the order of its span tree."""

    id: str
    depth: int
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str
    status_message: str = ""
    attributes: Attributes = {}


class CallReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A choice of a model call."""

    call_id: str
    choice: int
    agent: str
    outcome: str
    status: str | None
    """Whether the call was trained; None in production, of which none is."""
    reason: str = ""
    """Why it was not trained."""
    explanation: Explanation | None = None
    """How its advantage was computed; None if that was not recorded."""
    advantage: float | None = None
    notes: list[str] = []
    repeats: int = 0
    """How often the SDK sent the request again."""
    replayed_from: str = ""
    """Id of the rollout that has the texts and tokens of a replayed call, under the same call id;
    empty for other calls."""
    overridden: dict[str, tuple[Any, Any]] = {}
    """Field of the request → (the app's value, the value used)."""
    policy: str = ""
    temperature: float | None = None
    versions: list[tuple[int, int]] = []
    """Pairs (version of the policy, number of response tokens)."""
    prompt_ids: list[int] = []
    """Filled only in the report of a call, as are the next fields."""
    response_ids: list[int] = []
    logprobs: list[float] = []
    messages: list[dict[str, Any]] = []
    """Input and output messages."""


class RolloutReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout of a run, or an attempt of production."""

    rollout_id: str
    attempt_id: str
    mode: str
    step: int
    task_id: str
    status: str
    runner: str
    """Name of the runner, with its host and process id; in production, the service."""
    reward: float | None
    reward_source: str | None
    dimensions: dict[str, float]
    fork: Fork | None
    """The attempt that the rollout repeats up to a call; None if it repeats none."""
    departed: str
    """Why the rollout is no fork of that attempt, although it was to be; empty otherwise."""
    unscored: str
    """Why there is no reward; empty if there is one."""
    message: str
    capture_errors: list[str]
    notes: list[str]
    coverage: dict[str, int]
    spans: list[SpanReport]
    calls: list[CallReport]


def run_report(
    run: RunFolder, config: Mapping[str, Any], overview: Overview, page: Page
) -> RunReport:
    """Return the report of a run."""
    metrics = run.metrics()
    alerts = run_alerts(metrics, run.evaluations(), overview.failure)
    return RunReport(
        folder=str(run.path),
        config=dict(config),
        metrics=metrics,
        warnings=[WarningReport(alert.step, alert.text) for alert in alerts],
        rewards={name: _reward_report(run, name) for name in reward_names(run)},
        overridden=dict(overview.overridden),
        one_row=overview.one_row_means,
        breaks=dict(overview.breaks_by_cause),
        **_list(overview, page),
    )


def store_report(overview: Overview, page: Page) -> StoreReport:
    """Return the report of a store of production."""
    services, others = dict(overview.services), overview.others
    return StoreReport(url=overview.url, services=services, others=others, **_list(overview, page))


def _reward_report(run: RunFolder, name: str) -> RewardReport:
    rewards = run.rewards(name).values()
    values = [reward.value for reward in rewards if reward.value is not None]
    mean = sum(values) / len(values) if values else None
    return RewardReport(scored=len(values), unscored=len(rewards) - len(values), mean=mean)


def _list(overview: Overview, page: Page) -> dict[str, Any]:
    """Return the fields of `ListReport`."""
    rows = [
        RowReport(
            id=row.row_id,
            status=row.status,
            reward=row.reward,
            calls=dict(row.agents),
            **msgspec.structs.asdict(row.columns),
        )
        for row in shown_rows(overview.rows, page)
    ]
    return {
        "total": len(overview.rows),
        "counted": overview.read,
        "agents": dict(overview.agents),
        "calls": dict(overview.calls),
        "matching": len(matching_rows(overview.rows, page)),
        "rows": rows,
    }


def rollout_report(view: RolloutView) -> RolloutReport:
    """Return the report of a rollout, or of an attempt of production."""
    episode, rollout = view.episode, view.state.rollout
    is_production = rollout.mode is Mode.PRODUCTION
    return RolloutReport(
        rollout_id=rollout.rollout_id,
        attempt_id=episode.attempt_id,
        mode=str(rollout.mode),
        step=view.step,
        task_id=rollout.task_id,
        status=str(view.state.status),
        runner=episode.runner,
        reward=score_of_attempt(episode) if is_production else episode.reward,
        reward_source=episode.reward_source,
        dimensions=dict(episode.dimensions),
        fork=rollout.fork,
        departed=episode.departed,
        unscored=str(episode.unscored or ""),
        message=episode.message,
        capture_errors=list(episode.capture_errors),
        notes=list(episode.notes),
        coverage=view.coverage.counts(),
        spans=[
            SpanReport(
                id=node.span.span_id,
                depth=depth,
                name=node.span.name,
                kind=str(node.span.kind),
                start_ns=node.span.start_ns,
                end_ns=node.span.end_ns,
                status=str(node.span.status),
                status_message=node.span.status_message,
                attributes=node.span.attributes,
            )
            for depth, node in walk(episode.tree)
        ],
        calls=call_reports(view, view.coverage.entries, with_tokens=False),
    )


def call_reports(
    view: RolloutView, entries: Sequence[CallCoverage], *, with_tokens: bool = True
) -> list[CallReport]:
    """Return the reports of choices of calls.

    Args:
        view: the rollout of the calls.
        entries: the choices.
        with_tokens: whether the tokens and messages are included.
    """
    return [_call_report(view, entry, with_tokens) for entry in entries]


def _call_report(view: RolloutView, entry: CallCoverage, with_tokens: bool) -> CallReport:
    call = entry.call
    is_production = view.state.rollout.mode is Mode.PRODUCTION
    attributes: Attributes = {} if call.span is None else call.span.attributes
    explanation = view.explanation(call)
    fields: dict[str, Any] = {}
    if (record := call.record) is not None:
        fields = {"policy": record.policy, "temperature": record.sampling.temperature}
        fields["versions"] = record.versions
    if with_tokens:
        inputs = genai_messages.input_messages_of(attributes)
        outputs = genai_messages.output_messages_of(attributes)
        fields["messages"] = [dict(message) for message in (*inputs, *outputs)]
        if record is not None:
            fields["prompt_ids"] = record.prompt_ids
            fields["response_ids"] = record.response_ids
            fields["logprobs"] = record.logprobs
    return CallReport(
        call_id=call.call_id,
        choice=call.choice,
        agent=call.agent_path,
        outcome=str(call.outcome),
        status=None if is_production else str(entry.status),
        reason="" if is_production else str(entry.reason or ""),
        explanation=explanation,
        advantage=None if explanation is None else explanation.advantage,
        notes=[] if explanation is not None else view.explanation_lines(call),
        repeats=int(str(attributes.get(c.CALL_REPEATS, 0))),
        replayed_from=str(attributes.get(c.REPLAYED_ROLLOUT, "")),
        overridden=overrides_of(attributes),
        **fields,
    )
