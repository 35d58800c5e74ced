"""Which rank computes which rows, and where ranks are, without any process."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from lightspan import LightningRL, Torch, Trainer
from lightspan.errors import ConfigError
from lightspan.learners.ranks.shares import shares
from lightspan.learners.ranks.torchrun import own_rank, started
from lightspan.lightning.rows import Row
from lightspan.testing.learner_suite.rows import random_row
from lightspan.training.embedded import make_learner


def row(rollout: str, ids: list[int], policy: str = "writer") -> Row:
    return random_row(ids, random.Random(0), rollout, policy)


def test_a_rollout_is_not_torn_and_what_begins_alike_is_together() -> None:
    """Ten tokens shared, then one of its own each: a rank has the left branch, one the right."""
    left, right = list(range(10)), list(range(50, 60))
    rows = [
        row("a", [*left, 70]),
        row("b", [*right, 70]),
        row("a", [*left, 71]),
        row("c", [*left, 72]),
        row("d", [*right, 71]),
    ]
    assert shares(rows, 2, whole_rollouts=True) == [[0, 2, 3], [1, 4]]


def test_a_torn_rollout_is_only_scored() -> None:
    rows = [row("a", [number] * 8) for number in range(6)]
    assert shares(rows, 2, whole_rollouts=True) == [[0, 1, 2, 3, 4, 5], []]
    assert shares(rows, 2, whole_rollouts=False) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, [[], [], []]), (1, [[], [0], []]), (2, [[0], [], [1]])]
)
def test_fewer_rollouts_than_ranks_leave_some_without(
    count: int, expected: list[list[int]]
) -> None:
    rows = [row(f"ro-{number}", [number] * 5) for number in range(count)]
    assert shares(rows, 3, whole_rollouts=True) == expected


def test_shares_are_alike_in_new_tokens_whatever_the_order() -> None:
    """To within the largest rollout."""
    rng = random.Random(3)
    rows = [
        row(f"ro-{number}", [rng.randrange(300) for _ in range(rng.randint(1, 60))])
        for number in range(40)
    ]
    found = shares(rows, 4, whole_rollouts=True)
    assert Counter(index for share in found for index in share) == Counter(range(40))
    sizes = [sum(len(rows[index].ids) for index in share) for share in found]
    assert max(sizes) - min(sizes) <= 2 * 60
    mixed = rng.sample(range(40), 40)
    again = shares([rows[index] for index in mixed], 4, whole_rollouts=True)
    assert [sorted(mixed[index] for index in share) for share in again] == found


def test_a_policy_s_shares_do_not_depend_on_another_s() -> None:
    rows = [row(f"ro-{number}", [number] * 9) for number in range(4)]
    others = [row("ro-0", [7] * 900, "checker"), row("ro-1", [8] * 3, "checker")]
    alone = shares(rows, 2, whole_rollouts=True)
    both = shares([*rows, *others], 2, whole_rollouts=True)
    assert [[index for index in share if index < 4] for share in both] == alone


@pytest.mark.parametrize(
    ("described", "device", "processes", "expected"),
    [
        (Torch(), "cpu", 0, ("cpu",)),
        (Torch(), "cuda:1", 0, ("cuda:1",)),
        (Torch(), "cuda", 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        (Torch(ranks=3), "cpu", 0, ("cpu", "cpu", "cpu")),
        (Torch(ranks=2), "cuda", 2, ("cuda:0", "cuda:1")),
        (Torch(devices=("cuda:1", "cuda:2")), "cuda", 0, ("cuda:1", "cuda:2")),
        (Torch(devices=("cpu",)), "cuda", 0, ("cpu",)),
    ],
)
def test_where_ranks_are(
    described: Torch, device: str, processes: int, expected: tuple[str, ...]
) -> None:
    assert described.placed(device, started=processes) == expected


@pytest.mark.parametrize(
    ("described", "device", "processes", "text"),
    [
        (Torch(ranks=2), "cuda:1", 0, r"2 ranks cannot all be on device='cuda:1': give each its"),
        (Torch(ranks=2), "cpu", 4, "torchrun has started 4 processes, and the learner has 2 ranks"),
        (Torch(devices=("cpu",)), "cpu", 2, "give torchrun --nproc-per-node 1, or Torch"),
    ],
)
def test_where_ranks_cannot_be(described: Torch, device: str, processes: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        described.placed(device, started=processes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "Torch: ranks=0"),
        ({"ranks": 3, "devices": ["cpu", "cpu"]}, r"ranks=3 and 2 devices \(cpu, cpu\): give one"),
        ({"devices": "cuda:1"}, r"devices='cuda:1' must be a list: devices=\['cuda:1'\]"),
        ({"devices": ["gpu"]}, "device='gpu' is unknown"),
        ({"dtype": "int8"}, "Torch: dtype"),
        ({"token_budget": 0}, "Torch: token_budget"),
        ({"timeout_s": 0}, "Torch: timeout_s"),
        ({"timeout_s": 1e300}, r"Torch: timeout_s=1e\+300 must be .* at most 1e\+09"),
        ({"start_s": 1e300}, r"Torch: start_s=1e\+300 must be .* at most 1e\+09"),
        ({"share_prefixes": "no"}, "Torch: share_prefixes='no': use True or False"),
        ({"devices": [5]}, "device=5 is unknown"),
    ],
)
def test_what_a_description_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Torch(**options)  # type: ignore[arg-type]


def test_options_of_the_embedded_learner_are_the_description_s() -> None:
    with pytest.raises(ConfigError, match=r"give them to it, such as Torch\(token_budget=…\)"):
        Trainer(LightningRL("a/model"), learner=Torch(), learner_options={"token_budget": 9})


@pytest.mark.parametrize(
    ("described", "text"),
    [
        (Torch(ranks=2), r"CUDA_VISIBLE_DEVICES='0' shows 1 devices, .* be on 'cuda:1': show more"),
        (Torch(devices=("cuda:0", "cuda:3")), r"shows 1 devices, and a rank is to be on 'cuda:3'"),
        (Torch(devices=("cuda:2",)), r"shows 1 devices, and a rank is to be on 'cuda:2'"),
    ],
)
def test_fewer_devices_than_ranks_are_named(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, described: Torch, text: str
) -> None:
    """As a trainer makes its learner, before any rank is started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    trainer = Trainer(LightningRL(tiny), learner=described, device="cuda")
    with pytest.raises(ConfigError, match=rf"^Torch: .*{text}"):
        make_learner(trainer.settings)


def test_a_machine_with_fewer_gpus_than_ranks_is_named(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """What torch says is set here: not yet run on a machine with GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    trainer = Trainer(LightningRL(tiny), learner=Torch(ranks=2), device="cuda")
    with pytest.raises(
        ConfigError, match=r"a rank is to be on 'cuda:1', and torch sees 1 GPUs .* take fewer ranks"
    ):
        make_learner(trainer.settings)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the second of two processes."""
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_torchrun_is_seen_by_its_environment(torchrun: pytest.MonkeyPatch) -> None:
    assert (started(), own_rank()) == (2, 1)
    torchrun.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"started 2 processes, of which 1 are on this machine"):
        started()
    torchrun.setenv("WORLD_SIZE", "1")
    assert (started(), own_rank()) == (0, 0)


def test_torchrun_needs_a_learner_of_ranks(torchrun: pytest.MonkeyPatch) -> None:
    Trainer(LightningRL("a/model"), learner=Torch())
    with pytest.raises(ConfigError, match=r"this learner needs one: give learner=Torch\(\) to the"):
        Trainer(LightningRL("a/model"))
    with pytest.raises(
        ConfigError, match="torchrun has started 2 processes, and the learner has 3"
    ):
        Trainer(LightningRL("a/model"), learner=Torch(ranks=3))
