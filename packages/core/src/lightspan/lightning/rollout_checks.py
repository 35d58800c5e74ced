"""Health: what a person has to hear of rollouts: failures, missing rewards, unknown agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from lightspan.errors import RewardError, UnknownAgentError, UnsupportedError
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.selection import Coverage, Rejection, check_agents
from lightspan.lightning.uncaptured_advice import asked, fix_of
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.provenance import requests_of
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.reward import LARGEST
from lightspan.schema.routing import Route, Routing
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome

FAILURE_WARNING: Final = 0.05
"""Share of failed rollouts above which a batch warns (design law 4)."""
ENOUGH_TASKS: Final = 4
"""Tasks of which no call can be trained, or none is scored, after which training stops; or all, if
there are fewer."""
NAMED: Final = 5
"""Tasks, or reasons, that are named; the others are counted."""
MAX_CAPTURE_ERROR_LENGTH: Final = 600
"""Characters of what an attempt is damaged by, advice included."""
MAX_REASON_LENGTH: Final = 300
"""Characters of what a call failed with."""
WAY_OUT: Final = (
    "base_url=llm.base_url and api_key=llm.api_key, where `llm` is an argument that the app asks "
    "for, and the agent's name as the model; or use the OpenAI SDK"
)
"""How any client is pointed at the attempt's endpoint."""


class Health:
    """Looks at every batch of rollouts, and notes what is odd.

    Args:
        routing: whose patterns have to match an agent.
        note: where notes go.
        agents: every agent path, where the app declares them: they were checked before.
    """

    def __init__(
        self, routing: Routing, note: Callable[[str], None], agents: Sequence[str] | None = None
    ) -> None:
        self._routing = routing
        self._note = note
        self._seen: set[str] = set()
        self._agents_checked = agents is not None
        self._calls_checked = False
        self._called = False
        self._untrainable_tasks: set[str] = set()
        self._unscored_tasks: set[str] = set()
        """Those that a note has named."""
        self._capture_errors_noted = False

    def look(self, episodes: Sequence[Episode]) -> None:
        """Note what is odd.

        Raises:
            RewardError: the app returned something that is no reward.
            UnknownAgentError: after the first training batch, a pattern matches no agent.
            UnsupportedError: so far no call of an agent to train was one that can be trained
                (`check_trainable`), in several tasks or in all.
        """
        check_rewards(episodes)
        self._failures(episodes)
        self._damaged(episodes)
        self._unscored(episodes)
        self._seen |= seen_agents(episodes)
        trained = any(episode.mode is Mode.TRAIN for episode in episodes)
        if trained and not self._agents_checked:
            check_seen(self._routing, self._seen, episodes)
            self._agents_checked = True
        is_dry_run = any(episode.mode is Mode.DEV for episode in episodes)  # it says so itself
        if not self._calls_checked and not is_dry_run:
            self._calls_checked = self._trainable(episodes)

    def _trainable(self, episodes: Sequence[Episode]) -> bool:
        """`check_trainable`, which speaks of tasks: one that holds a picture stops no training of
        others. It raises when it is so of several, or of all.

        Where nothing is trained, rollouts without any call after others with some say nothing of
        the client: the app had nothing to ask, or a cache of its own answered.
        """
        silent = not any(episode.calls for episode in episodes)
        if silent and self._called and not self._routing.serves:
            return False
        self._called = self._called or not silent
        try:
            return check_trainable(self._routing, episodes)
        except UnsupportedError as error:
            fresh = {episode.task_id for episode in episodes} - self._untrainable_tasks
            self._untrainable_tasks |= fresh
            if len(self._untrainable_tasks) >= ENOUGH_TASKS or not fresh:
                raise
            self._note(str(error))
            return False

    def _failures(self, episodes: Sequence[Episode]) -> None:
        failed = [episode for episode in episodes if app_failed(episode)]
        lost = [episode for episode in episodes if not episode.finished]
        for what, affected in (("failed", failed), ("were lost", lost)):
            if len(affected) > FAILURE_WARNING * len(episodes):
                why = Counter(str(episode.outcome) for episode in affected).most_common(1)[0][0]
                self._note(
                    f"{100 * len(affected) / len(episodes):.0f} % of the rollouts {what} (mostly "
                    f"{why}; for example task {affected[0].task_id}: {affected[0].message[:200]})"
                )

    def _damaged(self, episodes: Sequence[Episode]) -> None:
        """The first ones, however few, and whenever there are many."""
        damaged = [episode for episode in episodes if episode.capture_errors]
        if not damaged or (
            self._capture_errors_noted and len(damaged) <= FAILURE_WARNING * len(episodes)
        ):
            return
        self._capture_errors_noted = True
        error = damaged[0].capture_errors[0][:MAX_CAPTURE_ERROR_LENGTH]
        self._note(
            f"{len(damaged)} of {plural(len(episodes), 'rollout')} are damaged, so not trained "
            f"(for example task {damaged[0].task_id}: {error})"
        )

    def _unscored(self, episodes: Sequence[Episode]) -> None:
        """Each task is named once, or a long run would name the same ones at every step. Failures
        have a note of their own."""
        fresh = {
            episode.task_id: episode
            for episode in episodes
            if episode.reward is None
            and episode.finished
            and not app_failed(episode)
            and episode.task_id not in self._unscored_tasks
        }
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
    """Whether the app failed (not the infrastructure under it)."""
    return episode.finished and episode.outcome is not Outcome.OK


def check_rewards(episodes: Sequence[Episode]) -> None:
    """Raise `RewardError` if an app returned something that is no reward."""
    for episode in episodes:
        if episode.outcome is Outcome.BAD_REWARD:
            raise RewardError(f"task {episode.task_id}: {episode.message}")


def check_scored(
    episodes: Sequence[Episode], unscored: set[str], *, step_rewards: bool = False
) -> bool:
    """Whether there was a reward to learn from. False: not yet.

    Args:
        unscored: tasks that had none so far; those of these rollouts are added.
        step_rewards: rewards on calls count too.

    Raises:
        RewardError: no rollout of several tasks had one, or none of all there are.
    """
    ended = [episode for episode in episodes if episode.finished and not app_failed(episode)]
    if any(episode.scored(step_rewards) for episode in episodes):
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


def check_seen(routing: Routing, seen: Iterable[str], episodes: Sequence[Episode]) -> None:
    """Check that every pattern matches an agent that was seen; where none was, say why instead.

    Raises:
        UnknownAgentError: a pattern matches no agent.
    """
    seen = set(seen)
    try:
        check_agents(routing, seen)
    except UnknownAgentError:
        if seen:
            raise
        raise UnknownAgentError(why_no_call(episodes)) from None


def check_trainable(routing: Routing, episodes: Sequence[Episode]) -> bool:
    """Whether a call of an agent to train was answered by its policy. False: none was, for reasons
    that may not last.

    Raises:
        UnsupportedError: none was, and none ever will be; it says why.
    """
    whys: Counter[tuple[str, str | None]] = Counter()
    for episode in episodes:
        for call in episode.calls:
            if not routing.target(call.agent_path).selected:
                continue
            why = None if episode.capture_errors else why_never(call, episode.mode)
            if why is None and call.outcome is CallOutcome.OK:
                return True
            whys[call.agent_path, why] += 1
    if not whys:
        return _check_called(episodes)
    if any(why is None for _, why in whys):
        return False
    named = [
        f"{agent}: {plural(count, 'call')} {why}" for (agent, why), count in whys.most_common()
    ]
    more = f"; and {len(named) - NAMED} more reasons" if len(named) > NAMED else ""
    raise UnsupportedError(
        f"no call of the agents to train can be trained: {'; '.join(named[:NAMED])}{more}"
    )


def check_computed(coverages: Sequence[Coverage]) -> bool:
    """Whether a call of an agent to train was sampled as engine and learner both compute it. False:
    there was none at all.

    Raises:
        UnsupportedError: all were sampled under a grammar, so that nothing would ever be learned.
    """
    rejections = [entry.rejection for coverage in coverages for entry in coverage.selected]
    if rejections and all(each is Rejection.CONSTRAINED for each in rejections):
        raise UnsupportedError(
            f"no call of the agents to train can be trained: all {plural(len(rejections), 'call')} "
            f"{Rejection.CONSTRAINED.text} (a response format, a strict or a forced tool), which "
            "engine and learner do not both compute (trainable_grammar): use the embedded engine "
            "and the torch learner, or ask for plain text"
        )
    return bool(rejections)


def _check_called(episodes: Sequence[Episode]) -> bool:
    """The same where no agent to train called: raise if nobody else did in training either."""
    is_evaluation = any(episode.mode is Mode.VAL for episode in episodes)
    calls = any(
        episode.calls or not episode.finished or episode.capture_errors for episode in episodes
    )
    failed = any(map(app_failed, episodes))  # before it called, perhaps
    if calls or failed or is_evaluation or not episodes:
        return False
    raise UnsupportedError(why_no_call(episodes))


def why_never(call: Call, mode: Mode) -> str | None:
    """Why no call like this one can be trained, for people ("by …", "refused: …"); None: nothing is
    known against it."""
    if call.span is None:
        return None
    if is_unseen(call):
        return str(client_of(call.span))
    if call.refused is None:
        return None
    code = call.span.attributes.get(c.ERROR_TYPE)
    # a prompt may be short another time; what sampling cannot do is only refused out of training
    if code in (c.CONTEXT_OVERFLOW, c.CHAT_ONLY):  # or of the dry run's own endpoint
        return None
    lasts = mode is not Mode.VAL or code == c.UNSUPPORTED_CONTENT
    return f"refused: {refusal_of(call.span)}" if lasts else None


def is_unseen(call: Call) -> bool:
    """Whether the call went past the gateway."""
    ended = call.outcome in (CallOutcome.OK, CallOutcome.ERROR)
    is_elsewhere = call.sequence_start is None and call.record is None
    return ended and is_elsewhere and call.route in (Route.APP, None)


class UnseenClient(NamedTuple):
    """Who made a call that went past the gateway; what is not known is empty."""

    name: str
    host: str
    fix: str

    def __str__(self) -> str:
        at = f" at {self.host}" if self.host else ""
        fix = self.fix or f"give it {WAY_OUT}"
        return f"by {self.name or 'a client'}{at}, which lightspan does not see: {fix}"


def client_of(span: Span) -> UnseenClient:
    """Who made a call that went past the gateway, as its span says."""
    known = span.attributes
    host, port = str(known.get(c.SERVER_ADDRESS, "")), known.get(c.SERVER_PORT)
    host = f"{host}:{port}" if host and port is not None else host
    return UnseenClient(str(known.get(c.CLIENT, "")), host, str(known.get(c.CLIENT_FIX, "")))


def refusal_of(span: Span) -> str:
    """What the gateway refused a call for, and what to do, for people."""
    said = span.status_message[:MAX_REASON_LENGTH]
    if span.attributes.get(c.ERROR_TYPE) != c.UNSUPPORTED_CONTENT:
        return said
    return (
        f"{said}. Take such parts out of what this agent sends, or leave it out of optimize= and "
        "let a model that reads them answer it (frozen=)"
    )


def why_no_call(episodes: Sequence[Episode]) -> str:
    """Why rollouts made no model call that was seen, for people."""
    failed = [episode for episode in episodes if episode.outcome is not Outcome.OK]
    silent = (
        "the app made no model call through the OpenAI SDK in its own process, nor to "
        "OPENAI_BASE_URL"
    )
    way_out = f"Give another client (LiteLLM, httpx, requests) or process {WAY_OUT}"
    past = requests_of(span for episode in episodes for span in episode.spans)
    if past:
        named = list(past)[:NAMED]
        silent += f"; it asked {', '.join(map(asked, named))}, which lightspan does not see"
        way_out = ". ".join(dict.fromkeys(f"For {one.client}, {fix_of(one)}" for one in named))
    if not failed:
        return f"{silent} (rollouts: {len(episodes)}). {way_out}"
    every = len(failed) == len(episodes)
    count = f"all {len(failed)}" if every else f"{len(failed)} of {len(episodes)}"
    first = f"{failed[0].outcome}: {failed[0].message[:300]}".rstrip(": ")
    rest = "" if every else f"; in the others {silent}"
    return f"no model call was seen: {count} rollouts failed, the first: {first}{rest}"


def seen_agents(episodes: Sequence[Episode]) -> set[str]:
    """Paths of every agent that acted or called a model."""
    paths = {call.agent_path for episode in episodes for call in episode.calls}
    for episode in episodes:
        agents = (span for span in episode.spans if span.kind is SpanKind.AGENT)
        paths |= {str(span.attributes[c.AGENT_PATH]) for span in agents}
    return paths


def _why_unscored(episode: Episode) -> str:
    if episode.unscored:
        return episode.unscored
    if episode.reward_source is None:
        if any(call.reward is not None for call in episode.calls):
            return 'rewards were emitted on calls only, which credit="discounted" pays for'
        return "the app returned None and emitted no reward"
    return f"NaN, infinity or more than {LARGEST:g} was {episode.reward_source}"
