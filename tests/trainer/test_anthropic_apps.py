"""Test that apps on Anthropic's SDK are trained unchanged; see also `test_structured_learning`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import Trainer
from lightspan.progress import SilentReporter
from lightspan.schema import semconv as c
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_torch.learner.torch import TorchLearner

CALLS = {
    "plain": {("writer", "policy"): 1, ("checker", "base"): 1},
    "concurrent": {("writer", "policy"): 2},
    "graph": {("writer", "policy"): 1, ("checker", "base"): 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_app_is_trained(
    rl: Callable[..., Any],
    apps: Any,
    ask: Callable[..., Any],
    tiny: Path,
    tmp_path: Path,
    name: str,
) -> None:
    app = getattr(importlib.import_module("anthropic_apps"), name)
    trainer = Trainer(
        rl(frozen="base"), steps=1, folder=tmp_path / "run", reporter=SilentReporter()
    )
    run = trainer.fit(app, ask(2), ask(1))
    before, after = (
        TorchLearner({"policy": str(path)}).weight_hash("policy") for path in (tiny, run.model)
    )
    assert before != after
    episodes = stored_episodes(RunFolder(run.folder).store_url)
    assert len(episodes) == 8 + 2
    for episode in episodes:
        assert (episode.outcome, episode.capture_errors) == ("ok", ())
        found = [(call.agent_path, call.record and call.record.policy) for call in episode.calls]
        assert {one: found.count(one) for one in found} == CALLS[name]
        for call in episode.calls:
            assert str(call.span.attributes[c.RESPONSE_ID]).startswith("msg_call")
    [line] = [line for line in RunFolder(run.folder).metrics() if line["kind"] == "train"]
    assert line["calls/trained"] == 8 * CALLS[name]["writer", "policy"]
