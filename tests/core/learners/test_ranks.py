"""RanksLearner: two ranks against the suite, and what is its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightspan.engines.weights import load_model
from lightspan.errors import ConfigError, DataError, ModelError, RankError
from lightspan.learners import LoRA, Optimizer, PolicyLoss
from lightspan.learners.ranks.learner import Ranks, RanksLearner
from lightspan.learners.ranks.processes import Processes
from lightspan.learners.ranks.shares import shares
from lightspan.learners.torch import TorchLearner
from lightspan.lightning.rows import Constraint, Row
from lightspan.testing.learner_suite import BOTH_CLIPS, LearnerSuite, make_rows
from lightspan.testing.learner_suite.reference import distance, published
from lightspan.testing.tiny import tiny_model

# slow: a rank takes seconds to start, and all tests of this file share one where it is not killed
pytestmark = pytest.mark.ranks

PLAIN = Optimizer(learning_rate=1e-3, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks that the learners here share."""
    torch.set_num_threads(1)
    ranks = Ranks(["cpu", "cpu"])
    yield ranks
    ranks.end()


class TestRanksLearner(LearnerSuite):
    @pytest.fixture(autouse=True)
    def made(self, two: Ranks) -> Iterator[None]:
        """The learners of a test, forgotten after it."""
        self._ranks, self._made = two, list[RanksLearner]()
        yield
        for learner in self._made:
            learner.close()

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> RanksLearner:
        learner = RanksLearner(models, ranks=self._ranks, **options)
        self._made.append(learner)
        return learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("ranks") / "model", seed=4, hidden=32)


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder)


async def check_alike(
    alone: TorchLearner, shared: RanksLearner, batches: Sequence[Sequence[Row]]
) -> None:
    """Updates on one device and on ranks: the same metrics, and the same weights to 1e-5 of what
    they moved by."""
    before = await published(alone)
    assert distance(await published(shared), before) == 0
    for batch in batches:
        metrics = shared.update(batch, BOTH_CLIPS)
        assert metrics == pytest.approx(alone.update(batch, BOTH_CLIPS), rel=1e-5, abs=1e-9)
    after = await published(alone)
    moved = distance(after, before)
    assert moved > 0.01
    assert distance(await published(shared), after) < 1e-5 * moved


async def test_uneven_shares_are_one_batch(two: Ranks, folder: Path, model: Any) -> None:
    """Rollouts of 11 rows and of 1; then seven rows of up to 40 tokens and one of 3."""
    rows = make_rows(model)
    whole = [replace(row, rollout_id="one") for row in rows[:-1]] + [rows[-1]]
    names = ("ids", "advantages", "weights", "logprobs", "versions", "temperatures")
    last: dict[str, Any] = {name: getattr(rows[0], name)[-3:] for name in names}
    short = replace(rows[0], rollout_id="short", mask=[False, True, True], **last)
    assert sorted(len(share) for share in shares(whole, 2, whole_rollouts=True)) == [1, 11]
    alone = TorchLearner({"writer": folder}, optimizer=PLAIN)
    shared = RanksLearner({"writer": folder}, ranks=two, optimizer=PLAIN)
    await check_alike(alone, shared, [whole, [*rows[1:8], short]])
    shared.close()


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
async def test_a_rank_without_rows_takes_the_same_step(
    two: Ranks, folder: Path, model: Any, lora: LoRA | None
) -> None:
    """Twice rank 1 has none; and what follows shows that both have one state."""
    rows = [replace(row, rollout_id="one") for row in make_rows(model)]
    assert shares(rows[:1], 2, whole_rollouts=True) == [[0], []]
    options: dict[str, Any] = {"optimizer": replace_rate(lora), "lora": lora}
    alone = TorchLearner({"writer": folder}, **options)
    shared = RanksLearner({"writer": folder}, ranks=two, **options)
    await check_alike(alone, shared, [rows[:1], rows[1:2], make_rows(model, seed=2)])
    shared.close()


def replace_rate(lora: LoRA | None) -> Optimizer:
    """Adapters begin with gradients of 0 in half of their parameters: a larger rate moves them."""
    return PLAIN if lora is None else Optimizer(learning_rate=1e-2, max_grad_norm=None)


def test_an_error_of_one_rank_is_all_s_and_they_go_on(two: Ranks, folder: Path, model: Any) -> None:
    """A row whose tokens do not follow their grammar is on rank 1; no step is taken."""
    rows = make_rows(model)
    learner = RanksLearner({"writer": folder}, ranks=two)
    for rank in (0, 1):
        [chosen, *_] = shares(rows, 2, whole_rollouts=True)[rank]
        bad = replace(rows[chosen], constraints=(Constraint(1, 2, 'start: "a12"'),))
        before = learner.weight_hash("writer")
        where = r"^rank 1 \(cpu\): " if rank else "^(?!rank)"
        with pytest.raises(DataError, match=where):
            learner.update([*rows[:chosen], bad, *rows[chosen + 1 :]], BOTH_CLIPS)
        assert learner.weight_hash("writer") == before
        with pytest.raises(DataError, match=where):
            learner.score([*rows[:chosen], bad, *rows[chosen + 1 :]])
    alone = TorchLearner({"writer": folder})
    expected = alone.update(rows, BOTH_CLIPS)
    assert learner.update(rows, BOTH_CLIPS) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert learner.score(rows) == [pytest.approx(row, abs=1e-6) for row in alone.score(rows)]
    learner.close()


def test_a_checkpoint_does_not_depend_on_ranks(
    two: Ranks, folder: Path, model: Any, tmp_path: Path
) -> None:
    """Saved by two, loaded by one; and the other way round."""
    rows, more = make_rows(model), make_rows(model, seed=1)
    shared = RanksLearner({"writer": folder}, ranks=two)
    alone = TorchLearner({"writer": folder})
    for learner in (shared, alone):
        learner.update(rows, PolicyLoss())
    shared.save(tmp_path / "two")
    alone.save(tmp_path / "one")
    back = TorchLearner({"writer": folder})
    back.load(tmp_path / "two")
    assert back.weight_hash("writer") == shared.weight_hash("writer")
    shared.load(tmp_path / "one")
    assert shared.weight_hash("writer") == alone.weight_hash("writer")
    expected = alone.update(more, PolicyLoss())
    assert shared.update(more, PolicyLoss()) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert back.update(more, PolicyLoss()) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert shared.state()["ranks"] == ["cpu", "cpu"]
    assert shared.usage()["cpu_s"] > 0
    shared.close()


def test_a_model_that_ranks_cannot_load_is_refused(two: Ranks, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy 'writer' is one in memory, and each rank loads"):
        RanksLearner({"writer": model}, ranks=two)
    with pytest.raises(ModelError, match="nowhere"):
        RanksLearner({"writer": tmp_path / "nowhere"}, ranks=two)
    with pytest.raises(ConfigError, match=r"devices=\['cpu'\] are of one rank: use TorchLearner"):
        Ranks(["cpu"])


def test_a_killed_rank_is_named_at_once(folder: Path, model: Any, tmp_path: Path) -> None:
    ranks = Ranks(["cpu", "cpu"])
    learner = RanksLearner({"writer": folder}, ranks=ranks, own=True)
    rows = make_rows(model)
    learner.update(rows, BOTH_CLIPS)
    learner.save(tmp_path)
    [pid] = ranks.pids
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    named = (
        rf"^rank 1 of the learner \(cpu, process {pid}\) was ended by SIGKILL, which the kernel "
        r"does where the host's memory runs out. What the last checkpoint holds is whole: go on "
    )
    with pytest.raises(RankError, match=named):
        learner.update(rows, BOTH_CLIPS)
    assert time.monotonic() - began < 10
    with pytest.raises(RankError, match=named):
        learner.score(rows)
    alone = TorchLearner({"writer": folder})
    alone.load(tmp_path)
    assert alone.weight_hash("writer") == learner.weight_hash("writer")
    learner.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_hangs_is_named_after_the_limit(
    folder: Path, model: Any, tmp_path: Path, size: int
) -> None:
    """The last one is stopped, and those that wait for it are not blamed. All are gone after."""
    ranks = Ranks(["cpu"] * size, timeout_s=5)
    learner = RanksLearner({"writer": folder}, ranks=ranks, own=True)
    rows = make_rows(model)
    learner.update(rows, BOTH_CLIPS)
    learner.save(tmp_path)
    processes = [psutil.Process(pid) for pid in ranks.pids]
    os.kill(ranks.pids[-1], signal.SIGSTOP)
    named = (
        rf"^rank {size - 1} of the learner \(cpu, process {ranks.pids[-1]}\) kept the others "
        r"waiting for longer than timeout_s=5 seconds\. What the last checkpoint holds is whole: go"
    )
    for _ in range(2):
        with pytest.raises(RankError, match=named):
            learner.update(rows, BOTH_CLIPS)
    assert not any(process.is_running() for process in processes)
    alone = TorchLearner({"writer": folder})
    alone.load(tmp_path)
    assert alone.weight_hash("writer") == learner.weight_hash("writer")
    learner.close()


def test_what_a_rank_died_of_is_said(folder: Path) -> None:
    """It was drowned by an interpreter that aborts at its end, because a thread reads its input."""
    ranks = Ranks(["cpu", "cpu"])
    with pytest.raises(RankError) as found:
        RanksLearner({"writer": folder}, ranks=ranks, own=True, share_prefixes="no")  # type: ignore[arg-type]
    assert re.match(r"rank 1 of the learner .* ended with status 1; it said", str(found.value))
    assert "msgspec.ValidationError: Expected `bool`, got `str`" in str(found.value)


def test_a_rank_that_hangs_while_it_loads_is_named(folder: Path) -> None:
    ranks = Ranks(["cpu", "cpu"])
    ranks._start_s = 5  # the processes themselves take as long on a busy machine
    os.kill(ranks.pids[0], signal.SIGSTOP)
    named = r"^rank 1 of the learner .* kept the others waiting for longer than start_s=5 seconds"
    with pytest.raises(RankError, match=named):
        RanksLearner({"writer": folder}, ranks=ranks, own=True)


async def test_three_ranks_are_one_learner(folder: Path, model: Any) -> None:
    """Batches of uneven rollouts, and of fewer than there are ranks."""
    ranks = Ranks(["cpu"] * 3)
    one = [replace(row, rollout_id="one") for row in make_rows(model)]
    # float64: after three steps float32's rounding alone is at the bound
    alone = TorchLearner({"writer": folder}, optimizer=PLAIN, dtype=torch.float64)
    shared = RanksLearner(
        {"writer": folder}, ranks=ranks, own=True, optimizer=PLAIN, dtype="float64"
    )
    batches = [make_rows(model), [*one[:-1], *make_rows(model, seed=5)[:3]], one[:2]]
    shared_out = [shares(batch, 3, whole_rollouts=True) for batch in batches]
    assert [sum(bool(share) for share in each) for each in shared_out] == [3, 2, 1]
    await check_alike(alone, shared, batches)
    assert shared.score(one) == [pytest.approx(row, abs=1e-5) for row in alone.score(one)]
    shared.close()


async def test_policies_may_be_in_another_order_after_a_resume(two: Ranks, tmp_path: Path) -> None:
    """Two models that differ: each policy has its own weights and optimiser again."""
    models = {
        name: tiny_model(tmp_path / name, seed=seed, hidden=32)
        for seed, name in enumerate(("writer", "critic"))
    }
    rows = [
        replace(row, policy=name)
        for name in models
        for row in make_rows(load_model(models[name]), seed=len(name))
    ]
    loaded = dict(reversed(models.items()))
    first = RanksLearner(models, ranks=two, optimizer=PLAIN)
    first.update(rows, BOTH_CLIPS)
    first.save(tmp_path / "saved")
    again = RanksLearner(loaded, ranks=two, optimizer=PLAIN)
    again.load(tmp_path / "saved")
    assert again.policies() == ["critic", "writer"]
    for name in models:
        assert again.weight_hash(name) == first.weight_hash(name)
    expected = first.update(rows, BOTH_CLIPS)
    assert again.update(rows, BOTH_CLIPS) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    for learner in (first, again):
        learner.close()


def test_a_model_of_pickles_is_refused_on_every_rank(
    two: Ranks, folder: Path, tmp_path: Path
) -> None:
    """No pickle is read, and the ranks go on."""
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(load_model(folder).state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot load the weights of .*pickled"):
        RanksLearner({"writer": pickled}, ranks=two)
    learner = RanksLearner({"writer": folder}, ranks=two)
    assert learner.weight_hash("writer") == TorchLearner({"writer": folder}).weight_hash("writer")
    learner.close()


def test_a_rank_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process says of itself was true before an upgrade."""
    monkeypatch.setattr(
        "lightspan.learners.ranks.group.runs", lambda: "lightspan 0.0.9, torch 2.12"
    )
    with pytest.raises(
        RankError,
        match=r"rank 1 of the learner runs lightspan \d.*, torch \d.*, Python 3\.\d+, and rank 0 "
        r"lightspan 0\.0\.9, torch 2\.12: start all ranks from one environment",
    ):
        Ranks(["cpu", "cpu"])


def test_a_rank_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError, match=r"no rank may take longer to start than start_s=0\.01"):
        Ranks(["cpu", "cpu"], start_s=0.01)
    monkeypatch.setattr("lightspan.learners.ranks.processes.MODULE", "nowhere.at_all")
    with pytest.raises(RankError, match=r"(?s)rank 1 of .* ended with status 1.*nowhere"):
        Ranks(["cpu", "cpu"])


TRAINER = """
import sys, time
from lightspan.learners.ranks.processes import Processes

processes = Processes(["cpu", "cpu"], timeout_s=60)
group = processes.connect(start_s=60)
print(*processes.pids(), flush=True)
time.sleep(60)
"""


def test_ranks_end_with_a_killed_trainer() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout is not None
        rank = psutil.Process(int(trainer.stdout.readline()))
        folder = Path(rank.cmdline()[4]).parent
        assert rank.is_running()
        trainer.kill()
    rank.wait(10)
    assert folder.is_dir()
    Processes(["cpu"], timeout_s=60).end()  # the next run removes what is left
    assert not folder.exists()
