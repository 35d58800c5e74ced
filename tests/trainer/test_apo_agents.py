"""APO over the instructions of two agents in an app that nobody edits: real frameworks and HTTP."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langgraph")

from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_testing.scripted import Request, ScriptedServer

BOTH = ["router", "clerk"]
CLERK = "You are a clerk of the {part_1} desk. "


class Run(NamedTuple):
    """A complete one. Only to be read."""

    folder: Path
    result: Any
    model: list[Request]
    thinker: list[Request]

    @property
    def found(self) -> SearchResult:
        found = read_found(self.folder)
        assert found is not None
        return found


def learned(
    desk: Any, environment: pytest.MonkeyPatch, folder: Path, reflects: Any = None, **options: Any
) -> Run:
    with (
        ScriptedServer(desk.speaks_variously) as model,
        ScriptedServer(reflects or desk.reflects) as thinker,
    ):
        environment.setenv("OPENAI_BASE_URL", model.url)
        options = {"kind": "APO", "app": desk.courteous, "optimize": BOTH, **options}
        result = desk.train(folder, thinker.url, **options)
    return Run(folder, result, model.requests, thinker.requests)


@pytest.fixture(scope="module")
def run(desk: Any, environment: pytest.MonkeyPatch, tmp_path_factory: Any) -> Run:
    return learned(desk, environment, tmp_path_factory.mktemp("desk") / "run")


def is_edit(request: Request) -> bool:
    return "<critique>" in request.last_text


def test_both_agents_learn(run: Run, desk: Any) -> None:
    assert [evaluation.mean for evaluation in run.result.evaluations] == [0.0, 1.0]
    prompts = run.result.prompts
    assert {name: (each.place, each.agent) for name, each in prompts.items()} == {
        name: ("agent", name) for name in BOTH
    }
    assert prompts["clerk"].before.text == f"{CLERK}Be brief."
    assert prompts["clerk"].after.text == f"{CLERK}Be kind."
    assert prompts["router"].after.text.endswith(desk.RULES)
    assert prompts["router"].after.fields == prompts["router"].before.fields != ()


def test_of_several_agents_each_expansion_changes_the_next_one(run: Run) -> None:
    """They are parts of one candidate, since the reward is of the app."""
    found = run.found
    changed: Counter[str] = Counter()
    for each in found.candidates[1:]:
        [parent] = each.parents
        before = found.candidates[parent].templates
        [name] = [name for name in before if each.templates[name] != before[name]]
        changed[name] += 1
    assert set(changed) == set(BOTH)
    best = found.candidates[found.chosen]
    assert best.mean == 1.0 > max(found.candidates[n].mean for n in best.parents)
    about = {name: sum(f'called "{name}"' in r.last_text for r in run.thinker) for name in BOTH}
    assert about["router"] == about["clerk"] > 0


def test_a_text_without_its_placeholders_costs_no_rollout(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forgets(request: Request) -> str:
        return "<prompt>Route it.</prompt>" if is_edit(request) else "It is too long."

    run = learned(desk, environment, tmp_path / "run", forgets, beam_rounds=1)
    found = run.found
    assert (len(found.candidates), found.unusable) == (1, 4)
    assert found.rollouts == 8 + 4 * 2
    assert not any(prompt.is_changed for prompt in run.result.prompts.values())
