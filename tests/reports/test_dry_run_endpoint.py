"""The dry run with an endpoint in the model's place: what is known, and what is estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LLM, DevReport, LightningRL, Trainer
from lightspan.errors import ConfigError
from lightspan.lightning.selection import Selection
from lightspan.progress import SilentReporter
from lightspan.schema.routing import Route
from lightspan.schema.token_records import Sampling
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_tools.dry_run.endpoints import (
    endpoint_routing,
    environment_endpoint,
    named_endpoint,
)


def answer(request: Request) -> str:
    """Numbers in turn to whom asks for help, words to the others."""
    return "0.5" if request.last_text == "more help please" else "look here"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ScriptedServer]:
    with ScriptedServer("more help please") as server:
        yield server


@pytest.fixture(scope="module")
def asked(
    dry_apps: Any, elsewhere: ScriptedServer, tiny: Path
) -> Iterator[tuple[DevReport, ScriptedServer]]:
    """One task, two rollouts, with the model's folder at hand."""
    with ScriptedServer(answer) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("THE_KEY", "sk-secret")
        algorithm = LightningRL(
            tiny, optimize="planner", frozen={"checker": "base"}, temperature=0.7, max_tokens=30
        )
        trainer = Trainer(algorithm, steps=1, reporter=SilentReporter())
        where = LLM(base_url=server.url, model="big", api_key_env="THE_KEY")
        tasks = [{"q": "easy", "url": elsewhere.url, "id": "easy"}]
        yield (
            trainer.dev(dry_apps.research, tasks, group_size=2, endpoint=where),
            server,
        )


def test_the_endpoint_answers_for_every_model_of_ours(
    asked: tuple[DevReport, ScriptedServer],
) -> None:
    report, server = asked
    goes_to = {agent.path: agent.goes_to for agent in report.agents}
    assert goes_to["checker"] == ["the starting weights"]
    assert goes_to["team/planner"] == ["policy policy"]
    assert [request.body["model"] for request in server.requests] == ["big"] * 6
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-secret"}
    assert report.answered_by == "endpoint"
    assert report.endpoint == f"big at {server.origin.removeprefix('http://')}"
    assert "sk-secret" not in str(report.json())


def test_agents_that_would_be_trained_are_asked_with_training_sampling(
    asked: tuple[DevReport, ScriptedServer],
) -> None:
    """Temperature and length are the algorithm's, what it cannot honour is left out; the frozen
    checker asks as it likes."""
    report, server = asked
    fields = ("temperature", "max_tokens", "seed", "presence_penalty")
    sent = [
        {field: request.body[field] for field in fields if field in request.body}
        for request in server.requests
    ]
    assert sent.count({"temperature": 0.7, "max_tokens": 30}) == 4
    assert sent.count({"max_tokens": 3}) == 2
    assert [(o.agent, o.field, o.asked, o.used, o.calls) for o in report.overrides] == [
        ("team/planner", "max_tokens", 40, 30, 4),
        ("team/planner", "presence_penalty", 0.5, None, 4),
        ("team/planner", "seed", 7, None, 4),
        ("team/planner", "temperature", 0.2, 0.7, 4),
    ]


def test_verdicts_are_those_of_fit(asked: tuple[DevReport, ScriptedServer]) -> None:
    report, _ = asked
    shown = [(a.path, a.route, a.calls, a.trained, a.frozen, a.rejected) for a in report.agents]
    assert shown == [
        ("checker", "base", 2, 0, 2, []),
        ("team", "app", 0, 0, 0, []),
        ("team/planner", "policy", 4, 4, 0, []),
        ("team/planner/helper", "app", 2, 0, 2, []),
    ]
    # what this dry run paid for is not what `fit` would pay for
    assert [e.agents for e in report.costs.endpoints] == [["team/planner/helper"]]


def test_memory_is_estimated_and_rows_and_time_are_not(
    asked: tuple[DevReport, ScriptedServer],
) -> None:
    report, _ = asked
    assert report.memory is not None
    assert report.memory.peak_bytes is None
    assert (report.rows, report.time) == (None, None)
    assert report.missing == [
        "rows: the token ids of an endpoint's answers",
        "time: an endpoint's speed does not predict that of a model trained here",
    ]


def test_token_counts_are_the_endpoints(dry_apps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the hub that is not here: nothing is fetched, and the report says what lacks."""
    with ScriptedServer("1") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
        monkeypatch.delenv("OPENAI_MODEL", raising=False)
        trainer = Trainer(LightningRL("nobody/nothing"), steps=1, reporter=SilentReporter())
        report = trainer.dev(
            dry_apps.says,
            [{"q": "three words here"}],
            group_size=2,
            endpoint=environment_endpoint(),
        )
        assert {request.body["model"] for request in server.requests} == {"any"}
    assert (report.rows, report.memory, report.time) == (None, None, None)
    assert report.endpoint is not None
    assert report.endpoint.startswith("the model that the app names at 127.0.0.1:")
    assert report.missing[0].startswith(
        "memory: the configuration of nobody/nothing is not on this machine: fetch it"
    )
    [writer] = report.agents
    assert writer.trained == 2
    assert writer.prompt_tokens is not None
    assert (writer.prompt_tokens.mean, writer.prompt_tokens.max) == (3.0, 3)


def test_calls_that_the_app_gets_over_are_told(dry_apps: Any, rl: Callable[..., Any]) -> None:
    """It scores 0 where its call failed; what failed is in the report all the same."""
    with ScriptedServer(lambda request: Reply(status=400, text="no such model")) as server:
        trainer = Trainer(rl(), steps=1, reporter=SilentReporter())
        where = LLM(base_url=server.url, model="big")
        report = trainer.dev(dry_apps.forgives, [{"q": "a"}], group_size=2, endpoint=where)
        failing = trainer.dev(dry_apps.says, [{"q": "a"}], group_size=1, endpoint=where)
    assert failing.warnings[0].startswith("1 of 1 rollouts failed, first of all: app_error: ")
    [writer] = report.agents
    [reason] = writer.rejected
    assert (reason.code, reason.calls) == ("error", 2)
    assert "no such model" in reason.text
    assert report.failure.startswith("all 2 calls of the agents that would be trained failed: ")
    assert report.failure.endswith(reason.text)


# --- parts ----------------------------------------------------------------------------------------


def test_routing_of_a_dry_run() -> None:
    """Ours go to the endpoint, with training's sampling where they would be trained."""
    helper = LLM(base_url="http://helper/v1", model="h")
    sampling = Sampling(temperature=0.7)
    routing = Selection.of(
        {"writer": "policy"},
        {"a": "base", "b": "shared", "c": None, "d": helper},
        default_policy="policy",
        sampling=sampling,
    ).routing
    where = LLM(base_url="http://dev/v1", model="m")
    found = endpoint_routing(routing, where)
    targets = {name: found.target(name) for name in ("writer", "a", "b", "c", "d", "other")}
    assert {name: target.route for name, target in targets.items()} == {
        "writer": Route.ENDPOINT,
        "a": Route.ENDPOINT,
        "b": Route.ENDPOINT,
        "c": Route.APP,
        "d": Route.ENDPOINT,
        "other": Route.APP,
    }
    assert targets["d"].endpoint == helper
    assert targets["a"].endpoint == targets["writer"].endpoint == where
    assert (targets["writer"].sampling, targets["a"].sampling) == (sampling, None)
    assert targets["d"].sampling is None


def test_the_endpoint_of_options_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert named_endpoint(None, None) is None
    assert environment_endpoint() is None
    assert named_endpoint("http://here/v1", None) == LLM(base_url="http://here/v1", model="")
    with pytest.raises(ConfigError, match="--endpoint-model m names no endpoint: give --base-url"):
        named_endpoint(None, "m")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    where: dict[str, Any] = {"model": "m", "api_key_env": "OPENAI_API_KEY"}
    assert named_endpoint("http://here/v1", "m") == LLM(base_url="http://here/v1", **where)
    public = LLM(base_url="https://api.openai.com/v1", **where)
    assert named_endpoint(None, "m") == public
    assert environment_endpoint() == msgspec.structs.replace(public, model="")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://here/v1")
    monkeypatch.setenv("OPENAI_MODEL", "m")
    assert environment_endpoint() == LLM(base_url="http://here/v1", **where)
