"""Tests of training with lightspan_agl: `fit` with a real model, and the dry run of `dev`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import lightspan_agl as agl
from lightspan import DevReport
from lightspan.errors import UnknownAgentError
from lightspan.lightning.rollout_checks import ENOUGH_TASKS
from lightspan.lightning.selection import CallStatus, classify_calls
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan.training.results import FitResult
from lightspan_gateway.serving.served_run import read_served
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agents(apps: Any) -> Any:
    """Return the module `agl_apps`; runner processes can import it too."""
    return importlib.import_module("agl_apps")


def config(model: Path, folder: Path, **trainer: Any) -> dict[str, Any]:
    """Return the configuration of a training with small batches of the tiny model."""
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2, "max_prompt_length": 400, "max_response_length": 8},
        "actor_rollout_ref": {
            "rollout": {"n": 4, "name": "vllm"},
            "actor": {"ppo_mini_batch_size": 1, "optim": {"lr": 1e-3}},
            "model": {"path": str(model)},
        },
        "trainer": {
            "total_training_steps": 1,
            "default_local_dir": str(folder),
            "device": "cpu",
            **trainer,
        },
    }


def questions(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"q": f"question {number}", **fields} for number in range(count)]


@pytest.fixture(scope="module")
def judged(
    agents: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FitResult, list[Any]]:
    """Train one step of an agent that calls a judge; return the result and the judge's requests."""
    folder = tmp_path_factory.mktemp("agl") / "run"
    with ScriptedServer(lambda request: "judged") as judge:
        trainer = agl.Trainer(
            n_runners=4,
            algorithm=agl.VERL(config(tiny, folder)),
            adapter={"agent_match": "write"},
        )
        train = questions(4, judge=judge.url)
        val = questions(2, held=1)
        result = trainer.fit(agents.Writer(max_tokens=5), train, val_dataset=[*val, val[0]])
        return result, list(judge.requests)


def test_agents_that_match_learn(judged: tuple[FitResult, list[Any]], tiny: Path) -> None:
    result, _ = judged
    assert result.steps == 1
    assert [len(evaluation.rewards) for evaluation in result.evaluations] == [2, 2]
    hashes = {
        TorchLearner({"policy": str(path)}).weight_hash("policy") for path in (tiny, result.model)
    }
    assert len(hashes) == 2
    [line] = [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]
    assert line["rollouts"] == line["scored"] == 8
    assert line["failed"] == line["damaged"] == 0
    assert line["agent/write_query/calls"] == line["agent/check_query/calls"] == 8
    assert line["calls/trained"] == 8
    assert line["calls/frozen"] == 16  # the checks, and those of the judge


def test_every_call_went_where_the_agent_pointed_it(judged: tuple[FitResult, list[Any]]) -> None:
    result, requests = judged
    assert len(requests) == 8
    assert {request.headers["authorization"] for request in requests} == {"Bearer own"}
    episodes = stored_episodes(RunFolder(result.folder).store_url, mode=Mode.TRAIN)
    calls = [call for episode in episodes for call in episode.calls]
    counts = Counter((call.agent_path, call.record is not None) for call in calls)
    assert counts == {("write_query", True): 8, ("check_query", True): 8, ("app", False): 8}
    sampled = {call.record.sampling.temperature for call in calls if call.record is not None}
    assert sampled == {1.0}
    validated = stored_episodes(RunFolder(result.folder).store_url, mode=Mode.VAL)
    records = [call.record for e in validated for call in e.calls if call.record is not None]
    assert len(records) == 8
    assert {record.sampling.temperature for record in records} == {0.0}


def test_the_run_knows_what_it_trained(judged: tuple[FitResult, list[Any]], tiny: Path) -> None:
    folder = RunFolder(judged[0].folder)
    stored = folder.read_config()
    assert stored["optimize"] == ["*write*"]
    assert json.loads(stored["app"].partition("agents.")[2].replace("%2E", ".")) == {
        "agent": "agl_apps:Writer",
        "llm": {
            "model": str(tiny),
            "sampling": {"train": {"temperature": 1.0}, "val": {"temperature": 0.0}},
        },
        "args": [],
        "kwargs": {"max_tokens": 5},
    }
    served = read_served(json.loads((folder.path / "result.json").read_text()), folder.path)
    [episode, *_] = stored_episodes(folder.store_url, mode=Mode.TRAIN)
    trained = [
        e.call.agent_path
        for e in classify_calls(episode, served.routing).entries
        if e.status is CallStatus.TRAINED
    ]
    assert trained == ["write_query"]


def test_a_wrong_agent_match_is_known_before_the_evaluation_is_paid_for(
    agents: Any, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trainer = agl.Trainer(
        n_runners=2,
        algorithm=agl.VERL(config(tiny, folder)),
        adapter={"agent_match": "^writer$"},
    )
    with ScriptedServer(lambda request: "judged") as judge:
        train = questions(4, judge=judge.url)
        with pytest.raises(UnknownAgentError, match="no agent matches 'writer'"):
            trainer.fit(agents.Writer(max_tokens=5), train, val_dataset=questions(12, held=1))
    assert len(stored_episodes(RunFolder(folder).store_url)) == ENOUGH_TASKS


def test_functions_train_too(agents: Any, tiny: Path, tmp_path: Path) -> None:
    length = {"total_epochs": 1, "total_training_steps": 9}
    algorithm = agl.VERL(config(tiny, tmp_path / "run", **length))
    result = agl.Trainer(algorithm=algorithm, n_runners=4).fit(agents.spell, questions(3))
    [line] = RunFolder(result.folder).metrics()
    assert line["calls/trained"] == line["calls"] == line["rollouts"] == 8


def test_dev_without_resources_is_our_dry_run(
    agents: Any, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = agl.VERL(config(tiny, tmp_path / "run"))
    trainer = agl.Trainer(algorithm=algorithm, adapter={"agent_match": "write"}, n_runners=4)
    report = trainer.dev(agents.Writer(), questions(2))
    assert not isinstance(report, agl.Trainer)
    assert report.rollouts == 8
    assert "write_query" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_dev_knows_how_long_fit_is_and_what_a_judge_costs(
    agents: Any, tiny: Path, tmp_path: Path
) -> None:
    length = {"total_epochs": 3, "total_training_steps": None}
    algorithm = agl.VERL(config(tiny, tmp_path / "run", **length))
    trainer = agl.Trainer(algorithm=algorithm, adapter={"agent_match": "write"}, n_runners=4)
    with ScriptedServer(lambda request: "judged") as judge:
        report = trainer.dev(agents.Writer(), questions(2, judge=judge.url))
        host = judge.origin.removeprefix("http://")
        requests = len(judge.requests)
    assert isinstance(report, DevReport)
    assert report.costs.plan.startswith("3 steps x 2 tasks x 4")
    assert report.costs.rollouts == 24
    [endpoint] = report.costs.endpoints
    assert endpoint.name.endswith(f" at {host}")
    assert (endpoint.calls, endpoint.expected_calls) == (requests, requests * 3)
    assert "no tool and no endpoint" not in report.text()


def test_importing_it_stays_light() -> None:
    """Check that importing lightspan_agl loads no heavy package, because runners import it too."""
    code = "import lightspan_agl as agl, sys; agl.VERL, agl.Trainer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "lightspan" in loaded, done.stderr
    heavy = {"torch", "transformers", "numpy", "aiohttp", "openai", "langchain_core", "langgraph"}
    assert loaded.isdisjoint(heavy)
