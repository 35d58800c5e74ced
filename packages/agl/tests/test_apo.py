"""Tests of `agl.APO`: the original's arguments and results, a program like its tutorial's, and
improvements."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError, DataError
from lightspan_agl._hooks import HookCalls
from lightspan_agl._local import local_runs
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

TUTORIAL = Path(__file__).parents[3] / "tests/apps" / "tutorial"
RULE = "Take the smallest room with enough seats."
ORIGINAL = {  # of agentlightning 0.3.0
    "async_openai_client": inspect.Parameter.empty,
    "gradient_model": "gpt-5-mini",
    "apply_edit_model": "gpt-4.1-mini",
    "diversity_temperature": 1.0,
    "gradient_batch_size": 4,
    "val_batch_size": 16,
    "beam_width": 4,
    "branch_factor": 4,
    "beam_rounds": 3,
    "rollout_batch_timeout": 3600.0,
    "run_initial_validation": True,
    "_poml_trace": False,
}


def books(request: Request) -> Any:
    """Answer as each model of the tutorial.

    They are the agent's model, which follows its prompt, the grader, the critic and the editor.
    """
    text, model = request.last_text, request.body["model"]
    if model == "gpt-5-mini":
        return f"The text does not say: {RULE}"
    if "<critique>" in text:
        old = text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
        return f"<prompt>{old} {RULE}</prompt>"
    if text.startswith("GRADE"):
        expected = text.partition("Expected: ")[2].partition(".")[0]
        return json.dumps({"score": float(f"Said: {expected}" in text)})
    if request.body.get("tools"):
        return Reply(tool_calls=[ToolCall(name="list_rooms", call_id="c1")])
    asked = str(request.messages[0]["content"])
    people = int(asked.partition("for ")[2].partition(" people")[0])
    small = "Attic" if people <= 2 else "Library" if people <= 6 else "Hall"
    return small if RULE in asked else "Hall"


def test_it_has_the_arguments_of_the_original() -> None:
    parameters = dict(inspect.signature(agl.APO.__init__).parameters)
    assert parameters.pop("self")
    assert parameters.pop("seed").default == 0
    assert {name: each.default for name, each in parameters.items()} == ORIGINAL


def test_the_tutorials_listing(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    with ScriptedServer(books) as server:
        done = subprocess.run(
            [sys.executable, str(TUTORIAL / "room_selector_apo.py")],
            env={**environment, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    template = f"Choose a room for {{people}} people who need: {{needs}}. {RULE}"
    assert done.stdout.splitlines()[-1] == f"best prompt (f-string): {template}"
    models = Counter(request.body["model"] for request in server.requests)
    asked = [each.last_text for each in server.requests if each.body["model"] == "gpt-5-mini"]
    # two rounds of four expansions; a rollout is two calls of the agent
    assert models["gpt-5-mini"] == len(asked) == 8
    assert all("answer: Hall" in text and "Reward: 0" in text for text in asked[:4])
    temperatures = {each.body.get("temperature") for each in server.requests}
    assert temperatures == {None, 1.0}
    assert "round 1 of 2: 1 new candidate of 4 expansions" in done.stderr
    assert "Traceback" not in done.stderr
    logged = (tmp_path / "apo.log").read_text().splitlines()
    assert any(line.startswith("[INFO] round 1 of 2: 1 new candidate") for line in logged)
    assert sum("round 1 of 2: 1 new" in line for line in logged) == 1


# --- what it does better ---------------------------------------------------------------------
@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(edits) as running:
        yield running


def edits(request: Request) -> str:
    if "<critique>" not in request.last_text:
        return "say more"
    old = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"<prompt>{old} more</prompt>"


TASKS = [{"q": f"q{n}"} for n in range(4)]
SMALL: dict[str, Any] = {
    "gradient_batch_size": 2,
    "val_batch_size": 2,
    "beam_width": 1,
    "branch_factor": 1,
    "beam_rounds": 1,
}


def learn(
    server: ScriptedServer,
    agent: Any,
    template: str = "Say {q}",
    *,
    train: Any = TASKS[:2],
    val: Any = TASKS[2:],
    runners: int = 2,
    **options: Any,
) -> agl.APO[Any]:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="key")
    algorithm: agl.APO[Any] = agl.APO(client, **{**SMALL, **options})
    resources: agl.NamedResources = {
        "main_llm": agl.LLM(endpoint=server.url, model="own"),
        "style": agl.PromptTemplate(template=template, engine="f-string"),
    }
    trainer = agl.Trainer(algorithm=algorithm, n_runners=runners, initial_resources=resources)
    trainer.fit(agent, train, val_dataset=val)
    return algorithm


class Scores(agl.LitAgent[Any]):
    """An agent that scores longer prompts higher, and records the modes of its rollouts."""

    asked: list[tuple[str, str, str]] = []  # noqa: RUF012 - of all its copies

    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return self.note("train", task, resources)

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return self.note("val", task, resources)

    def note(self, mode: str, task: Any, resources: Any) -> float:
        assert set(resources) == {"main_llm", "style"}
        text = resources["style"].format(**task)
        self.asked.append((mode, task["q"], text))
        return len(text) / 100


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_prompt_without_placeholders_has_braces_as_the_editor_wrote_them(is_filled: bool) -> None:
    """Nobody need fill it; an agent that does gets the same text."""

    def answer(request: Request) -> str:
        if "<prompt>" not in request.last_text:
            return "criticism"
        return '<prompt>Answer as {style} JSON {"a": 1}.</prompt>'

    seen = set()

    @agl.rollout
    def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        text = prompt_template.format(**task) if is_filled else prompt_template.template
        seen.add(text)
        return float("JSON" in text)

    with ScriptedServer(answer) as server:
        learned = learn(server, agent, "You help.").get_best_prompt()
    assert seen == {"You help.", 'Answer as {style} JSON {"a": 1}.'}
    assert learned.template == learned.format() == 'Answer as {style} JSON {"a": 1}.'


def test_a_candidate_has_braces_that_python_can_fill() -> None:
    def answer(request: Request) -> str:
        if "<prompt>" not in request.last_text:
            return "criticism"
        return '<prompt>Say {q} as {"answer": 1}</prompt>'

    Scores.asked.clear()
    with ScriptedServer(answer) as server:
        algorithm = learn(server, Scores())
    assert algorithm.get_best_prompt().template == 'Say {q} as {{"answer": 1}}'
    assert ("val", "q2", 'Say q2 as {"answer": 1}') in Scores.asked


def test_a_placeholder_that_the_search_would_lose_is_refused(server: ScriptedServer) -> None:
    message = (
        r"^APO cannot keep the placeholder \{user-question\} of 'style': a name has letters, "
        r"digits and _ only; write \{user_question\}$"
    )
    with pytest.raises(ConfigError, match=message):
        learn(server, Scores(), "At most {limit:.2f}: {user-question}")
    assert server.requests == []


def test_validation_tasks_choose_and_training_tasks_are_shown(server: ScriptedServer) -> None:
    Scores.asked.clear()
    algorithm = learn(server, Scores())
    assert algorithm.get_best_prompt() == agl.PromptTemplate(
        template="Say {q} more", engine="f-string"
    )
    before, after = "Say {}", "Say {} more"
    expected = [("val", q, before.format(q)) for q in ("q2", "q3")] * 2
    expected += [("train", q, before.format(q)) for q in ("q0", "q1")]
    expected += [("val", q, after.format(q)) for q in ("q2", "q3")] * 2
    assert Counter(Scores.asked) == Counter(expected)
    critic = server.requests[0].last_text
    assert '"q": "q0"' in critic
    assert "q2" not in critic


def test_a_repeated_task_counts_as_often_as_it_is_listed(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the means are those of the listed tasks: 0.25 before, 0.45 after the change."""
    asked: Counter[tuple[str, str]] = Counter()

    @agl.rollout
    def agent(task: Any, resources: agl.NamedResources) -> float:
        prompt = resources["style"].template  # type: ignore[union-attr]
        asked[prompt, task["q"]] += 1
        return (0.0 if task["q"] == "a" else 0.6) if "more" in prompt else float(task["q"] == "a")

    tasks = [{"q": "a"}, *[{"q": "b"}] * 3]
    options = {"val_batch_size": 8, "gradient_batch_size": 8}
    with caplog.at_level(logging.INFO, "lightspan_agl"):
        algorithm = learn(server, agent, train=tasks, val=tasks, **options)
    assert "candidate 1 is chosen: 0.250 -> 0.450 on 4 tasks of the selection" in caplog.text
    assert algorithm.get_best_prompt().template == "Say {q} more"
    before, after = "Say {q}", "Say {q} more"  # the whole, a batch, and of the first the critique
    assert asked == {(before, "a"): 3, (before, "b"): 9, (after, "a"): 2, (after, "b"): 6}


def test_a_lost_placeholder_costs_no_rollout(server: ScriptedServer) -> None:
    Scores.asked.clear()
    server.script = lambda request: "<prompt>Say something much longer than before.</prompt>"
    algorithm = learn(server, Scores())
    assert algorithm.get_best_prompt().template == "Say {q}"
    assert {text for _, _, text in Scores.asked} == {"Say q0", "Say q1", "Say q2", "Say q3"}
    assert len(Scores.asked) == 4


class Hangs(agl.LitAgent[Any]):
    """An agent whose longer prompt is good at one task and never ends at the other.

    The mean of the finished rollouts alone would favour this prompt.
    """

    is_over = threading.Event()

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if "more" not in resources["style"].format(**task):
            return 0.6
        if task["q"] == "q3":
            self.is_over.wait(20)
        return 1.0


def test_rollouts_that_do_not_end_stay_in_the_mean(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    Hangs.is_over.clear()
    timer = threading.Timer(6.0, Hangs.is_over.set)
    timer.start()
    try:
        with caplog.at_level(logging.INFO, "lightspan_agl"):
            algorithm = learn(server, Hangs(), rollout_batch_timeout=2.0)
    finally:
        Hangs.is_over.set()
        timer.cancel()
    assert algorithm.get_best_prompt().template == "Say {q}"
    assert "1 of 2 rollouts have not ended within 2 s" in caplog.text
    assert "1 round of the beam is done" in caplog.text


@pytest.mark.parametrize("how", ["none", "raises", "late"])
def test_a_rollout_without_a_reward_counts_as_0(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Check negative rewards, of which 0 is not the lowest: -0.3 before, -0.2 after the change."""

    @agl.rollout
    async def agent(task: Any, resources: agl.NamedResources) -> float | None:
        if "more" not in resources["style"].template:  # type: ignore[union-attr]
            return -0.3
        if task["q"] == "q2":
            return -0.4
        if how == "late":
            await asyncio.Event().wait()
        if how == "raises":
            raise ValueError("no answer")
        return None

    with caplog.at_level(logging.INFO, "lightspan_agl"):
        algorithm = learn(server, agent, rollout_batch_timeout=3.0 if how == "late" else 60.0)
    assert "candidate 1 is chosen: -0.300 -> -0.200 on 2 tasks of the selection" in caplog.text
    assert algorithm.get_best_prompt().template == "Say {q} more"


class Alone(agl.LitAgent[Any]):
    """An agent that records which prompts run at the same time."""

    running: Counter[str] = Counter()  # noqa: RUF012 - of all its copies
    together: set[frozenset[str]] = set()  # noqa: RUF012 - of all its copies

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        prompt = resources["style"].template
        self.running[prompt] += 1
        time.sleep(0.1)
        self.together.add(frozenset(+self.running))
        self.running[prompt] -= 1
        return len(prompt) / 100


def test_each_prompts_batch_has_a_deadline_of_its_own(server: ScriptedServer) -> None:
    """Check that prompts are run one after another, so that the deadline is of one prompt."""
    Alone.together.clear()
    algorithm = learn(server, Alone(), runners=8)
    assert "more" in algorithm.get_best_prompt().template
    assert Alone.together == {frozenset({"Say {q}"}), frozenset({"Say {q} more"})}


async def test_rollouts_after_one_that_does_not_end_are_run() -> None:
    """Check that a sync agent which cannot be cancelled does not hold the only slot."""
    is_over = threading.Event()

    @agl.rollout
    def agent(task: Any, resources: agl.NamedResources) -> float:
        if task == "hangs":
            is_over.wait(20)
        return 1.0

    try:
        async with local_runs(
            agent,  # type: ignore[arg-type]
            {},
            slots=1,
            timeout_s=1.0,
            hooks=HookCalls(),
        ) as runs:
            for task, reward in (("ends", 1.0), ("hangs", None), ("ends", 1.0)):
                [episode] = await runs.rollouts([task])
                assert episode.reward == reward
            is_over.set()
    finally:
        is_over.set()


def bare(request: Request) -> str:
    if "<critique>" not in request.last_text:
        return "say more"
    return "Say {q} more"


def test_an_answer_with_the_new_text_alone_is_used(server: ScriptedServer) -> None:
    server.script = bare
    assert learn(server, Scores()).get_best_prompt().template == "Say {q} more"


def test_a_warning_names_a_search_without_a_usable_answer(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script = lambda request: "I am sorry."
    with caplog.at_level(logging.WARNING, "lightspan_agl"):
        assert learn(server, Scores()).get_best_prompt().template == "Say {q}"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("APO: none of the 2 answers of gradient_model and apply_edit_model had")
    assert "has no <prompt>" in line


def test_the_first_of_several_templates_is_learned_with_a_warning(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.rollout
    def agent(task: Any, resources: agl.NamedResources) -> float:
        return len(resources["b"].template) / 100  # type: ignore[union-attr]

    client = openai.AsyncOpenAI(base_url=server.url, api_key="key")
    algorithm: agl.APO[Any] = agl.APO(client, **SMALL)
    resources: agl.NamedResources = {
        name: agl.PromptTemplate(template=f"{name} {{q}}") for name in ("b", "c")
    }
    trainer = agl.Trainer(algorithm=algorithm, initial_resources=resources)
    with caplog.at_level(logging.WARNING, "lightspan_agl"):
        trainer.fit(agent, TASKS[:2], val_dataset=TASKS[2:])  # type: ignore[arg-type]
    assert algorithm.get_best_prompt().template == "b {q} more"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["APO learns the prompt template 'b'; without a change: 'c'"]


def test_a_task_that_is_not_json_is_named(server: ScriptedServer) -> None:
    with pytest.raises(
        DataError, match=r"^train_dataset\[1\] has the key 1; keys are text: write '1'$"
    ):
        learn(server, Scores(), train=[{"q": "a"}, {1: "a"}])


# --- what is refused ------------------------------------------------------------------------
def test_what_it_cannot_work_with_is_refused(server: ScriptedServer) -> None:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="key")
    with pytest.raises(ConfigError, match=r"pass an openai.AsyncOpenAI"):
        agl.APO(openai.OpenAI(base_url=server.url, api_key="key"))  # type: ignore[arg-type]
    for name in ("beam_width", "branch_factor", "beam_rounds", "val_batch_size"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            agl.APO(client, **{name: 0})
    with pytest.raises(ConfigError, match="rollout_batch_timeout=0"):
        agl.APO(client, rollout_batch_timeout=0)
    algorithm: agl.APO[Any] = agl.APO(client)
    with pytest.raises(ConfigError, match=r"no best prompt yet: call Trainer.fit first"):
        algorithm.get_best_prompt()
    with pytest.raises(ConfigError, match="initial_resources="):
        agl.Trainer(algorithm=algorithm).fit(Scores(), TASKS, val_dataset=TASKS)
    with pytest.raises(ConfigError, match="fit needs val_dataset"):
        learn(server, Scores(), val=None)


def test_what_is_without_effect_is_said(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="key")
    with caplog.at_level(logging.INFO, "lightspan_agl"):
        agl.APO(client, run_initial_validation=False, _poml_trace=True)
    assert [record.getMessage() for record in caplog.records] == [
        "APO(run_initial_validation=False) has no effect",
        "APO(_poml_trace=True) has no effect",
    ]
