"""Test algorithms without policies: no engine, no learner, no torch; the app's own endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prompt_apps as apps  # type: ignore[import-not-found]
import pytest

from lightspan import Trainer
from lightspan.algorithms import TrainerContext
from lightspan.cli import main
from lightspan.errors import ConfigError
from lightspan.progress import SilentReporter
from lightspan.runners.local import LocalRunners
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway import Gateway
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from packages.gateway.tests.remote_store.served import serving

Run = tuple[Path, Any]


@pytest.fixture(scope="module")
def shared() -> Iterator[ScriptedServer]:
    """Run the endpoint of the run that several tests share."""
    with ScriptedServer(_shouts) as running:
        yield running


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(_shouts) as running:
        yield running


def _shouts(request: Request) -> str:
    return request.last_text.upper()


def _tasks(server: ScriptedServer, *numbers: int) -> list[dict[str, str]]:
    return [{"q": f"q{n}", "want": f"SAY Q{n}", "url": server.url} for n in numbers]


def _trainer(algorithm: Any, folder: Path, **options: Any) -> Trainer:
    quiet = {"runners": 2, "folder": folder, "reporter": SilentReporter()}
    return Trainer(algorithm, **{**quiet, **options})


@pytest.fixture(scope="module")
def run(shared: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two steps; return the run's folder and its result. Tests must not change them."""
    folder = tmp_path_factory.mktemp("without") / "run"
    trainer = _trainer(apps.Trial(["{q}", "say {q}"]), folder, steps=2)
    result = trainer.fit(apps.styled, _tasks(shared, 0, 1, 2, 3), _tasks(shared, 4, 5))
    return folder, result


class Elsewhere(LocalRunners):
    """Runners that count as runners of other machines."""

    elsewhere = True


def test_a_gateway_that_no_call_needs_is_not_tried(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the store's server refuses no training whose calls it does not forward."""
    monkeypatch.setattr(Gateway, "url", property(lambda self: "http://127.0.0.1:9"))
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        options = {"store": served.url, "runners": Elsewhere(2)}
        trainer = _trainer(apps.Trial(["{q}", "say {q}"]), tmp_path / "run", **options)
        trainer.evaluate(apps.styled, _tasks(server, 0))
    assert len(server.requests) == 1


def test_calls_go_to_the_apps_own_endpoint_and_are_recorded(
    run: Run, shared: ScriptedServer
) -> None:
    episodes = stored_episodes(run[0] / "store.db")
    calls = [call for episode in episodes for call in episode.calls]
    assert len(calls) == len(shared.requests) == 2 * 2 * 2 + 2 + 2
    assert {request.headers["authorization"] for request in shared.requests} == {"Bearer own-key"}
    assert {call.route for call in calls} == {Route.APP}
    spans = [call.span for call in calls if call.span is not None]
    assert {span.kind for span in spans} == {SpanKind.LLM}
    assert all("say" in str(span.attributes[c.INPUT_MESSAGES]) for span in spans[-2:])


async def test_a_group_has_one_version_of_the_resources(run: Run) -> None:
    async with open_store(run[0] / "store.db") as store:
        states = await store.rollouts(mode=Mode.TRAIN)
        texts: Counter[str] = Counter()
        for state in states:
            resources = await store.get_resources(state.rollout.resources_id)
            assert set(resources) == {ROUTING, "style"}
            texts[resources["style"].template] += 1  # type: ignore[union-attr]
            same = [s for s in states if s.rollout.group_id == state.rollout.group_id]
            assert {s.rollout.resources_id for s in same} == {state.rollout.resources_id}
    assert texts == {"{q}": 4, "say {q}": 4}
    assert len({state.rollout.resources_id for state in states}) == 2


@pytest.mark.parametrize("command", [["serve"], ["export", "model", "-o", "out"]])
def test_there_is_no_model_to_serve_or_export(
    run: Run, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = command
    assert main([verb, str(run[0]), *rest]) == 1
    assert capsys.readouterr().err == (
        f"lightspan: the run in {run[0]} trained no policy, so it has no model\n"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda"}, "device='cuda'"),
        ({"engine": object()}, "engine=<object"),
        ({"keep": "best", "validate_every": 1}, "keep='best'"),
    ],
)
def test_what_is_said_of_weights_is_refused(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        _trainer(apps.Trial(["{q}"]), tmp_path / "run", **options)
    assert str(refused.value).startswith(named)
    assert str(refused.value).endswith(
        "Trial trains no policy, so there is neither an engine nor a learner; leave it out"
    )


def test_an_algorithm_may_know_its_steps(tmp_path: Path) -> None:
    _trainer(apps.Trial(["{q}"], steps=1), tmp_path / "run", steps=1)
    for options in ({"steps": 3}, {"epochs": 2.0}):
        [name] = options
        with pytest.raises(
            ConfigError, match=f"^{name}=.*sets its own .*1 step.*leave {name}= out"
        ):
            _trainer(apps.Trial(["{q}"], steps=1), tmp_path / "run", **options)


def test_a_routing_that_needs_a_policy_is_refused(tmp_path: Path) -> None:
    class Routed(apps.Trial):
        def routing(self) -> Routing:
            return Routing(rules=[Rule("speaker", Target(route=Route.BASE, policy="base"))])

    with pytest.raises(ConfigError, match="sends calls to base, and it has no policies"):
        _trainer(Routed(["{q}"]), tmp_path / "run")


def test_an_app_that_asks_for_the_trained_model_is_refused(
    server: ScriptedServer, tmp_path: Path
) -> None:
    trainer = _trainer(apps.Trial(["{q}"]), tmp_path / "run", steps=1)
    for run in (trainer.fit, trainer.dev, trainer.evaluate):
        with pytest.raises(ConfigError, match="'wants_llm' asks for `llm`, and Trial trains no mo"):
            run(apps.wants_llm, _tasks(server, 0))


def test_an_app_that_takes_no_such_prompt_is_refused(
    server: ScriptedServer, tmp_path: Path
) -> None:
    trainer = _trainer(apps.Trial(["{q}"]), tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="'echo' has no argument 'style', so what Trial makes"):
        trainer.fit(apps.echo, _tasks(server, 0))
    assert server.requests == []


def test_there_is_no_engine_and_no_learner(server: ScriptedServer, tmp_path: Path) -> None:
    found: list[str] = []

    class Looks(apps.Trial):
        async def run_step(self, world: TrainerContext) -> dict[str, float]:
            for name in ("engine", "learner"):
                with pytest.raises(ConfigError) as refused:
                    getattr(world, name)
                found.append(str(refused.value))
            with pytest.raises(ConfigError, match="no engine: give it policies"):
                await world.publish()
            return {}

    _trainer(Looks(["{q}"]), tmp_path / "run", steps=1).fit(apps.styled, _tasks(server, 0, 1))
    assert found == [
        f"Looks has no policies, so a run of it has no {part}: give it policies(), or do without"
        for part in ("engine", "learner")
    ]


def test_a_dry_run_sends_calls_where_the_app_points_them(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm = apps.Trial(["{q}", "say {q}"])
    trainer = _trainer(algorithm, tmp_path / "run", steps=2)
    report = trainer.dev(apps.styled, _tasks(server, 0, 1, 2, 3), _tasks(server, 4), count=2)
    assert len(server.requests) == report.rollouts == 2
    assert (report.rows, report.memory, report.missing) == (None, None, [])
    assert report.warnings == []
    assert report.failure == ""
    [endpoint] = report.costs.endpoints
    assert endpoint.calls == 2
    assert report.text().startswith("dry run of prompt_apps:styled: Trial, 2 tasks x 1 rollout, ")
