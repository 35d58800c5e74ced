"""AIR: automatic intermediate rewarding (arXiv 2508.03680 §3.4).

*Signals* are read from what was recorded anyway: whether tools succeeded, failed or answered
nonsense, whether the arguments that a model wrote for them are JSON, and any function of one's own.

`mode="potential"` shapes by potentials (Ng, Harada, Russell 1999). With Phi(s) the potential of the
state in which a turn is taken, each turn earns F = gamma · Phi(s_next) - Phi(s) on top, and
Phi = 0 at the end, also where the attempt was cut off (else gamma^T · Phi(s_T) would leak into the
return). With reward-to-go and any gamma the sums telescope:

    G'_t = G_t - Phi(s_t)

Phi(s) = scale · the mean, over signals, of what each saw on average before the turn began (0 where
it saw nothing): with the default signal, scale · the fraction of tool calls that succeeded so far.
It depends on what happened before (`lightspan.lightning.history`), never on the action being
scored, so that it cannot change which policy is best: it tells how much of a return is due to the
state that a call was made in. Statistics (scale, groups without variance) are those of
the rewards without shaping, and what is left of Phi is centred as returns-to-go are: by the mean
over *other* rollouts' calls in the same turn (or state), so that no rollout is paid for its own
later states:

    A_t = ((G_t - Phi(s_t)) - mean of (G - Phi) over the others' calls in turn t) / scale

Under identical assignment every call of a rollout would get G'_0 = G_0 - Phi(s_0), and rollouts of
a task start alike: nothing would change. Hence the `discounted` credit rule. Nor would it with a
critic, which comes to expect Phi: (V - Phi, G - Phi) has the advantages of (V, G).

`mode="bonus"` pays `scale` for each thing seen to the call that caused it, and never takes it back.
A rollout that fails after many successful tool calls may then beat one that solves its task:

    R = 0 and five good tool calls: 0 + 5 · 0.3 = 1.5      R = 1 and one: 1 + 0.3 = 1.3

The potential orders them by R, as it should be. Bonuses are rewards like any other: statistics and
groups' variance see them. Evaluation sees neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.credit import (
    GAE,
    Credit,
    RewardToGo,
    Terminal,
    TurnsEnded,
    rewards_after,
)
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.history import History, ToolCall, Trace, parts
from lightspan.lightning.selection import Coverage
from lightspan.lightning.transitions import turn_depths
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import CALL_OPEN, PYTHON_TAG
from lightspan.schema.records import Json
from lightspan.schema.validation import is_number

AIRMode = Literal["potential", "bonus"]

_TOOL_MARKS: Final = (CALL_OPEN, PYTHON_TAG)
"""What a tool call begins with, in whichever family's text."""
_BARE_CALL: Final = re.compile(r'\s*(?:```(?:json)?\s*)?[\[{][\s{]*"(?:name|parameters|arguments)"')
"""The same where it is the whole answer: plain JSON."""
_CUT: Final = re.compile(r"… \(\d+ characters\)$")
"""How adapters end a result of which they kept only the beginning."""
_json: Final = msgspec.json.Decoder()


# --- signals ----------------------------------------------------------------------------------


class Observed(NamedTuple):
    """One thing that a signal saw."""

    value: float
    after: int | None
    """Model calls that began after this sequence number have it in their history; None: it is
    unplaced."""
    cause: CallKey | None
    """The model call that caused it; None: the last turn that had ended by `since`."""
    since: int | None


class _ToolSignal(msgspec.Struct, frozen=True, kw_only=True):
    """What signals of tool calls share."""

    tools: str = "*"
    """Glob on names."""

    def __post_init__(self) -> None:
        if not isinstance(self.tools, str) or not self.tools:
            raise ConfigError(
                f"{type(self).__name__}: tools={self.tools!r}: use one glob on the names of tools, "
                "such as 'search_*'"
            )

    @property
    def name(self) -> str:
        tag = str(self.__struct_config__.tag)
        return tag if self.tools == "*" else f"{tag}[{self.tools}]"

    def see(self, trace: Trace) -> list[Observed]:
        seen = []
        for tool, after, since in trace.tools:
            if tool.succeeded is not None and fnmatchcase(tool.name, self.tools):
                value = self.value(tool, succeeded=tool.succeeded)
                if value is not None:
                    seen.append(Observed(value, after, tool.call, since))
        return seen

    def value(self, tool: ToolCall, *, succeeded: bool) -> float | None:
        """What a tool call counts; None: nothing is known of it."""
        return float(succeeded)


class ToolSuccess(_ToolSignal, frozen=True, kw_only=True, tag="tool_success"):
    """1 for each tool call that succeeded, 0 for each that failed."""


class ToolError(_ToolSignal, frozen=True, kw_only=True, tag="tool_error"):
    """-1 for each tool call that failed or whose result is malformed, 0 for each other one."""

    result: Literal["any", "json"] = "any"
    """What a result has to be: with `json` everything else is malformed, no result too. A result
    that was cut when it was recorded is left out: nobody knows what the whole was."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.result not in ("any", "json"):
            raise ConfigError(f"ToolError: result={self.result!r}: use 'any' or 'json'")

    def value(self, tool: ToolCall, *, succeeded: bool) -> float | None:
        if succeeded and self.result == "json":
            if _is_cut(tool.result):
                return None
            succeeded = _loads(tool.result) is not _BAD
        return 0.0 if succeeded else -1.0


class ValidArguments(msgspec.Struct, frozen=True, kw_only=True, tag="valid_arguments"):
    """1 for each model call whose tool calls all have a JSON object as arguments, 0 for each with
    one that has not, or that was begun and could not be read; none for calls that use no tool."""

    @property
    def name(self) -> str:
        return "valid_arguments"

    def see(self, trace: Trace) -> list[Observed]:
        seen = []
        for call in trace.calls:
            is_valid = _are_valid(call, trace.messages.get(call.key, {}))
            if is_valid is not None:
                seen.append(Observed(float(is_valid), call.sequence_end, call.key, None))
        return seen


SignalFunction = Callable[[History], float]
Signal = ToolSuccess | ToolError | ValidArguments | SignalFunction
"""A function gets the history of a turn. As a potential it says what the state before the turn is
worth, as a bonus what the one after it is; both times `scale`."""

_BUILT_IN: Final = (ToolSuccess, ToolError, ValidArguments)
_BAD: Final = object()


def _loads(text: str | None) -> Any:
    try:
        return _json.decode(text or "")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _BAD


def _is_cut(result: str | None) -> bool:
    """Whether an adapter kept only the beginning."""
    return result is not None and _CUT.search(result) is not None


def _are_valid(call: Call, message: Mapping[str, Any]) -> bool | None:
    """Whether the arguments of a call's tool calls are JSON objects; None: it made no tool call."""
    arguments = [part.get("arguments") for part in parts(message, "tool_call")]
    if any(not _is_object(value) for value in arguments):
        return False
    texts = [str(part.get("content") or "") for part in parts(message, "text")]
    if any(_holds_call(call, text) for text in texts):
        return False
    return True if arguments else None


def _holds_call(call: Call, text: str) -> bool:
    """Whether a tool call that could not be read stayed text (`lightspan_gateway.tools`)."""
    if any(mark in text for mark in _TOOL_MARKS):
        return True
    has_tools = call.span is not None and c.TOOL_DEFINITIONS in call.span.attributes
    return has_tools and _BARE_CALL.match(text) is not None


def _is_object(arguments: Any) -> bool:
    value = _loads(arguments) if isinstance(arguments, str) else arguments
    return isinstance(value, Mapping)


def signal_name(signal: Signal) -> str:
    """The signal's name in metrics."""
    if isinstance(signal, _BUILT_IN):
        return signal.name
    return str(getattr(signal, "__name__", type(signal).__name__))


# --- settings ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AIR:
    """Intermediate rewards from signals (see the module).

    Args:
        signals: `ToolSuccess()`, `ToolError()`, `ValidArguments()`, or functions of a `History`
            that return a number.
        scale: of a potential, or of one bonus; rewards of 0 to 1 are assumed.
        mode: `potential` leaves the best policy the best; `bonus` may not.

    Raises:
        ConfigError: a signal that is none, or two of one name; a scale that is not above 0.
    """

    signals: Sequence[Signal] = (ToolSuccess(),)
    scale: float = 0.3
    mode: AIRMode = "potential"

    def __post_init__(self) -> None:
        signals: object = self.signals
        if isinstance(signals, str) or not isinstance(signals, Sequence):
            raise ConfigError(
                f"AIR: signals={signals!r} must be a sequence: write signals=(…,) with a "
                "comma, also for one signal"
            )
        object.__setattr__(self, "signals", tuple(self.signals))
        if self.mode not in ("potential", "bonus"):
            raise ConfigError(f"AIR: mode={self.mode!r}: use 'potential' or 'bonus'")
        if not is_number(self.scale) or self.scale <= 0:
            raise ConfigError(
                f"AIR: scale={self.scale!r} must be above 0 and finite: a number such as 0.3"
            )
        if not self.signals:
            raise ConfigError("AIR: signals is empty: name at least one, such as ToolSuccess()")
        for signal in self.signals:
            _check_signal(signal)
        names = [signal_name(signal) for signal in self.signals]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"AIR: two signals are named {twice[0]!r}: metrics would mix them")

    def config(self) -> dict[str, Json]:
        """The settings as JSON. A function stands there by module and name: whether its code has
        changed cannot be told."""
        return {
            "mode": self.mode,
            "scale": self.scale,
            "signals": [_described(signal) for signal in self.signals],
        }


def _check_signal(signal: Signal) -> None:
    if isinstance(signal, type):
        raise ConfigError(
            f"AIR: the signal {signal.__name__} is a class: write {signal.__name__}()"
        )
    if not isinstance(signal, _BUILT_IN) and not callable(signal):
        raise ConfigError(f"AIR: {signal!r} is no signal: use ToolSuccess() or a function")
    name = signal_name(signal)
    if iscoroutinefunction(signal):
        raise ConfigError(f"AIR: the signal {name} is async: use a plain function")


def _described(signal: Signal) -> Json:
    if isinstance(signal, _BUILT_IN):
        return msgspec.to_builtins(signal)
    kind = type(signal)
    name = getattr(signal, "__qualname__", kind.__qualname__)
    return f"{getattr(signal, '__module__', kind.__module__)}:{name}"


def check_air(air: AIR | None, credit: Credit) -> None:
    """Raise `ConfigError` where AIR with this credit rule does nothing, or is not defined."""
    if air is None:
        return
    if air.mode == "potential" and isinstance(credit, Terminal):
        raise ConfigError(
            'air= with credit="terminal" would change nothing: with the final reward on every '
            "call, potentials cancel in the comparison of rollouts that start alike; leave credit "
            'out (discounted), or use AIR(mode="bonus")'
        )
    if air.mode == "potential" and isinstance(credit, GAE):
        raise ConfigError(
            'air= with credit="critic" would change nothing: the critic comes to expect the '
            'potentials; leave one of them out, or use AIR(mode="bonus")'
        )
    if not isinstance(credit, Terminal | RewardToGo):
        raise ConfigError(
            f"air= needs the reward-to-go of a turn, which the credit rule {credit.name} does not "
            'tell: use credit="discounted", or shape the rewards in the rule itself'
        )


# --- shaping ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What AIR adds to the credit of an episode's selected calls."""

    credits: Mapping[CallKey, float] = field(default_factory=dict)
    """-Phi(s_t), or bonuses."""
    seen: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Signal → what it saw."""
    total: float = 0.0
    """Of all bonuses, undiscounted: part of the rollout's return."""
    unplaced: int = 0
    """How many things were seen that no history can hold (potential), or that no selected call
    caused (bonus)."""


def shape(air: AIR, credit: Credit, episode: Episode, coverage: Coverage) -> Shaping:
    """What AIR adds to the credit of each selected call.

    Raises:
        ConfigError: a signal's function failed, or returned no finite number.
    """
    calls = [entry.call for entry in coverage.selected]
    if not calls:
        return Shaping()
    trace, turns = Trace(episode), turn_depths(calls)
    if air.mode == "potential":
        return _potentials(air, trace, calls, turns)
    return _bonuses(air, credit, trace, calls, turns)


def bonuses(
    air: AIR | None, credit: Credit, episodes: Sequence[Episode], coverages: Sequence[Coverage]
) -> dict[str, float]:
    """Attempt → the sum of its bonuses, a part of its return; empty where there are none.

    Raises:
        ConfigError: as `shape`.
    """
    if air is None or air.mode != "bonus":
        return {}
    return {
        episode.attempt_id: shape(air, credit, episode, coverage).total
        for episode, coverage in zip(episodes, coverages, strict=True)
    }


def potential_rewards(potentials: Sequence[float], gamma: float) -> list[float]:
    """[turns] F_t = gamma · Phi(s_(t+1)) - Phi(s_t), with 0 for the potential after the last.

    Example:
        >>> potential_rewards([0.0, 1.0, 0.5], 0.5)
        [0.5, -0.75, -0.5]
    """
    following = [*potentials[1:], 0.0] if potentials else []
    return [gamma * then - now for now, then in zip(potentials, following, strict=True)]


def turn_positions(calls: Sequence[Call], turns: Sequence[int]) -> list[int]:
    """[turns] The sequence number at which each turn begins, that of its first call; 0 for a turn
    that the gateway did not see. They ascend."""
    starts: dict[int, int] = {}
    for call, turn in zip(calls, turns, strict=True):
        if call.sequence_start is not None:
            starts[turn] = min(starts.get(turn, call.sequence_start), call.sequence_start)
    return [starts.get(turn, 0) for turn in range(max(turns) + 1)]


def _potentials(air: AIR, trace: Trace, calls: Sequence[Call], turns: Sequence[int]) -> Shaping:
    positions = turn_positions(calls, turns)
    per_turn = [0.0] * len(positions)
    saw: dict[str, list[float]] = {}
    unplaced = 0
    for signal in air.signals:
        name = signal_name(signal)
        if isinstance(signal, _BUILT_IN):
            seen = signal.see(trace)
            values = _means_before(seen, positions)
            saw[name] = [observed.value for observed in seen]
            unplaced += sum(observed.after is None for observed in seen)
        else:
            values = [_ask(signal, trace.history(t, at)) for t, at in enumerate(positions)]
            saw[name] = values
        for turn, value in enumerate(values):
            per_turn[turn] += air.scale * value / len(air.signals)
    credits = {call.key: -per_turn[turn] for call, turn in zip(calls, turns, strict=True)}
    return Shaping(credits=credits, seen=saw, unplaced=unplaced)


def _means_before(seen: Iterable[Observed], positions: Sequence[int]) -> list[float]:
    """Per position (ascending) the mean of what was seen before it; 0 where there was nothing."""
    placed = sorted((o.after, o.value) for o in seen if o.after is not None)
    means, total, count = [], 0.0, 0
    for position in positions:
        while count < len(placed) and placed[count][0] < position:
            total += placed[count][1]
            count += 1
        means.append(total / count if count else 0.0)
    return means


def _bonuses(
    air: AIR, credit: Credit, trace: Trace, calls: Sequence[Call], turns: Sequence[int]
) -> Shaping:
    turn_of = {call.key: turn for call, turn in zip(calls, turns, strict=True)}
    own: dict[CallKey, float] = dict.fromkeys(turn_of, 0.0)
    shared = [0.0] * (max(turns) + 1)
    ended = TurnsEnded(calls, turns)
    saw: dict[str, list[float]] = {}
    unplaced = 0
    for signal in air.signals:
        if not isinstance(signal, _BUILT_IN):
            values = _after_turns(signal, trace, turn_positions(calls, turns))
            shared = [s + air.scale * value for s, value in zip(shared, values, strict=True)]
            saw[signal_name(signal)] = values
            continue
        seen = signal.see(trace)
        saw[signal_name(signal)] = [observed.value for observed in seen]
        for value, _, cause, since in seen:
            turn = None if since is None else ended.before(since + 1)
            if cause in own:
                own[cause] += air.scale * value
            elif turn is None:
                unplaced += 1
            else:
                shared[turn] += air.scale * value
    total = math.fsum([*own.values(), *shared])
    credits = _paid(credit, own, shared, turn_of)
    return Shaping(credits=credits, seen=saw, total=total, unplaced=unplaced)


def _after_turns(signal: SignalFunction, trace: Trace, positions: Sequence[int]) -> list[float]:
    """What a function says of the state after each turn."""
    following = [*(after for _, after in pairwise(positions)), math.inf]
    return [_ask(signal, trace.history(turn + 1, at)) for turn, at in enumerate(following)]


def _paid(
    credit: Credit,
    own: Mapping[CallKey, float],
    shared: Sequence[float],
    turn_of: Mapping[CallKey, int],
) -> dict[CallKey, float]:
    """Bonuses as the credit rule hands them out: to what came before, or to every call alike."""
    if not isinstance(credit, RewardToGo):
        total = math.fsum([*own.values(), *shared])
        return dict.fromkeys(own, total)
    by_turn = [0.0] * len(shared)
    for key, value in own.items():
        by_turn[turn_of[key]] += value
    after = rewards_after(by_turn, shared, credit.gamma)
    return {key: value + after[turn_of[key]] for key, value in own.items()}


def _ask(signal: SignalFunction, history: History) -> float:
    name = signal_name(signal)
    try:
        value = signal(history)
    except Exception as error:
        raise ConfigError(
            f"AIR: the signal {name} failed on task {history.task_id}, turn {history.turn}: "
            f"{type(error).__name__}: {error}; return 0.0 where it has nothing to say"
        ) from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(
            f"AIR: the signal {name} returned {value!r} on task {history.task_id}, turn "
            f"{history.turn}: return a finite number"
        )
    return float(value)


def shaping_metrics(shapings: Sequence[Shaping]) -> dict[str, float]:
    """What AIR did in a step: `shaping_mean` over calls, what each signal saw on average (and how
    often, as `<signal>/seen`), and how many things are `unplaced`."""
    credits = [value for shaping in shapings for value in shaping.credits.values()]
    metrics = {"unplaced": float(sum(shaping.unplaced for shaping in shapings))}
    if credits:
        metrics["shaping_mean"] = math.fsum(credits) / len(credits)
    for name in dict.fromkeys(name for shaping in shapings for name in shaping.seen):
        values = [value for shaping in shapings for value in shaping.seen.get(name, ())]
        metrics[f"{name}/seen"] = float(len(values))
        if values:
            metrics[name] = math.fsum(values) / len(values)
    return metrics
