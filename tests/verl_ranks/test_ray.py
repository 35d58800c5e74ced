"""verl's ranks in Ray: checkpoints of either kind, what is killed in mid-step, other clusters."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.errors import ConfigError, LightspanError, RankError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import LoRA
from lightspan_testing.learner_suite import BOTH_CLIPS
from lightspan_verl.learner import VerlLearner
from lightspan_verl.local_ranks import Workers
from lightspan_verl.rank_group import RankGroup
from lightspan_verl.ray_workers import RayWorkers
from tests.ray_nodes.nodes import Cluster
from tests.verl_ranks.conftest import ADAMW

pytestmark = pytest.mark.timeout(600)

TWO = ["cpu", "cpu"]


@pytest.fixture(scope="module")
def in_ray(python: str) -> Iterator[RayWorkers]:
    """Two ranks of a cluster of their own, which tests that kill nothing share."""
    workers = RayWorkers(python, TWO)
    yield workers
    workers.end()


# --- the same learner -----------------------------------------------------------------------
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_checkpoints_pass_between_processes_and_ray(
    one: Workers,
    two: Workers,
    in_ray: RayWorkers,
    folder: Path,
    batches: list[list[Row]],
    tmp_path: Path,
    lora: LoRA | None,
) -> None:
    """Processes, Ray, one process, Ray: the losses of a learner that was never interrupted."""
    options: dict[str, Any] = {"optimizer": ADAMW, "lora": lora}
    whole = VerlLearner({"writer": folder}, workers=two, **options)
    losses = [whole.update(rows, BOTH_CLIPS) for rows in batches]
    lives: Sequence[RankGroup] = (two, in_ray, one, in_ray)
    for number, (workers, rows) in enumerate(zip(lives, batches, strict=True)):
        learner = VerlLearner({"writer": folder}, workers=workers, **options)
        if number:
            learner.load(tmp_path / f"{number - 1}")
        metrics = learner.update(rows, BOTH_CLIPS)
        assert metrics == pytest.approx(losses[number], rel=1e-4, abs=1e-5)
        learner.save(tmp_path / f"{number}")
        learner.close()
    whole.close()


def test_an_error_of_ours_on_a_rank_is_raised_here_and_all_go_on(
    in_ray: RayWorkers, folder: Path, batches: list[list[Row]], tmp_path: Path
) -> None:
    learner = VerlLearner({"writer": folder}, workers=in_ray)
    learner.save(tmp_path)
    (tmp_path / "policy-0-rank-001.safetensors").unlink()
    with pytest.raises(LightspanError, match=r"verl's rank \d \(cpu\): .*files of it are missing"):
        learner.load(tmp_path)
    assert learner.update(batches[0], BOTH_CLIPS)["skipped"] == 0
    learner.close()


# --- closed by default ----------------------------------------------------------------------
JOINING = """
import sys, ray
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host  # loopback is where the head is
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print("JOINED", flush=True)
"""


def joins(python: str, head: str, **environment: str) -> bool:
    """Whether a program gets into the cluster, within a minute."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    program = subprocess.Popen(
        [python, "-c", JOINING, head],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        said, _ = program.communicate(timeout=60)
    except subprocess.TimeoutExpired:  # it goes on trying
        program.kill()
        said, _ = program.communicate()
    return "JOINED" in said


def test_its_cluster_is_on_loopback_and_asks_for_a_token(python: str, in_ray: RayWorkers) -> None:
    everything = [psutil.Process(in_ray.driver)]
    everything += everything[0].children(recursive=True)
    listening = {
        each.laddr.ip
        for process in everything
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    head, token = in_ray.head, everything[0].environ()["RAY_AUTH_TOKEN"]
    assert joins(python, head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    other = secrets.token_hex(32)
    assert not joins(python, head, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=other)
    assert not joins(python, head, RAY_AUTH_MODE="disabled")


# --- what is killed in mid-step -------------------------------------------------------------
def held(workers: RayWorkers, what: Callable[[], None]) -> threading.Thread:
    """Hold the next step by a stopped rank, and do something in the middle of it."""
    os.kill(workers.pids[1], signal.SIGSTOP)
    thread = threading.Timer(3.0, what)
    thread.start()
    return thread


def processes_of(workers: RayWorkers) -> list[psutil.Process]:
    driver = psutil.Process(workers.driver)
    return [driver, *driver.children(recursive=True)]


def nothing_is_left(started: Sequence[psutil.Process], workers: RayWorkers) -> None:
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert not workers._folder.exists()


def goes_on(
    workers: RankGroup,
    folder: Path,
    saved: Path,
    batches: list[list[Row]],
    expected: dict[str, float],
) -> None:
    """From the checkpoint, with the loss that would have been next."""
    again = VerlLearner({"writer": folder}, workers=workers, optimizer=ADAMW)
    again.load(saved)
    assert again.update(batches[1], BOTH_CLIPS) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    again.close()


@pytest.fixture(scope="module")
def expected(one: Workers, folder: Path, batches: list[list[Row]]) -> dict[str, float]:
    """The second update of a learner that was never interrupted."""
    whole = VerlLearner({"writer": folder}, workers=one, optimizer=ADAMW)
    whole.update(batches[0], BOTH_CLIPS)
    second = whole.update(batches[1], BOTH_CLIPS)
    whole.close()
    return second


def begun(workers: RayWorkers, folder: Path, rows: list[Row], saved: Path) -> VerlLearner:
    """A learner that has taken a step, and saved what came of it."""
    learner = VerlLearner({"writer": folder}, workers=workers, own=True, optimizer=ADAMW)
    learner.update(rows, BOTH_CLIPS)
    learner.save(saved)
    return learner


def test_a_rank_that_is_killed_in_mid_step_is_named(
    python: str,
    one: Workers,
    folder: Path,
    batches: list[list[Row]],
    expected: dict[str, float],
    tmp_path: Path,
) -> None:
    workers = RayWorkers(python, TWO)
    learner = begun(workers, folder, batches[0], tmp_path)
    started, victim = processes_of(workers), workers.pids[1]
    thread = held(workers, lambda: os.kill(victim, signal.SIGKILL))
    named = (
        rf"^verl's rank 1 \(cpu\), process {victim}, has died; Ray says:[\s\S]*"
        r"The last checkpoint is intact: continue with resume=True"
    )
    with pytest.raises(RankError, match=named):
        learner.update(batches[1], BOTH_CLIPS)
    thread.join()
    with pytest.raises(RankError, match="verl's rank 1"):
        learner.score(batches[1])
    nothing_is_left(started, workers)
    learner.close()
    goes_on(one, folder, tmp_path, batches, expected)


@pytest.mark.parametrize("names", [("gcs_server",), ("gcs_server", "raylet")], ids=["gcs", "all"])
def test_a_head_that_is_killed_in_mid_step_is_named(
    python: str,
    one: Workers,
    folder: Path,
    batches: list[list[Row]],
    expected: dict[str, float],
    tmp_path: Path,
    names: tuple[str, ...],
) -> None:
    workers = RayWorkers(python, TWO)
    learner = begun(workers, folder, batches[0], tmp_path)
    started = processes_of(workers)
    heads = [each for each in started if each.name() in names]
    assert len(heads) == len(names)

    def kill() -> None:
        for head in heads:
            head.kill()

    thread = held(workers, kill)
    named = (
        rf"^the head of the Ray cluster \({workers.head}\) does not answer any more, and verl's 2 "
        r"ranks are lost with it\. The last checkpoint is intact: continue with resume=True"
    )
    with pytest.raises(RankError, match=named):
        learner.update(batches[1], BOTH_CLIPS)
    thread.join()
    nothing_is_left(started, workers)
    learner.close()
    goes_on(one, folder, tmp_path, batches, expected)


def test_a_killed_steward(
    python: str, folder: Path, batches: list[list[Row]], tmp_path: Path
) -> None:
    workers = RayWorkers(python, ["cpu"])
    learner = begun(workers, folder, batches[0], tmp_path)
    started, driver = processes_of(workers), workers.driver
    os.kill(driver, signal.SIGKILL)
    with pytest.raises(RankError, match=r"ranks are lost with it|was ended by SIGKILL"):
        learner.update(batches[1], BOTH_CLIPS)
    nothing_is_left(started, workers)
    learner.close()


def test_a_hung_rank(python: str, folder: Path, batches: list[list[Row]], tmp_path: Path) -> None:
    workers = RayWorkers(python, TWO, timeout_s=120)
    learner = begun(workers, folder, batches[0], tmp_path)
    started = processes_of(workers)
    workers._timeout_s = 10
    os.kill(workers.pids[1], signal.SIGSTOP)
    with pytest.raises(
        RankError, match=r"verl's rank 1 \(cpu\) took longer than timeout_s=10 [\s\S]*resume=True"
    ):
        learner.update(batches[1], BOTH_CLIPS)
    nothing_is_left(started, workers)
    learner.close()


# --- clusters of others ---------------------------------------------------------------------
@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What lets nodes and the trainer into one cluster."""
    file = tmp_path / "token"
    file.write_text(secrets.token_hex(32))
    found = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(file),
        "RAY_raylet_start_wait_time_s": "300",  # a busy machine takes more than Ray's 30
    }
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def test_ranks_of_a_cluster_that_is_there(
    python: str,
    folder: Path,
    batches: list[list[Row]],
    expected: dict[str, float],
    token: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One on each of two nodes. They end with the learner, and the cluster stays; what it lacks,
    and who may not join, is said."""
    with Cluster(python, **token) as cluster:
        for node in [cluster.add(cpus=1), cluster.add(cpus=1)]:
            node.wait_ready()
        address = cluster.address
        too_many = r"Verl\(ranks=3, .*: the ranks take 3 CPU, one each, and the Ray cluster has 2: "
        with pytest.raises(ConfigError, match=too_many):
            RayWorkers(python, ["cpu"] * 3, ray=address)
        no_gpus = r"the ranks take 2 GPU, one each, and the Ray cluster has 0: take fewer ranks, or"
        with pytest.raises(ConfigError, match=no_gpus):
            RayWorkers(python, ["cuda:0", "cuda:1"], ray=address)
        workers = RayWorkers(python, TWO, ray=address)
        learner = begun(workers, folder, batches[0], tmp_path / "saved")
        ranks = [psutil.Process(pid) for pid in workers.pids]
        raylets = {each.environ()["RAY_RAYLET_PID"] for each in ranks}
        assert len(raylets) == 2
        metrics = learner.update(batches[1], BOTH_CLIPS)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert workers.where.endswith(f", {address}")
        busy = r"the ranks take 1 CPU, of which 0 are free in the Ray cluster, and others have had"
        with pytest.raises(LightspanError, match=busy):
            RayWorkers(python, ["cpu"], ray=address, start_s=20)
        learner.close()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert not alive
        assert all(node.process.poll() is None for node in cluster.nodes)
        monkeypatch.delenv("RAY_AUTH_MODE")
        with pytest.raises(ConfigError, match=r"asks for no token: .* or take ray=True"):
            RayWorkers(python, TWO, ray=address)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"lacks verl: start its nodes with verl's"),
        ("0.8.0", r"has verl 0\.8\.0, and .* has \d+\.\d+\.\d+: start its nodes with verl's"),
    ],
    ids=["none", "another"],
)
def test_a_cluster_without_this_verl_is_refused(
    python: str, token: dict[str, str], tmp_path: Path, version: str | None, words: str
) -> None:
    """Its nodes have an environment of their own: all that verl's has, but verl."""
    other, packages = environment_but(python, tmp_path / "other", "verl")
    if version is not None:
        (packages / f"verl-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n"
        (packages / f"verl-{version}.dist-info" / "METADATA").write_text(metadata)
    with Cluster(str(other), **token) as cluster:
        cluster.add(cpus=1).wait_ready()
        with pytest.raises(ConfigError, match=r"the Ray cluster's Python \(.*other.*\) " + words):
            RayWorkers(python, ["cpu"], ray=cluster.address)


def test_ranks_run_the_trainers_lightspan_whatever_their_nodes_have(
    python: str, folder: Path, batches: list[list[Row]], token: dict[str, str], tmp_path: Path
) -> None:
    other, packages = environment_but(python, tmp_path / "other", "lightspan")
    (packages / "lightspan").mkdir()
    (packages / "lightspan" / "__init__.py").write_text("raise ImportError('another lightspan')\n")
    assert subprocess.run([other, "-c", "import lightspan"], stderr=-3).returncode == 1
    with Cluster(str(other), **token) as cluster:
        cluster.add(cpus=1).wait_ready()
        workers = RayWorkers(python, ["cpu"], ray=cluster.address)
        learner = begun(workers, folder, batches[0], tmp_path / "saved")
        learner.close()


def environment_but(python: str, folder: Path, lacking: str) -> tuple[Path, Path]:
    """An environment that has links to what another one has, but for one package: its interpreter,
    and where its packages lie."""
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    made = folder / "bin" / "python"
    here, there = (
        Path(subprocess.run([each, "-c", asked], check=True, stdout=-1, text=True).stdout.strip())
        for each in (python, str(made))
    )
    for path in here.iterdir():
        if not path.name.startswith(lacking):
            (there / path.name).symlink_to(path)
    return made, there
