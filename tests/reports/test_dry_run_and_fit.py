"""Test that `dev` and `fit` report the same problem for apps that cannot be trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import Trainer
from lightspan.errors import UnknownAgentError, UnsupportedError
from lightspan.lightning.rollout_checks import ENOUGH_TASKS
from lightspan.progress import SilentReporter
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.dry_run.report_model import Reason
from tests.reports.dry_runs import dev, scripted

pytestmark = pytest.mark.slow


def trainer_of(
    rl: Callable[..., Any],
    folder: Path,
    *answers: str,
    steps: int = 3,
    tasks: int = 1,
) -> Trainer:
    """Return a trainer with a scripted engine, which stops answering when it is closed."""
    return Trainer(
        rl(group_size=2, tasks_per_step=tasks),
        engine=scripted({"": answers}),
        steps=steps,
        folder=folder / "run",
        reporter=SilentReporter(),
    )


def test_an_app_that_calls_no_model(rl: Callable[..., Any], dry_apps: Any) -> None:
    report = dev(rl, dry_apps.silent, ["1"], agents=["writer"])
    assert report.warnings[0].startswith("fit would stop: the app made no model call through the ")
    assert report.warnings[1] == "never called, so not trained: writer"
    assert "  writer: called no model" in report.text().splitlines()
    assert report.rows is not None
    assert (report.rows.calls, report.rows.rows) == (0, 0)
    assert report.failure == report.warnings[0]


SUB_AGENTS = (
    "{!r} matches no agent that calls a model itself: the calls are made by its sub-agents "
    "'resolve/resolver', which it does not match. Name 'resolve/*' in its place"
)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"optimize": "resolve", "frozen": "base"}, "resolve"),
        ({"optimize": ["res*lve", "checker"], "frozen": "base"}, "res*lve"),
        ({"optimize": "*", "frozen": {"resolve": "base"}}, "resolve"),
    ],
)
@pytest.mark.parametrize("agents", [None, ["resolve", "resolve/resolver", "checker"]])
def test_an_agent_whose_sub_agents_make_all_calls(
    rl: Callable[..., Any],
    dry_apps: Any,
    tmp_path: Path,
    options: dict[str, Any],
    pattern: str,
    agents: list[str] | None,
) -> None:
    """Check a node around an agent: the pattern matches the node, and every call is the agent's."""

    def trainer() -> Trainer:
        algorithm = rl(group_size=2, tasks_per_step=1, **options)
        engine, folder = scripted({"": ["1", "0"]}), tmp_path / "run"
        return Trainer(algorithm, engine=engine, steps=2, folder=folder, reporter=SilentReporter())

    tasks = [{"q": "a"}, {"q": "b"}]
    report = trainer().dev(dry_apps.delegates, tasks, group_size=2, agents=agents)
    reason = SUB_AGENTS.format(pattern)
    assert f"fit would stop: {reason}" in report.warnings
    assert "base_url" not in report.text()
    if options["optimize"] != "*":
        note = "  resolve: called no model itself, its sub-agents did: resolve/resolver"
        assert note in report.text().splitlines()
    with pytest.raises(UnknownAgentError) as caught:
        trainer().fit(dry_apps.delegates, tasks, agents=agents)
    assert str(caught.value) == reason
    assert not [line for line in trainer().folder.metrics() if line["kind"] == "train"]


def test_a_wrong_name_is_known_before_the_held_out_tasks_are_paid_for(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    algorithm = rl(optimize="resolvr", frozen="base", group_size=2, tasks_per_step=1)
    engine, folder = scripted({"": ["1", "0"]}), tmp_path / "run"
    trainer = Trainer(algorithm, engine=engine, folder=folder, reporter=SilentReporter())
    held_out = [{"q": f"held out {number}"} for number in range(20)]
    with pytest.raises(UnknownAgentError, match="no agent matches 'resolvr'"):
        trainer.fit(dry_apps.delegates, [{"q": "a"}, {"q": "b"}], held_out)
    assert len(stored_episodes(folder / "store.db")) == ENOUGH_TASKS


def test_a_pattern_that_the_error_names_trains(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    algorithm = rl(optimize="resolve/*", frozen="base", group_size=2, tasks_per_step=1)
    engine = scripted({"": ["1", "0"]})
    trainer = Trainer(
        algorithm, engine=engine, steps=1, folder=tmp_path / "run", reporter=SilentReporter()
    )
    trainer.fit(dry_apps.delegates, [{"q": "a"}])
    [line] = [line for line in trainer.folder.metrics() if line["kind"] == "train"]
    assert (line["calls/trained"], line["calls/frozen"]) == (2, 2)


def test_a_selected_agent_without_calls(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    """Check an agent that acts and calls no model, beside another that does."""
    tasks = [{"q": "a", "checks": False}]

    def trainer(folder: str, optimize: Any) -> Trainer:
        algorithm = rl(optimize=optimize, frozen="base", group_size=2, tasks_per_step=1)
        engine, path = scripted({"": ["1", "0"]}), tmp_path / folder
        return Trainer(algorithm, engine=engine, steps=2, folder=path, reporter=SilentReporter())

    reason = (
        "no agent that 'checker' matches made a model call in the first rollouts (2), only "
        f"'resolve/resolver'. If it calls a model by another client, give that one {WAY_OUT}"
    )
    declare = ". If it acts in few rollouts, name all agents: fit(…, agents=[…])"
    both = ["checker", "resolver"]
    report = trainer("dev", both).dev(dry_apps.delegates, tasks, group_size=2)
    assert report.warnings[0] == f"fit would stop: {reason}{declare}"
    with pytest.raises(UnknownAgentError) as caught:
        trainer("both", both).fit(dry_apps.delegates, tasks)
    assert str(caught.value) == reason + declare
    agents = ["resolve/resolver", "checker"]
    declared = trainer("declared", both)
    declared.fit(dry_apps.delegates, tasks, agents=agents)
    assert declared.folder.read_result()
    # if no other agent is selected, nothing would ever be trained
    report = trainer("dev", "checker").dev(dry_apps.delegates, tasks, group_size=2, agents=agents)
    assert report.warnings[0] == "never called, so not trained: checker"
    with pytest.raises(UnsupportedError) as caught:
        trainer("alone", "checker").fit(dry_apps.delegates, tasks, agents=agents)
    assert str(caught.value) == reason


FIX = "use framework.ChatOpenAI in its place"
WAY_OUT = (
    "base_url=llm.base_url and api_key=llm.api_key, where `llm` is an argument that the app asks "
    "for, and the agent's name as the model; or use the OpenAI SDK"
)


def test_a_client_that_bypasses_the_gateway_is_named_by_dev_and_fit(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(rl, tmp_path, "1")
    report = trainer.dev(dry_apps.bypasses, [{"q": "a"}], group_size=2)
    named = f"by dry_apps.Foreign at models.test:8443, which lightspan does not see: {FIX}"
    assert [agent.unseen for agent in report.agents] == [[f"2 calls {named}"]]
    stops = f"no call of the agents to train can be trained: writer: 2 calls {named}"
    assert report.warnings[0] == f"fit would stop: {stops}"
    why = "no tokens: not trainable; the call did not go through the gateway"
    text = report.text()
    assert f"  writer: 2 rejected (no_tokens): {why}\n  writer: 2 calls {named}\n" in text
    assert "secret" not in text + str(report.json())
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(dry_apps.bypasses, [{"q": "a"}])
    assert str(caught.value) == stops


def test_a_client_that_nobody_tells_of(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    """Check plain Python over HTTP: the agent has a name, but no recorded call."""
    trainer = trainer_of(rl, tmp_path, "1")
    with ScriptedServer("1") as server:
        task = {"q": "a", "url": server.url}
        report = trainer.dev(dry_apps.posts, [task], group_size=2)
        stops = (
            "the app made no model call through the OpenAI SDK in its own process, nor to "
            "OPENAI_BASE_URL (rollouts: 2). Give another client (LiteLLM, httpx, requests) or "
            f"process {WAY_OUT}"
        )
        assert report.warnings[0] == f"fit would stop: {stops}"
        told = (
            "  writer: made no call of the OpenAI SDK, of a client that an adapter knows, or to "
            "the attempt's endpoint. If it calls a model by another client, give that one "
            f"{WAY_OUT}"
        )
        assert told in report.text().splitlines()
        with pytest.raises(UnsupportedError) as caught:
            trainer.fit(dry_apps.posts, [task])
        assert str(caught.value) == stops


def test_a_client_that_is_given_the_attempts_endpoint_trains(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    """Check an app that sends its HTTP requests to the attempt's endpoint, as the report
    advises.
    """
    trainer = trainer_of(rl, tmp_path, "1", "0")
    report = trainer.dev(dry_apps.posts_to, [{"q": "a"}], group_size=2)
    assert [(agent.path, agent.trained, agent.unseen) for agent in report.agents] == [
        ("writer", 2, [])
    ]
    assert not [warning for warning in report.warnings if "fit would stop" in warning]


CHAT_REFUSED = (
    "messages[0].content[1] is of type 'image_url': only text is understood; images ('image_url') "
    "need a policy with a vision model, such as Qwen2.5-VL, and the embedded engine"
)
RESPONSE_REFUSED = (
    "input[0].content[0] is of type 'input_image': only messages with text, calls of tools and "
    "their outputs are understood; images ('input_image') need a policy with a vision model, such "
    "as Qwen2.5-VL, and the embedded engine"
)
ADVICE = (
    "Take such parts out of what this agent sends, or leave it out of optimize= and let a model "
    "that reads them answer it (frozen=)"
)


@pytest.mark.parametrize(
    ("app", "refused", "failed"),
    [("looks", CHAT_REFUSED, 0), ("sees", RESPONSE_REFUSED, 2)],
)
def test_pictures_are_refused_by_fit_as_dev_says(
    rl: Callable[..., Any],
    dry_apps: Any,
    tmp_path: Path,
    app: str,
    refused: str,
    failed: int,
) -> None:
    program, tasks = getattr(dry_apps, app), [{"q": "a"}, {"q": "b"}]
    trainer = trainer_of(rl, tmp_path, "1", tasks=2)
    report = trainer.dev(program, tasks, count=1, folder=tmp_path / "dev")
    stops = "no call of the agents to train can be trained: writer: {} calls refused: "
    stops += f"{refused}. {ADVICE}"
    assert f"fit would stop: {stops.format(2)}" in report.warnings
    assert not any("no call would be trained" in warning for warning in report.warnings)
    [writer] = report.agents
    why = f"the gateway refused the request: {refused}. {ADVICE}"
    assert writer.rejected == [Reason(code="refused", text=why, calls=2)]
    assert f"  writer: 2 rejected (refused): {why}" in report.text()
    rewards = report.rewards
    assert (rewards.failed, rewards.lost, rewards.rollouts) == (failed, 0, 2)
    assert report.failure.startswith("all 2 ")
    assert refused in report.failure
    assert sum(file.stat().st_size for file in (tmp_path / "dev").glob("store.db*")) < 500_000
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(program, tasks)
    assert str(caught.value) == stops.format(4)


def test_a_picture_in_some_tasks_leaves_the_others_to_learn_from(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    tasks = [{"q": "a"}, {"q": "b", "text": True}]
    trainer = trainer_of(rl, tmp_path, "1", "0", steps=1, tasks=2)
    report = trainer.dev(dry_apps.looks, tasks, group_size=2)
    [writer] = report.agents
    assert (writer.trained, [(r.code, r.calls) for r in writer.rejected]) == (2, [("refused", 2)])
    why = f"the gateway refused the request: {CHAT_REFUSED}. {ADVICE}"
    assert f"2 of 4 calls would be rejected (2 refused: {why})" in report.warnings
    assert not any("fit would stop" in warning for warning in report.warnings)
    training = trainer_of(rl, tmp_path, "1", "0", steps=1, tasks=2)
    training.fit(dry_apps.looks, tasks)
    [line] = [line for line in training.folder.metrics() if line["kind"] == "train"]
    calls = {key: value for key, value in line.items() if key.startswith("calls/")}
    assert calls == {"calls/trained": 2, "calls/rejected:refused": 2}


@pytest.mark.parametrize(
    ("fields", "shown", "said"),
    [
        ({"seed": 7}, "seed=7", "'seed' = 7"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5", "'presence_penalty' = 0.5"),
        ({"logit_bias": {"5": 1}}, 'logit_bias={"5": 1}', "'logit_bias' = {'5': 1}"),
        ({"brand_new": True}, "brand_new=true", "'brand_new' = True"),
    ],
)
def test_what_evaluations_refuse(
    rl: Callable[..., Any],
    dry_apps: Any,
    tmp_path: Path,
    fields: dict[str, Any],
    shown: str,
    said: str,
) -> None:
    """Check fields that training sets aside: `dev` says that `fit` will stop, and it does, in its
    first evaluation and before most of it.
    """
    train, val = ([{"q": f"{what} {n}", "fields": fields} for n in range(20)] for what in "ab")
    report = trainer_of(rl, tmp_path, "1", "0").dev(dry_apps.samples, train[:1], val, group_size=2)
    refuses = (
        f"evaluations sample as the app asks, so they refuse {shown} of writer, which training"
    )
    assert report.warnings[0] == (
        f"fit would stop: its {refuses} sets aside. Leave that out of the app's requests"
    )
    trainer = trainer_of(rl, tmp_path, "1", "0")
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(dry_apps.samples, train, val)
    assert str(caught.value) == (
        "evaluations sample as the app asks, so they refuse a call of writer: "
        f"{said} cannot be honoured by this engine; leave it out"
    )
    assert trainer.folder.metrics() == []
    # without held-out tasks nothing is refused
    report = trainer_of(rl, tmp_path, "1", "0").dev(dry_apps.samples, train[:1], group_size=2)
    assert report.warnings[0].startswith(f"with held-out tasks, fit would stop: its {refuses}")
    alone = trainer_of(rl, tmp_path / "alone", "1", "0", steps=1)
    alone.fit(dry_apps.samples, train)
    assert [line["failed"] for line in alone.folder.metrics()] == [0]


def test_what_evaluations_set_aside_too(
    rl: Callable[..., Any], dry_apps: Any, tmp_path: Path
) -> None:
    """Check a field that only one provider's models know, and sampling that the engine can do."""
    tasks = [
        {"q": name, "fields": {"reasoning_effort": "low", "temperature": 0.5, "max_tokens": 5}}
        for name in "abc"
    ]
    trainer = trainer_of(rl, tmp_path, "1", "0", steps=1)
    report = trainer.dev(dry_apps.samples, tasks[:1], tasks[1:], group_size=2)
    assert not any("evaluations" in warning for warning in report.warnings)
    result = trainer_of(rl, tmp_path, "1", "0", steps=1).fit(dry_apps.samples, tasks[:1], tasks[1:])
    assert [e.failed for e in result.evaluations] == [0, 0]
