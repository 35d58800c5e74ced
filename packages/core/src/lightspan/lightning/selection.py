"""Selection: choose the agents to train, and find out which of their calls can be trained.

`classify_calls` puts each call of an episode into exactly one of three classes, so that no call is
dropped silently: *trained*, *frozen* (its agent is not selected) or *rejected* (its agent is
selected, but the call cannot be trained; the reason is a `Rejection`).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, UnknownAgentError
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.turns import Turns
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode
from lightspan.schema.routing import BASE_POLICY, Route, Routing, make_routing, matches
from lightspan.schema.semconv import UNNAMED_AGENT
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling

Frozen = str | LLM | Mapping[str, str | LLM | None] | None
"""Values of `frozen=` of `LightningRL`."""

MAX_NAME_LENGTH: Final = 100
"""Maximum bytes of a policy's name. File systems allow 255 bytes for a name, and lightspan adds a
prefix and a suffix.
"""


class CallStatus(StrEnum):
    """Class of a call: trained, frozen (its agent is not selected) or rejected."""

    TRAINED = "trained"
    FROZEN = "frozen"
    REJECTED = "rejected"


class Rejection(StrEnum):
    """Reason why a call of a selected agent is not trained; if several apply, only one is given."""

    _value_: str
    text: str
    """The reason in words."""

    def __new__(cls, value: str, text: str) -> Rejection:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    LATE = "late", "written after the attempt was sealed, or under a lost lease"
    MODE_NOT_TRAIN = "mode_not_train", "the rollout was not made for training"
    UNFINISHED = "unfinished", "the attempt is still running, was lost or was cancelled"
    DAMAGED = "damaged", "the attempt has a capture error"
    STALE = "stale", "sampled by weights that are too old"
    CANCELLED = "cancelled", "the client or the app left before the answer was complete"
    UNDELIVERED = "undelivered", "the answer never reached the app"
    RESAMPLED = "resampled", "sampled anew after a cancelled try whose tokens are gone: biased"
    REPLAYED = "replayed", "answered as in the attempt that the rollout repeats, which trains it"
    DEPARTED = "departed", "the attempt did not repeat the recorded one that it was forked from"
    REFUSED = "refused", "the gateway refused the request"
    ERROR = "error", "the call failed"
    NO_TOKENS = "no_tokens", "no tokens: not trainable; the call did not go through the gateway"
    OTHER_POLICY = "other_policy", "sampled by another policy than the one that the agent trains"
    EMPTY_RESPONSE = "empty_response", "no token was sampled"
    NO_LOGPROBS = "no_logprobs", "log-probabilities are missing or not finite"
    MALFORMED = "malformed", "the arrays of the token record differ in length"
    NO_IMAGE = "no_image", "the store does not have an image of the prompt"
    CONSTRAINED = "constrained", "sampled under a grammar or a forced tool choice"
    TEMPERATURE_ZERO = "temperature_zero", "decoded greedily, which has no policy gradient"
    TRUNCATED_SAMPLING = "truncated_sampling", "sampled under top-p or top-k"
    OUT_OF_CONTEXT = "out_of_context", "longer than the learner's longest sequence"
    RETRIED = "retried", "its agent ended in an error and was retried (failure_reward=None)"
    UNSCORED = "unscored", "the episode has no usable reward, which is not a reward of zero"
    GRAMMAR_MISMATCH = "grammar_mismatch", "its tokens break its grammar as the learner compiles it"
    TARGET_KL = "target_kl", "target_kl skipped its minibatch: the policy had moved further"
    UNUSED = (
        "unused",
        "no update has used it: its step has not ended, or was interrupted and repeated, "
        "the batch left it out, or its step searched for prompts",
    )


class CallCoverage(msgspec.Struct, frozen=True, gc=False):
    """Status of one call: whether it is trained, and why not."""

    call: Call
    status: CallStatus
    policy: str = ""
    """Policy that the agent's calls train; empty for a frozen agent."""
    rejection: Rejection | None = None

    @property
    def reason(self) -> str:
        """Why the call is not trained, in words; empty for a trained call."""
        if self.status is CallStatus.FROZEN:
            return f"agent {self.call.agent_path} is not selected"
        return self.rejection.text if self.rejection is not None else ""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Status of every call of an episode: trained, frozen or rejected.

    `classify_calls` creates it.
    """

    attempt_id: str
    entries: tuple[CallCoverage, ...]
    """Status of each call, in causal order, with late calls at the end."""
    step_rewards: bool = False
    """Whether the credit rule uses rewards on calls; then such rewards can score the episode."""

    @property
    def trained(self) -> list[Call]:
        return [entry.call for entry in self.entries if entry.status is CallStatus.TRAINED]

    @property
    def rejected(self) -> list[CallCoverage]:
        return [entry for entry in self.entries if entry.status is CallStatus.REJECTED]

    @cached_property
    def selected(self) -> list[CallCoverage]:
        """The calls of agents to train, whether trained or rejected.

        Calls that were recorded after the end of the attempt are left out, and replayed calls,
        which count where they were sampled.
        """
        return [entry for entry in self._made if entry.call.outcome is not CallOutcome.REPLAYED]

    @property
    def _made(self) -> list[CallCoverage]:
        """The selected calls, and the replayed calls of agents to train."""
        entries = [entry for entry in self.entries if entry.status is not _FROZEN]
        return [entry for entry in entries if entry.rejection is not Rejection.LATE]

    @cached_property
    def turns(self) -> Turns:
        """The selected calls with their turns, that is, their depths in the causal order.

        Replayed calls deepen the turns of the calls after them.
        """
        return Turns([entry.call for entry in self._made])

    def counts(self) -> dict[str, int]:
        """Return status → number of calls, the highest number first.

        The status is `trained`, `frozen` or `rejected:<reason>`.
        """
        counts = Counter(
            str(entry.status) if entry.rejection is None else f"rejected:{entry.rejection}"
            for entry in self.entries
        )
        return dict(counts.most_common())

    def reject(self, reasons: Mapping[CallKey, Rejection]) -> Coverage:
        """Return a copy in which the trained calls in `reasons` are rejected.

        Args:
            reasons: (call id, choice) → reason.
        """
        if not reasons:
            return self
        entries = tuple(
            CallCoverage(entry.call, CallStatus.REJECTED, entry.policy, reasons[entry.call.key])
            if entry.status is CallStatus.TRAINED and entry.call.key in reasons
            else entry
            for entry in self.entries
        )
        coverage = replace(self, entries=entries)
        vars(coverage)["turns"] = self.turns  # rejected calls stay selected
        return coverage


def classify_calls(
    episode: Episode,
    routing: Routing,
    *,
    supported: Collection[Rejection] = (),
    modes: Collection[Mode] = (Mode.TRAIN,),
    max_length: int | None = None,
    step_rewards: bool = False,
) -> Coverage:
    """Return the status of each call of the episode, including calls recorded after its end.

    Args:
        episode: the episode.
        routing: routing of agents to the policies that their calls train.
        supported: reasons for rejection that do not apply, because engine and learner both support
            such calls: `TRUNCATED_SAMPLING`, `CONSTRAINED`, both or none.
        modes: modes whose rollouts may be trained. A dry run adds `Mode.DEV`. `Mode.PRODUCTION` is
            never trained.
        max_length: maximum tokens of prompt and response that the learner accepts; None for no
            limit.
        step_rewards: whether the credit rule uses rewards on calls (`Credit.step_rewards`).
    """
    whole = _episode_rejection(episode, modes)
    unscored = None if episode.scored(step_rewards) else Rejection.UNSCORED
    check = _CallCheck(frozenset(supported), max_length)
    retried = episode.retried if episode.failure_reward is None else ()

    @cache  # matching patterns is the most expensive part, and an episode has few paths
    def policy_of(path: str) -> str | None:
        target = routing.target(path)
        return target.policy if target.route is Route.POLICY else None

    found = []
    for call in episode.calls:
        policy = policy_of(call.agent_path)
        # unscored comes last, because it would hide the reasons that concern the call itself
        reason = None if policy is None else whole or check.rejection(call, policy)
        if policy is not None and reason is None:
            reason = Rejection.RETRIED if call.key in retried else unscored
        found.append(_covered(call, policy, reason))
    late = Rejection.LATE
    found += [_covered(call, policy_of(call.agent_path), late) for call in episode.late_calls]
    return Coverage(attempt_id=episode.attempt_id, entries=tuple(found), step_rewards=step_rewards)


def _covered(call: Call, policy: str | None, reason: Rejection | None) -> CallCoverage:
    if policy is None:
        return CallCoverage(call, _FROZEN)
    return CallCoverage(call, _TRAINED if reason is None else CallStatus.REJECTED, policy, reason)


def _episode_rejection(episode: Episode, modes: Collection[Mode]) -> Rejection | None:
    # production is never trained: its calls were not sampled by the policy to train
    if episode.mode not in modes or episode.mode is Mode.PRODUCTION:
        return Rejection.MODE_NOT_TRAIN
    if not episode.finished:
        return Rejection.DEPARTED if episode.departed else Rejection.UNFINISHED
    return Rejection.DAMAGED if episode.capture_errors else None


# enum members as globals: attribute access on the class is slow, and each call reads them
_OK: Final = CallOutcome.OK
_CANCELLED: Final = FinishReason.CANCELLED
_TRAINED: Final = CallStatus.TRAINED
_FROZEN: Final = CallStatus.FROZEN


class _CallCheck(NamedTuple):
    """Checks whether a call can be trained, by the call's own data alone.

    Args:
        supported: reasons for rejection that do not apply, as in `classify_calls`.
        max_length: maximum tokens of prompt and response; None for no limit.
    """

    supported: frozenset[Rejection]
    max_length: int | None

    def rejection(self, call: Call, policy: str) -> Rejection | None:
        """Return why `call` cannot train `policy`; None if it can."""
        record = call.record
        if call.outcome is not _OK:
            return Rejection.REFUSED if call.refused is not None else Rejection[call.outcome.name]
        if record is None:
            return Rejection.NO_TOKENS
        if record.finish_reason is _CANCELLED:
            return Rejection.CANCELLED
        if record.policy != policy:
            return Rejection.OTHER_POLICY
        # ids are packed, four bytes each; only those of trained calls are unpacked
        size = len(record.response)
        if not size:
            return Rejection.EMPTY_RESPONSE
        if len(record.logprob_data) != size:
            return Rejection.NO_LOGPROBS
        counts = [count for _, count in record.versions]  # of the tokens of each version
        if len(record.prompt) % 4 or 4 * sum(counts) != size or min(counts) < 1:
            return Rejection.MALFORMED
        if record.constrained and Rejection.CONSTRAINED not in self.supported:
            return Rejection.CONSTRAINED
        sampling = record.sampling
        if not sampling.temperature > 0:
            return Rejection.TEMPERATURE_ZERO
        if not sampling.exact and Rejection.TRUNCATED_SAMPLING not in self.supported:
            return Rejection.TRUNCATED_SAMPLING
        if self.max_length is not None and size + len(record.prompt) > 4 * self.max_length:
            return Rejection.OUT_OF_CONTEXT
        return None


# --- the user's selection ---------------------------------------------------------------------


def parse_optimize(
    optimize: str | Sequence[str] | Mapping[str, str], default_policy: str
) -> dict[str, str]:
    """Return pattern → policy for a value of `optimize=`.

    Args:
        optimize: a pattern on agent paths, several patterns, or pattern → name of a policy.
        default_policy: policy of patterns without a named policy.

    Raises:
        ConfigError: `optimize` is empty, a pattern or policy is not a usable text, or a policy is
            called `base`, which is the name of the starting weights.
    """
    patterns = (optimize,) if isinstance(optimize, str) else optimize
    if not isinstance(patterns, Iterable):
        raise ConfigError(
            f"optimize={optimize!r}: use a name or pattern, a list of them, or a mapping of them "
            "to names of policies"
        )
    names = [_checked(pattern, "a pattern") for pattern in patterns]
    policies = (
        dict(optimize) if isinstance(optimize, Mapping) else dict.fromkeys(names, default_policy)
    )
    if not policies:
        raise ConfigError('optimize names no agent: name one or leave it out for every agent ("*")')
    for pattern, policy in policies.items():
        _check_name(_checked(policy, f"the policy of {pattern!r}"))
        if policy == BASE_POLICY:
            raise ConfigError(f"optimize: {policy!r} means the starting weights; rename the policy")
    return policies


def _checked(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or value.strip("/") != value:
        raise ConfigError(
            f"optimize: {what} must be a non-empty text that neither begins nor ends with `/`, "
            f"not {value!r}"
        )
    return value


def _check_name(policy: str) -> None:
    """Raise `ConfigError` unless `policy` is valid as the name of a folder and of a model."""
    is_folder = policy not in (".", "..") and not {"/", "\\"} & set(policy)
    if is_folder and policy.isprintable() and len(policy.encode()) <= MAX_NAME_LENGTH:
        return
    raise ConfigError(
        f"optimize: the policy {policy[:MAX_NAME_LENGTH]!r} cannot be the name of the folder of "
        f"its model: use at most {MAX_NAME_LENGTH} bytes of printable text without `/` and `\\`"
    )


@dataclass(frozen=True)
class Selection:
    """The agents that the user selected for training, and the routing of all agents' calls.

    Example:
        >>> from lightspan.lightning.selection import Selection, check_agents
        >>> selection = Selection.of(["write", "rewrite"], default_policy="sql")
        >>> selection.policies
        ['sql']
        >>> check_agents(selection.routing, ["write", "rewrite", "check"])
        >>> check_agents(selection.routing, ["writer", "rewrite"])
        Traceback (most recent call last):
        lightspan.errors.UnknownAgentError: no agent matches 'write'. Did you mean 'rewrite' or \
'writer'? Agents: 'rewrite', 'writer'
    """

    routing: Routing

    @classmethod
    def of(
        cls,
        optimize: str | Sequence[str] | Mapping[str, str] = "*",
        frozen: Frozen = None,
        *,
        default_policy: str = "policy",
        sampling: Sampling | None = None,
    ) -> Selection:
        """Return the selection for values of `optimize=` and `frozen=`.

        Args:
            optimize: a pattern on agent paths, several patterns, or pattern → name of a policy.
            frozen: model for the calls of all other agents, as in `LightningRL`.
            default_policy: policy of patterns that name none. With `frozen="shared"`, its weights
                also answer the calls of frozen agents.
            sampling: sampling settings of the trained policies. None keeps the settings in each
                request of the app.

        Raises:
            ConfigError: `optimize` or `frozen` has an invalid value, or both have the same pattern.
        """
        policies = parse_optimize(optimize, default_policy)
        both = sorted(policies.keys() & frozen.keys()) if isinstance(frozen, Mapping) else []
        if both:
            raise ConfigError(f"{both} is in optimize and in frozen: keep it in one of them")
        try:
            return cls(make_routing(policies, frozen, default_policy, sampling))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def policies(self) -> list[str]:
        """The trained policies, in the order of the rules of `routing`."""
        trained = [rule.target.policy for rule in self.routing.rules if rule.target.selected]
        return list(dict.fromkeys(trained))


def check_agents(routing: Routing, paths: Iterable[str], hint: str = "") -> None:
    """Raise `UnknownAgentError` if a pattern of `optimize=` or `frozen=` matches no agent path.

    Args:
        routing: routing with the patterns.
        paths: paths of all agents.
        hint: end of the error message.
    """
    agents = sorted(set(paths))
    unmatched = routing.unmatched(agents)
    frozen = [rule for rule in routing.rules if not rule.target.selected]
    unmatched += [rule.pattern for rule in frozen if not any(map(rule.matches, agents))]
    if unmatched:
        raise UnknownAgentError(unknown_agents(unmatched, agents) + hint)


_UNNAMED: Final = (
    ", the name of calls without an agent. Install the adapter of the app's framework and call "
    "its instrument() in the app's module, such as lightspan_langgraph.instrument(); or put `with "
    'lightspan.agent("name"):` around the call'
)


def unknown_agents(patterns: Iterable[str], paths: Sequence[str]) -> str:
    """Return the error message for `patterns` that match none of the agents' `paths`."""
    names = sorted({path.rpartition("/")[2] for path in paths} | set(paths))
    agents = ", ".join(repr(path) for path in paths) or "none was seen"
    unnamed = _UNNAMED if list(paths) == [UNNAMED_AGENT] else ""
    messages = []
    for pattern in patterns:
        close = sub_agent_patterns(pattern, paths)
        close = close or sorted(difflib.get_close_matches(pattern, names, n=3, cutoff=0.5))
        guess = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        messages.append(f"no agent matches {pattern!r}.{guess} Agents: {agents}{unnamed}")
    return " ".join(messages)


def sub_agent_patterns(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return patterns that match the agents inside those that `pattern` matches, such as `team/*`.

    Args:
        pattern: pattern on agent paths.
        paths: paths of agents; those outside every agent that `pattern` matches are ignored.
    """
    levels: dict[str, int] = {}
    for path in paths:
        names = path.split("/")
        outer = ("/".join(names[:depth]) for depth in range(1, len(names)))
        if match := next((each for each in outer if matches(pattern, each)), None):
            levels[match] = max(levels.get(match, 0), path.count("/") - match.count("/"))
    return [f"{outer}/{'*' if depth == 1 else '**'}" for outer, depth in sorted(levels.items())]
