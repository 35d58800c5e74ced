"""Load stored rollouts with what was recorded, which of their calls are trained, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import msgspec

from lightspan.algorithms.recorded_attempts import RecordedAttempt
from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Call, Episode, score_failure
from lightspan.lightning.selection import Coverage, Rejection, classify_calls
from lightspan.schema.records import Mode, RolloutState
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import make_routing
from lightspan.stores.protocol import Store
from lightspan.training.collector import read_episodes
from lightspan.training.folder import EXPLANATIONS, REWARDS, TAKEN, RunFolder
from lightspan.training.rewards import Scored, with_reward


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout with its recorded spans and calls (its episode).

    `coverage` records for each call whether it was trained, and if not, why.
    """

    state: RolloutState
    episode: Episode
    coverage: Coverage
    step: int
    """Number of the step that trained the rollout, or else of the step that began it."""
    explanations: Mapping[str, Explanation]
    """`attempt/call/choice` → explanation of the advantage."""
    mismatches: Mapping[str, str] = field(default_factory=dict)
    """`attempt/call/choice` → why the learner could not compute the call under its grammar."""

    def explanation(self, call: Call) -> Explanation | None:
        """Return how the advantage of a call was computed; None if that was not recorded."""
        return self.explanations.get(_key(self.episode.attempt_id, call))

    def explanation_lines(self, call: Call) -> list[str]:
        """Return one line on how a call's advantage was computed, or why it could not be trained.

        Return no line if nothing was recorded about the call.
        """
        key = _key(self.episode.attempt_id, call)
        if key in self.explanations:
            return [explanation_text(self.explanations[key])]
        return [self.mismatches[key]] if key in self.mismatches else []


def explanation_text(why: Explanation) -> str:
    """Describe in one line how the advantage and the weight of a call were computed."""
    compared = why.credit if why.compared is None else why.compared
    formula = str(why.zero_reason or f"({compared:g} - {why.baseline:g}) / {why.scale:g}")
    for term in why.terms:
        weight = "" if term.weight == 1 else f"{term.weight:g} · "
        formula += f" + {weight}({term.credit:g} - {term.baseline:g}) / {term.scale:g}"
        formula += f" ({term.name})"
    comparison = ""
    if why.against != "rollouts":
        comparison = f", turn {why.turn}, others {why.against}: {why.others}"
    if why.expected is not None:
        comparison = f", turn {why.turn}, the critic expected {why.expected:g}"
    shaping = "" if why.shaping is None else f", AIR {why.shaping:+g}"
    shaping += f", length {why.penalty:+g}" if why.penalty else ""
    return (
        f"advantage {why.advantage:+.6g} = {formula}; {why.estimator} over {why.size} "
        f"{why.unit}s (group {why.group_id}, this one {why.value:g}); credit "
        f"{why.credit:g} ({why.credit_rule}{shaping}){comparison}; share {why.share:.1%} of "
        f"the rollout: {why.tokens} tokens of weight {why.token_weight:.6g} "
        f"({why.weighting})"
    )


_DECLARABLE: Final = (Rejection.CONSTRAINED, Rejection.TRUNCATED_SAMPLING)
"""Reasons for rejection that do not apply if engine and learner declare that they support them."""
_EVERY_AGENT: Final = make_routing({"*": "policy"}, None, "policy", None)


def view_of(recorded: RecordedAttempt) -> RolloutView:
    """Return the view of an attempt that was recorded in production.

    Its coverage shows every call as not trainable, because production records no token ids.
    """
    coverage = classify_calls(recorded.episode, _EVERY_AGENT)
    return RolloutView(recorded.state, recorded.episode, coverage, recorded.state.rollout.step, {})


async def read_views(
    run: RunFolder,
    store: Store,
    config: Mapping[str, Any],
    states: Sequence[RolloutState],
    rewards: Mapping[str, Scored] | None,
) -> list[RolloutView]:
    """Return the views of a run's rollouts. Rollouts that no runner ever started are left out.

    Args:
        run: folder of the run.
        store: store of the run.
        config: settings of the run (`RunFolder.read_config`).
        states: states of the rollouts, from `Store.rollouts`.
        rewards: rollout id → score, from `trained_rewards`; None to use the rewards that the app
            itself recorded.
    """
    attempts = await store.attempts([state.rollout.rollout_id for state in states])
    claimed = {attempt.rollout_id for attempt in attempts}
    states = [state for state in states if state.rollout.rollout_id in claimed]
    failure_reward = failure_rewards(run, config)
    episodes = await read_episodes(store, states)
    routings = {
        resources_id: routing_of(await store.get_resources(resources_id) if resources_id else {})
        for resources_id in {state.rollout.resources_id for state in states}
    }
    trained_in = training_steps(run)
    steps = [trained_in.get(s.rollout.group_id or "", s.rollout.step) for s in states]
    by_step = {step: run.explanations(step) for step in set(steps)}
    mismatches = {step: run.mismatches(step) for step in by_step}
    folder = run.path / EXPLANATIONS  # a file of a step may hold no explanation
    explained = {step for step in by_step if (folder / f"step-{step:06d}.json").exists()}
    lines = run.metrics()
    complete = {line["step"] for line in lines if line["kind"] == "train"}
    # The capabilities of engine and learner are not stored; the steps count what they rejected.
    rejected = {key for line in lines for key, count in line.items() if count}
    supported = [each for each in _DECLARABLE if f"calls/rejected:{each}" not in rejected]
    views = []
    for state, episode, step in zip(states, episodes, steps, strict=True):
        rollout = state.rollout
        if rewards is not None:
            episode = with_reward(episode, rewards.get(episode.rollout_id))
        episode = score_failure(episode, failure_reward(rollout.mode, step))
        classify = partial(
            classify_calls,
            episode,
            routings[rollout.resources_id],
            max_length=config.get("max_length"),
            step_rewards=bool(config.get("step_rewards")),
        )
        explanations, unfit = by_step[step], mismatches[step]
        # With overlap, the step that began a group ends long before the group is trained.
        is_waiting = (
            trained_in and rollout.mode is Mode.TRAIN and rollout.group_id not in trained_in
        )
        is_complete = step in complete and not is_waiting
        coverage = _trained_coverage(
            classify,
            explanations if is_complete else {},
            unfit,
            supported=supported,
            is_explained=step in explained or not is_complete,
        )
        views.append(RolloutView(state, episode, coverage, step, explanations, unfit))
    return views


def failure_rewards(
    run: RunFolder, config: Mapping[str, Any]
) -> Callable[[Mode, int], float | None]:
    """Return a function that computes the reward which a failed rollout got in the run.

    Its arguments are the rollout's mode and step. It returns None if failed rollouts got no reward.
    With the setting `"lowest"`, it returns the lowest reward of the run up to that step; for an
    evaluation rollout, rewards of the step's evaluation count too.
    """
    setting = config.get("failure_reward")
    if setting != "lowest":
        return lambda mode, step: setting
    lines = [line for line in run.metrics() if line.get("failure_reward") is not None]

    def lowest(mode: Mode, step: int) -> float:
        is_before = "train" if mode is Mode.TRAIN else ""
        past = [
            line["failure_reward"]
            for line in lines
            if line["step"] < step or (line["step"] == step and is_before in line["kind"])
        ]
        return float(min([0.0, *past]))

    return lowest


def trained_rewards(run: RunFolder, config: Mapping[str, Any]) -> dict[str, Scored] | None:
    """Return the rewards that the run was trained on: rollout id → score.

    Return None if the run was trained on the rewards that the app itself recorded.
    """
    reward = config.get("reward")
    return run.rewards(str(reward.get("name"))) if isinstance(reward, dict) else None


def _trained_coverage(
    classify: Callable[..., Coverage],
    explanations: Mapping[str, Explanation],
    mismatches: Mapping[str, str],
    *,
    supported: Collection[Rejection],
    is_explained: bool,
) -> Coverage:
    """Determine for each call of an episode whether it was trained, and if not, why.

    A call is rejected if the update left it out. This is known only if the step is not complete or
    stored explanations of its advantages (how each was computed). Otherwise such calls are shown as
    trained.

    Args:
        classify: `classify_calls` with the episode as its argument.
        explanations: call id → how the call's advantage was computed in this step.
        mismatches: call id → reason, for calls whose tokens the learner could not follow in their
            grammar.
        supported: reasons of `_DECLARABLE` for which no step of the run rejected a call.
        is_explained: whether the step stored explanations, even if there were none to store, or is
            not complete.
    """
    if not is_explained and not mismatches:
        return classify()
    coverage = classify(supported=supported if is_explained else ())
    widest, explained = classify(supported=_DECLARABLE), explanations.keys() | mismatches.keys()
    entries = tuple(
        wide if _key(coverage.attempt_id, wide.call) in explained else entry
        for entry, wide in zip(coverage.entries, widest.entries, strict=True)
    )
    coverage = replace(coverage, entries=entries)
    keys = {call.key: _key(coverage.attempt_id, call) for call in coverage.trained}
    unfit = (key for key, name in keys.items() if name in mismatches)
    coverage = coverage.reject(dict.fromkeys(unfit, Rejection.GRAMMAR_MISMATCH))
    if not is_explained:
        return coverage
    unused = (key for key, name in keys.items() if name not in explained)
    return coverage.reject(dict.fromkeys(unused, Rejection.UNUSED))


def _key(attempt_id: str, call: Call) -> str:
    return f"{attempt_id}/{call.call_id}/{call.choice}"


def training_steps(run: RunFolder) -> dict[str, int]:
    """Return the step that trained each group of rollouts, by group id.

    Only groups that were enqueued ahead are listed (`RunFolder.write_taken`). The result is empty
    if there are none.

    Raises:
        ConfigError: a file of a step is damaged.
    """
    steps: dict[str, int] = {}
    for path in sorted((run.path / TAKEN).glob("step-*.json")):
        try:
            groups = msgspec.json.decode(path.read_bytes(), type=list[str])
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
        steps |= dict.fromkeys(groups, int(path.stem.removeprefix("step-")))
    return steps


def reward_names(run: RunFolder) -> list[str]:
    """Return the names of the rewards that judges and functions gave in a run."""
    return sorted(path.stem for path in (run.path / REWARDS).glob("*.jsonl"))
