"""What a run's store says of its rollouts, judged by the run's own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightspan.folders import RunFolder
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.lightning.selection import Coverage, Rejection, cover
from lightspan.recorded import Seen
from lightspan.records import RolloutState
from lightspan.resources import routing_of
from lightspan.routing import make_routing
from lightspan.store import Store


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout, its episode, and what was made of each of its calls."""

    state: RolloutState
    episode: Episode
    coverage: Coverage
    explanations: Mapping[str, Explanation]
    """`attempt/call/choice` → what the learner was told."""

    def explanation(self, call: Call) -> Explanation | None:
        return self.explanations.get(_key(self.episode.attempt_id, call))


_EVERY_AGENT: Final = make_routing({"*": "policy"}, None, "policy", None)


def view_of(seen: Seen) -> RolloutView:
    """An attempt of production: every call of it is rejected, and says why."""
    return RolloutView(seen.state, seen.episode, cover(seen.episode, _EVERY_AGENT), {})


async def read_views(
    run: RunFolder, store: Store, config: Mapping[str, Any], states: Sequence[RolloutState]
) -> list[RolloutView]:
    """What became of these rollouts, judged by the run's settings; unclaimed ones are left out.

    Args:
        run: for the explanations that it keeps.
        store: of the run.
        config: of the run (`RunFolder.read_config`).
        states: of `Store.rollouts`.
    """
    ids = [state.rollout.rollout_id for state in states]
    attempts = {attempt.rollout_id: attempt for attempt in await store.attempts(ids)}
    attempt_ids = [attempt.attempt_id for attempt in attempts.values()]
    spans, records = await store.spans(attempt_ids), await store.token_records(attempt_ids)
    routings = {
        resources_id: routing_of(await store.get_resources(resources_id) if resources_id else {})
        for resources_id in {state.rollout.resources_id for state in states}
    }
    explained = {step: run.explanations(step) for step in {s.rollout.step for s in states}}
    views = []
    for state in states:
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
        coverage = cover(
            episode,
            routings[state.rollout.resources_id],
            max_length=config.get("max_length"),
            step_rewards=_step_rewards(config),
        )
        told = explained[state.rollout.step]
        views.append(RolloutView(state, episode, _consumed(coverage, told), told))
    return views


def _consumed(coverage: Coverage, told: Mapping[str, Explanation]) -> Coverage:
    """The coverage, without what no update of the step was told of. A step that is not done yet, or
    whose algorithm explains nothing, is left as it is."""
    if not told:
        return coverage
    unused = (c.key for c in coverage.trained if _key(coverage.attempt_id, c) not in told)
    return coverage.reject(dict.fromkeys(unused, Rejection.UNUSED))


def _key(attempt_id: str, call: Call) -> str:
    return f"{attempt_id}/{call.call_id}/{call.choice}"


def _step_rewards(config: Mapping[str, Any]) -> bool:
    """Whether rewards on calls counted. Runs that did not note it are judged by the rule's name."""
    noted = config.get("step_rewards")
    return config.get("credit", "terminal") != "terminal" if noted is None else bool(noted)
