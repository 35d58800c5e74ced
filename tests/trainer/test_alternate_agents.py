"""Test Alternate with an app without lightspan.

The instructions of two agents are found and learned, in turns with the weights of one of them. The
other agent has an endpoint of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import alternate_agents as toy  # type: ignore[import-not-found]
import pytest
from alternate_toy import reflects  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan.lightning.episode import Episode
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_store
from lightspan_prompts.search.candidates import read_searches
from lightspan_prompts.search.prompt_discovery import texts_of
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from tests.trainer.test_alternate_runs import tensors

pytestmark = pytest.mark.slow

SEARCHES = (1, 4)
"""The steps of the run, of five, that search for prompts."""


class Run(NamedTuple):
    """A complete run; tests must not change it."""

    folder: Path
    result: Any
    guide: list[Request]
    """Requests to the guide's own endpoint."""


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alternate") / "run"
    with (
        ScriptedServer(toy.speaks) as guide,
        ScriptedServer(reflects) as thinker,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OPENAI_BASE_URL", guide.url)  # that the app is configured with
        result = toy.fit(folder, toy.algorithm(tiny, thinker.url))
    return Run(folder, result, guide.requests)


async def by_step(folder: Path) -> dict[int, list[Episode]]:
    """Return step → episodes of training."""
    async with open_store(folder / "store.db") as store:
        states = await store.rollouts(mode=Mode.TRAIN)
    steps = {state.rollout.rollout_id: state.rollout.step for state in states}
    found: dict[int, list[Episode]] = defaultdict(list)
    for episode in await asyncio.to_thread(stored_episodes, folder / "store.db", mode=Mode.TRAIN):
        found[steps[episode.rollout_id]].append(episode)
    return found


@pytest.mark.slow
def test_prompts_of_both_and_the_weights_of_one_learn(run: Run, tiny: Path) -> None:
    """Check that all three improve: two prompts, and the weights of one agent."""
    prompts = run.result.prompts
    assert {name: (each.place, each.agent) for name, each in prompts.items()} == {
        name: ("agent", name) for name in toy.BOTH
    }
    assert [prompts[name].before.text for name in toy.BOTH] == [toy.GUIDE, toy.WRITER]
    assert prompts["guide"].after.text.startswith(f"{toy.GUIDE} softly")
    assert prompts["writer"].after.text.startswith(f"{toy.WRITER} softly")
    before, after = tensors(tiny), tensors(run.result.model)
    moved = [name for name in before if not before[name].equal(after[name])]
    assert len(moved) > len(before) / 2
    first, last = run.result.evaluations
    assert last.mean - first.mean >= 0.2 - 0.1  # one word for the guide; the model's may fall
    assert json.loads((run.folder / "prompts.json").read_text())["writer"]["agent"] == "writer"


def test_the_app_is_looked_at_once(run: Run) -> None:
    first, second = read_searches(run.folder).values()
    assert first.surveyed == second.surveyed is not None
    given = first.candidates[0].templates
    assert given == {"guide": toy.GUIDE, "writer": toy.WRITER}
    assert second.candidates[0].templates == first.candidates[first.chosen].templates != given
    journals = sorted(run.folder.glob("journal/step-*/journal/gepa.jsonl"))
    assert [path.read_text().count('"type":"survey"') for path in journals] == [1, 0]
    assert first.kept == second.kept == {}
    # in every rollout but those of the survey both agents are told a candidate's text
    assert first.applied == 2 * (first.rollouts - 4)
    assert second.applied == 2 * second.rollouts


async def test_weights_learn_with_the_texts_that_were_chosen(run: Run) -> None:
    """Check that the writer's prompts have the chosen text, and so have requests to the guide."""
    searches = [*read_searches(run.folder).values()]
    chosen = [each.candidates[each.chosen].templates for each in searches]
    expected = {2: chosen[0], 3: chosen[0], 5: chosen[1]}
    for step, episodes in (await by_step(run.folder)).items():
        if step in SEARCHES:
            continue
        assert len(episodes) == 8
        for episode in episodes:
            texts = {text.agent: text for text in texts_of(episode)}
            assert {name: (t.text, t.applied) for name, t in texts.items()} == {
                "guide": (toy.GUIDE, True),
                "writer": (toy.WRITER, True),
            }
            for call in episode.calls:
                assert call.span is not None
                sent = str(call.span.attributes[c.INPUT_MESSAGES])
                assert expected[step][call.agent_path] in sent
                assert (call.record is not None) == (call.agent_path == "writer")
                assert call.outcome is CallOutcome.OK
    told = {request.messages[0]["content"] for request in run.guide}
    assert {toy.GUIDE, *(each["guide"] for each in chosen)} <= told
    assert {request.headers["authorization"] for request in run.guide} == {"Bearer own-key"}
