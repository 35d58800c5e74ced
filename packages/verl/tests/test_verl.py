"""Parts of the verl learner that need no verl: its settings, its checks, its shards."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from lightspan import LightningRL, Optimizer, Verl
from lightspan.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.training.backends import check_parts
from lightspan_testing.learner_suite.rows import random_row
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_verl.cuda_devices import cuda_device
from lightspan_verl.environment import check_environment
from lightspan_verl.learner import CAPABILITIES, VerlLearner, partition
from lightspan_verl.shards import SavedShards, Shard, write


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"python": ""}, "python=''"),
        ({"python": "p", "ranks": 0}, "Verl: ranks"),
        ({"python": "p", "token_budget": 0}, "Verl: token_budget"),
        ({"python": "p", "dtype": "float16"}, "Verl: dtype"),
        ({"python": "p", "timeout_s": -1}, "Verl: timeout_s"),
    ],
)
def test_a_description_is_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Verl(**options)  # type: ignore[arg-type]


def test_where_ranks_are() -> None:
    assert Verl(python="p").rank_devices("cuda:1") == ("cuda:1",)
    assert Verl(python="p", ranks=2).rank_devices("cpu") == ("cpu", "cpu")
    assert Verl(python="p", ranks=2).rank_devices("cuda") == ("cuda:0", "cuda:1")
    with pytest.raises(ConfigError, match="2 ranks cannot all be on device='cuda:1'"):
        Verl(python="p", ranks=2).rank_devices("cuda:1")


def test_where_ranks_are_started_is_said() -> None:
    assert Verl(python="p").describe("cpu") == "starting 1 rank of the learner: cpu"
    two = "starting 2 ranks of the learner: cpu, cpu"
    assert Verl(python="p", ranks=2).describe("cpu") == two


def interpreter(folder: Path, found: str) -> str:
    """Return a program that answers like an interpreter; `found` is its answer."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{found}'\n")
    path.chmod(0o700)
    return str(path)


ALL = (
    '"verl": "0.9.1", "msgspec": "1", "torch": "2", "transformers": "5", "tensordict": "0.10", '
    '"safetensors": "0.5", "uvicorn": "0.3"'
)


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ("{}", "has no verl: .*python -m pip install verl==0.9.1 msgspec"),
        ('{"verl": "0.8.0"}', "has verl 0.8.0, and this lightspan drives 0.9.1"),
        ('{"verl": "0.9.1", "torch": "2"}', "lacks msgspec, transformers, tensordict"),
        (f'{{{ALL}, "trl": "1.16.0"}}', "has TRL 1.16.0.*pip uninstall trl"),
        ("no json", "does not run as an interpreter"),
    ],
)
def test_what_an_environment_lacks_is_named(tmp_path: Path, found: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_environment(interpreter(tmp_path, found))


def test_an_environment_that_has_all(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f'{{{ALL}, "trl": "0.27.0"}}')
    assert check_environment(python)["verl"] == "0.9.1"


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/python' is no program"):
        check_environment(str(tmp_path / "nowhere" / "python"))
    with pytest.raises(ConfigError, match="has no verl"):
        check_environment(sys.executable)


def test_check_refuses_by_name_what_is_not_declared(tmp_path: Path) -> None:
    engine = EngineCapabilities(exact_tokens=True)
    for options, match in (
        ({"optimizer": Optimizer(name="muon")}, r"Optimizer\(name='muon'\)"),
        ({"estimator": "ppo"}, "a critic"),
    ):
        algorithm = LightningRL(tmp_path, **options)
        with pytest.raises(UnsupportedError, match=match):
            algorithm.check(engine, CAPABILITIES)


def test_an_engine_that_takes_images_is_refused_before_a_rollout(tmp_path: Path) -> None:
    """the embedded engine takes images of a vision model, and verl trains on none."""
    algorithm = LightningRL(tmp_path, learning_rate=1e-5)
    engine, learner = Parts(EngineCapabilities(exact_tokens=True)), Parts(CAPABILITIES)
    check_parts(algorithm, engine, learner)  # type: ignore[arg-type]
    engine = Parts(EngineCapabilities(exact_tokens=True, images=("policy",)))
    with pytest.raises(UnsupportedError, match="takes images for policy, which the learner cannot"):
        check_parts(algorithm, engine, learner)  # type: ignore[arg-type]


class Parts:
    """An engine or a learner of one policy, of which only the capabilities are known."""

    def __init__(self, capabilities: EngineCapabilities | LearnerCapabilities) -> None:
        self.capabilities = capabilities

    def policies(self) -> dict[str, int]:
        return {"policy": 1}


def test_mixed_temperatures_are_refused_where_they_are_not_declared() -> None:
    rows = [random_row([5, 6, 7, 8], random.Random(seed), "ro", "writer") for seed in range(9)]
    LearnerCapabilities().check_temperatures(rows)
    one = LearnerCapabilities(mixed_temperatures=False)
    with pytest.raises(UnsupportedError, match=r"mixed_temperatures.*0\.5, 0\.7, 1\.0"):
        one.check_temperatures(rows)
    alike = [row for row in rows if len({*row.temperatures} - {1.0}) == 0]
    one.check_temperatures(alike)


def test_shards_are_read_by_any_number_of_ranks(tmp_path: Path) -> None:
    """A tensor of 7 rows is written as 3, 3 and 1, and read in other parts, one of them empty."""
    whole = torch.arange(21.0).view(7, 3)
    step = torch.tensor(4.0)
    for rank, (start, stop) in enumerate([(0, 3), (3, 6), (6, 7)]):
        shards = {"w": Shard(whole[start:stop], start, 7), "step": Shard(step, 0, -1)}
        write(tmp_path / f"policy-0-rank-{rank:03}.safetensors", shards)
    saved = SavedShards(tmp_path, 0)
    assert saved.names == {"w", "step"}
    for start, stop in [(0, 4), (4, 7), (0, 7), (7, 7), (2, 3)]:
        local = torch.zeros(stop - start, 3)
        saved.read("w", Shard(local, start, 7))
        assert torch.equal(local, whole[start:stop])
    found = torch.zeros(())
    saved.read("step", Shard(found, 0, -1))
    assert float(found) == 4.0
    with pytest.raises(CheckpointError, match="7 places of w"):
        saved.read("w", Shard(torch.zeros(8, 3), 0, 8))
    with pytest.raises(CheckpointError, match="nothing of v"):
        saved.read("v", Shard(torch.zeros(8, 3), 0, 8))
    with pytest.raises(CheckpointError, match="no weights of policy 1"):
        SavedShards(tmp_path, 1)


def test_weights_in_pickles_are_never_read(tmp_path: Path) -> None:
    """verl itself would read them, so they are refused before a process gets an order."""
    folder = tiny_model(tmp_path / "pickled", seed=0, hidden=32)
    torch.save(load_model(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    class Unasked:
        devices = ("cpu",)

    with pytest.raises(ModelError, match=r"no model\*\.safetensors.*\.bin, pickles.* never read"):
        VerlLearner({"writer": folder}, workers=Unasked())  # type: ignore[arg-type]


def test_partition_gives_each_rank_about_as_many_tokens() -> None:
    rows = [random_row([7] * size, random.Random(0), "ro", "writer") for size in (3, 9, 4, 5)]
    assert partition(rows, 2) == [[0, 1], [2, 3]]
    assert partition(rows[:1], 3) == [[0], [], []]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("4,6,7", ["4", "6", "7"]),
        ("GPU-ab, MIG-cd,0", ["GPU-ab", "MIG-cd", "0"]),
    ],
)
def test_a_rank_sees_its_own_of_the_cards_that_the_trainer_sees(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [cuda_device(device) for device in ("cuda", "cuda:1", "cuda:2")] == expected


@pytest.mark.parametrize(("shown", "count"), [("", 0), ("3,-1,4", 1)])
def test_a_card_that_is_not_shown(monkeypatch: pytest.MonkeyPatch, shown: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(
        ConfigError, match=rf"CUDA_VISIBLE_DEVICES='{shown}' shows {count} devices.*'cuda:1'"
    ):
        cuda_device("cuda:1")
