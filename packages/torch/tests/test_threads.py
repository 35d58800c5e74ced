"""Tests of torch's CPU threads: how they wait, how many there are, and what the user is told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightspan_torch import threads


def waiting(code: str, **environment: str) -> tuple[str, str]:
    """Run code in a new process; return OpenMP's settings, and OMP_WAIT_POLICY after it."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{code}\nprint(os.environ.get('OMP_WAIT_POLICY'))"],
        env={**own, "OMP_DISPLAY_ENV": "VERBOSE", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "environment", "spins", "policy"),
    [
        ("import lightspan_torch, torch", {}, "0", "PASSIVE"),
        ("from lightspan import SFT; import torch", {"OMP_NUM_THREADS": "2"}, "0", "PASSIVE"),
        ("import torch, lightspan_torch", {}, "300000", "None"),
        ("import lightspan_torch, torch", {"GOMP_SPINCOUNT": "7"}, "7", "None"),
    ],
)
def test_threads_sleep_while_they_wait(
    code: str, environment: dict[str, str], spins: str, policy: str
) -> None:
    settings, kept = waiting(code, **environment)
    if "GOMP_SPINCOUNT" not in settings:
        pytest.skip("torch has another OpenMP than GNU's, which shows other settings")
    assert f"GOMP_SPINCOUNT = '{spins}'" in settings
    assert kept == policy


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Give torch four threads on a machine of four CPUs; return the list of its set counts."""
    counts = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads, "_is_spinning", False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return counts


def test_a_containers_quota_limits_threads(
    four: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    threads.limit_threads("cpu")
    assert four == [4]
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    threads.limit_threads("cuda:0")
    assert four == [4]
    threads.limit_threads("cpu")
    threads.limit_threads("cpu")
    assert four == [4, 2]
    assert caplog.messages == [
        "torch uses 2 of 4 threads: the container may use 2 CPUs; OMP_NUM_THREADS sets another "
        "number"
    ]


def test_spinning_threads_get_free_cpus_only(
    four: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (6.1, 0.0, 0.0))
    threads.limit_threads("cpu")
    assert four == [4]  # they sleep
    monkeypatch.setattr(threads, "_is_spinning", True)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.limit_threads("cpu")
    assert four == [4]  # the user's own number
    monkeypatch.delenv("OMP_NUM_THREADS")
    with caplog.at_level(logging.WARNING):
        threads.limit_threads("cpu")
    assert four == [4, 1]
    [message] = caplog.messages
    assert "torch uses 1 of 4 threads: the machine is busy (load 6.1)" in message
    assert "OMP_WAIT_POLICY=PASSIVE in the environment" in message
