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
from lightspan.lightning.selection import (
    CallCoverage,
    CallStatus,
    Coverage,
    Rejection,
    classify_calls,
)
from lightspan.schema.images import Image
from lightspan.schema.records import Mode, RolloutState
from lightspan.schema.resources import routing_of
from lightspan.schema.routing import Routing, make_routing
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
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of calls by digest, as far as they were read."""

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
    if why.mixture:
        terms = (f"{term.weight:g} · {term.credit:g} ({term.name})" for term in why.mixture)
        comparison += f", the mixture {why.predicted:g} = {' + '.join(terms)}"
    shaping = "" if why.shaping is None else f", AIR {why.shaping:+g}"
    shaping += f", length {why.penalty:+g}" if why.penalty else ""
    return (
        f"advantage {why.advantage:+.6g} = {formula}; {why.estimator} over {why.size} "
        f"{why.unit}s (group {why.group_id}, this one {why.value:g}); credit "
        f"{why.credit:g} ({why.credit_rule}{shaping}){comparison}; share {why.share:.1%} of "
        f"the rollout per policy: {why.tokens} tokens of weight {why.token_weight:.6g} "
        f"({why.weighting})"
    )


_DECLARABLE: Final = (Rejection.CONSTRAINED, Rejection.TRUNCATED_SAMPLING)
"""Reasons for rejection that do not apply if engine and learner declare that they support them."""
FORK: Final = "fork"
"""`algorithm` in the settings of continuations by `lightspan fork`."""
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
    """Return the views of a run's rollouts (`ViewReader`)."""
    return await ViewReader(run, store, config, rewards).read(states)


class ViewReader:
    """Reads the views of a run's rollouts in parts, of which each has to fit into memory.

    Args:
        run: folder of the run.
        store: store of the run.
        config: settings of the run (`RunFolder.read_config`).
        rewards: rollout id → score, from `trained_rewards`; None to use the rewards that the app
            itself recorded.
    """

    def __init__(
        self,
        run: RunFolder,
        store: Store,
        config: Mapping[str, Any],
        rewards: Mapping[str, Scored] | None,
    ) -> None:
        self._run = run
        self._store = store
        self._config = config
        self._rewards = rewards
        self._failure_reward = failure_rewards(run, config)
        self._trained_in = training_steps(run)
        lines = run.metrics()
        self._complete = {line["step"] for line in lines if line["kind"] == "train"}
        # The capabilities of engine and learner are not stored; the steps count what they rejected.
        rejected = {key for line in lines for key, count in line.items() if count}
        self._supported = [e for e in _DECLARABLE if f"calls/rejected:{e}" not in rejected]
        self._steps: dict[int, _StepFiles] = {}
        self._routings: dict[str, Routing] = {}

    def step_of(self, group_id: str, step: int) -> int:
        """Return the number of the step that trained a group, or else of the step that began it."""
        return self._trained_in.get(group_id, step)

    async def read(self, states: Sequence[RolloutState]) -> list[RolloutView]:
        """Return the views of rollouts. Rollouts that no runner ever started are left out."""
        states = [state for state in states if state.attempt_id is not None]
        episodes = await read_episodes(self._store, states)
        ids = {state.rollout.resources_id for state in states}
        for resources_id in ids - self._routings.keys():
            resources = await self._store.get_resources(resources_id) if resources_id else {}
            self._routings[resources_id] = routing_of(resources)
        steps = [self.step_of(s.rollout.group_id, s.rollout.step) for s in states]
        self._steps = {n: self._steps.get(n) or _StepFiles.read(self._run, n) for n in set(steps)}
        return [self._view(*each) for each in zip(states, episodes, steps, strict=True)]

    def _view(self, state: RolloutState, episode: Episode, step: int) -> RolloutView:
        rollout, files = state.rollout, self._steps[step]
        if self._rewards is not None:
            episode = with_reward(episode, self._rewards.get(episode.rollout_id))
        episode = score_failure(episode, self._failure_reward(rollout.mode, step))
        classify = partial(
            classify_calls,
            episode,
            self._routings[rollout.resources_id],
            max_length=self._config.get("max_length"),
            step_rewards=bool(self._config.get("step_rewards")),
            modes=(Mode.TRAIN, Mode.DEV),  # as the report of a dry run shows its calls
        )
        # With overlap, the step that began a group ends long before the group is trained.
        is_train = rollout.mode is Mode.TRAIN
        is_waiting = self._trained_in and is_train and rollout.group_id not in self._trained_in
        is_complete = step in self._complete and not is_waiting
        if rollout.mode is Mode.DEV:  # no update could use the calls
            coverage = classify(supported=self._supported)
            if self._config.get("algorithm") == FORK:
                reason = Rejection.MODE_NOT_TRAIN
                coverage = coverage.reject({call.key: reason for call in coverage.trained})
            return RolloutView(state, episode, coverage, step, {})
        coverage = _trained_coverage(
            classify,
            files.explanations if is_complete else {},
            files.mismatches,
            supported=self._supported,
            is_explained=files.is_explained or not is_complete,
        )
        return RolloutView(state, episode, coverage, step, files.explanations, files.mismatches)


@dataclass(frozen=True, slots=True)
class _StepFiles:
    """What a run stored of the calls of a step."""

    explanations: Mapping[str, Explanation]
    mismatches: Mapping[str, str]
    is_explained: bool
    """Whether the file of explanations exists; it may hold none."""

    @classmethod
    def read(cls, run: RunFolder, step: int) -> _StepFiles:
        exists = (run.path / EXPLANATIONS / f"step-{step:06d}.json").exists()
        return cls(run.explanations(step), run.mismatches(step), exists)


def failure_rewards(
    run: RunFolder, config: Mapping[str, Any]
) -> Callable[[Mode, int], float | None]:
    """Return a function that computes the reward which a failed rollout got in the run.

    Its arguments are the rollout's mode and step. It returns None if failed rollouts got no reward.
    With the setting `"lowest"`, it returns the value that the step recorded for its training
    rollouts. For an evaluation rollout, or if the step recorded none, it returns the lowest reward
    of the run before it, and for an evaluation rollout of the step too.
    """
    setting = config.get("failure_reward")
    if setting != "lowest":
        return lambda mode, step: setting
    lines = [line for line in run.metrics() if line.get("failure_reward") is not None]

    def lowest(mode: Mode, step: int) -> float:
        is_train = mode is Mode.TRAIN
        first = max(step, 1)  # those before the first step belong to a search
        own = [one for one in lines if one["step"] == first and one["kind"] in ("train", "search")]
        if is_train and own:
            return float(own[-1]["failure_reward"])
        past = [one for one in lines if one["step"] < step + (not is_train)]
        return float(min([0.0, *(one["failure_reward"] for one in past)]))

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
        _as_trained(wide) if _key(coverage.attempt_id, wide.call) in explained else entry
        for entry, wide in zip(coverage.entries, widest.entries, strict=True)
    )
    coverage = replace(coverage, entries=entries)
    keys = {call.key: _key(coverage.attempt_id, call) for call in coverage.trained}
    unfit = (key for key, name in keys.items() if name in mismatches)
    coverage = coverage.reject(dict.fromkeys(unfit, Rejection.GRAMMAR_MISMATCH))
    if not is_explained:
        return coverage
    unused = {key: Rejection.UNUSED for key, name in keys.items() if name not in explained}
    skipped = {
        key: Rejection.TARGET_KL
        for key, name in keys.items()
        if name in explanations and not explanations[name].token_weight
    }
    return coverage.reject(unused | skipped)


def _as_trained(entry: CallCoverage) -> CallCoverage:
    """Return the status of a call that has an explanation; distillation needs no reward."""
    if entry.rejection is not Rejection.UNSCORED:
        return entry
    return msgspec.structs.replace(entry, status=CallStatus.TRAINED, rejection=None)


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
