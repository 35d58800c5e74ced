"""LightningRL's pure part: what attempts recorded goes in, what a learner is trained on comes out.

No I/O, no clock, no torch. Each arrow is a function, linear in its input and free of recursion:

    spans, token records
      │ build_episode         `episode`: calls in causal order, each with its agent and rewards
      ▼
    Episode
      │ classify_calls        `selection`: every call is trained, frozen or rejected for a reason
      ▼
    Coverage
      │ trained_transitions   `transitions`: the trained calls, each with its turn
      ▼
    Transitions ── `credit`, `air` ──► credits, returns ── `advantages`, `baselines` ──► advantages
      │ build_rows            `rows`: merged by exact token prefix
      ▼
    Rows

`build_batch` (`batch`) does everything after `classify_calls`, for the episodes of one optimiser
step. Beside the arrows: `returns` are for statistics, `gae` estimates advantages from a critic's
values, `length_penalty` lowers the reward of answers that are too long, `states` is the state of a
call, `history` what AIR's signals read, `transcript` what a judge reads, `merge_diagnostics` says
why a conversation became several rows, `rollout_checks` warns about a batch (`uncaptured_advice`:
about requests outside the SDKs), `span_tree` is for display.

Worked example: one task, two rollouts. In the first, a writer's call (prompt 1 2, sampled 3) is
followed by a second call whose prompt repeats all of that, so both make one row. The second rollout
has one call, and fails.

    >>> from lightspan.lightning import BatchConfig, Selection, build_batch, build_episode
    >>> from lightspan.lightning import classify_calls
    >>> from lightspan.schema.records import Attempt, AttemptStatus, Outcome, Rollout
    >>> from lightspan.schema.reward import Reward
    >>> from lightspan.schema.token_records import TokenRecord
    >>> def record(attempt, call, prompt, response, sequence):
    ...     return TokenRecord.create(
    ...         prompt_ids=prompt, response_ids=response, logprobs=[-0.5] * len(response),
    ...         versions=[(1, len(response))], attempt_id=attempt, call_id=call, choice=0,
    ...         policy="sql", agent_path="writer", sequence_start=sequence,
    ...         sequence_end=sequence + 1,
    ...     )
    >>> def episode(name, reward, records):
    ...     rollout = Rollout(rollout_id="ro-" + name, task={}, task_id="t", group_id="g")
    ...     attempt = Attempt(
    ...         attempt_id="at-" + name, rollout_id=rollout.rollout_id, number=1, epoch=1,
    ...         status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK, reward=Reward(reward),
    ...     )
    ...     return build_episode(attempt, rollout, [], records)
    >>> good = episode("a", 1.0, [
    ...     record("at-a", "c1", [1, 2], [3], 1), record("at-a", "c2", [1, 2, 3, 4], [5, 6], 3),
    ... ])
    >>> bad = episode("b", 0.0, [record("at-b", "c3", [1, 2], [7], 1)])
    >>> routing = Selection.of({"writer": "sql"}).routing
    >>> coverages = [classify_calls(rollout, routing) for rollout in (good, bad)]
    >>> coverages[0].counts()
    {'trained': 2}
    >>> batch = build_batch([good, bad], coverages, BatchConfig(estimator="dr_grpo"))
    >>> for row in batch.rows:
    ...     print(row.ids, row.mask.count(True), row.call_ids)
    [1, 2, 3, 4, 5, 6] 3 (('c1', 0), ('c2', 0))
    [1, 2, 7] 1 (('c3', 0),)

The first rollout is half above the mean, and each of its three trained tokens carries a third of
its weight, 1 / R with R = 2:

    >>> print(batch.explanations["at-a", "c2", 0])
    advantage +0.5 = (1 - 0.5) / 1; dr_grpo over 2 rollouts (group g, this one 1); credit 1 \
(terminal); share 66.7% of the rollout: 2 tokens of weight 0.166667 (rollout)
    >>> batch.weight_mass()
    1.0
"""

from lightspan.lightning.advantages import (
    ESTIMATORS,
    BaselineScale,
    Estimator,
    Explanation,
    Observation,
    Resampling,
    Unit,
    ZeroReason,
    dr_grpo,
    groups_without_variance,
    grpo,
    needs_resampling,
    normalise,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from lightspan.lightning.air import (
    AIR,
    Shaping,
    Signal,
    ToolError,
    ToolSuccess,
    ValidArguments,
    check_air,
    potential_rewards,
    shape,
)
from lightspan.lightning.batch import (
    WEIGHTS,
    Batch,
    BatchBuilder,
    BatchConfig,
    Weight,
    build_batch,
    draft_batch,
    split_minibatches,
)
from lightspan.lightning.credit import (
    ATGRPO,
    GAE,
    Anchor,
    Credit,
    Discounted,
    GiGPO,
    Terminal,
    anchor,
    assign,
    discounted,
    parse_credit,
    terminal,
)
from lightspan.lightning.episode import Call, CallKey, EmittedReward, Episode, build_episode
from lightspan.lightning.gae import (
    DEFAULT_LAMBDA,
    explained_variance,
    gae,
    interval_successors,
    successors,
    values_by_call,
    warmup_lambda,
)
from lightspan.lightning.history import History, PlacedTool, ToolCall, Trace
from lightspan.lightning.length_penalty import Overlong, overlong_metrics, overlong_penalties
from lightspan.lightning.merge_diagnostics import (
    Break,
    CallMessages,
    Cause,
    Merging,
    Relation,
    read_merging,
)
from lightspan.lightning.returns import group_rewards
from lightspan.lightning.rows import Row, RowBuild, build_rows, merge, usable_transitions
from lightspan.lightning.selection import (
    CallCoverage,
    CallStatus,
    Coverage,
    Rejection,
    Selection,
    check_agents,
    classify_calls,
    parse_optimize,
)
from lightspan.lightning.span_tree import SpanNode, SpanTree, build_tree, walk
from lightspan.lightning.states import State, StateKey
from lightspan.lightning.transitions import (
    Transition,
    TransitionKey,
    interval_depths,
    trained_transitions,
    turn_depths,
)

__all__ = [
    "AIR",
    "ATGRPO",
    "DEFAULT_LAMBDA",
    "ESTIMATORS",
    "GAE",
    "WEIGHTS",
    "Anchor",
    "BaselineScale",
    "Batch",
    "BatchBuilder",
    "BatchConfig",
    "Break",
    "Call",
    "CallCoverage",
    "CallKey",
    "CallMessages",
    "CallStatus",
    "Cause",
    "Coverage",
    "Credit",
    "Discounted",
    "EmittedReward",
    "Episode",
    "Estimator",
    "Explanation",
    "GiGPO",
    "History",
    "Merging",
    "Observation",
    "Overlong",
    "PlacedTool",
    "Rejection",
    "Relation",
    "Resampling",
    "Row",
    "RowBuild",
    "Selection",
    "Shaping",
    "Signal",
    "SpanNode",
    "SpanTree",
    "State",
    "StateKey",
    "Terminal",
    "ToolCall",
    "ToolError",
    "ToolSuccess",
    "Trace",
    "Transition",
    "TransitionKey",
    "Unit",
    "ValidArguments",
    "Weight",
    "ZeroReason",
    "anchor",
    "assign",
    "build_batch",
    "build_episode",
    "build_rows",
    "build_tree",
    "check_agents",
    "check_air",
    "classify_calls",
    "discounted",
    "dr_grpo",
    "draft_batch",
    "explained_variance",
    "gae",
    "group_rewards",
    "groups_without_variance",
    "grpo",
    "interval_depths",
    "interval_successors",
    "merge",
    "needs_resampling",
    "normalise",
    "overlong_metrics",
    "overlong_penalties",
    "parse_credit",
    "parse_optimize",
    "potential_rewards",
    "read_merging",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "shape",
    "split_minibatches",
    "successors",
    "terminal",
    "trained_transitions",
    "turn_depths",
    "usable_transitions",
    "values_by_call",
    "walk",
    "warmup_lambda",
]
