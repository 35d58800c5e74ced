"""Count what became of the model calls of a run, by agent.

The counts of each rollout are kept. They are computed again only if the rollout changed, or if its
step ended, because only then it is known which of its calls were trained.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from lightspan.lightning.selection import Rejection
from lightspan.schema.records import Mode
from lightspan_tools.rollout_view import RolloutView
from lightspan_tools.sampling_overrides import overrides_of
from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue
from lightspan_ui.entries import Entry
from lightspan_ui.rollouts import SEARCHES, fate_of, has_searched_prompt, views_of
from lightspan_ui.run_files import LiveRunFolder

PORTION: Final = 128
"""Number of rollouts whose calls are read at once."""
FIRST_S: Final = 0.5
"""Seconds for which an answer waits for the counts. The rest is counted in the background."""


class CallCounts(NamedTuple):
    """What became of a rollout's calls. Equal ones are stored once."""

    calls: tuple[tuple[str, views.Fate, str, int], ...]
    """(agent, fate, reason, number of calls)."""
    learns: tuple[str, ...]
    """Agents whose calls train a policy, or have a prompt that is searched."""
    overrides: tuple[tuple[str, int], ...]
    """(sampling parameter, number of calls in which it was replaced)."""


class Coverage:
    """The counts of a run's calls.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: LiveRunFolder) -> None:
        self._folder = folder
        self._counts: dict[str, tuple[object, CallCounts]] = {}
        """Rollout id → what the counts depend on, and the counts."""
        self._interned: dict[CallCounts, CallCounts] = {}
        self._basis: object = None
        self._task: asyncio.Task[None] | None = None

    async def refresh(self, catalogue: Catalogue) -> None:
        """Count calls that were not counted, for a short time; go on in the background."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._count(catalogue))
        done, _ = await asyncio.wait([self._task], timeout=FIRST_S)
        for task in done:
            task.result()

    def close(self) -> None:
        """Stop counting in the background."""
        if self._task is not None:
            self._task.cancel()

    def agents(self, rewards: Mapping[str, float | None]) -> list[views.AgentCoverage]:
        """Return what became of each agent's calls, those that learn first.

        Args:
            rewards: rollout id → reward.
        """
        calls: Counter[str] = Counter()
        fates: Counter[tuple[str, str]] = Counter()
        rejected: dict[str, Counter[str]] = {}
        learning: set[str] = set()
        for counts, times in self._distinct().items():
            learning.update(counts.learns)
            for agent, fate, reason, n in counts.calls:
                calls[agent] += n * times
                fates[agent, fate] += n * times
                if fate == "rejected":
                    rejected.setdefault(agent, Counter())[reason] += n * times
        if not learning and self._folder.read_config().get("algorithm") in SEARCHES:
            learning = set(calls)  # prompts of the app's code: no call says which one it used
        means = self._mean_rewards(rewards)
        return [
            views.AgentCoverage(
                path=agent,
                learns=agent in learning,
                calls=calls[agent],
                trained=fates[agent, "trained"],
                frozen=fates[agent, "frozen"],
                evaluation=fates[agent, "evaluation"],
                recorded=fates[agent, "recorded"],
                reward=means.get(agent),
                rejected=dict(rejected.get(agent, Counter()).most_common()),
            )
            for agent in sorted(calls, key=lambda agent: (agent not in learning, agent))
        ]

    def _mean_rewards(self, rewards: Mapping[str, float | None]) -> dict[str, float]:
        """Return the mean reward of the rollouts in which each agent acted."""
        groups: dict[CallCounts, list[float]] = {}
        for name, (_, counts) in self._counts.items():
            reward = rewards.get(name)
            if reward is not None:
                groups.setdefault(counts, []).append(reward)
        sums: dict[str, list[tuple[float, int]]] = {}
        for counts, values in groups.items():
            for agent in {agent for agent, *_ in counts.calls}:
                sums.setdefault(agent, []).append((math.fsum(values), len(values)))
        return {
            agent: math.fsum(total for total, _ in parts) / sum(n for _, n in parts)
            for agent, parts in sums.items()
        }

    def overrides(self) -> dict[str, int]:
        """Return in how many calls each sampling parameter of the app was replaced."""
        total: Counter[str] = Counter()
        for counts, times in self._distinct().items():
            for name, n in counts.overrides:
                total[name] += n * times
        return dict(total.most_common())

    @property
    def rollouts(self) -> int:
        """Number of rollouts whose calls are counted."""
        return len(self._counts)

    def _distinct(self) -> Counter[CallCounts]:
        return Counter(counts for _, counts in self._counts.values())

    async def _count(self, catalogue: Catalogue) -> None:
        while todo := self._uncounted(catalogue):
            for number, start in enumerate(range(0, len(todo), PORTION), 1):
                portion = todo[start : start + PORTION]
                shown = await views_of(catalogue, self._folder, [entry for entry, _ in portion])
                counted = {view.state.rollout.rollout_id: counts_of(view) for view in shown}
                for entry, key in portion:
                    counts = counted.get(entry.summary.rollout_id, _NOTHING)
                    counts = self._interned.setdefault(counts, counts)
                    self._counts[entry.summary.rollout_id] = key, counts
                catalogue.note_progress(number)
                await asyncio.sleep(0)
            catalogue.note_progress()

    def _uncounted(self, catalogue: Catalogue) -> list[tuple[Entry, object]]:
        """Return the rollouts to count, with what their counts depend on, the newest first."""
        basis = self._read_basis()
        if basis != self._basis:
            self._counts, self._basis = {}, basis
        lines, steps = self._folder.metrics(), catalogue.scoring.steps
        complete = {line["step"] for line in lines if line["kind"] == "train"}
        todo: list[tuple[Entry, object]] = []
        for entry in catalogue.newest:
            summary = entry.summary
            if summary.attempt_id is None:
                continue
            is_waiting = steps and summary.mode is Mode.TRAIN and summary.group_id not in steps
            key = summary.change, entry.step in complete and not is_waiting
            if self._counts.get(summary.rollout_id, (None,))[0] != key:
                todo.append((entry, key))
        return todo

    def _read_basis(self) -> object:
        """Return what the counts of all rollouts depend on: which calls the learner refused."""
        names = {f"calls/rejected:{each}" for each in (Rejection.CONSTRAINED, _TRUNCATED)}
        lines = self._folder.metrics()
        refused = {name for line in lines for name in names & line.keys() if line[name]}
        return self._folder.tail.generation, frozenset(refused)


_TRUNCATED: Final = Rejection.TRUNCATED_SAMPLING
_NOTHING: Final = CallCounts((), (), ())


def counts_of(view: RolloutView) -> CallCounts:
    """Return the counts of a rollout's calls."""
    calls: Counter[tuple[str, views.Fate, str]] = Counter()
    overrides: Counter[str] = Counter()
    learns: dict[str, None] = {}
    for entry in view.coverage.entries:
        reason = "" if entry.rejection is None else str(entry.rejection)
        calls[entry.call.agent_path, fate_of(view, entry), reason] += 1
        if entry.policy or has_searched_prompt(entry):
            learns[entry.call.agent_path] = None
        if entry.call.span is not None:
            overrides.update(overrides_of(entry.call.span.attributes).keys())
    return CallCounts(
        tuple((*key, n) for key, n in sorted(calls.items())),
        tuple(learns),
        tuple(sorted(overrides.items())),
    )
