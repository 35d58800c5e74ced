"""Views: what a store says of rollouts, judged by the run's own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from lightspan.algorithms.recorded_attempts import RecordedAttempt
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.lightning.selection import Coverage, Rejection, classify_calls
from lightspan.schema.records import Mode, RolloutState
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import make_routing
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Scored, with_reward


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout, its episode, and what was made of each of its calls."""

    state: RolloutState
    episode: Episode
    coverage: Coverage
    step: int
    """That trained it; where none did, that began it."""
    explanations: Mapping[str, Explanation]
    """`attempt/call/choice` → what the learner was told."""
    mismatches: Mapping[str, str] = field(default_factory=dict)
    """`attempt/call/choice` → why the learner could not compute it under its grammar."""

    def mismatch(self, call: Call) -> str | None:
        return self.mismatches.get(_key(self.episode.attempt_id, call))

    def explanation(self, call: Call) -> Explanation | None:
        return self.explanations.get(_key(self.episode.attempt_id, call))


_DECLARABLE: Final = (Rejection.CONSTRAINED, Rejection.TRUNCATED_SAMPLING)
"""What is trained where engine and learner both declare it."""
_EVERY_AGENT: Final = make_routing({"*": "policy"}, None, "policy", None)


def view_of(recorded: RecordedAttempt) -> RolloutView:
    """The view of an attempt of production: every call of it is rejected, and says why."""
    coverage = classify_calls(recorded.episode, _EVERY_AGENT)
    return RolloutView(recorded.state, recorded.episode, coverage, recorded.state.rollout.step, {})


async def read_views(
    run: RunFolder,
    store: Store,
    config: Mapping[str, Any],
    states: Sequence[RolloutState],
    rewards: Mapping[str, Scored] | None,
) -> list[RolloutView]:
    """What became of these rollouts, judged by the run's settings; unclaimed ones are left out.

    Args:
        run: keeps the explanations.
        store: the run's.
        config: the run's settings (`RunFolder.read_config`).
        states: the rollouts, as `Store.rollouts` gives them.
        rewards: see `trained_rewards`.
    """
    ids = [state.rollout.rollout_id for state in states]
    attempts = {attempt.rollout_id: attempt for attempt in await store.attempts(ids)}
    attempt_ids = [attempt.attempt_id for attempt in attempts.values()]
    spans, records = await store.spans(attempt_ids), await store.token_records(attempt_ids)
    routings = {
        resources_id: routing_of(await store.get_resources(resources_id) if resources_id else {})
        for resources_id in {state.rollout.resources_id for state in states}
    }
    taken = run.taken()
    steps = [taken.get(s.rollout.group_id or "", s.rollout.step) for s in states]
    by_step = {step: run.explanations(step) for step in set(steps)}
    mismatches = {step: run.mismatches(step) for step in by_step}
    explained = {step for step in by_step if run.is_explained(step)}
    views = []
    for state, step in zip(states, steps, strict=True):
        attempt = attempts.get(state.rollout.rollout_id)
        if attempt is None:
            continue
        episode = build_episode(
            attempt,
            state.rollout,
            spans.get(attempt.attempt_id, []),
            records.get(attempt.attempt_id, []),
            failure_reward=config.get("failure_reward"),
        )
        if rewards is not None:
            episode = with_reward(
                episode,
                rewards.get(episode.rollout_id),
                failure_reward=config.get("failure_reward"),
            )
        judge = partial(
            classify_calls,
            episode,
            routings[state.rollout.resources_id],
            max_length=config.get("max_length"),
            step_rewards=bool(config.get("step_rewards")),
        )
        explanations, unfit = by_step[step], mismatches[step]
        # with overlap the step that began a group is done long before the group is trained
        waits = taken and state.rollout.mode is Mode.TRAIN and state.rollout.group_id not in taken
        is_explained = step in explained and not waits
        coverage = _consumed(judge, explanations, unfit, is_explained=is_explained)
        views.append(RolloutView(state, episode, coverage, step, explanations, unfit))
    return views


def trained_rewards(run: RunFolder, config: Mapping[str, Any]) -> dict[str, Scored] | None:
    """Rollout id → the reward that was learned from; None where that was the app's own."""
    given = config.get("reward")
    return run.rewards(str(given.get("name"))) if isinstance(given, dict) else None


def _consumed(
    judge: Callable[..., Coverage],
    explanations: Mapping[str, Explanation],
    mismatches: Mapping[str, str],
    *,
    is_explained: bool,
) -> Coverage:
    """The coverage, with calls that no update of their step learned from as rejected. A step that
    is not done yet, or whose algorithm explains nothing, is left as it is.

    Args:
        judge: `classify_calls` of the episode.
        explanations: of what the step's updates learned from.
        mismatches: what the learner could not compute under its grammar.
        is_explained: whether the step said what it learned from, be it nothing.
    """
    coverage = judge()
    if not is_explained and not mismatches:
        return coverage
    # what engine and learner declared is not noted: what was learned from says it
    widest, known = judge(supported=_DECLARABLE), explanations.keys() | mismatches.keys()
    entries = tuple(
        wide if _key(coverage.attempt_id, wide.call) in known else entry
        for entry, wide in zip(coverage.entries, widest.entries, strict=True)
    )
    coverage = replace(coverage, entries=entries)
    keys = {call.key: _key(coverage.attempt_id, call) for call in coverage.trained}
    unfit = (key for key, name in keys.items() if name in mismatches)
    coverage = coverage.reject(dict.fromkeys(unfit, Rejection.GRAMMAR_MISMATCH))
    if not is_explained:
        return coverage
    unused = (key for key, name in keys.items() if name not in known)
    return coverage.reject(dict.fromkeys(unused, Rejection.UNUSED))


def _key(attempt_id: str, call: Call) -> str:
    return f"{attempt_id}/{call.call_id}/{call.choice}"
