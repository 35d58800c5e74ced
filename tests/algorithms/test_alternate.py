"""Test Alternate: the order of its turns, its budget, and resuming.

Rollouts are made up and no weights are trained; `test_alternate_runs.py` trains a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import APO, GEPA, LLM, Alternate, LightningRL, PromptTemplate
from lightspan.errors import ConfigError, EngineError
from lightspan.schema.records import task_id
from lightspan.training.resume import FREE
from lightspan_prompts.alternate import INITIAL_WEIGHTS
from lightspan_prompts.search.candidates import read_searches
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.prompts.tests import made_up

TASKS: list[Any] = [{"n": n} for n in range(8)]


def reflects(request: Request) -> str:
    text = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"<prompt>\n{text} more\n</prompt>"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflects) as running:
        yield running


class World(made_up.World):
    """A trainer context with made-up rollouts, also for the turns that train weights."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda task, texts: len(texts["style"]) / 100)
        self.tasks = TASKS
        self.step = 0
        self.taught_nothing: list[int] = []
        self.offered: list[Any] = []
        """Tasks of each step that trains weights."""

    async def rollouts(self, tasks: Any, group_size: int, *args: Any, **given: Any) -> Any:
        if "resources" in given:
            return await super().rollouts(tasks, group_size, *args, **given)
        self.rollouts_done += len(tasks) * group_size
        self.offered.append([task["n"] for task in tasks])
        return []

    def explain(self, explanations: Any) -> None:
        assert explanations == {}
        self.taught_nothing.append(self.step)


class Still(LightningRL):
    """An algorithm that runs a step's rollouts without training anything."""

    async def run_step(self, world: Any) -> dict[str, float]:
        await self.collect(world)
        return {"reward": 0.5}

    def state(self) -> dict[str, Any]:
        return {"half": "known"}

    def load_state(self, state: dict[str, Any]) -> None:
        assert state == {"half": "known"}


OF_THE_SEARCH = ("max_tokens", "proposals", "max_reflections")


def alternate(server: ScriptedServer, kind: str = "APO", **options: Any) -> Alternate:
    llm = LLM(base_url=server.url, model="thinker")
    style = {"style": PromptTemplate("Say {q}")}
    common: dict[str, Any] = {"max_rollouts": 60, "perfect_reward": None, "significance": None}
    common |= {name: options.pop(name) for name in list(options) if name in OF_THE_SEARCH}
    beam = {
        "beam_width": 1,
        "branch_factor": 1,
        "gradient_batch_size": 2,
        "val_batch_size": 2,
        "beam_rounds": 1,
    }
    prompts: Any = (
        APO(style, llm, **beam, **common) if kind == "APO" else GEPA(style, llm, **common)
    )
    weights = Still("somewhere", optimize="writer", group_size=2, tasks_per_step=2)
    return Alternate(prompts, weights, **{"max_rollouts": 80, "cycles": 2, **options})


async def steps(algorithm: Alternate, world: World, *numbers: int) -> list[dict[str, float]]:
    done = []
    for world.step in numbers:
        done.append(await algorithm.run_step(world))  # type: ignore[arg-type]
    return done


def text_of(algorithm: Alternate) -> str:
    return algorithm.resources()["style"].template


# --- before the run -------------------------------------------------------------------------
async def test_a_share_that_is_too_small_is_known_before_any_rollout(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm, world = alternate(server, "GEPA", cycles=5), World(tmp_path)
    with pytest.raises(
        ConfigError, match=r"this search may use 12: GEPA\(max_rollouts=12\) is too"
    ):
        await algorithm.check_run(world)  # type: ignore[arg-type]
    await alternate(server, "GEPA").check_run(world)  # type: ignore[arg-type]
    assert world.rollouts_done == 0


# --- turns ----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["APO", "GEPA"])
async def test_it_takes_turns(server: ScriptedServer, tmp_path: Path, kind: str) -> None:
    algorithm, world = alternate(server, kind), World(tmp_path)
    # of 80 rollouts 60 are for searches, the others make five steps of four
    assert algorithm.total_steps == 7
    done = await steps(algorithm, world, *range(1, 8))
    assert ["candidates" in metrics for metrics in done] == [
        *(True, False, False, False),
        *(True, False, False),
    ]
    assert world.rollouts_done <= 80
    assert world.taught_nothing == [1, 5]
    searches = read_searches(tmp_path)
    assert list(searches) == ["step-000001", "step-000005"]
    first, second = searches.values()
    # a search goes on from what the one before it chose
    assert first.candidates[0].templates == {"style": "Say {q}"}
    assert second.candidates[0].templates == first.candidates[first.chosen].templates
    assert "more" in second.candidates[0].templates["style"]
    assert algorithm.learned_prompts()["style"].before.template == "Say {q}"
    assert text_of(algorithm) == second.candidates[second.chosen].templates["style"]
    assert text_of(algorithm).count("more") > first.candidates[first.chosen].templates[
        "style"
    ].count("more")


async def test_a_new_run_starts_with_the_initial_prompts(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm = alternate(server)
    fresh = algorithm.state()
    await steps(algorithm, World(tmp_path), 1, 2)
    assert "more" in text_of(algorithm)
    algorithm.reset()
    assert (text_of(algorithm), algorithm.state()) == ("Say {q}", fresh)


async def test_weights_never_see_what_prompts_are_chosen_by(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm, world = alternate(server), World(tmp_path)
    await steps(algorithm, world, *range(1, 8))
    split = algorithm.prompts.split(TASKS)
    assert sorted(world.offered[0] + world.offered[1]) == sorted(t["n"] for t in split.feedback)
    assert len(world.offered) == 5
    assert {n for step in world.offered for n in step} == {task["n"] for task in split.feedback}


async def test_weights_may_choose_tasks_by_their_rates(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """Check that the order of the weights' algorithm is used, on the same tasks."""
    algorithm, world = alternate(server), World(tmp_path)
    algorithm.weights = Still(
        "somewhere", optimize="writer", group_size=2, tasks_per_step=2, tasks="adaptive"
    )
    await steps(algorithm, world, *range(1, 8))
    names = {task_id(task) for task in algorithm.prompts.split(TASKS).feedback}
    records = algorithm.weights._history.records
    assert records.keys() == names
    assert sum(record.draws for record in records.values()) == 10
    assert sum(map(len, world.offered)) == 10


class Cached(World):
    """A trainer context whose app keeps a cache across searches and restarts."""

    async def rollouts(self, tasks: Any, group_size: int, *args: Any, **given: Any) -> Any:
        episodes = await super().rollouts(tasks, group_size, *args, **given)
        cache = self.path / "cache"
        known = cache.read_text().split() if cache.exists() else []
        for episode in episodes:
            if episode.task_id in known:
                episode.calls.clear()
            known.append(episode.task_id)
        cache.write_text(" ".join(known))
        return episodes


async def test_a_cache_that_is_still_there_in_a_second_search_is_found(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """Check two searches and a resume: the second search's first rollouts are in the cache too."""
    algorithm, world = alternate(server, "GEPA"), Cached(tmp_path)
    world.calls = [made_up.call(1, "small", 9, 1)]
    await steps(algorithm, world, 1, 2, 3, 4)
    in_first = len({*(tmp_path / "cache").read_text().split()})
    state = json.loads(json.dumps(algorithm.state()))
    algorithm = alternate(server, "GEPA")
    algorithm.load_state(state)
    await steps(algorithm, world, 5)
    first, second = read_searches(tmp_path).values()
    in_both = len({*(tmp_path / "cache").read_text().split()})
    # each task was asked once in all
    assert first.unasked == {"": first.rollouts - in_first}
    assert second.unasked == {"": second.rollouts - (in_both - in_first)}


async def test_a_search_without_tokens_is_left_out(server: ScriptedServer, tmp_path: Path) -> None:
    algorithm, world = alternate(server, max_tokens=10), World(tmp_path)
    first = await steps(algorithm, world, 1)
    assert first[0]["tokens"] > 10
    before = text_of(algorithm)
    assert await steps(algorithm, world, 5) == [{"rollouts": 0, "scored": 0, "failed": 0}]
    assert world.notes[-1] == "max_tokens=10 is used up: the prompts stay unchanged"
    assert text_of(algorithm) == before


# --- going on -------------------------------------------------------------------------------
async def test_it_goes_on_after_each_step(server: ScriptedServer, tmp_path: Path) -> None:
    whole, world = alternate(server), World(tmp_path / "whole")
    await steps(whole, world, *range(1, 8))
    offered = []
    state: Any = None
    for step in range(1, 8):
        algorithm, part = alternate(server), World(tmp_path / "part")
        if state is not None:
            algorithm.load_state(json.loads(json.dumps(state)))
        await steps(algorithm, part, step)
        offered += part.offered
        state = algorithm.state()
    assert text_of(algorithm) == text_of(whole)
    assert offered == world.offered
    kept = read_searches(tmp_path / "part")
    assert [f.candidates for f in kept.values()] == [
        f.candidates for f in read_searches(tmp_path / "whole").values()
    ]


async def test_a_search_goes_on_by_its_journal(server: ScriptedServer, tmp_path: Path) -> None:
    algorithm, world = alternate(server), World(tmp_path)
    await steps(algorithm, world, 1, 2, 3, 4)
    state = json.loads(json.dumps(algorithm.state()))
    done = world.rollouts_done

    def refuses(request: Request) -> Any:
        is_edit = "<critique>" in request.last_text
        return Reply(status=401, text="no") if is_edit else reflects(request)

    server.script = refuses
    with pytest.raises(EngineError, match="AuthenticationError"):
        await steps(algorithm, world, 5)
    before = world.rollouts_done - done
    assert before > 0
    server.script = reflects
    again, other = alternate(server), World(tmp_path)
    again.load_state(state)
    asked = len(server.requests)
    await steps(again, other, 5)
    found = read_searches(tmp_path)["step-000005"]
    assert other.rollouts_done == found.rollouts - before
    assert len(server.requests) - asked == found.reflections - 1  # the critique is not asked again


async def test_other_weights_have_another_journal(server: ScriptedServer, tmp_path: Path) -> None:
    """Check that a run that is reset by several steps trains other weights and searches anew."""
    algorithm, world = alternate(server), World(tmp_path)
    await steps(algorithm, world, 1, 2, 3)
    state = json.loads(json.dumps(algorithm.state()))
    await steps(algorithm, world, 4, 5)
    [old] = (tmp_path / "journal").glob("step-000005-*")
    assert [path.name for path in (tmp_path / "journal").glob("step-000001-*")] == [
        f"step-000001-{INITIAL_WEIGHTS}"
    ]
    again, other = alternate(server), World(tmp_path)
    again.load_state(state)
    await steps(again, other, 4)
    done = other.rollouts_done
    await steps(again, other, 5)
    assert other.rollouts_done - done == read_searches(tmp_path)["step-000005"].rollouts
    [new] = (tmp_path / "journal").glob("step-000005-*")
    assert new != old
    assert (tmp_path / "journal" / f"step-000001-{INITIAL_WEIGHTS}").is_dir()


# --- settings -------------------------------------------------------------------------------
def test_its_settings_are_those_of_both(server: ScriptedServer) -> None:
    algorithm = alternate(server)
    config = algorithm.config()
    json.dumps(config)
    assert (config["algorithm"], config["model"], config["optimize"]) == (
        *("Alternate", "somewhere", "writer"),
    )
    search: Any = config["search"]
    assert search["prompts"] == {"style": {"type": "prompt", "template": "Say {q}"}}
    # what may change between two lives of a run does not stand elsewhere
    assert {"reflection", "timeout_s"} <= FREE & config.keys()
    assert config["budget"] == {"max_cost": None, "prices": {}}  # steps are laid out by the others
    assert not {"reflection", "timeout_s"} & search.keys()
    weights = algorithm.weights
    for name in ("seed", "group_size", "tasks_per_step", "minibatches", "loss", "batch_config"):
        assert getattr(algorithm, name) == getattr(weights, name)
    assert algorithm.policies() == weights.policies() != {}
    assert algorithm.routing() == weights.routing()
    assert (algorithm.searches, algorithm.search_rollouts) == (2, 60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_rollouts": 67},
            r"may use 60 of them, and a step of weights takes 4: give at least 68",
        ),
        ({"cycles": 6, "max_rollouts": 80}, "give at least 84, or fewer cycles"),
        ({"max_reflections": 3}, "max_reflections=3 is too few .* at least 4"),
        (
            {"kind": "GEPA", "max_reflections": 5, "proposals": 3},
            "max_reflections=5 is too few .* at least 6",
        ),
    ],
)
def test_options_that_cannot_be_honoured(
    server: ScriptedServer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        alternate(server, **options)


def test_what_is_no_half_is_refused(server: ScriptedServer) -> None:
    both = alternate(server)
    with pytest.raises(ConfigError, match="the first argument is a GEPA or an APO"):
        Alternate(both.weights, both.weights, max_rollouts=100)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights="):
        Alternate(both.prompts, both.prompts, max_rollouts=100)  # type: ignore[arg-type]
