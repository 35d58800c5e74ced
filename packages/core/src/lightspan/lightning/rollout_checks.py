"""Check rollouts for failures, missing rewards, unknown agents and calls that cannot be trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Final, NamedTuple

from lightspan.errors import AppError, RewardError, UnknownAgentError, UnsupportedError
from lightspan.lightning.episode import Call, Episode, policy_calls
from lightspan.lightning.selection import (
    Coverage,
    Rejection,
    check_agents,
    sub_agent_patterns,
    unknown_agents,
)
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.reward import LARGEST
from lightspan.schema.routing import Route, Routing, matches
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome

FAILURE_WARNING: Final = 0.05
"""Share of failed, lost or damaged rollouts of a batch above which they are reported."""
ENOUGH_TASKS: Final = 4
"""Number of tasks without a trainable call, or without a reward, after which training stops; if
there are fewer tasks, it stops after all of them."""
ENOUGH_ROLLOUTS: Final = 16
"""Number of rollouts that fail alike, in two batches or more, after which training stops although
a model had answered in them, or in earlier ones."""
NAMED: Final = 5
"""Maximum number of tasks or reasons in a message; of further ones it gives only the number."""
MAX_CAPTURE_ERROR_LENGTH: Final = 600
"""Maximum characters of a capture error in a message, including advice."""
MAX_REASON_LENGTH: Final = 300
"""Maximum characters of the gateway's reason for a refused call."""
WAY_OUT: Final = (
    "base_url=llm.base_url and api_key=llm.api_key, where `llm` is an argument that the app asks "
    "for, and the agent's name as the model; or use the OpenAI SDK"
)
"""Advice on how to point any client at the attempt's endpoint."""
_DECLARE: Final = "name all agents: fit(…, agents=[…])"


def is_silent(episode: Episode, routing: Routing) -> bool:
    """Return whether an app finished without a call that reached a trained policy."""
    is_whole = episode.finished and not episode.capture_errors and not app_failed(episode)
    return is_whole and not policy_calls(episode, routing)


class RolloutChecks:
    """Checks of each batch of rollouts, which print a message for each problem.

    Args:
        routing: routing of the agents; each of its patterns must match an agent.
        note: function that prints a message for the user.
        agents: paths of all agents; None if the app does not declare them. If they are declared, an
            agent to train may make its first call in a later step.
    """

    def __init__(
        self, routing: Routing, note: Callable[[str], None], agents: Sequence[str] | None = None
    ) -> None:
        self.needs_rewards = True
        """Whether rollouts without a reward are reported."""
        self.defers_failures = False
        """Whether the caller reports failures, by `note_failures`, for all parts of a batch."""
        self._routing = routing
        self._note = note
        self._agents: set[str] = set()
        self._callers: set[str] = set()
        self._declared = agents
        self.agents_checked = False
        """Whether the patterns were checked, so that they are not checked again."""
        self._calls_checked = False
        self._untrainable_tasks: set[str] = set()
        self._unscored_tasks: set[str] = set()
        """Tasks that a message about missing rewards has named so far."""
        self._capture_errors_noted = False
        self._alike: list[Sequence[Episode]] = []
        """The latest batches in which all rollouts failed, in the same way."""
        self._has_succeeded = False

    def check(self, episodes: Sequence[Episode]) -> None:
        """Report problems of a batch of rollouts.

        Raises:
            AppError: the app failed in the same way in all of the latest rollouts.
            RewardError: all of the latest rollouts were lost, or have no reward for the same
                reason.
            UnknownAgentError: in the first training batch in which a rollout ended well, a pattern
                matches no agent that calls a model; or in such an evaluation before it, of
                `ENOUGH_TASKS` tasks or more, no pattern of `optimize=` matches any agent.
            UnsupportedError: in `ENOUGH_TASKS` tasks or in all tasks, the agents to train made no
                call, or no call that can be trained (`check_trainable`).
        """
        self.note_failures([] if self.defers_failures else episodes)
        self._note_damaged(episodes)
        if self.needs_rewards:
            self._note_unscored(episodes)
        self._callers |= callers_of(episodes)
        agents = (s for e in episodes for s in e.spans if s.kind is SpanKind.AGENT)
        self._agents |= self._callers | {str(span.attributes[c.AGENT_PATH]) for span in agents}
        trained = any(episode.mode is Mode.TRAIN for episode in episodes)
        if trained and not self.agents_checked:
            self.agents_checked = check_patterns(
                self._routing, self._declared, self._agents, self._callers, episodes
            )
        is_unknown = not (self.agents_checked or self._declared)
        unreached = why_unreached(self._routing, self._agents, episodes) if is_unknown else ""
        if trained and unreached:
            self._note(unreached)
        is_val = len(episodes) >= ENOUGH_TASKS and all(e.mode is Mode.VAL for e in episodes)
        if is_val and self._agents and is_unknown and not unreached:
            selected = [rule.pattern for rule in self._routing.rules if rule.target.selected]
            if selected and selected == self._routing.unmatched(self._agents):
                check_agents(self._routing, self._agents)
        if any(episode.mode is Mode.DEV for episode in episodes):
            return  # a dry run reports untrainable calls and failures itself
        self._calls_checked = self._calls_checked or self._trainable(episodes)
        self._check_alike(episodes, unreached)

    def _check_alike(self, episodes: Sequence[Episode], unreached: str) -> None:
        """Raise an error, with `unreached`, if all of the latest rollouts failed in the same way.

        The error comes later if a model had answered, or if rollouts succeeded before. Then the
        next answers or prompts may work, so more rollouts are awaited.

        Raises:
            AppError: the app failed.
            RewardError: the rollouts were lost or not scored.
        """
        ways = {_way_of_failure(episode) for episode in episodes}
        self._has_succeeded = self._has_succeeded or None in ways
        batches = [batch for batch in self._alike if {_way_of_failure(batch[0])} == ways]
        self._alike = [] if None in ways or len(ways) != 1 else [*batches, episodes]
        if not self._alike:
            return
        failed = [episode for batch in self._alike for episode in batch]
        tasks, earlier = ({e.task_id for e in part} for part in (failed, chain(*batches)))
        first, is_app = failed[0], app_failed(failed[0])
        is_early = not (self._has_succeeded or any(map(_is_answered, failed)))
        is_enough = len(failed) >= ENOUGH_ROLLOUTS and len(self._alike) > 1
        if (len(tasks) < ENOUGH_TASKS and tasks != earlier) or not (
            is_early or is_enough or not first.finished
        ):
            return
        can_answer = is_app and not is_early
        advice = ". If an answer can cause it, return a low reward for it" if can_answer else ""
        raise (AppError if is_app else RewardError)(
            f"the latest {plural(len(failed), 'rollout')}, of {plural(len(tasks), 'task')}, all "
            f"{'failed alike' if is_app else 'are unscored'} ({first.outcome}), so there is "
            f"nothing to learn from. The first, of task {first.task_id}: "
            f"{_error_of(first)}{advice}{f'; {unreached}' if unreached else ''}"
        )

    def _trainable(self, episodes: Sequence[Episode]) -> bool:
        """Return whether any call of an agent to train can be trained.

        At first the error is printed and not raised: one task with a picture, for example, must not
        stop the training of the other tasks.

        Raises:
            UnsupportedError: `ENOUGH_TASKS` tasks, or all tasks, have no trainable call.
        """
        try:
            if check_trainable(self._routing, episodes):
                return True
            is_train = any(episode.mode is Mode.TRAIN for episode in episodes)
            if is_train and (reason := _why_idle(self._routing, callers_of(episodes), episodes)):
                raise UnsupportedError(reason)
            return False
        except UnsupportedError as error:
            fresh = {episode.task_id for episode in episodes} - self._untrainable_tasks
            self._untrainable_tasks |= fresh
            if len(self._untrainable_tasks) >= ENOUGH_TASKS or not fresh:
                raise
            self._note(str(error))
            return False

    def note_failures(self, episodes: Sequence[Episode]) -> None:
        """Report that many rollouts of a batch failed or were lost."""
        failed = [episode for episode in episodes if app_failed(episode)]
        lost = [episode for episode in episodes if not episode.finished]
        for what, affected in (("failed", failed), ("were lost", lost)):
            if len(affected) > FAILURE_WARNING * len(episodes):
                why = Counter(str(episode.outcome) for episode in affected).most_common(1)[0][0]
                runners = {episode.runner for episode in affected}
                is_one = len(runners) == 1 < len({episode.runner for episode in episodes})
                where = f", all on runner {affected[0].runner}" if is_one else ""
                self._note(
                    f"{100 * len(affected) / len(episodes):.0f} % of the rollouts {what}{where} "
                    f"(mostly {why}; for example task {affected[0].task_id}: {affected[0].message})"
                )

    def _note_damaged(self, episodes: Sequence[Episode]) -> None:
        """Print a message if rollouts of the batch have recording errors.

        After the first message, another is printed only for a batch with many such rollouts.
        """
        damaged = [episode for episode in episodes if episode.capture_errors]
        is_rare = len(damaged) <= FAILURE_WARNING * len(episodes)
        if not damaged or (self._capture_errors_noted and is_rare):
            return
        self._capture_errors_noted = True
        error = damaged[0].capture_errors[0][:MAX_CAPTURE_ERROR_LENGTH]
        self._note(
            f"{len(damaged)} of {plural(len(episodes), 'rollout')} are damaged, so not trained "
            f"(for example task {damaged[0].task_id}: {error})"
        )

    def _note_unscored(self, episodes: Sequence[Episode]) -> None:
        """Report tasks without a usable reward, each task only once in a run.

        Rollouts whose app failed are left out, because `note_failures` reports them.
        """
        ended = [e for e in episodes if e.reward is None and e.finished and not app_failed(e)]
        fresh = {e.task_id: e for e in ended if e.task_id not in self._unscored_tasks}
        if not fresh:
            return
        self._unscored_tasks |= fresh.keys()
        named = [f"{task} ({_why_unscored(e)})" for task, e in list(fresh.items())[:NAMED]]
        more = f" and {len(fresh) - NAMED} more tasks" if len(fresh) > NAMED else ""
        self._note(
            f"no usable reward, so unscored, which is not zero: {', '.join(named)}{more}; a task "
            "is named once"
        )


def app_failed(episode: Episode) -> bool:
    """Return whether the app failed; False for failures of the infrastructure."""
    return episode.finished and episode.outcome is not Outcome.OK


def failed_with_reward(episode: Episode) -> bool:
    """Return whether the app failed after it had given a reward, which counts."""
    return app_failed(episode) and episode.reward_source != "failure" and episode.reward is not None


def _is_answered(episode: Episode) -> bool:
    return any(call.outcome is CallOutcome.OK for call in episode.calls)


def _way_of_failure(episode: Episode) -> tuple[str, ...] | None:
    """Return a key that is equal for rollouts that failed in the same way.

    It contains the outcome and the error. If a model had answered, errors are compared by their
    texts, without words that contain digits. If not, errors are compared by their types only. None
    for a rollout that did not fail or was cancelled.
    """
    if episode.outcome in (Outcome.OK, Outcome.CANCELLED) and not episode.unscored:
        return None
    if not episode.finished:
        return ("lost",)
    text = re.sub(r"\w*\d\w*", "#", _error_of(episode))
    return str(episode.outcome), text if _is_answered(episode) else text.partition(":")[0]


def _error_of(episode: Episode) -> str:
    return episode.message or episode.unscored or str(episode.outcome)


def check_evaluable(episodes: Sequence[Episode], *, is_whole: bool = False) -> None:
    """Raise `UnsupportedError` if a call was refused because of a request parameter.

    Evaluations refuse a parameter that they cannot apply, because they sample as the app asks.
    Training may ignore it.

    Args:
        episodes: episodes of an evaluation.
        is_whole: whether they are all of its episodes. Then it is also an error if every call was
            refused for any reason but a prompt that is too long, because no model was asked.
    """
    calls = [call for episode in episodes for call in episode.recorded_calls]
    refused = [call.span for call in calls if call.span and call.refused is not None]
    is_none = is_whole and len(refused) == len(calls)
    for span in refused:
        code, path = span.attributes.get(c.ERROR_TYPE), span.attributes.get(c.AGENT_PATH)
        what = f"evaluations sample as the app asks, so they refuse a call of {path}"
        if is_none and code not in (c.UNSUPPORTED_PARAMETER, c.CONTEXT_OVERFLOW):
            what = f"the gateway refused all {plural(len(calls), 'call')} of an evaluation"
        elif code != c.UNSUPPORTED_PARAMETER:
            continue
        raise UnsupportedError(f"{what}: {refusal_of(span)}")


def check_scored(
    episodes: Sequence[Episode], unscored: set[str], *, step_rewards: bool = False
) -> bool:
    """Return whether any rollout has a reward.

    Args:
        episodes: episodes of a batch.
        unscored: ids of the tasks without a reward so far; tasks of this batch are added to it.
        step_rewards: whether rewards on calls count.

    Raises:
        RewardError: no rollout of `ENOUGH_TASKS` tasks, or of all tasks, had a reward so far.
    """
    ended = [episode for episode in episodes if episode.finished and not app_failed(episode)]
    if any(e.scored(step_rewards) and e.reward_source != "failure" for e in episodes):
        return True
    fresh = {episode.task_id for episode in ended} - unscored
    unscored |= fresh
    if not ended or (fresh and len(unscored) < ENOUGH_TASKS):
        return False
    reasons = Counter(map(_why_unscored, ended))
    why = ", ".join(f"{reason} ({count} of {len(ended)})" for reason, count in reasons.items())
    raise RewardError(
        f"no rollout has a reward, so there is nothing to learn from: {why}. Return a number from "
        "the app, or call lightspan.emit_reward(number)"
    )


def check_patterns(
    routing: Routing,
    declared: Collection[str] | None,
    agents: Collection[str],
    callers: Collection[str],
    episodes: Sequence[Episode],
) -> bool:
    """Return whether each pattern of `optimize=` matches an agent that has called a model.

    Args:
        routing: routing with the patterns.
        declared: paths of all agents, which may make their first call later; None if unknown.
        agents: paths of the agents seen so far.
        callers: paths of the agents that have called a model so far.
        episodes: episodes of a batch. If no agent was seen, the error explains why these episodes
            have no recorded call.

    Raises:
        UnknownAgentError: a pattern matches no agent. Or it matches only agents that leave all
            calls to their sub-agents. Or `declared` is None, and no agent that the pattern matches
            has called a model. Not raised if `declared` is None and no episode ended well, because
            its agents may act later.
    """
    if not declared and all(map(is_cut, episodes)):
        return False
    if not (declared or agents) and (routing.rules or routing.serves):
        raise UnknownAgentError(why_no_call(episodes))
    cut = 0 if declared else sum(map(is_cut, episodes))
    hint = f". {cut} of {len(episodes)} rollouts did not end well: mend that first, or {_DECLARE}"
    check_agents(routing, declared or agents, hint if cut else "")
    for rule in (each for each in routing.rules if not any(map(each.matches, callers))):
        # `*` is for the agents that no other pattern names
        others = [r for r in routing.rules if r is not rule and r.pattern.strip("*")]
        inside = [path for path in callers if not any(other.matches(path) for other in others)]
        if narrower := sub_agent_patterns(rule.pattern, inside):
            calling = sorted(path for path in inside if any(matches(n, path) for n in narrower))
            raise UnknownAgentError(
                f"{rule.pattern!r} matches no agent that calls a model itself: the calls are made "
                f"by its sub-agents {', '.join(map(repr, calling[:NAMED]))}, which it does not "
                f"match. Name {' and '.join(map(repr, narrower))} in its place"
            )
    if declared is None and (reason := _why_idle(routing, callers, episodes)):
        raise UnknownAgentError(f"{reason}. If it acts in few rollouts, {_DECLARE}")
    return not routing.unmatched(callers)


def why_unreached(routing: Routing, agents: Collection[str], episodes: Sequence[Episode]) -> str:
    """Return a message about patterns that match no agent seen, as no episode ended well.

    Empty if no agent was seen, if a rollout ended well, or if every pattern of `optimize=` matches
    one of `agents`.
    """
    names = routing.unmatched(agents)
    why = f"not reached yet, as no rollout ended well: {unknown_agents(names, sorted(agents))}; "
    why += f"checked once one does. To check the names before any rollout, {_DECLARE}"
    return why if agents and names and all(map(is_cut, episodes)) else ""


def _why_idle(routing: Routing, callers: Collection[str], episodes: Sequence[Episode]) -> str:
    """Return a message about the patterns of `optimize=` that match no agent that called a model.

    Empty if every pattern matches one, if no agent at all called a model, or if a failure may be
    the reason.
    """
    patterns = routing.unmatched(callers)
    if not patterns or not callers or any(map(is_cut, episodes)):
        return ""
    return (
        f"no agent that {' or '.join(map(repr, patterns))} matches made a model call in the first "
        f"rollouts ({len(episodes)}), only {', '.join(map(repr, sorted(callers)[:NAMED]))}. If it "
        f"calls a model by another client, give that one {WAY_OUT}"
    )


def is_cut(episode: Episode) -> bool:
    """Return whether a failure may have ended the episode before its model calls."""
    return app_failed(episode) or not episode.finished or bool(episode.capture_errors)


def check_trainable(routing: Routing, episodes: Sequence[Episode]) -> bool:
    """Return whether any call of an agent to train can be trained.

    False if no call can be trained now, but later calls may be. Always True if the gateway serves
    no agent.

    Raises:
        UnsupportedError: no call can be trained, for permanent reasons. Or no agent called a model,
            although all rollouts have finished without errors and none belongs to an evaluation.
    """
    if not routing.serves:
        return True
    whys: Counter[tuple[str, str | None]] = Counter()
    for episode in episodes:
        for call in episode.recorded_calls:
            if not routing.target(call.agent_path).selected:
                continue
            why = None if episode.capture_errors else why_never(call, episode.mode)
            if why is None and call.outcome is CallOutcome.OK:
                return True
            whys[call.agent_path, why] += 1
    if not whys:
        is_evaluation = any(episode.mode is Mode.VAL for episode in episodes)
        if is_evaluation or not episodes or callers_of(episodes) or any(map(is_cut, episodes)):
            return False
        raise UnsupportedError(why_no_call(episodes))
    if any(why is None for _, why in whys):
        return False
    named = [f"{agent}: {plural(n, 'call')} {why}" for (agent, why), n in whys.most_common()]
    more = f"; and {len(named) - NAMED} more reasons" if len(named) > NAMED else ""
    raise UnsupportedError(
        f"no call of the agents to train can be trained: {'; '.join(named[:NAMED])}{more}"
    )


def check_computed(coverages: Sequence[Coverage]) -> bool:
    """Return whether the agents to train made any call.

    Raises:
        UnsupportedError: all of their calls were sampled under a grammar (such as a response
            format), which the engine, the learner or both do not support.
    """
    rejections = [entry.rejection for coverage in coverages for entry in coverage.selected]
    if rejections and set(rejections) == {Rejection.CONSTRAINED}:
        raise UnsupportedError(
            f"no call of the agents to train can be trained: all {plural(len(rejections), 'call')} "
            f"{Rejection.CONSTRAINED.text} (a response format, a strict or a forced tool), which "
            "engine and learner do not both compute (trainable_grammar): use the embedded engine "
            "and the torch learner, or ask for plain text"
        )
    return bool(rejections)


def why_never(call: Call, mode: Mode) -> str | None:
    """Return why calls like `call` can never be trained; None if later calls may be trainable.

    The result is a phrase. It names the client that bypasses the gateway ("by …"), or gives the
    reason of the gateway's refusal ("refused: …").

    Args:
        call: a call that was not trained.
        mode: mode of its rollout.
    """
    if call.span is None:
        return None
    if is_uncaptured(call):
        return str(client_of(call.span))
    if call.refused is None:
        return None
    code = call.span.attributes.get(c.ERROR_TYPE)
    # another prompt may be shorter or have other images, and some features are refused outside
    # training only
    if code in (c.CONTEXT_OVERFLOW, c.CHAT_ONLY, c.INVALID_IMAGE):
        return None
    is_permanent = mode is not Mode.VAL or code == c.UNSUPPORTED_CONTENT
    return f"refused: {refusal_of(call.span)}" if is_permanent else None


def is_uncaptured(call: Call) -> bool:
    """Return whether the call bypassed the gateway, so that its tokens are unknown."""
    ended = call.outcome in (CallOutcome.OK, CallOutcome.ERROR)
    is_elsewhere = call.sequence_start is None and call.record is None
    return ended and is_elsewhere and call.route in (Route.APP, None)


class UncapturedClient(NamedTuple):
    """A client whose model call bypassed the gateway, with advice; unknown fields are empty."""

    name: str
    host: str
    fix: str

    def __str__(self) -> str:
        at = f" at {self.host}" if self.host else ""
        fix = self.fix or f"give it {WAY_OUT}"
        return f"by {self.name or 'a client'}{at}, which lightspan does not see: {fix}"


def client_of(span: Span) -> UncapturedClient:
    """Return the client of a call that bypassed the gateway, from the call's span."""
    attributes = span.attributes
    host, port = str(attributes.get(c.SERVER_ADDRESS, "")), attributes.get(c.SERVER_PORT)
    host = f"{host}:{port}" if host and port is not None else host
    name, fix = attributes.get(c.CLIENT, ""), attributes.get(c.CLIENT_FIX, "")
    return UncapturedClient(str(name), host, str(fix))


def refusal_of(span: Span) -> str:
    """Return why the gateway refused the call of `span`, with advice for unsupported content."""
    reason = span.status_message[:MAX_REASON_LENGTH]
    if span.attributes.get(c.ERROR_TYPE) != c.UNSUPPORTED_CONTENT:
        return reason
    return (
        f"{reason}. Take such parts out of what this agent sends, or leave it out of optimize= and "
        "let a model that reads them answer it (frozen=)"
    )


def why_no_call(episodes: Sequence[Episode]) -> str:
    """Return an explanation, with advice, why `episodes` have no recorded model call."""
    failed = [episode for episode in episodes if episode.outcome is not Outcome.OK]
    silent = (
        "the app made no model call through the OpenAI SDK in its own process, nor to "
        "OPENAI_BASE_URL"
    )
    way_out = f"Give another client (LiteLLM, httpx, requests) or process {WAY_OUT}"
    if not failed:
        spans = (span for episode in episodes for span in episode.spans)
        ends = (s.status_message for s in spans if s.attributes.get(c.COMMAND_STATUS))
        ended = next((f". The first: {text}" for text in ends), "")
        return f"{silent} (rollouts: {len(episodes)}){ended}. {way_out}"
    is_all = len(failed) == len(episodes)
    count = f"all {len(failed)}" if is_all else f"{len(failed)} of {len(episodes)}"
    first = f"{failed[0].outcome}: {failed[0].message}".rstrip(": ")
    rest = "" if is_all else f"; in the others {silent}"
    return f"no model call was seen: {count} rollouts failed, the first: {first}{rest}"


def callers_of(episodes: Sequence[Episode]) -> set[str]:
    """Return the paths of the agents that called a model."""
    return {call.agent_path for episode in episodes for call in episode.recorded_calls}


def _why_unscored(episode: Episode) -> str:
    if episode.unscored:
        return episode.unscored
    if episode.reward_source is None:
        if any(call.reward is not None for call in episode.calls):
            return 'rewards were emitted on calls only, which credit="discounted" pays for'
        return "the app returned None and emitted no reward"
    return f"NaN, infinity or more than {LARGEST:g} was {episode.reward_source}"
