"""Test forked rollouts in a real training: runner processes, a SQLite store, the tiny model."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import lightspan_ui.views as v
from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.algorithms import TrainerContext
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.export import Filter, What, export_run
from lightspan_tools.inspect import inspect_run
from packages.otel.tests.backend import Backend
from packages.ui.tests.ui_client import serving
from tests.reports.ui_numbers import check_run

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


@pytest.fixture(scope="module")
def forked(
    tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunFolder, list[Span]]:
    """Train on 4 trunks and 12 forks at their third calls; return the run, and the sent spans.

    Half of the forks have the words of a set in their prompts, and run in either of two processes.
    """

    async def collects(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        return await trainer.forks([third_call(trunk) for trunk in trunks], FORKS)

    tasks = [{"q": f"question {n}", "words": n == 0} for n in range(TASKS)]
    folder, backend = tmp_path_factory.mktemp("forked") / "run", Backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTSPAN_OTLP", backend.url)
        run = train(folder, tiny, apps.converses, tasks, collects, frozen="shared")
    backend.close()
    return run, backend.spans()


def test_forks_of_a_training(forked: tuple[RunFolder, list[Span]]) -> None:
    """Check spans, coverage, groups and metrics."""
    run, _ = forked
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
    assert (line["rollouts"], line["scored"]) == (len(trunks), len(trunks))
    rewards = [trunk.reward for trunk in trunks]
    assert line["reward"] == pytest.approx(sum(r or 0.0 for r in rewards) / len(rewards))
    assert line["calls/trained"] == TASKS * GROUP * 3 + len(forks)
    assert line["calls/rejected:replayed"] == len(forks) * 2
    texts = [json.dumps(span.attributes) for fork in forks for span in fork.spans]
    assert sum("question" in text for text in texts) == 2 * len(forks)  # calls 3 and 4 only


def first_fork(run: RunFolder) -> tuple[Episode, Episode]:
    """Return a fork and the trunk that it repeats."""
    episodes = stored_episodes(run.store_url, mode=Mode.TRAIN)
    fork = next(episode for episode in episodes if episode.fork is not None)
    assert fork.fork is not None
    [trunk] = [e for e in episodes if e.attempt_id == fork.fork.attempt_id]
    return fork, trunk


def test_inspect_shows_forks(forked: tuple[RunFolder, list[Span]]) -> None:
    run, _ = forked
    fork, trunk = first_fork(run)
    shown = inspect_run(run.path)
    assert "16 rollouts, 12 of them forks or replays; calls by agent: writer 24" in shown
    assert sum("  fork   " in line for line in shown.splitlines()) == 12
    report = json.loads(inspect_run(run.path, as_json=True))
    assert Counter(row.get("fork_of", "") for row in report["rows"])[trunk.rollout_id] == FORKS
    shown = inspect_run(run.path, fork.rollout_id)
    point = trunk.calls[2].call_id
    assert f"repeats rollout {trunk.rollout_id} up to call {point}" in shown
    why = "rejected answered as in the attempt that the rollout repeats, which trains it"
    assert f"{trunk.calls[0].call_id}/0 writer: {why}" in shown
    shown = inspect_run(run.path, fork.rollout_id, trunk.calls[0].call_id)
    assert f"its texts and tokens: the call of this id of rollout {trunk.rollout_id}" in shown
    whole = json.loads(inspect_run(run.path, fork.rollout_id, as_json=True))
    assert whole["fork"] == {
        "attempt_id": trunk.attempt_id,
        "call_id": point,
        "rollout_id": trunk.rollout_id,
    }
    origins = [call.get("replayed_from") for call in whole["calls"]]
    assert origins == [trunk.rollout_id, trunk.rollout_id, None, None]


def exported(run: RunFolder, what: What, **options: Any) -> tuple[list[Any], dict[str, int]]:
    stream = io.BytesIO()
    summary = export_run(run.path, what, stream, **options)
    return [json.loads(line) for line in stream.getvalue().splitlines()], dict(summary.left_out)


@pytest.mark.parametrize("what", ["transitions", "messages"])
def test_a_replayed_call_is_exported_once(forked: tuple[RunFolder, list[Span]], what: What) -> None:
    run, _ = forked
    rows, left_out = exported(run, what, only=Filter(agents=("writer",)))
    keys = Counter((row["call_id"], row["choice"]) for row in rows)
    assert set(keys.values()) == {1}
    assert len(rows) == TASKS * GROUP * 3 + TASKS * GROUP * FORKS
    assert left_out["replayed calls, which are rows of the rollout that they repeat"] == 24
    forks = [row for row in rows if row["fork_of"]]
    assert len(forks) == TASKS * GROUP * FORKS


def test_spans_are_exported_as_references(forked: tuple[RunFolder, list[Span]]) -> None:
    run, sent = forked
    fork, trunk = first_fork(run)
    rows, _ = exported(run, "spans")
    spans = {row["span_id"]: row for row in rows if row["attempt_id"] == fork.attempt_id}
    replayed = spans[fork.calls[0].span_id]
    assert replayed["attributes"]["lightspan.replay.rollout_id"] == trunk.rollout_id
    assert [link[1] for link in replayed["links"]] == [trunk.calls[0].span_id]
    [span] = [s for s in sent if s.span_id == fork.calls[0].span_id]
    assert [link.span_id for link in span.links] == [trunk.calls[0].span_id]
    assert span.attributes["lightspan.replay.attempt_id"] == trunk.attempt_id
    assert span.links[0].trace_id in {each.trace_id for each in sent}


async def test_the_page_shows_forks(forked: tuple[RunFolder, list[Span]]) -> None:
    run, _ = forked
    await check_run(run.path)
    fork, trunk = await asyncio.to_thread(first_fork, run)
    async with serving(run.path) as client:
        path = f"/runs/{run.path.name}/rollouts/{fork.rollout_id}"
        detail = await client.get(path, v.RolloutDetail)
        assert (detail.row.fork_of, detail.row.fork_call) == (
            trunk.rollout_id,
            trunk.calls[2].call_id,
        )
        origins = [call.replayed_from for call in detail.calls]
        assert origins == [trunk.rollout_id, trunk.rollout_id, "", ""]
        assert [call.is_fork for call in detail.calls] == [False, False, True, False]
        facets = await client.get(f"/runs/{run.path.name}/facets", v.Facets)
        episodes = await asyncio.to_thread(stored_episodes, run.store_url)
        rewards = [episode.reward for episode in episodes if episode.fork is None]
        assert facets.mean == pytest.approx(sum(r or 0.0 for r in rewards) / len(rewards))


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
    assert (line["rollouts"], line["failed"], line["lost"], line["damaged"]) == (4, 0, 0, 0)


def test_refusals(tiny: Path, apps: Any, tmp_path: Path) -> None:
    async def refuses(trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        [checked] = [point for point in fork_points(trunks[0]) if point.call is None]
        with pytest.raises(ConfigError, match=r"not a call of the gateway.*frozen=\"base\""):
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
