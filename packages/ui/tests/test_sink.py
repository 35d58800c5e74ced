"""The page of a training: a child process that ends with it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from lightspan.errors import ConfigError
from lightspan.training.sinks import MetricSink, SinkRun
from lightspan_ui.sink import KEY_VARIABLE, UiSink, free_port
from packages.ui.tests.recorded import make_run


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_served(address: str) -> bool:
    """Return whether the page at an address answers to its token."""
    parts = urlsplit(address)
    url = f"http://{parts.netloc}/api/v1{parts.path}"
    key = parts.query.removeprefix("token=")
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=10) as page:
            return page.status == 200
    except OSError:
        return False


def run_of(folder: Path) -> SinkRun:
    return SinkRun(run_id="run-1", folder=folder, config={}, first_step=0)


def address_in(lines: list[str]) -> str:
    [line] = lines
    match = re.fullmatch(r"watch: (http://127\.0\.0\.1:\d+/runs/\S+\?token=\S+)", line)
    assert match is not None
    return match[1]


@pytest.mark.slow
def test_the_page_is_there_while_the_run_trains(tmp_path: Path) -> None:
    asyncio.run(make_run(tmp_path / "run", steps=1, is_complete=False))
    lines: list[str] = []
    sink = UiSink(0, lines.append)
    assert isinstance(sink, MetricSink)
    sink.open(run_of(tmp_path / "run"))
    address = address_in(lines)
    assert KEY_VARIABLE not in os.environ
    wait_for(lambda: is_served(address))
    sink.log(1, {"train/reward": 1.0})
    begun = time.monotonic()
    sink.close()
    assert time.monotonic() - begun < 5
    assert not is_served(address)
    sink.close()


_TRAINER = """
import sys, time
from pathlib import Path
from lightspan.training.sinks import SinkRun
from lightspan_ui.sink import UiSink
UiSink(0, lambda line: print(line, flush=True)).open(
    SinkRun(run_id="run-1", folder=Path(sys.argv[1]), config={}, first_step=0)
)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_page_ends_if_the_trainer_is_killed(tmp_path: Path) -> None:
    asyncio.run(make_run(tmp_path / "run", steps=1, is_complete=False))
    trainer = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    with trainer:
        assert trainer.stdout is not None
        address = address_in([trainer.stdout.readline().rstrip()])
        wait_for(lambda: is_served(address))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_for(lambda: not is_served(address))


def test_a_taken_port_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) not in (port, 0)
    assert free_port(port) == port


@pytest.mark.parametrize("port", [-1, 65_536, "8765", None])
def test_an_invalid_port_is_an_error(port: int) -> None:
    with pytest.raises(ConfigError, match="ui="):
        UiSink(port)


@pytest.mark.slow
def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    asyncio.run(make_run(tmp_path / "run", steps=1))
    command = [sys.executable, "-m", "lightspan_ui", str(tmp_path / "run"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+/runs/run\?token=(\S+)", line)
        assert match is not None
        url = line.split()[1].partition("/runs")[0]
        events = Request(f"{url}/api/v1/events", headers={"Authorization": f"Bearer {match[1]}"})
        with urlopen(events, timeout=10) as stream:
            assert stream.readline() == b": open\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


@pytest.mark.slow
def test_it_needs_no_torch(tmp_path: Path) -> None:
    text = (
        "import sys, lightspan_ui.command, lightspan_ui.main, lightspan_ui.sink; "
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
