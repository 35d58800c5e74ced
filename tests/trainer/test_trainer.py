"""Test Trainer: the files of a run, which agents it trains, and which it leaves unchanged."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM, Optimizer, PolicyLoss, Torch, Trainer
from lightspan.errors import ConfigError, EngineError, StoreError, UnsupportedError
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema.records import Mode
from lightspan.stores import open_store
from lightspan.stores.protocol import StoredCall
from lightspan.stores.sqlite.store import SQLiteStore
from lightspan.training.collector import read_episodes
from lightspan.training.folder import RunFolder
from lightspan.training.results import FitResult
from lightspan_testing.scripted import ScriptedServer
from lightspan_torch.learner.torch import TorchLearner

Run = tuple[FitResult, Any]

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two steps with two agents, one of them frozen at the starting weights."""
    from lightspan import LightningRL

    algorithm = LightningRL(
        tiny,
        optimize="writer",
        frozen="base",
        group_size=4,
        tasks_per_step=2,
        minibatches=2,
        learning_rate=1e-3,
        seed=3,
    )
    trainer = Trainer(
        algorithm, steps=2, folder=tmp_path_factory.mktemp("runs") / "first", validate_every=1
    )
    train, val = _questions(6), _questions(3, held=1)
    return trainer.fit(apps.two, train, val), algorithm


def _questions(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"q": f"question {number}", **fields} for number in range(count)]


def _episodes(folder: RunFolder, run_id: str, mode: Mode = Mode.TRAIN) -> list[Any]:
    async def read() -> list[Any]:
        async with open_store(folder.store_url) as store:
            return await read_episodes(store, await store.rollouts(run_id=run_id, mode=mode))

    return asyncio.run(read())


def _hash(model: Path) -> str:
    return TorchLearner({"policy": str(model)}).weight_hash("policy")


# --- what a run leaves behind -------------------------------------------------------------------


def test_config_says_what_was_asked(run: Run, tiny: Path) -> None:
    config = json.loads((run[0].folder / "config.json").read_text())
    assert config.pop("run_id").startswith("run-")
    assert config.pop("train") == {"tasks": 6, "fingerprint": "8f7a7ffcd1a8debf"}
    assert config.pop("val") == {"tasks": 3, "fingerprint": "ce8ad10c820c4898"}
    loss, optimizer = config.pop("loss"), config.pop("optimizer")
    assert loss["clip_high"] == 0.28
    assert optimizer["learning_rate"] == 1e-3
    assert {name: value for name, value in config.items() if value is not None} == {
        "algorithm": "lightning_rl",
        "app": "toy_apps:two",
        "model": str(tiny),
        "optimize": "writer",
        "frozen": "base",
        "estimator": "grpo",
        "unit": "rollout",
        "credit": "terminal",
        "step_rewards": False,
        "weight": "rollout",
        "group_size": 4,
        "tasks_per_step": 2,
        "tasks": "shuffled",
        "minibatches": 2,
        "resample": 0,
        "temperature": 1.0,
        "overlap": 0,
        "failure_reward": "lowest",
        "timeout_s": 600.0,
        "seed": 3,
        "steps": 2,
        "epochs": 1.0,
        "validate_every": 1,
        "keep": "last",
        "checkpoint_every": 1,
        "device": "cpu",
        "metric": "reward",
    }


def test_metrics_count_every_rollout_call_and_second(run: Run) -> None:
    lines = RunFolder(run[0].folder).metrics()
    kinds = [(line["kind"], line["step"]) for line in lines]
    assert kinds == [("eval", 0), ("train", 1), ("eval", 1), ("train", 2), ("eval", 2)]
    spent = [line["cpu_s/engine"] + line["cpu_s/learner"] for line in lines]
    assert spent == sorted(spent)
    for line in lines:
        if line["kind"] == "eval":
            assert (line["n"], line["unscored"], line["failed"]) == (3, 0, 0)
            assert line["low"] <= line["mean"] <= line["high"]
            continue
        assert line["rollouts"] == line["scored"] == line["batch/scored"] == 8
        assert line["failed"] == line["lost"] == line["damaged"] == 0
        assert line["calls"] == 16
        assert line["agent/writer/calls"] == line["agent/checker/calls"] == 8
        assert line["agent/writer/reward"] == line["agent/checker/reward"] == line["reward"]
        assert line["calls/trained"] == line["calls/frozen"] == 8
        assert line["batch/groups"] == 2
        assert line["reward_se"] >= 0
        assert 0 < line["learner/tokens"] == line["batch/trained_tokens"]
        assert line["learner/fresh_tokens"] > 0
        assert line["learner/logprob_gap_mean"] < 1e-4
        assert {"learner/loss", "learner/clip_fraction", "learner/entropy"} <= line.keys()
        assert line["learner/approx_kl"] > 0
        assert line["engine/tokens_per_s"] > 0
        assert 0 < line["seconds/rollouts"] < line["seconds"]


def test_folder_is_closed_to_others_and_complete(run: Run) -> None:
    folder = run[0].folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("store")) == [
        "checkpoints",
        "config.json",
        "evaluations",
        "explanations",
        "learning_curve.png",
        "lock",
        "metrics.jsonl",
        "model",
        "result.json",
    ]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-000001",
        "step-000002",
    ]
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_exported_model_loads_with_transformers_and_has_learned(run: Run, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run[0].model)
    tokenizer = AutoTokenizer.from_pretrained(run[0].model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.config.model_type == "qwen2"
    assert _hash(run[0].model) != _hash(tiny)


def test_rows_come_from_the_selected_agent_alone(run: Run) -> None:
    result, algorithm = run
    folder = RunFolder(result.folder)
    run_id = folder.read_config()["run_id"]
    calls = {
        f"{episode.attempt_id}/{call.call_id}/{call.choice}": call
        for episode in _episodes(folder, run_id)
        for call in episode.calls
    }
    assert len(calls) == 32
    for step in (1, 2):
        explained = folder.explanations(step)
        assert {calls[key].agent_path for key in explained} == {"writer"}
    rows = algorithm.last_batch.rows
    writers = {
        call.record.call_id: call.record.prompt_ids + call.record.response_ids
        for call in calls.values()
        if call.agent_path == "writer"
    }
    assert rows
    for row in rows:
        assert row.ids == writers[row.call_ids[0][0]]


def test_frozen_base_keeps_the_starting_weights(run: Run) -> None:
    """Check that every answer of the checker has version 0 of `base`, also after training."""
    folder = RunFolder(run[0].folder)
    run_id = folder.read_config()["run_id"]
    episodes = _episodes(folder, run_id) + _episodes(folder, run_id, Mode.VAL)
    seen = {
        (call.agent_path, call.record.policy, call.record.versions[0][0])
        for episode in episodes
        for call in episode.calls
    }
    assert seen == {
        ("checker", "base", 0),
        ("writer", "policy", 1),
        ("writer", "policy", 2),
        ("writer", "policy", 3),
    }


# --- what is trained ----------------------------------------------------------------------------


@pytest.mark.slow
def test_training_moves_the_reward(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    algorithm = rl(group_size=8, tasks_per_step=8, learning_rate=3e-3, minibatches=2)
    trainer = Trainer(algorithm, steps=8, folder=tmp_path / "run")
    result = trainer.fit(apps.spell, ask(64), ask(64, held=1))
    assert result.gain is not None
    assert result.gain.low > 0
    lines = [line for line in trainer.folder.metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_two_policies_have_weights_of_their_own(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Check that only the writer's policy changes, whose reward varies."""
    algorithm = rl(optimize={"writer": "a", "reviewer": "b"})
    tasks = ask(2, who="writer") + ask(2, who="reviewer")
    result = Trainer(algorithm, steps=2, folder=tmp_path / "run").fit(apps.either, tasks)
    start = _hash(tiny)
    assert _hash(result.model / "a") != start
    assert _hash(result.model / "b") == start


def test_shared_agents_follow_the_moving_weights_untrained(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    trainer = Trainer(rl(frozen="shared"), steps=2, folder=tmp_path / "run")
    trainer.fit(apps.two, ask(4))
    run_id = trainer.folder.read_config()["run_id"]
    calls = [c for e in _episodes(trainer.folder, run_id) for c in e.calls]
    versions = {
        path: {c.record.versions[0][0] for c in calls if c.agent_path == path}
        for path in ("writer", "checker")
    }
    assert versions == {"writer": {1, 2}, "checker": {1, 2}}
    line = trainer.folder.metrics()[-1]
    assert (line["calls/trained"], line["calls/frozen"]) == (8, 8)


@pytest.mark.parametrize("through_gateway", [False, True])
def test_frozen_agents_reach_an_endpoint(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, through_gateway: bool
) -> None:
    """Check the app's own endpoint with `frozen=None`, and the given one with an `LLM`."""
    with ScriptedServer("scripted help") as server:
        where = LLM(base_url=server.url, model="big") if through_gateway else None
        url = "http://127.0.0.1:9/v1" if through_gateway else server.url
        trainer = Trainer(rl(frozen=where), steps=1, folder=tmp_path / "run")
        trainer.fit(apps.asks_elsewhere, ask(2, url=url))
        assert len(server.requests) == 8
        assert {r.body["model"] for r in server.requests} == {"big" if through_gateway else "any"}
        assert not any("lightspan" in name for r in server.requests for name in r.headers)
    line = trainer.folder.metrics()[-1]
    assert (line["calls/trained"], line["calls/frozen"], line["failed"]) == (8, 8, 0)


def test_checkpoints_come_as_often_as_asked_and_at_the_end(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    trainer = Trainer(rl(), steps=6, checkpoint_every=4, folder=tmp_path / "run")
    trainer.fit(apps.spell, ask(2))
    kept = sorted(path.name for path in trainer.folder.checkpoints.iterdir())
    assert kept == ["step-000004", "step-000006"]


def test_keys_are_not_kept(
    apps: Any, rl: Make, tmp_path: Path, ask: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the run's folder has the variable's name, and neither our key nor the app's."""
    monkeypatch.setenv("HELPER_KEY", "sk-kept-nowhere")
    with ScriptedServer("scripted help") as server:
        where = LLM(base_url=server.url, model="big", api_key_env="HELPER_KEY")
        trainer = Trainer(rl(frozen=where), steps=1, folder=tmp_path / "run")
        trainer.fit(apps.asks_elsewhere, ask(2, url="http://127.0.0.1:9/v1"))
        keys = {request.headers["authorization"] for request in server.requests}
        assert keys == {"Bearer sk-kept-nowhere"}
    files = [path for path in trainer.folder.path.rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert b"HELPER_KEY" in kept
    assert b"scripted help" in kept
    assert b"sk-kept-nowhere" not in kept
    assert b"own-key" not in kept


def test_a_key_of_a_frozen_model_is_missing(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    """Check that the variable is named before anything is loaded or run."""
    where = LLM(base_url="http://127.0.0.1:9/v1", model="big", api_key_env="NO_SUCH_KEY")
    trainer = Trainer(rl(frozen=where), steps=1, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"needs the key in \$NO_SUCH_KEY, which is not set"):
        trainer.fit(apps.asks_elsewhere, ask(2, url="http://127.0.0.1:9/v1"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_loss_with_kl_learns_from_groups_that_do_not_vary(
    apps: Any, rl: Make, tmp_path: Path, ask: Make
) -> None:
    tasks = ask(2, give="number")
    plain = Trainer(rl(), steps=1, folder=tmp_path / "plain")
    plain.fit(apps.odd, tasks)
    assert "learner/loss" not in plain.folder.metrics()[-1]
    algorithm = rl(loss=PolicyLoss(entropy=0.01))
    spread = Trainer(algorithm, steps=1, folder=tmp_path / "entropy")
    spread.fit(apps.odd, tasks)
    assert spread.folder.metrics()[-1]["learner/rows"] == 8


def test_evaluate_leaves_the_run_as_it_is(run: Run, apps: Any, rl: Make, ask: Make) -> None:
    folder = run[0].folder
    before = {p: p.read_bytes() for p in folder.glob("*.json*")}
    trainer = Trainer(run[1], folder=folder)
    evaluation = trainer.evaluate(apps.two, ask(4, held=2), resume=True)
    assert (evaluation.step, len(evaluation.rewards), evaluation.unscored) == (2, 4, 0)
    assert {p: p.read_bytes() for p in folder.glob("*.json*")} == before


# --- parts of one's own -------------------------------------------------------------------------


def test_a_learner_that_lacks_an_option_is_refused(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    class Plain(TorchLearner):
        @property
        def capabilities(self) -> LearnerCapabilities:
            return LearnerCapabilities(kl=False)

    algorithm = rl(loss=PolicyLoss(kl=0.1))
    learner = Plain({"policy": str(tiny)}, optimizer=Optimizer())
    trainer = Trainer(algorithm, folder=tmp_path / "run", learner=learner)
    with pytest.raises(UnsupportedError, match=r"does not support a KL term \(PolicyLoss.kl\)"):
        trainer.fit(apps.spell, ask(2))


def test_a_store_of_one_process_is_refused(apps: Any, rl: Make, tmp_path: Path, ask: Make) -> None:
    trainer = Trainer(rl(), folder=tmp_path / "run", store="memory:")
    with pytest.raises(UnsupportedError, match="'memory:' lives in one process"):
        trainer.fit(apps.spell, ask(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps=-1 must be at least 0"),
        ({"epochs": 0}, "epochs=0 must be a finite number above 0"),
        ({"epochs": 2, "steps": 9}, "epochs=2 has no effect with steps=: give one of them"),
        ({"checkpoint_every": 0}, "checkpoint_every=0 must be at least 1"),
        ({"validate_every": 0}, "validate_every=0 must be at least 1"),
        ({"lease_s": 1e300}, "lease_s=1e.300 must be a finite number above 0 and at most 1e.09"),
        ({"device": 0}, "device=0 is unknown"),
        ({"learner": Torch}, "learner=<class .*: give Torch.…. or Verl.…. or a learner"),
        ({"learner": "tensor"}, "no plugin of the kind 'learners' is called 'tensor'; installed: "),
        ({"engine": "llm"}, "no plugin of the kind 'engines' is called 'llm'; installed: "),
        ({"runners": ""}, "runners='': give a number or LocalRunners.…. or runners of your own"),
    ],
)
def test_impossible_settings_are_refused(rl: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(rl(), **options)


# --- a store whose disk is full -----------------------------------------------------------------


def test_an_attempt_with_a_call_that_was_not_stored_is_never_trained(
    apps: Any, rl: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a rollout of which the store refuses the first call and later every mark."""
    refused: list[str] = []
    add_calls = SQLiteStore.add_calls

    async def add_or_refuse(store: SQLiteStore, calls: Sequence[StoredCall]) -> list[bool]:
        if not refused:
            refused.append(calls[0].span.attempt_id)
            raise StoreError("the disk is full")
        return await add_calls(store, calls)

    async def refuse(store: SQLiteStore, attempt_id: str, reason: str) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(SQLiteStore, "add_calls", add_or_refuse)
    monkeypatch.setattr(SQLiteStore, "mark_damaged", refuse)
    trainer = Trainer(rl(), steps=1, folder=tmp_path / "run")
    trainer.fit(apps.asks_again, _questions(2, waits=False))
    [line] = trainer.folder.metrics()
    assert (line["rollouts"], line["damaged"], line["calls"]) == (8, 1, 15)
    assert (line["calls/trained"], line["calls/rejected:damaged"]) == (14, 1)
    trained = {key.split("/")[0] for key in trainer.folder.explanations(1)}
    assert len(trained) == 7
    assert refused[0] not in trained


# --- an engine that has died --------------------------------------------------------------------


def test_an_engine_that_has_died_ends_the_run(
    apps: Any, rl: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the run ends with the engine's error."""

    def breaks(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("lightspan_torch.engine._batcher.Batcher._step", breaks)
    trainer = Trainer(rl(), steps=2, folder=tmp_path / "run")
    stopped = "the generation thread of policy policy stopped: the device is gone"
    with pytest.raises(EngineError, match=stopped):
        trainer.fit(apps.two, _questions(4))
