"""Test trials as apps, without Harbor: their options, references, tasks and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import AppError, ConfigError, DataError
from lightspan.runners.app import as_app
from lightspan.runners.program import ProgramError
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan_harbor import HarborTasks, HarborTrial, trial
from lightspan_harbor.app import merged
from lightspan_harbor.command import _pairs
from lightspan_programs import system

POLICY = Target(route=Route.POLICY, policy="policy")
LOCAL = LLM(base_url="http://127.0.0.1:1/v1", model="policy")


# --- tasks ------------------------------------------------------------------------------------
def test_a_suite_is_a_folder_of_tasks(tmp_path: Path) -> None:
    for name in ("b", "group/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text("")
    (tmp_path / "b/instruction.md").write_text("Do b.")
    tasks = HarborTasks(tmp_path)
    assert len(tasks) == 2
    assert list(tasks) == [
        {"id": "b", "path": f"{tmp_path}/b", "instruction": "Do b."},
        {"id": "group/a", "path": f"{tmp_path}/group/a"},
    ]
    assert [task["id"] for task in HarborTasks(tmp_path / "b")] == ["b"]


def test_a_suite_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no suite"):
        HarborTasks(tmp_path / "gone")
    with pytest.raises(DataError, match=r"has no Harbor task: .* task\.toml"):
        HarborTasks(tmp_path)


# --- options ----------------------------------------------------------------------------------
def test_a_trial_travels_as_text() -> None:
    app = trial(
        agent="mini-swe-agent",
        environment="podman",
        options={"max_turns": 3},
        env={"SMALL_MODEL": "title"},
        agents={"title": system("Generate a title*")},
        prompts={"rules": "AGENTS.md"},
        running=2,
        memory_mb=4096,
        config={"timeout_multiplier": 2.0},
    )
    assert HarborTrial.from_reference(app.reference) == app
    assert trial(agent="codex").reference == 'harbor:{"agent":"codex"}'
    with pytest.raises(AppError, match="is no trial of Harbor"):
        HarborTrial.from_reference('harbor:{"agents":"x"}')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": ""}, "agent='' of a trial: give a name"),
        ({"agent": "codex", "provider": "google"}, 'use "openai" or "anthropic"'),
        ({"agent": "codex", "running": 0}, "running"),
        ({"agent": "codex", "env": {"OPENAI_API_KEY": "x"}}, "cannot hold 'OPENAI_API_KEY'"),
        ({"agent": "codex", "options": {"x": object()}}, "must be JSON"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trial(**options)


def test_agents_are_named_as_those_of_a_command() -> None:
    app = trial(agent="claude-code", agents={"title": system("Generate a title*")})
    assert list(app.agent_paths()) == ["app", "title"]
    assert list(trial(agent="codex", agents="small").agent_paths()) == ["app", "small"]
    with pytest.raises(ConfigError, match=r"agents \['title'\] are neither optimised nor frozen"):
        app.check_routing(Routing(rules=[Rule("app", POLICY)]))
    app.check_routing(Routing(rules=[Rule("*", POLICY)]))
    with pytest.raises(ConfigError, match="no policy answers this agent's calls: name its model"):
        trial(agent="codex").check_routing(Routing())
    trial(agent="codex", model="openai/gpt-5-mini").check_routing(Routing())


def test_an_environment_without_harbor_is_told_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AppError, match=r"a trial needs Harbor where the runners are: .*python=…"):
        trial(agent="oracle").check()


# --- requests ---------------------------------------------------------------------------------
def test_a_task_of_another_kind_is_an_error() -> None:
    with pytest.raises(ProgramError, match="is no Harbor task: use HarborTasks"):
        trial(agent="oracle")._request({"q": 1}, "at-1", None, {}, None)


def test_a_prompt_without_a_place_is_an_error() -> None:
    rules = {"rules": PromptTemplate("Be brief.")}
    with pytest.raises(ProgramError, match=r"the prompts \['rules'\] have no place in the trial"):
        trial(agent="codex")._request({"path": "/t"}, "at-1", LOCAL, rules, None)
    assert as_app(trial(agent="codex")).takes("rules", alone=True)


def test_the_request_of_a_trial(tmp_path: Path) -> None:
    app = trial(
        agent="claude-code",
        environment="podman",
        options={"max_turns": 3},
        env={"SMALL": "title"},
        prompts={"rules": "AGENTS.md"},
        config={"environment": {"override_cpus": 2}, "timeout_multiplier": 2},
        folder=tmp_path,
    )
    rules = {"rules": PromptTemplate("Be brief.")}
    request = app._request({"id": "t", "path": "/t", "x": 1}, "at-1", LOCAL, rules, None)
    assert request.config == {
        "task": {"path": "/t"},
        "trial_name": "at-1",
        "trials_dir": str(tmp_path),
        "agent": {
            "name": "claude-code",
            "model_name": "anthropic/policy",
            "kwargs": {"max_turns": 3},
            "env": {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "SMALL": "title"},
        },
        "environment": {"type": "podman", "override_cpus": 2},
        "timeout_multiplier": 2,
    }
    assert request.prompts == [("rules", "AGENTS.md", "Be brief.")]
    own = trial(agent="my.agents:Mine", model="openai/big", environment="my:Sandbox")
    config = own._request({"name": "org/task"}, "at-1", None, {}, None).config
    assert config["agent"] == {
        "import_path": "my.agents:Mine", "model_name": "openai/big", "kwargs": {}, "env": {}
    }  # fmt: skip
    assert config["environment"] == {"import_path": "my:Sandbox"}
    assert config["task"] == {"name": "org/task"}


def test_fields_of_objects_are_merged() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "d": {"e": 5}}) == {
        "a": {"b": 4, "c": 2},
        "d": {"e": 5},
    }


def test_options_of_the_command_are_pairs() -> None:
    pairs = _pairs("--option", ["max_turns=20", "model=a=b", "rest="])
    assert pairs == [("max_turns", "20"), ("model", "a=b"), ("rest", "")]
    for wrong in ("max_turns", "=20"):
        with pytest.raises(ConfigError, match=f"--env '{wrong}': write NAME=VALUE"):
            _pairs("--env", [wrong])
