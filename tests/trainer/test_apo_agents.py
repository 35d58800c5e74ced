"""APO over the instructions of two agents in an app that nobody edits: real frameworks and HTTP."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.trainer.killed_searches import killed_thrice

pytest.importorskip("langchain_openai")
pytest.importorskip("langgraph")

from lightspan import APO, LLM, PromptTemplate
from lightspan.errors import ConfigError, EngineError, UnknownAgentError
from lightspan.schema.records import Mode
from lightspan.schema.resources import INSTRUCTIONS
from lightspan.schema.system_prompts import Instructions
from lightspan.training.collector import stored_episodes
from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_tools.inspect import inspect_run

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


def is_clerk(request: Request) -> bool:
    return str(request.messages[0]["content"]).startswith("You are a clerk")


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


def test_no_rollout_is_done_only_to_find_the_texts(run: Run) -> None:
    train = stored_episodes(run.folder / "store.db", mode=Mode.TRAIN)
    found = run.found
    assert found.rollouts == len(train)
    assert sum(not is_clerk(request) for request in run.model) == len(train) + 4 + 4
    # the first evaluation is of the app as it is; then two texts are sent in each rollout
    assert (found.applied, found.kept, found.unasked) == (2 * (len(train) - 8), {}, {})
    kinds = [json.loads(line)["type"] for line in _journal(run.folder)]
    assert kinds[:3] == ["header", "survey", "evaluation"]
    assert kinds.count("survey") == 1


def _journal(folder: Path) -> list[str]:
    return (folder / "journal" / "apo.jsonl").read_text().splitlines()


def test_the_models_are_told_of_the_placeholders(run: Run) -> None:
    for request in run.thinker[:2]:
        assert "placeholders that the application fills: {" in request.last_text
    [*_, first] = [r for r in run.thinker if 'called "clerk"' in r.last_text]
    assert f"<prompt>\n{CLERK}" in first.last_text


def test_another_agent_is_left_as_it_is(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its requests say what the app says, and go out with the app's own key."""
    run = learned(desk, environment, tmp_path / "run", optimize="router")
    assert list(run.result.prompts) == ["router"]
    assert [evaluation.mean for evaluation in run.result.evaluations] == [0.0, 0.5]
    clerks = [r.messages[0]["content"] for r in run.model if is_clerk(r)]
    assert len(clerks) > 20
    assert {text.partition(" desk. ")[2] for text in clerks} == {"Be brief."}
    routers = [r.messages[0]["content"] for r in run.model if not is_clerk(r)]
    assert any(text.endswith(desk.RULES) for text in routers)
    assert {r.headers["authorization"] for r in run.model} == {"Bearer own-key"}


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


def test_names_that_the_app_lacks_and_shares(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UnknownAgentError, match="Did you mean 'router'"):
        learned(desk, environment, tmp_path / "a", optimize=["ruter"])
    assert not [line for line in _journal(tmp_path / "a") if '"reflection"' in line]


def test_what_was_found_goes_on_in_another_process(run: Run) -> None:
    """As `Trainer.evaluate(…, resume=True)` has it: from the checkpoint."""
    state = json.loads(next((run.folder / "checkpoints").glob("*1/state.json")).read_bytes())
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="thinker")
    algorithm = APO(reflection=llm, optimize=BOTH)
    assert algorithm.resources() == {INSTRUCTIONS: Instructions(surveyed=BOTH)}
    assert algorithm.learned_prompts() == {}
    algorithm.load_state(state["algorithm"])
    told = algorithm.resources()[INSTRUCTIONS]
    assert isinstance(told, Instructions)
    assert {each.agent: each.text for each in told.rewrites} == {
        name: each.after.template for name, each in run.result.prompts.items()
    }
    assert algorithm.learned_prompts() == run.result.prompts


def test_a_dry_run_tells_what_is_found(run: Run, desk: Any) -> None:
    episodes = stored_episodes(run.folder / "store.db", mode=Mode.TRAIN)[:8]
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="thinker")
    algorithm = APO(reflection=llm, optimize=BOTH, **desk.BEAM)
    lines = algorithm.inspect_episodes(episodes)
    assert [line.partition(":")[0] for line in lines] == [
        f"found the text of {name!r}" for name in BOTH
    ]
    with pytest.raises(UnknownAgentError, match="Did you mean 'clerk'"):
        APO(reflection=llm, optimize=["clark"]).inspect_episodes(episodes)


def test_inspect_shows_what_was_sent(run: Run) -> None:
    text = inspect_run(run.folder)
    assert f"\ntexts of candidates were sent in {run.found.applied} calls\nprompt router:" in text
    assert "prompt clerk:\n" in text


def test_a_model_that_fails_ends_it_and_it_goes_on_later(
    run: Run, desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(request: Request) -> Any:
        return Reply(status=401, text="no") if is_edit(request) else desk.reflects(request)

    with pytest.raises(EngineError, match="AuthenticationError"):
        learned(desk, environment, tmp_path / "run", refuses)
    again = learned(desk, environment, tmp_path / "run")
    assert pool(again.found) == pool(run.found)
    assert is_edit(again.thinker[0])  # no critique is asked for again, and no rollout done again
    train = stored_episodes(again.folder / "store.db", mode=Mode.TRAIN)
    assert len(train) == again.found.rollouts == run.found.rollouts


def test_a_prompt_of_the_same_name_is_refused(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="thinker")
    with pytest.raises(ConfigError, match="'router' is in prompts and in optimize"):
        APO({"router": PromptTemplate("x")}, llm, optimize=["router"])


def pool(found: SearchResult) -> list[Any]:
    return [(each.templates, each.parents, each.mean, each.is_whole) for each in found.candidates]


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_is_killed(desk: Any, environment: Any, tmp_path: Path) -> None:
    """SIGKILL in the survey, in a reflection, and in the rollouts of candidates: the text that is
    found, and the candidates, are those of a run that was not killed."""
    options = {"app": desk.route, "optimize": ["router"]}
    whole = learned(desk, environment, tmp_path / "whole", **options).found
    folder = tmp_path / "run"
    killed_thrice(folder, desk.speaks_variously, desk.reflects, "APO")
    found = read_found(folder)
    assert found is not None
    assert found.surveyed == whole.surveyed
    assert pool(found) == pool(whole)
    assert (found.rollouts, found.reflections) == (whole.rollouts, whole.reflections)
