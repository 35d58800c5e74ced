r"""LightningRL's pure part: from the records of attempts to the rows that a learner trains on.

No I/O, no clock, no torch. Each arrow is a function, linear in its input and free of recursion:

    spans, token records
      │ build_episode         `episode`: calls in causal order, each with its agent and rewards
      ▼
    Episode
      │ classify_calls        `selection`: every call is trained, frozen or rejected for a reason
      ▼
    Coverage
      │ trained_transitions   `transitions`: the trained calls, each with its turn (`turns`)
      ▼
    Transitions ── `credit`, `air` ──► credits, returns ── `advantages`, `baselines` ──► advantages
      │ build_rows            `rows`: merged by exact token prefix
      ▼
    Rows

`prepare_batch` (`batch`) does everything after `classify_calls`, for the episodes of one optimiser
step. Further modules: `returns` sums rewards for statistics, `gae` estimates advantages from a
critic's values, `mixture` weighs them with a group's mean, `families` credits forks,
`length_penalty` penalises answers that are too long, `states` describes the state of a call,
`forks` finds the calls at which an attempt can be forked, `history` builds the input of `air`'s
signals, `rollout_checks` reports problems of a batch, `span_tree` builds a tree of spans for
display.

Worked example: one task, two rollouts. In the first, a writer's call (prompt 1 2, sampled 3) is
followed by a second call whose prompt repeats all of that, so both make one row. The second rollout
has one call, and fails.

    >>> from lightspan.lightning import BatchConfig, Selection
    >>> from lightspan.lightning import build_episode, classify_calls, prepare_batch
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
    >>> config = BatchConfig(estimator="dr_grpo")
    >>> batch = prepare_batch([good, bad], coverages, config).finish()
    >>> for row in batch.rows:
    ...     print(row.ids, row.mask.count(True), row.call_ids)
    [1, 2, 3, 4, 5, 6] 3 (('c1', 0), ('c2', 0))
    [1, 2, 7] 1 (('c3', 0),)

The first rollout's reward is 0.5 above the mean. With R = 2 rollouts, each rollout weighs 1 / R,
and each of the three trained tokens of the first rollout carries a third of that:

    >>> why = batch.explanations["at-a", "c2", 0]
    >>> why.advantage, why.credit, why.baseline, why.scale, why.tokens, round(why.share, 3)
    (0.5, 1.0, 0.5, 1.0, 2, 0.667)
    >>> sum(weight for row in batch.rows for weight in row.weights)
    1.0
"""

from lightspan.lightning.batch import Batch, BatchConfig, prepare_batch
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.lightning.rows import build_rows
from lightspan.lightning.selection import Coverage, Rejection, Selection, classify_calls
from lightspan.lightning.transitions import Transition, trained_transitions

__all__ = ["Batch", "BatchConfig", "Call", "Coverage", "Episode", "Rejection", "Selection"]
__all__ += ["Transition", "build_episode", "build_rows", "classify_calls", "prepare_batch"]
__all__ += ["trained_transitions"]
