"""AIR: automatic intermediate rewarding (arXiv 2508.03680 §3.4).

A *signal* is a series of numbers that are computed from the recorded spans: whether each tool call
succeeded, or the results of a function of the user.

`mode="potential"` shapes rewards by potentials (Ng, Harada, Russell 1999). With Phi(s) the
potential of the state in which a turn is taken, each turn earns F = gamma · Phi(s_next) - Phi(s) in
addition. At the end Phi = 0, also if the attempt was cut off; else gamma^T · Phi(s_T) would leak
into the return. With reward-to-go the sums telescope, for any gamma:

    G'_t = G_t - Phi(s_t)

Phi(s) is `scale` times a mean over the signals. Each signal contributes the mean of its values
before the turn began, or 0 without a value. With the default signal, Phi(s) is `scale` times the
fraction of tool calls that succeeded so far. Phi depends on the past
(`lightspan.lightning.history`), never on the action that is scored. So it cannot change which
policy is best.

Scales, and the test for groups without variance, use the rewards without Phi. The baseline includes
Phi. It is a mean over *other* rollouts' calls in the same turn (or state), so that no rollout is
rewarded for its own later states:

    A_t = ((G_t - Phi(s_t)) - mean of (G - Phi) over the others' calls in turn t) / scale

Potentials have no effect with two credit rules, which are therefore refused:

- `terminal` would give every call of a rollout G'_0 = G_0 - Phi(s_0). The rollouts of a task start
  alike, so their differences would not change.
- With `critic`, the critic learns to predict Phi: (V - Phi, G - Phi) has the advantages of (V, G).

`mode="bonus"` adds `scale` times each value of a signal to the reward of the call that caused it,
or of the turn if the signal is a function. With reward-to-go, earlier calls are credited with it
too, and with `terminal` all calls of the rollout. The bonus stays in the return. So a rollout that
fails after many successful tool calls may beat a rollout that solves its task:

    R = 0 and five good tool calls: 0 + 5 · 0.3 = 1.5      R = 1 and one: 1 + 0.3 = 1.3

With potentials, the order of the two is that of R. Bonuses are rewards like any other: statistics
and the variance of groups include them. Evaluation includes neither bonuses nor potentials.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.credit import GAE, Credit, RewardToGo, Terminal, rewards_after
from lightspan.lightning.episode import CallKey, Episode
from lightspan.lightning.history import History, Trace
from lightspan.lightning.selection import Coverage
from lightspan.lightning.turns import Turns
from lightspan.schema.validation import check_choice, check_number

AIRMode = Literal["potential", "bonus"]


# --- signals ----------------------------------------------------------------------------------


class Observed(NamedTuple):
    """One value of a signal, such as the success of one tool call, with its time in the attempt."""

    value: float
    after: int | None
    """Sequence number: a state before a model call that began later includes the value. None if no
    state can include the value.
    """
    cause: CallKey | None
    """Model call that caused the value. None if it is unknown; then the last turn that ended by
    `since` counts as the cause.
    """
    since: int | None
    """Sequence number at the start of the tool call: model calls that ended up to it came before;
    None if unknown.
    """


class ToolSuccess(msgspec.Struct, frozen=True, kw_only=True, tag="tool_success"):
    """Signal of AIR with the value 1 for each tool call that succeeded, 0 for each that failed."""

    tools: str = "*"
    """Glob on names of tools."""

    def __post_init__(self) -> None:
        if not isinstance(self.tools, str) or not self.tools:
            raise ConfigError(
                f"ToolSuccess: tools={self.tools!r}: use one glob on the names of tools, such as "
                "'search_*'"
            )

    @property
    def name(self) -> str:
        tag = str(self.__struct_config__.tag)
        return tag if self.tools == "*" else f"{tag}[{self.tools}]"

    def observe(self, trace: Trace) -> list[Observed]:
        """Return the value of each tool call whose name matches `tools` and whose success is known.

        Args:
            trace: model calls and tool calls of an attempt.
        """
        return [
            Observed(float(tool.succeeded), after, tool.call, since)
            for tool, after, since in trace.tools
            if tool.succeeded is not None and fnmatchcase(tool.name, self.tools)
        ]


SignalFunction = Callable[[History], float]
Signal = ToolSuccess | SignalFunction
"""`ToolSuccess`, or a function of a history. With `mode="potential"` the function gets the history
before a turn, with `mode="bonus"` the history after it; its value is multiplied by `scale`."""


def signal_name(signal: Signal) -> str:
    """Return the signal's name in metrics."""
    if isinstance(signal, ToolSuccess):
        return signal.name
    return str(getattr(signal, "__name__", type(signal).__name__))


# --- settings ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AIR:
    """Intermediate rewards from signals, such as the success of tool calls.

    Args:
        signals: `ToolSuccess()`, or functions of a `History` that return a number.
        scale: factor of a potential or bonus; the default assumes rewards of 0 to 1.
        mode: `potential` adds differences of a potential, which do not change which policy is best;
            `bonus` adds the values themselves, which may change it.

    Raises:
        ConfigError: `signals` is empty or no sequence, contains something that is not a signal, or
            has two signals with one name; `scale` is not above 0; `mode` is unknown.
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
        check_choice("AIR: mode", self.mode, get_args(AIRMode))
        check_number("AIR: scale", self.scale, above=0)
        if not self.signals:
            raise ConfigError("AIR: signals is empty: name at least one, such as ToolSuccess()")
        for signal in self.signals:
            _check_signal(signal)
        names = [signal_name(signal) for signal in self.signals]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"AIR: two signals are named {twice[0]!r}: metrics would mix them")


def _check_signal(signal: Signal) -> None:
    if isinstance(signal, type) or not (isinstance(signal, ToolSuccess) or callable(signal)):
        raise ConfigError(f"AIR: {signal!r} is not a signal: use ToolSuccess() or a function")
    name = signal_name(signal)
    if iscoroutinefunction(signal):
        raise ConfigError(f"AIR: the signal {name} is async: use a plain function")


def check_air(air: AIR | None, credit: Credit) -> None:
    """Raise `ConfigError` if AIR does not support the credit rule, or would have no effect with it.

    Args:
        air: settings of AIR (automatic intermediate rewards); None if AIR is off.
        credit: the credit rule.
    """
    if air is None:
        return
    if air.mode == "potential" and isinstance(credit, Terminal | GAE):
        raise ConfigError(
            f'air= with credit="{credit.name.partition("(")[0]}" would change nothing: potentials '
            "cancel where every call has the final reward, and a critic learns to predict them; "
            'leave credit out (discounted), or use AIR(mode="bonus")'
        )
    if not isinstance(credit, Terminal | RewardToGo):
        raise ConfigError(
            f"air= needs the reward-to-go of a turn, which the credit rule {credit.name} does not "
            'define: use credit="discounted", or shape the rewards in the rule itself'
        )


# --- shaping ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What AIR (automatic intermediate rewards) adds to the credits of an episode's calls."""

    credits: Mapping[CallKey, float] = field(default_factory=dict)
    """Call → number to add to its credit: minus the potential before its turn, or its bonuses."""
    observed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name of a signal → its values."""
    total: float = 0.0
    """Sum of all bonuses, undiscounted, as a part of the rollout's return; 0 for potentials."""
    unplaced: int = 0
    """Number of values without effect. With potentials, no state can include them; with bonuses, no
    selected call caused them.
    """


def shape(air: AIR, credit: Credit, episode: Episode, coverage: Coverage) -> Shaping:
    """Compute what AIR adds to the credit of each call of an agent to train.

    Args:
        air: settings of AIR.
        credit: credit rule, which decides how bonuses are passed on to earlier calls.
        episode: episode with the calls.
        coverage: which calls are trained, frozen or rejected. Frozen calls are left out.

    Raises:
        ConfigError: a signal's function failed, or returned no finite number.
    """
    turns = coverage.turns
    if not turns.count:
        return Shaping()
    trace = Trace(episode)
    if air.mode == "potential":
        return _potentials(air, trace, turns)
    return _bonuses(air, credit, trace, turns)


def bonuses(
    air: AIR | None, credit: Credit, episodes: Sequence[Episode], coverages: Sequence[Coverage]
) -> dict[str, float]:
    """Return attempt id → sum of the attempt's bonuses, which its total reward includes.

    Empty if `air` is None, or has another mode than "bonus".

    Raises:
        ConfigError: a signal's function failed, or returned no finite number.
    """
    if air is None or air.mode != "bonus":
        return {}
    return {
        episode.attempt_id: shape(air, credit, episode, coverage).total
        for episode, coverage in zip(episodes, coverages, strict=True)
    }


def turn_positions(turns: Turns) -> list[int]:
    """Return for each turn the sequence number at which its first call began, in turn order.

    The gateway gives each start and each end of a call the next sequence number. The result is 0
    for a turn whose calls all bypassed the gateway.
    """
    starts: dict[int, int] = {}
    for call, turn in turns:
        if call.sequence_start is not None:
            starts[turn] = min(starts.get(turn, call.sequence_start), call.sequence_start)
    return [starts.get(turn, 0) for turn in range(turns.count)]


def _potentials(air: AIR, trace: Trace, turns: Turns) -> Shaping:
    positions = turn_positions(turns)
    per_turn = [0.0] * turns.count
    by_signal: dict[str, list[float]] = {}
    unplaced = 0
    for signal in air.signals:
        if isinstance(signal, ToolSuccess):
            observed = signal.observe(trace)
            values = _means_before(observed, positions)
            by_signal[signal.name] = [each.value for each in observed]
            unplaced += sum(each.after is None for each in observed)
        else:
            values = [_evaluate(signal, trace.history(t, at)) for t, at in enumerate(positions)]
            by_signal[signal_name(signal)] = values
        for turn, value in enumerate(values):
            per_turn[turn] += air.scale * value / len(air.signals)
    credits = {call.key: -per_turn[turn] for call, turn in turns}
    return Shaping(credits=credits, observed=by_signal, unplaced=unplaced)


def _means_before(observed: Iterable[Observed], positions: Sequence[int]) -> list[float]:
    """Return for each position the mean of a signal's values before it; 0 if there are none.

    Args:
        observed: values of a signal. A value whose `after` is None is ignored.
        positions: sequence numbers at which turns begin, ascending.
    """
    placed = sorted((each.after, each.value) for each in observed if each.after is not None)
    totals = [0.0, *accumulate(value for _, value in placed)]
    counts = [bisect_left(placed, (position,)) for position in positions]
    return [totals[count] / count if count else 0.0 for count in counts]


def _bonuses(air: AIR, credit: Credit, trace: Trace, turns: Turns) -> Shaping:
    own: dict[CallKey, float] = dict.fromkeys(turns.by_key, 0.0)
    shared = [0.0] * turns.count
    by_signal: dict[str, list[float]] = {}
    unplaced = 0
    for signal in air.signals:
        if not isinstance(signal, ToolSuccess):
            # the state after a turn is that before the next one
            ends = [*turn_positions(turns)[1:], math.inf]
            values = [_evaluate(signal, trace.history(t + 1, at)) for t, at in enumerate(ends)]
            shared = [s + air.scale * value for s, value in zip(shared, values, strict=True)]
            by_signal[signal_name(signal)] = values
            continue
        observed = signal.observe(trace)
        by_signal[signal.name] = [each.value for each in observed]
        for value, _, cause, since in observed:
            turn = None if since is None else turns.ended_before(since + 1)
            if cause in own:
                own[cause] += air.scale * value
            elif turn is None:
                unplaced += 1
            else:
                shared[turn] += air.scale * value
    total = math.fsum([*own.values(), *shared])
    credits = dict.fromkeys(own, total)
    if isinstance(credit, RewardToGo):  # a call gets its own bonus and those of later turns
        by_turn = [0.0] * turns.count
        for key, value in own.items():
            by_turn[turns.by_key[key]] += value
        after = rewards_after(by_turn, shared, credit.gamma)
        credits = {key: value + after[turns.by_key[key]] for key, value in own.items()}
    return Shaping(credits=credits, observed=by_signal, total=total, unplaced=unplaced)


def _evaluate(signal: SignalFunction, history: History) -> float:
    """Return the value of a signal's function for `history`.

    Raises:
        ConfigError: the function failed, or returned no finite number.
    """
    name = signal_name(signal)
    try:
        value = signal(history)
    except Exception as error:
        raise ConfigError(
            f"AIR: the signal {name} failed on task {history.task_id}, turn {history.turn}: "
            f"{type(error).__name__}: {error}; return 0.0 for a state without a value"
        ) from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(
            f"AIR: the signal {name} returned {value!r} on task {history.task_id}, turn "
            f"{history.turn}: return a finite number"
        )
    return float(value)


def shaping_metrics(shapings: Sequence[Shaping]) -> dict[str, float]:
    """Return AIR's metrics of a step.

    - `shaping_mean`: the mean number that AIR adds to the credit of a call
    - the name of a signal: the mean of its values
    - `<signal>/seen`: the number of its values
    - `unplaced`: the number of values that have no effect (`Shaping.unplaced`)
    """
    credits = [value for shaping in shapings for value in shaping.credits.values()]
    metrics = {"unplaced": float(sum(shaping.unplaced for shaping in shapings))}
    if credits:
        metrics["shaping_mean"] = math.fsum(credits) / len(credits)
    for name in dict.fromkeys(name for shaping in shapings for name in shaping.observed):
        values = [value for shaping in shapings for value in shaping.observed.get(name, ())]
        metrics[f"{name}/seen"] = float(len(values))
        if values:
            metrics[name] = math.fsum(values) / len(values)
    return metrics
