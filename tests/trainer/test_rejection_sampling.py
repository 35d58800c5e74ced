"""Train by best of n: what is imitated, what is counted, and what stays unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LoRA, RejectionSampling, Trainer
from lightspan.algorithms import TrainerContext
from lightspan.progress import SilentReporter
from lightspan.schema.routing import BASE_POLICY
from lightspan_tools.inspect import inspect_run

Make = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_only_the_chosen_agent_learns(
    apps: Any,
    tiny: Path,
    tmp_path: Path,
    ask: Make,
    monkeypatch: pytest.MonkeyPatch,
    lora: LoRA | None,
) -> None:
    hashes: list[tuple[str, str]] = []
    step = RejectionSampling.run_step

    async def watched(self: RejectionSampling, trainer: TrainerContext) -> Any:
        metrics = await step(self, trainer)
        engine: Any = trainer.engine
        hashes.append((engine.weight_hash("policy"), engine.weight_hash(BASE_POLICY)))
        return metrics

    monkeypatch.setattr(RejectionSampling, "run_step", watched)
    algorithm = RejectionSampling(
        tiny,
        optimize="writer",
        frozen="base",
        group_size=4,
        tasks_per_step=2,
        learning_rate=1e-3,
        lora=lora,
    )
    folder = tmp_path / "run"
    trainer = Trainer(algorithm, steps=2, folder=folder, reporter=SilentReporter())
    result = trainer.fit(apps.two, ask(4))
    assert result.steps == 2
    trained, base = zip(*hashes, strict=True)
    assert len(set(trained)) == 2
    assert len(set(base)) == 1
    for line in (line for line in trainer.folder.metrics() if line["kind"] == "train"):
        counts = {key: line.get(key, 0) for key in ("imitated", "left_out/not_best", "rollouts")}
        assert counts["imitated"] + counts["left_out/not_best"] == counts["rollouts"] == 8
        assert line["calls/trained"] == line["calls/frozen"] == line["imitated"] > 0
        whys = trainer.folder.explanations(line["step"]).values()
        assert sum(why.token_weight * why.tokens for why in whys) == pytest.approx(1.0)
    text = inspect_run(folder)
    imitated = sum(line["imitated"] for line in trainer.folder.metrics())
    assert f"frozen 16, rejected:unused {16 - imitated:.0f}, trained {imitated:.0f}" in text


@pytest.mark.slow
def test_failures_are_counted_and_nothing_is_learned_from_equal_rewards(
    apps: Any, tiny: Path, tmp_path: Path, ask: Make, lines: Any
) -> None:
    algorithm = RejectionSampling(tiny, group_size=2, tasks_per_step=2, learning_rate=1e-3)
    trainer = Trainer(algorithm, steps=1, folder=tmp_path / "run", reporter=lines)
    good, bad = {"q": "a", "give": "number"}, {"q": "b", "give": "nan"}
    trainer.fit(apps.odd, [good, bad])
    [line] = [each for each in trainer.folder.metrics() if each["kind"] == "train"]
    counts = {key: value for key, value in line.items() if key.startswith("left_out/")}
    assert counts == {"left_out/not_best": 2, "left_out/unscored": 2}
    assert line["imitated"] == 0
    assert not any(key.startswith("learner/") for key in line)
    assert any("nothing to imitate in 4 rollouts" in text for text in lines.texts)
