"""Test a training whose app's agents are known only by spans: one is trained, one is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, Trainer
from lightspan.progress import SilentReporter
from lightspan.training.folder import RunFolder


@pytest.mark.slow
def test_one_of_two_agents_is_trained(
    tmp_path: Path,
    apps: Any,
    rl: Callable[..., LightningRL],
    ask: Callable[..., list[dict[str, Any]]],
) -> None:
    algorithm = rl(optimize="boss/helper", frozen="base", tasks_per_step=1)
    folder = tmp_path / "run"
    trainer = Trainer(algorithm, steps=1, folder=folder, reporter=SilentReporter())
    trainer.fit("otel_app:answer", ask(1), ask(1))
    [line] = [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]
    assert line["agent/boss/calls"] == line["agent/boss/helper/calls"] == line["rollouts"] == 4
    assert (line["calls/trained"], line["calls/frozen"]) == (4, 4)
