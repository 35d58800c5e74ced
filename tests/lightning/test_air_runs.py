"""Test AIR as an option of LightningRL, and in a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import AIR, LightningRL, Trainer
from lightspan.errors import ConfigError
from lightspan.lightning.air import ToolSuccess
from lightspan.lightning.credit import discounted, terminal
from lightspan.lightning.episode import Episode
from lightspan.lightning.history import Trace
from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.records import Mode
from lightspan_testing.scripted_engine import ScriptedEngine
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run
from lightspan_torch.engine.tokenizer import load_tokenizer
from packages.core.tests.lightning.steps import raises, shaping

pytestmark = pytest.mark.slow

Make = Callable[..., Any]


# --- settings -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "prize"}, "mode='prize': use one of 'potential', 'bonus'"),
        ({"scale": 0}, "scale=0 must be a finite number above 0"),
        ({"signals": ()}, "signals is empty"),
        ({"signals": max}, r"signals=<built-in function max> must be a sequence: write signals=\("),
        ({"signals": (ToolSuccess,)}, r"ToolSuccess'> is not a signal: use ToolSuccess\(\)"),
        ({"signals": ("tool_success",)}, "'tool_success' is not a signal"),
        ({"signals": (ToolSuccess(), ToolSuccess())}, "two signals are named 'tool_success'"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AIR(**options)


def test_lightning_rl_takes_it_and_selects_discounted_credit() -> None:
    config = LightningRL("a/model", air=True).batch_config
    assert config.air == AIR()
    assert config.credit == discounted(1)
    assert LightningRL("a/model", air=True, gamma=0.5).batch_config.credit == discounted(0.5)
    assert LightningRL("a/model", air=False).batch_config.air is None
    assert LightningRL("a/model").batch_config.credit == terminal
    bonus = LightningRL("a/model", air=AIR(mode="bonus"), credit="terminal").batch_config
    assert bonus.credit == terminal


class Own:
    name, step_rewards = "own", False

    def __call__(self, episode: Episode, coverage: Any) -> dict[Any, float]:
        return {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"air": True, "credit": "terminal"}, 'air= with credit="terminal" would change nothing'),
        ({"air": True, "credit": Own()}, "which the credit rule own does not define"),
        ({"air": "tool_success"}, "air='tool_success': use lightspan.AIR"),
        ({"air": True, "estimator": "ppo"}, 'air= with credit="critic" would change nothing'),
    ],
)
def test_what_air_contradicts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL("a/model", **options)


def test_config_says_it_as_json() -> None:
    assert LightningRL("a/model").config()["air"] is None
    air = AIR(signals=(ToolSuccess(tools="sql*"), raises), scale=0.1)
    config = LightningRL("a/model", air=air).config()
    assert json.loads(json.dumps(config["air"])) == {
        "mode": "potential",
        "scale": 0.1,
        "signals": [
            {"type": "tool_success", "tools": "sql*"},
            f"{raises.__module__}:raises",
        ],
    }
    assert config["credit"] == "discounted(1)"


# --- in a run -------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"mode": "potential"}, {"mode": "bonus"}])
def test_a_run_shapes_by_its_own_tools(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, options: dict[str, Any]
) -> None:
    """Check the way from `lightspan.tool` in a runner to the learner, the metrics and `inspect`."""
    from tool_app import parsed  # type: ignore[import-not-found]

    algorithm = rl(air=AIR(scale=0.5, **options), gamma=1.0, tasks_per_step=3)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run")
    result = trainer.fit(parsed, ask(3), ask(2, held=1))
    before, line, after = trainer.folder.metrics()
    assert line["air/tool_success/seen"] == line["rollouts"] == 12
    assert line["air/unplaced"] == 0
    rate, mean = line["air/tool_success"], line["air/shaping_mean"]
    assert 0 < rate < 1, "no tool failed, or all: change the seed of the test"
    # potential: nothing before the first call, -0.5 before the second; bonus: 0.5 for the first
    assert mean == pytest.approx(rate * 0.25 * (-1 if options["mode"] == "potential" else 1))
    rewards = [e.reward for e in stored_episodes(trainer.settings.store_url, mode=Mode.TRAIN)]
    assert line["reward"] == pytest.approx(math.fsum(map(float, rewards)) / 12)
    assert all(0 <= reward <= 1 for reward in map(float, rewards))
    assert before["mean"] == result.evaluations[0].interval.mean <= 1
    assert not any(key.startswith("air/") for key in (*before, *after))
    rollout = algorithm.last_batch.rows[0].rollout_id
    assert re.search(
        r"credit \S+ \(discounted\(1\), AIR \S+\), turn \d, others in its turn: \d; share",
        inspect_run(trainer.folder.path, rollout),
    )


def test_tools_of_a_real_agent_are_placed_by_their_ids(
    apps: Any, rl: Make, tmp_path: Path, tiny: Path
) -> None:
    """Check a LangChain agent with its adapter and the gateway: three tool calls, one of which
    fails.
    """
    pytest.importorskip("lightspan_langgraph")
    from agent_app import solve  # type: ignore[import-not-found]

    def query(text: str) -> str:
        return f'<tool_call>\n{{"name": "sql", "arguments": {{"query": "{text}"}}}}\n</tool_call>'

    turns = [query("a"), query("from nowhere") + query("b"), "<tool_call>{nothing}</tool_call>"]

    def script(request: GenerationRequest) -> str:
        asked = engine.tokenizer("policy").decode(request.prompt_ids)
        return turns[min(asked.count("<tool_response>"), 2)]

    engine = ScriptedEngine(load_tokenizer(str(tiny)), script, policies={"policy": 0})
    algorithm = rl(air=AIR(scale=1.0), gamma=1.0, tasks_per_step=1, group_size=2)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run", engine=engine)
    trainer.fit(solve, [{"q": "how many?", "reward": 0.5}])
    episodes = stored_episodes(trainer.settings.store_url, mode=Mode.TRAIN)
    assert len(episodes) == 2
    for episode in episodes:
        assert not episode.capture_errors
        first, second, third = (call.call_id for call in episode.calls)
        found = [(t.tool.call, t.tool.succeeded, t.tool.result) for t in Trace(episode).tools]
        assert sorted(found, key=str) == sorted(
            [
                ((first, 0), True, "[[1]]"),
                ((second, 0), False, None),
                ((second, 0), True, "[[1]]"),
            ],
            key=str,
        )
        assert shaping(episode, AIR(scale=1)) == {
            first: 0.0,
            second: -1.0,
            third: pytest.approx(-2 / 3),
        }
    line = trainer.folder.metrics()[-1]
    assert line["air/tool_success"] == pytest.approx(2 / 3)
    assert (line["air/tool_success/seen"], line["air/unplaced"]) == (6, 0)
    assert line["air/shaping_mean"] == pytest.approx(-(0 + 1 + 2 / 3) / 3)
