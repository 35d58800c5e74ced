"""Put together the page of a run: its settings, the coverage of its calls, and its scorers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lightspan.schema.records import Mode
from lightspan.training.folder import REWARDS, TAKEN
from lightspan_tools.overview import pruned_text
from lightspan_tools.rollout_view import (
    failure_rewards,
    reward_names,
    trained_rewards,
    training_steps,
)
from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue
from lightspan_ui.coverage import Coverage
from lightspan_ui.entries import Scoring
from lightspan_ui.run_files import LiveRunFolder, stamp_of
from lightspan_ui.runs import flat_settings, mean_of, metric_names


class RunScoring:
    """How a run computes rewards and steps, read again only if its files changed.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: LiveRunFolder) -> None:
        self._folder = folder
        self._key: object = None
        self._scoring = Scoring()

    def read(self) -> Scoring:
        """Return how the run computes rewards and steps now.

        Raises:
            ConfigError: a file of the run is damaged.
        """
        folder, config = self._folder, self._folder.read_config()
        reward = config.get("reward")
        name = str(reward.get("name")) if isinstance(reward, dict) else ""
        lines = folder.metrics()
        is_lowest = config.get("failure_reward") == "lowest"
        key = (
            stamp_of(folder.path / REWARDS / f"{name}.jsonl") if name else None,
            stamp_of(folder.path / TAKEN),
            (folder.tail.generation, len(lines)) if is_lowest else None,
        )
        if key != self._key:
            failure_reward: Callable[[Mode, int], float | None] = functools.cache(
                failure_rewards(folder, config)
            )
            self._scoring = Scoring(
                rewards=trained_rewards(folder, config),
                failure_reward=failure_reward,
                steps=training_steps(folder),
            )
            self._key = key
        return self._scoring


def detail_of(
    summary: views.RunSummary,
    folder: LiveRunFolder,
    catalogue: Catalogue | None,
    coverage: Coverage,
    error: str,
) -> views.RunDetail:
    """Return the page of a run.

    Args:
        summary: summary of the run.
        folder: folder of the run.
        catalogue: rollouts of the run; None if its store cannot be read.
        coverage: counts of its calls.
        error: why the store cannot be read.
    """
    if summary.error:
        return views.RunDetail(
            summary=summary, settings={}, agents=[], coverage_of=0, rollouts=0, error=error
        )
    lines, result = folder.metrics(), folder.read_result() or {}
    entries = [] if catalogue is None else list(catalogue.entries.values())
    stored = [e.step for e in entries if e.summary.mode is Mode.TRAIN and e.summary.attempt_id]
    kept = result.get("kept")
    return views.RunDetail(
        summary=summary,
        settings=flat_settings(folder.read_config()),
        agents=coverage.agents(
            {e.summary.rollout_id: e.reward for e in entries if e.summary.fork is None}
        ),
        coverage_of=coverage.rollouts + sum(e.summary.attempt_id is None for e in entries),
        rollouts=len(entries),
        pruned=pruned_text(lines, min(stored, default=None)) if catalogue is not None else "",
        overrides=coverage.overrides(),
        scorers=scorers(folder),
        metric_names=metric_names([line for line in lines if line["kind"] == "train"]),
        result=str(result.get("summary") or ""),
        kept=None if kept is None else kept["step"],
        error=error,
    )


def scorers(folder: LiveRunFolder) -> dict[str, views.Estimate]:
    """Return the mean reward by each judge or function of the run."""
    means = {}
    for name in reward_names(folder):
        scores = folder.rewards(name).values()
        values = [score.value for score in scores if score.value is not None]
        means[name] = views.Estimate(mean=mean_of(values), n=len(values))
    return means
