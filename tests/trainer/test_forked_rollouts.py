"""Test forked rollouts in a real training: runner processes, a SQLite store, the tiny model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.algorithms import TrainerContext
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes

pytestmark = pytest.mark.slow

TASKS, GROUP, FORKS = 2, 2, 3
Collect = Callable[[TrainerContext, list[Episode]], Awaitable[list[Episode]]]


class Forking(LightningRL):
    """An algorithm that also trains forks: it extends its rollouts by those of `collects`."""

    def __init__(self, collects: Collect, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.collects = collects

    async def collect(self, trainer: TrainerContext) -> list[Episode]:
        trunks = await super().collect(trainer)
        return trunks + await self.collects(trainer, trunks)


def third_call(episode: Episode) -> ForkPoint:
    return fork_points(episode)[2]


def train(
    folder: Path, tiny: Path, app: Any, tasks: list[Any], collects: Collect, **options: Any
) -> RunFolder:
    algorithm = Forking(
        collects,
        tiny,
        optimize="writer",
        group_size=GROUP,
        tasks_per_step=TASKS,
        learning_rate=1e-3,
        **options,
    )
    trainer = Trainer(algorithm, runners=LocalRunners(4, processes=2), steps=1, folder=folder)
    trainer.fit(app, tasks)
    return RunFolder(folder)


def test_forks_of_a_training(tiny: Path, apps: Any, tmp_path: Path) -> None:
    """Check spans, coverage, groups and metrics of 12 forks at the third call of 4 trunks.

    Half of them have the words of a set in their prompts, and run in either of two processes.
    """

    async def collects(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        return await trainer.forks([third_call(trunk) for trunk in trunks], FORKS)

    tasks = [{"q": f"question {n}", "words": n == 0} for n in range(TASKS)]
    run = train(tmp_path / "run", tiny, apps.converses, tasks, collects, frozen="shared")
    episodes = stored_episodes(run.store_url, mode=Mode.TRAIN)
    trunks = [episode for episode in episodes if episode.fork is None]
    forks = [episode for episode in episodes if episode.fork is not None]
    assert (len(trunks), len(forks)) == (TASKS * GROUP, TASKS * GROUP * FORKS)
    by_id = {episode.attempt_id: episode for episode in trunks}
    groups = Counter(fork.group_id for fork in forks)
    assert groups == dict.fromkeys(groups, FORKS)
    assert not groups.keys() & {trunk.group_id for trunk in trunks}
    for fork in forks:
        assert fork.fork is not None
        trunk = by_id[fork.fork.attempt_id]
        assert not fork.departed
        assert fork.task_id == trunk.task_id
        assert [str(call.outcome) for call in fork.calls[:2]] == ["replayed"] * 2
        assert [call.call_id for call in fork.calls[:2]] == [c.call_id for c in trunk.calls[:2]]
        assert [call.agent_path for call in fork.calls] == ["writer"] * 3 + ["checker"]
        assert fork.calls[2].record is not None
        assert trunk.calls[2].record is not None
        assert fork.calls[2].record.prompt == trunk.calls[2].record.prompt
    line = next(line for line in run.metrics() if line["kind"] == "train")
    assert line["calls/trained"] == TASKS * GROUP * 3 + len(forks)
    assert line["calls/rejected:replayed"] == len(forks) * 2
    texts = [json.dumps(span.attributes) for fork in forks for span in fork.spans]
    assert sum("question" in text for text in texts) == 2 * len(forks)  # calls 3 and 4 only


def test_departed_forks_are_left_out(
    tiny: Path, apps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that forks of an app with the time in its prompt are told, and in no statistics."""
    kept: list[list[Episode]] = []

    async def collects(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        points = [third_call(trunk) for trunk in trunks]
        kept.append(await trainer.forks(points, FORKS))
        return kept[0]

    tasks = [{"q": f"question {n}", "clock": n == 0} for n in range(TASKS)]
    run = train(tmp_path / "run", tiny, apps.converses, tasks, collects, frozen="shared")
    departed = [e for e in stored_episodes(run.store_url, mode=Mode.TRAIN) if e.departed]
    assert len(departed) == GROUP * FORKS == len(kept[0])
    assert all("a time of day" in episode.departed for episode in departed)
    assert all(episode.reward is None and not episode.finished for episode in departed)
    output = capsys.readouterr()
    text = output.out + output.err
    assert "6 of 12 forks left out: they departed from the attempt that they repeat" in text
    assert "% of the rollouts" not in text
    line = next(line for line in run.metrics() if line["kind"] == "train")
    assert (line["rollouts"], line["failed"], line["lost"], line["damaged"]) == (10, 0, 0, 0)


def test_refusals(tiny: Path, apps: Any, tmp_path: Path) -> None:
    async def refuses(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        [checked] = [point for point in fork_points(trunks[0]) if point.call is None]
        with pytest.raises(ConfigError, match=r"did not go through the gateway.*frozen=\"base\""):
            await trainer.forks([checked], 1)
        with pytest.raises(ConfigError, match="forks: count=0 must be at least 1"):
            await trainer.forks([third_call(trunks[0])], 0)
        return []

    with ScriptedServer("fine") as server:
        tasks = [{"q": f"question {n}", "own": server.url} for n in range(TASKS)]
        train(tmp_path / "run", tiny, apps.converses, tasks, refuses)


def test_overlap_is_refused(tiny: Path, apps: Any, tmp_path: Path) -> None:
    async def refuses(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        with pytest.raises(ConfigError, match="forks: with overlap="):
            await trainer.forks([third_call(trunks[0])], 1)
        return []

    tasks = [{"q": f"question {n}"} for n in range(TASKS)]
    options: dict[str, Any] = {"frozen": "shared", "overlap": 1}
    train(tmp_path / "run", tiny, apps.converses, tasks, refuses, **options)
