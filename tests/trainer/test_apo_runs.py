"""Test APO in a `Trainer`, with real apps, frameworks, HTTP and stores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import apo_toy  # type: ignore[import-not-found]
import gepa_toy  # type: ignore[import-not-found]
import pytest

from lightspan.cli import main
from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run

LEARNED = {"rules": "SHOUT Speak.", "form": 'REVERSE As {"text": …}. Q: {q}'}
BOTH = ["router", "clerk"]
CLERK = "You are a clerk of the {part_1} desk. "


def result_of(folder: Path) -> SearchResult:
    found = read_found(folder)
    assert found is not None
    return found


def test_prompts_that_the_app_asks_for_are_learned_and_shown(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / "run"
    with ScriptedServer(gepa_toy.speaks) as model, ScriptedServer(apo_toy.reflects) as thinker:
        result = apo_toy.train(folder, model.url, thinker.url)
    assert result.model is None
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert {name: each.template for name, each in result.prompts.items()} == LEARNED
    found = result_of(folder)
    in_training = [e for e in stored_episodes(folder / "store.db") if e.mode == "train"]
    assert found.rollouts == len(in_training)
    assert found.candidates[found.chosen].templates == LEARNED
    text = inspect_run(folder)
    assert text.startswith(f"{folder}: APO\napp prompt_apps:told\n")
    assert "candidate 0, as given: selection 0.000 (0 0 0 0)\n" in text
    parents = found.candidates[found.chosen].parents[0]
    assert f"candidate {found.chosen}, of {parents}: selection 1.000 (1 1 1 1), chosen\n" in text
    beaten = [n for n, each in enumerate(found.candidates) if not each.is_whole]
    assert f"candidate {beaten[0]}, of 0: a batch of selection 0." in text
    assert main(["export", str(folder), "prompts", "--prompt", "rules"]) == 0
    assert capsysbinary.readouterr().out == b"SHOUT Speak.\n"


@pytest.mark.slow
def test_instructions_of_two_agents_that_nobody_edits_are_learned(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the search changes both agents' instructions in turn, as parts of one
    candidate.
    """
    pytest.importorskip("langchain_openai")
    pytest.importorskip("langgraph")
    folder = tmp_path / "run"
    with (
        ScriptedServer(desk.speaks_variously) as model,
        ScriptedServer(desk.reflects) as thinker,
    ):
        environment.setenv("OPENAI_BASE_URL", model.url)
        result = desk.train(folder, thinker.url, kind="APO", app=desk.courteous, optimize=BOTH)
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    prompts = result.prompts
    assert {name: (each.place, each.agent) for name, each in prompts.items()} == {
        name: ("agent", name) for name in BOTH
    }
    assert prompts["clerk"].before.text == f"{CLERK}Be brief."
    assert prompts["clerk"].after.text == f"{CLERK}Be kind."
    assert prompts["router"].after.text.endswith(desk.RULES)
    assert prompts["router"].after.fields == prompts["router"].before.fields != ()
    found = result_of(folder)
    changed: Counter[str] = Counter()
    for each in found.candidates[1:]:
        [parent] = each.parents
        before = found.candidates[parent].templates
        [name] = [name for name in before if each.templates[name] != before[name]]
        changed[name] += 1
    assert set(changed) == set(BOTH)
    best = found.candidates[found.chosen]
    assert best.mean == 1.0 > max(found.candidates[n].mean for n in best.parents)
    about = [sum(f'called "{name}"' in r.last_text for r in thinker.requests) for name in BOTH]
    assert about[0] == about[1] > 0
