"""Selection: which agents are trained, and what became of every single call.

`classify_calls` puts each call of an episode into exactly one of three classes, so that nothing is
dropped silently: *trained*, *frozen* (its agent is not selected) or *rejected* (its agent is
selected, but the call cannot be trained, and the reason says why).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, UnknownAgentError
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode
from lightspan.schema.routing import BASE_POLICY, Route, Routing, make_routing
from lightspan.schema.semconv import UNNAMED_AGENT
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling

Frozen = str | LLM | Mapping[str, str | LLM | None] | None
"""What `frozen=` takes."""


MAX_NAME_LENGTH: Final = 100
"""Of a policy, in bytes: file systems take 255 of a name, and ours stand before and after it."""


class CallStatus(StrEnum):
    """What became of a call."""

    TRAINED = "trained"
    FROZEN = "frozen"
    REJECTED = "rejected"


class Rejection(StrEnum):
    """Why a call of a selected agent is not trained: the first of these that holds."""

    _value_: str
    text: str
    """The reason for people."""

    def __new__(cls, value: str, text: str) -> Rejection:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    LATE = "late", "written after the attempt was sealed, or under a lost lease"
    MODE_NOT_TRAIN = "mode_not_train", "the rollout was not made for training"
    UNFINISHED = (
        "unfinished",
        "the attempt did not end by itself: it runs, was lost or was cancelled",
    )
    DAMAGED = "damaged", "the attempt has a capture error"
    STALE = "stale", "sampled by weights that are too old"
    CANCELLED = "cancelled", "the client left before the answer was complete"
    UNDELIVERED = "undelivered", "the answer never reached the app"
    RESAMPLED = "resampled", "sampled anew after a cancelled try whose tokens are gone: biased"
    REFUSED = "refused", "the gateway refused the request"
    ERROR = "error", "the call failed"
    NO_TOKENS = "no_tokens", "no tokens: not trainable; the call did not go through the gateway"
    INEXACT_ENGINE = "inexact_engine", "the engine does not give the token ids as it sampled them"
    OTHER_POLICY = "other_policy", "sampled by another policy than the one that the agent trains"
    EMPTY_RESPONSE = "empty_response", "no token was sampled"
    NO_LOGPROBS = "no_logprobs", "log-probabilities are missing or not finite"
    MALFORMED = "malformed", "the arrays of the token record do not fit together"
    CONSTRAINED = "constrained", "sampled under a grammar or a forced tool choice"
    TEMPERATURE_ZERO = "temperature_zero", "decoded greedily, which has no policy gradient"
    TRUNCATED_SAMPLING = "truncated_sampling", "sampled under top-p or top-k"
    OUT_OF_CONTEXT = "out_of_context", "longer than the learner's longest sequence"
    UNSCORED = "unscored", "the episode has no usable reward, which is not a reward of zero"
    GRAMMAR_MISMATCH = (
        "grammar_mismatch",
        "its tokens do not follow its grammar as the learner compiles it",
    )
    UNUSED = (
        "unused",
        "no update learned from it: its step was interrupted and done again, or never came, "
        "the batch left it out, or its step searched for prompts",
    )


class CallCoverage(msgspec.Struct, frozen=True, gc=False):
    """What became of one call."""

    call: Call
    verdict: CallStatus
    policy: str = ""
    """The policy that the call's agent trains; empty for frozen agents."""
    rejection: Rejection | None = None

    @property
    def reason(self) -> str:
        """Why it is not trained, for people; empty if it is."""
        if self.verdict is CallStatus.FROZEN:
            return f"agent {self.call.agent_path} is not selected"
        return self.rejection.text if self.rejection is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What became of every call of an episode. Built by `classify_calls`."""

    attempt_id: str
    entries: tuple[CallCoverage, ...]
    """Every call, in causal order; late ones last."""
    step_rewards: bool = False
    """Whether rewards on calls counted as rewards of the episode."""

    @property
    def trained(self) -> list[Call]:
        return [entry.call for entry in self.entries if entry.verdict is CallStatus.TRAINED]

    @property
    def frozen(self) -> list[Call]:
        return [entry.call for entry in self.entries if entry.verdict is CallStatus.FROZEN]

    @property
    def rejected(self) -> list[CallCoverage]:
        return [entry for entry in self.entries if entry.verdict is CallStatus.REJECTED]

    @property
    def selected(self) -> list[CallCoverage]:
        """Calls of selected agents that are not late: trained, or rejected for another reason."""
        return [
            entry
            for entry in self.entries
            if entry.verdict is _TRAINED
            or (entry.verdict is not _FROZEN and entry.rejection is not Rejection.LATE)
        ]

    def counts(self) -> dict[str, int]:
        """How many calls are `trained`, `frozen`, and `rejected:<reason>`, most frequent first."""
        counts = Counter(
            str(entry.verdict) if entry.rejection is None else f"rejected:{entry.rejection}"
            for entry in self.entries
        )
        return dict(counts.most_common())

    def reject(self, reasons: Mapping[CallKey, Rejection]) -> Coverage:
        """A copy in which these trained calls are rejected."""
        if not reasons:
            return self
        entries = tuple(
            CallCoverage(entry.call, CallStatus.REJECTED, entry.policy, reasons[entry.call.key])
            if entry.verdict is CallStatus.TRAINED and entry.call.key in reasons
            else entry
            for entry in self.entries
        )
        return Coverage(attempt_id=self.attempt_id, entries=entries, step_rewards=self.step_rewards)


def classify_calls(
    episode: Episode,
    routing: Routing,
    *,
    engine_exact: bool = True,
    supported: Collection[Rejection] = (),
    modes: Collection[Mode] = (Mode.TRAIN,),
    max_length: int | None = None,
    step_rewards: bool = False,
) -> Coverage:
    """Each call of the episode, late ones too, in exactly one class.

    Args:
        routing: which agents train which policy.
        engine_exact: the engine declares exact token ids and log-probabilities.
        supported: `TRUNCATED_SAMPLING` and `CONSTRAINED`, where engine and learner both declare it.
        modes: whose rollouts may be trained. A dry run adds `Mode.DEV` to see what would be.
            `Mode.PRODUCTION` never may.
        max_length: the longest sequence, in tokens of prompt and response, that the learner takes.
        step_rewards: the credit rule pays for rewards on calls (`Credit.step_rewards`).
    """
    whole = _episode_rejection(episode, modes)
    unscored = None if episode.scored(step_rewards) else Rejection.UNSCORED
    judge = _Judge(engine_exact, frozenset(supported), max_length)

    @cache  # matching patterns costs more than judging, and an episode has few paths
    def policy_of(path: str) -> str | None:
        target = routing.target(path)
        return target.policy if target.route is Route.POLICY else None

    entries = []
    for call in episode.calls:
        policy = policy_of(call.agent_path)
        # unscored comes last: it says nothing of the call, and would hide what does
        reason = None if policy is None else whole or judge.rejection(call, policy) or unscored
        entries.append(_covered(call, policy, reason))
    late = Rejection.LATE
    entries += [_covered(call, policy_of(call.agent_path), late) for call in episode.late_calls]
    return Coverage(
        attempt_id=episode.attempt_id, entries=tuple(entries), step_rewards=step_rewards
    )


def _covered(call: Call, policy: str | None, reason: Rejection | None) -> CallCoverage:
    if policy is None:
        return CallCoverage(call, _FROZEN)
    return CallCoverage(call, _TRAINED if reason is None else CallStatus.REJECTED, policy, reason)


def _episode_rejection(episode: Episode, modes: Collection[Mode]) -> Rejection | None:
    # production is out whatever the caller lists: the policy to train did not sample it
    if episode.mode not in modes or episode.mode is Mode.PRODUCTION:
        return Rejection.MODE_NOT_TRAIN
    if not episode.finished:
        return Rejection.UNFINISHED
    return Rejection.DAMAGED if episode.capture_errors else None


_OF_OUTCOME: Final = {
    CallOutcome.CANCELLED: Rejection.CANCELLED,
    CallOutcome.UNDELIVERED: Rejection.UNDELIVERED,
    CallOutcome.RESAMPLED: Rejection.RESAMPLED,
    CallOutcome.ERROR: Rejection.ERROR,
}


_OK: Final = CallOutcome.OK
_CANCELLED: Final = FinishReason.CANCELLED
_TRAINED: Final = CallStatus.TRAINED
_FROZEN: Final = CallStatus.FROZEN


class _Judge(NamedTuple):
    """Says why a selected call cannot be trained, by the call alone."""

    exact: bool
    supported: frozenset[Rejection]
    max_length: int | None

    def rejection(self, call: Call, policy: str) -> Rejection | None:
        record = call.record
        if call.outcome is not _OK:
            return Rejection.REFUSED if call.refused is not None else _OF_OUTCOME[call.outcome]
        if record is None:
            return Rejection.NO_TOKENS
        if record.finish_reason is _CANCELLED:
            return Rejection.CANCELLED
        if not self.exact:
            return Rejection.INEXACT_ENGINE
        if record.policy != policy:
            return Rejection.OTHER_POLICY
        # lengths of the packed ids, four bytes each: unpacking is left to those that are trained
        size = len(record.response)
        if not size:
            return Rejection.EMPTY_RESPONSE
        if len(record.logprob_data) != size:
            return Rejection.NO_LOGPROBS
        if size % 4 or len(record.prompt) % 4 or not _covers(record.versions, size // 4):
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


def _covers(versions: Sequence[tuple[int, int]], tokens: int) -> bool:
    """Whether every token has a version: (version, how many tokens) of each run."""
    if len(versions) == 1:
        return versions[0][1] == tokens
    return sum(count for _, count in versions) == tokens and all(n > 0 for _, n in versions)


# --- what the user asks for -------------------------------------------------------------------


def parse_optimize(
    optimize: str | Sequence[str] | Mapping[str, str], default_policy: str
) -> dict[str, str]:
    """Pattern → policy, for what `optimize=` takes: a pattern, several, or a mapping of patterns to
    names of policies.

    Raises:
        ConfigError: nothing is named, a pattern or policy is no usable text, or a policy is called
            `base`, which means the starting weights.
    """
    if isinstance(optimize, str):
        named: dict[str, str] = {optimize: default_policy}
    elif isinstance(optimize, Mapping):
        named = dict(optimize)
    elif isinstance(optimize, Iterable):
        named = {_checked(pattern, "a pattern"): default_policy for pattern in optimize}
    else:
        raise ConfigError(
            f"optimize={optimize!r}: use a name or pattern, a list of them, or a mapping of them "
            "to names of policies"
        )
    if not named:
        raise ConfigError(
            'optimize names no agent: name one, or leave it out for every agent ("*")'
        )
    for pattern, policy in named.items():
        _checked(pattern, "a pattern")
        _check_name(_checked(policy, f"the policy of {pattern!r}"))
        if policy == BASE_POLICY:
            raise ConfigError(f"optimize: {policy!r} means the starting weights; rename the policy")
    return named


def _checked(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or value.strip("/") != value:
        raise ConfigError(
            f"optimize: {what} must be a text that is not empty and has no `/` at its ends, "
            f"not {value!r}"
        )
    return value


def _check_name(policy: str) -> None:
    """A policy's name is that of the folder of its model, and of a model to clients."""
    is_folder = policy not in (".", "..") and not {"/", "\\"} & set(policy)
    if is_folder and policy.isprintable() and len(policy.encode()) <= MAX_NAME_LENGTH:
        return
    raise ConfigError(
        f"optimize: the policy {policy[:MAX_NAME_LENGTH]!r} cannot name the folder of its "
        f"model: use at most {MAX_NAME_LENGTH} bytes of printable text without `/` and `\\`"
    )


@dataclass(frozen=True)
class Selection:
    """What the user selected: the routing, with the check that every name exists.

    Example:
        >>> from lightspan.lightning import Selection
        >>> chosen = Selection.of(["write", "rewrite"], default_policy="sql")
        >>> chosen.policies
        ['sql']
        >>> chosen.check(["write", "rewrite", "check"])
        >>> chosen.check(["writer", "rewrite"])
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
        """The selection that `optimize=` and `frozen=` ask for; `sampling` is that of trained
        policies.

        Raises:
            ConfigError: see `parse_optimize`; a pattern is in both; `frozen` is unknown.
        """
        named = parse_optimize(optimize, default_policy)
        both = sorted(named.keys() & frozen.keys()) if isinstance(frozen, Mapping) else []
        if both:
            raise ConfigError(f"{both} is in optimize and in frozen: keep it in one of them")
        try:
            return cls(make_routing(named, frozen, default_policy, sampling))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def policies(self) -> list[str]:
        """The trained policies, in order of their first rule."""
        trained = [rule.target.policy for rule in self.routing.rules if rule.target.selected]
        return list(dict.fromkeys(trained))

    def check(self, paths: Iterable[str]) -> None:
        """Check that every pattern matches an agent.

        Raises:
            UnknownAgentError: one of `optimize=` or `frozen=` matches none of these paths.
        """
        check_agents(self.routing, paths)


def check_agents(routing: Routing, paths: Iterable[str]) -> None:
    """See `Selection.check`."""
    agents = sorted(set(paths))
    frozen = [rule for rule in routing.rules if not rule.target.selected]
    unmatched = routing.unmatched(agents)
    unmatched += [rule.pattern for rule in frozen if not any(map(rule.matches, agents))]
    if unmatched:
        raise UnknownAgentError(unknown_agents(unmatched, agents))


def unknown_agents(patterns: Iterable[str], paths: Sequence[str]) -> str:
    """What to say of patterns that match none of these."""
    return " ".join(_unknown(pattern, paths) for pattern in patterns)


_UNNAMED: Final = (
    ", as calls are called that nobody names. Install the adapter of the app's framework and call "
    "its instrument() in the app's module, such as lightspan_langgraph.instrument(); or say `with "
    'lightspan.agent("name"):` around the call'
)


def _unknown(pattern: str, paths: Sequence[str]) -> str:
    names = sorted({path.rpartition("/")[2] for path in paths} | set(paths))
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    guess = f" Did you mean {' or '.join(repr(name) for name in sorted(close))}?" if close else ""
    agents = ", ".join(repr(path) for path in paths) or "none was seen"
    unnamed = _UNNAMED if list(paths) == [UNNAMED_AGENT] else ""
    return f"no agent matches {pattern!r}.{guess} Agents: {agents}{unnamed}"
