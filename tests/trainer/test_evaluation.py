"""Test evaluations: their temperature, and when a repeated run gives the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM, Trainer
from lightspan.errors import ConfigError
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.inspect import inspect_run
from lightspan_torch.learner.torch import TorchLearner

Make = Callable[..., Any]


@pytest.mark.slow
def test_what_agents_are_sampled_at_is_said_and_can_be_told(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, lines: Any
) -> None:
    """Check that the frozen checker keeps the app's temperature; training has its own."""
    algorithm = rl(frozen="base", temperature=0.9)
    trainer = Trainer(
        algorithm, steps=1, folder=tmp_path / "run", reporter=lines, validate_temperature=0
    )
    result = trainer.fit(apps.two, ask(2), ask(2, held=1))
    assert [e.temperatures for e in result.evaluations] == [{"writer": [0.0], "checker": [1.0]}] * 2
    said = [text for text in lines.texts if "held-out reward" in text]
    assert [text.partition("; ")[2] for text in said[:2]] == [
        "sampled at temperature: checker at 1, writer at 0"
    ] * 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["temperature"], config["validate_temperature"]) == (0.9, 0)
    asked = Trainer(rl(frozen="base"), folder=tmp_path / "asked", reporter=lines)
    assert asked.evaluate(apps.two, ask(1)).temperatures == {"writer": [1.0], "checker": [1.0]}
    with pytest.raises(ConfigError, match="validate_temperature=-1 must be a finite number at le"):
        Trainer(rl(), validate_temperature=-1)


@pytest.mark.parametrize(
    ("frozen", "sampling", "said"),
    [
        (None, {}, "sampled at temperature: helper at its endpoint's own, writer at 1"),
        ("llm", {"temperature": 0.25}, "sampled at temperature: helper at 0.25, writer at 1"),
    ],
)
def test_an_agent_elsewhere_that_nobody_gives_a_temperature_is_named_too(
    apps: Any,
    rl: Make,
    tmp_path: Path,
    ask: Make,
    lines: Any,
    frozen: str | None,
    sampling: dict[str, float],
    said: str,
) -> None:
    with ScriptedServer("scripted help") as server:
        where = LLM(base_url=server.url, model="m", sampling=sampling) if frozen else None
        trainer = Trainer(rl(frozen=where), folder=tmp_path / "run", reporter=lines)
        trainer.evaluate(apps.asks_elsewhere, ask(1, url=server.url))
        assert server.requests[-1].body.get("temperature") == sampling.get("temperature")
    [text] = [text for text in lines.texts if "held-out reward" in text]
    assert text.partition("; ")[2] == said


def test_an_evaluation_that_the_apps_cache_answers_says_so(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, lines: Any
) -> None:
    """Check a cache in a variable of the app, which nobody can switch off from outside."""
    algorithm = rl(group_size=2, tasks_per_step=2)
    trainer = Trainer(algorithm, runners=1, steps=1, folder=tmp_path / "run", reporter=lines)
    result = trainer.fit(apps.remembers, ask(2), ask(3, held=1))
    assert [(e.policy_calls, e.silent) for e in result.evaluations] == [(3, 0), (0, 3)]
    [step] = [line for line in trainer.folder.metrics() if line["kind"] == "train"]
    assert (step["rollouts"], step["silent"], result.outcomes.silent) == (4, 4, 4)
    assert any(
        text.startswith("step 1/1 ") and "4 without a call of the policy" in text
        for text in lines.texts
    )
    [warning] = [text for text in lines.texts if "training rollouts made no call" in text]
    assert "warning: 4 of 4 training rollouts made no call of the policy" in warning
    [warning] = [text for text in lines.texts if "asked the policy nothing" in text]
    assert "warning: the evaluation of step 1 asked the policy nothing, so its reward" in warning
    assert any(
        text.startswith("step 1: held-out reward ") and ", 3 without a call of the policy" in text
        for text in lines.texts
    )
    assert "; held out: without a call of the policy 0 -> 3" in result.summary()
    first, last = [line for line in trainer.folder.metrics() if line["kind"] == "eval"]
    assert (first["policy_calls"], last["policy_calls"], last["silent"]) == (3, 0, 3)
    shown = inspect_run(tmp_path / "run")
    assert ", n=3), 3 without a call of the policy" in shown


@pytest.mark.slow
def test_one_attempt_at_a_time_gives_the_same_numbers_again(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    """Check equal tokens, rewards and weights, bit for bit, before and after an update."""

    def run(name: str) -> tuple[Any, ...]:
        algorithm = rl(frozen="base", seed=3)
        trainer = Trainer(algorithm, runners=1, steps=1, folder=tmp_path / name)
        result = trainer.fit(apps.two, ask(3), ask(3, held=1))
        lines = trainer.folder.metrics()
        rewards = [line.get("reward") for line in lines]
        assert not any(e.failed for e in result.evaluations)
        weights = TorchLearner({"policy": str(result.model)}).weight_hash("policy")
        return [e.rewards for e in result.evaluations], rewards, weights

    assert run("one") == run("other")
