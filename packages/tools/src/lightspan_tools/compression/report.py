"""Describe what a compression imitated, what it costs, and how good the small model is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec

from lightspan.progress import plural
from lightspan.training.statistics import Interval, paired_gain
from lightspan_tools.compression.measurement import Measurement
from lightspan_tools.compression.recorded import Recorded, Tokens

if TYPE_CHECKING:
    from lightspan_tools.compression.run import Compression


class FineTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What was imitated, or with `--dry-run` would be."""

    demonstrations: int
    left_out: dict[str, int]
    """Reason → number of calls that are not imitated."""
    losses: list[float] = []
    """Mean loss of each update; empty for a plan."""
    seconds: float = 0.0
    """CPU seconds of the learner."""
    note: str = ""
    """A line about imitated calls with a low score; empty if there are none."""

    def text(self) -> str:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(self.left_out.items()))
        verb = "imitated" if self.losses else "would be imitated"
        text = f"{plural(self.demonstrations, 'call')} {verb}; left out: {reasons or 'none'}"
        if self.losses:
            text += f"; loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}"
            text += f" in {plural(len(self.losses), 'update')}, {self.seconds:,.0f} CPU-s"
        return f"{text}\n{self.note}" if self.note else text


@dataclass(frozen=True, kw_only=True)
class CompressionReport:
    """What `lightspan compress` did."""

    settings: Compression
    recorded: Recorded
    tuning: FineTuning
    before: Measurement | None = None
    """The held-out tasks with the app's own endpoint; None without an app."""
    after: Measurement | None = None
    """The same with the small model."""

    @property
    def is_plan(self) -> bool:
        """Whether nothing was fine-tuned (`--dry-run`)."""
        return not self.tuning.losses

    @property
    def gain(self) -> Interval | None:
        """Reward of the small model minus that of the endpoint, per task, with its interval.

        None unless both were measured on tasks that were scored with both.
        """
        if self.before is None or self.after is None:
            return None
        first, last = self.before.evaluation, self.after.evaluation
        gain = paired_gain(first.rewards, last.rewards, {}, last.lowest_reward)
        return gain if gain.n else None

    @property
    def costs(self) -> dict[str, float]:
        """Cost of 1,000 calls: `recorded` if there are prices, `small` if measured with a price."""
        settings, costs = self.settings, {}
        tokens = self.recorded.tokens
        if settings.prices is not None and tokens.calls > tokens.uncounted:
            costs["recorded"] = tokens.cost_per_1000(settings.prices)
        after, price = self.after, settings.price_per_hour
        if price is not None and after is not None and after.tokens.calls:
            costs["small"] = 1000 * after.seconds_per_call * price / 3600
        return costs

    def text(self) -> str:
        """Return the report as lines of text."""
        settings, recorded = self.settings, self.recorded
        callers = ", ".join(f"{path} {count:,}" for path, count in recorded.agents.items())
        lines = [
            f"{plural(recorded.attempts, 'attempt')} recorded; calls by agent: {callers or 'none'}",
            f"scores of the chosen agents' calls: {_scores(recorded)}",
            self.tuning.text(),
            *self._measured_lines(),
            "cost of 1,000 calls:",
            f"  recorded endpoint, calls of production  {self._cost('recorded')}"
            f"{_tokens(recorded.tokens)}",
        ]
        if self.after is not None:
            lines.append(
                f"  {settings.folder}, calls of the held-out tasks  {self._cost('small')}"
                f"{_tokens(self.after.tokens)}, {1000 * self.after.seconds_per_call:,.1f} s of "
                f"this machine ({settings.device}, up to {plural(settings.runners, 'attempt')} "
                "at once)"
            )
        return "\n".join([*lines, *self._advice()])

    def _cost(self, name: str) -> str:
        cost = self.costs.get(name)
        return "" if cost is None else f"{cost:.4g}; "

    def _measured_lines(self) -> list[str]:
        if self.before is None or self.after is None:
            return []
        names = {"recorded endpoint": self.before, str(self.settings.folder): self.after}
        lines = [
            f"{name}: {each.evaluation.text('reward').partition(': ')[2]}"
            for name, each in names.items()
        ]
        gain = "no task was scored with both" if self.gain is None else str(self.gain)
        return [*lines, f"difference of the small model: {gain}"]

    def _advice(self) -> list[str]:
        settings = self.settings
        if self.is_plan:
            return ["nothing was written: leave --dry-run out to fine-tune"]
        optimize = f", optimize={list(settings.agents)!r}" if settings.agents else ""
        train = f"Trainer(LightningRL({str(settings.folder)!r}{optimize})).fit(app, tasks)"
        advice = [
            "next:",
            f"  use it:      lightspan serve {settings.folder}",
            f"  with a metric: {train}",
        ]
        if self.after is None:
            advice.append(
                "  measure it:  the same command with --resume --app MODULE:APP --tasks FILE.jsonl"
            )
        if settings.prices is None:
            advice.append("  cost in money: --price INPUT OUTPUT, per million tokens")
        elif self.after is not None and settings.price_per_hour is None:
            advice.append("  its cost in money: --price-per-hour PRICE, of this machine")
        return advice

    def json(self) -> str:
        """Return the report as JSON."""
        measurements = {
            name: None if each is None else _plain(each)
            for name, each in (("before", self.before), ("after", self.after))
        }
        gain = None if self.gain is None else msgspec.to_builtins(self.gain)
        report = {
            "recorded": msgspec.to_builtins(self.recorded),
            "tuning": msgspec.to_builtins(self.tuning),
            **measurements,
            "difference": gain,
            "cost_per_1000_calls": self.costs,
        }
        return json.dumps(report, indent=2)


def _plain(measurement: Measurement) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(measurement)
    return plain | {"seconds_per_call": measurement.seconds_per_call}


def _scores(recorded: Recorded) -> str:
    scores, calls = recorded.scores, recorded.tokens.calls
    if not scores:
        return f"none of {plural(calls, 'answered call')}"
    return (
        f"{len(scores):,} of {plural(calls, 'answered call')}, mean {fmean(scores):.3g}, "
        f"median {median(scores):.3g}"
    )


def _tokens(tokens: Tokens) -> str:
    if tokens.calls == tokens.uncounted:
        return "unknown: no answer had its usage"
    unknown = f" ({tokens.uncounted:,} calls without usage)" if tokens.uncounted else ""
    return (
        f"{1000 * tokens.input:,.0f} input and {1000 * tokens.output:,.0f} output tokens{unknown}"
    )
