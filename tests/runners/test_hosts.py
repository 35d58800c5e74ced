"""Test `Trainer(runners=Hosts())` with `lightspan runner --join` in other processes, and in other
network namespaces.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan import Trainer
from lightspan.stores import open_store
from lightspan_cluster import Hosts
from lightspan_gateway.remote_store.client import SERVER_BACKOFF_S
from lightspan_testing.tiny import tiny_model
from packages.cluster.tests.test_hosts import join_of, plan_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
APPS = ROOT / "tests/apps"
SOON_S = 120.0
LINE = re.compile(r"lightspan runner --join (\S+/[\w-]{64}) far_app:answer")

APP = """
import os, re
from pathlib import Path

import openai
from lightspan import agent, rollout

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
TOKEN = re.compile(rb"[\\w-]{64}")

def shown():
    "Return the tokens in command lines and environments of this machine."
    texts = [os.environb.get(name, b"") for name in os.environb if name.startswith(b"LIGHTSPAN")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        texts += [word for word in line.split(b"\\0") if b"/" in word and b":" in word]
    return [text for text in texts if TOKEN.search(text.rpartition(b"/")[2])]

@rollout
def answer(task, llm):
    messages = [{"role": "user", "content": task["q"]}]
    own = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
    with agent("writer"):
        reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
        stream = own.chat.completions.create(
            model="any", max_tokens=4, messages=messages, stream=True
        )
        parts = [part for part in stream]
    own.close()
    text = reply.choices[0].message.content or ""
    return {
        "reward": float(len(text)),
        "streamed": float(bool(parts)),
        "shown": float(len(shown())),
        "plain address": float(llm.base_url.startswith("http://127.0.0.1:")),
    }
"""


class Programs:
    """Start programs, and end them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "far_app.py").write_text(APP)
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("LIGHTSPAN")}

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        log = self.folder / f"log-{len(self._started)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, env=self.env
            )
        self._started.append((process, log))
        return process

    def runner(
        self, join: str, *more: object, prefix: Sequence[object] = ()
    ) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-m", "lightspan.cli", "runner", "--join", join]
        return self.start(*command, "--app-dir", self.folder, *more, "far_app:answer")

    def text(self, process: subprocess.Popen[bytes]) -> str:
        [log] = [log for started, log in self._started if started is process]
        return log.read_text()

    def says(self, process: subprocess.Popen[bytes], pattern: str | re.Pattern[str]) -> str:
        """Wait until a program has printed `pattern`; return the pattern's group."""
        deadline = time.monotonic() + SOON_S
        while not (match := re.search(pattern, self.text(process))):
            assert process.poll() is None, self.text(process)
            assert time.monotonic() < deadline, self.text(process)
            time.sleep(0.05)
        return match[match.re.groups]

    def ends(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until a program has ended normally; return what it printed."""
        process.wait(SOON_S)
        assert process.returncode == 0, self.text(process)
        return self.text(process)

    def stop(self) -> None:
        for process, _ in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.stop()


class Starts:
    """A reporter that starts a runner as soon as the trainer prints how to."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.texts: list[str] = []
        self.runners: list[subprocess.Popen[bytes]] = []

    def start(self, title: str, total: int) -> None: ...

    def advance(self, count: int = 1, **values: float | str) -> None: ...

    def finish(self, summary: str = "") -> None: ...

    def line(self, text: str) -> None:
        self.texts.append(text)
        if match := LINE.search(text):
            for _ in range(2):
                self.runners.append(self._programs.runner(match[1], "--slots", "2"))


def test_two_runners_join_by_the_printed_line(
    rl: Callable[..., Any], ask: Callable[..., Any], tmp_path: Path, programs: Programs
) -> None:
    """Check that they share the attempts, show no token, and end with the training."""
    reporter = Starts(programs)
    trainer = Trainer(
        rl(),
        runners=Hosts(4, address="127.0.0.1", timeout_s=SOON_S),
        steps=2,
        folder=tmp_path / "run",
        reporter=reporter,
    )
    result = trainer.fit("far_app:answer", ask(4), ask(4, held=1))
    assert result.steps == 2
    printed = "\n".join(reporter.texts)
    [join] = LINE.findall(printed)
    token = join.partition("/")[2]
    assert printed.count(token) == 1
    for runner in reporter.runners:
        text = programs.ends(runner)
        assert " is complete" in text
        assert token not in text
    for path in (tmp_path / "run").glob("*.json*"):
        assert token[:32] not in path.read_text() or path.name == "store.hosts.json"
    assert dimensions(trainer) == {("streamed", 1.0), ("shown", 0.0), ("plain address", 1.0)}


def dimensions(trainer: Trainer) -> set[tuple[str, float]]:
    """Return the dimensions of all attempts' rewards except the reward itself."""

    async def read() -> set[tuple[str, float]]:
        async with open_store(trainer.settings.store_url) as store:
            states = await store.rollouts()
            attempts = await store.attempts([state.rollout.rollout_id for state in states])
        rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
        assert len(rewards) == len(attempts) > 0
        return {item for reward in rewards for item in reward.dimensions.items()}

    return {item for item in asyncio.run(read()) if item[0] != "reward"}


def train(
    programs: Programs, model: Path, *more: object, prefix: Sequence[object] = ()
) -> subprocess.Popen[bytes]:
    script = APPS / "train_hosts.py"
    return programs.start(*prefix, sys.executable, script, programs.folder / "run", model, 3, *more)


def test_a_runner_waits_for_a_killed_trainer(tmp_path: Path, programs: Programs) -> None:
    """Check that a resumed run has the same line, and that the runner joins it again."""
    model = tiny_model(tmp_path / "model", seed=0)
    first = train(programs, model, "127.0.0.1")
    join = programs.says(first, LINE)
    runner = programs.runner(join)
    programs.says(first, "step 1")
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(sum(SERVER_BACKOFF_S) + 4.0)  # the runner is in a pause of the longest kind
    second = train(programs, model, "127.0.0.1")
    assert programs.says(second, LINE) == join
    programs.ends(second)
    assert " is complete" in programs.ends(runner)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"fingerprint": "x" * 32}, "another certificate than the token names"),
        ({"key": "x" * 32}, "has another token: copy the line"),
    ],
)
async def test_a_wrong_token_ends_the_runner(
    tmp_path: Path, programs: Programs, damage: dict[str, Any], message: str
) -> None:
    hosts, plan = Hosts(address="127.0.0.1"), plan_of(tmp_path)
    await hosts.start(plan)
    join = (await join_of(hosts, plan))._replace(**damage)
    runner = programs.runner(join.text)
    assert await asyncio.to_thread(runner.wait, SOON_S) == 1, programs.text(runner)
    await hosts.stop()
    assert message in programs.text(runner)
    assert "Traceback" not in programs.text(runner)
    assert "x" * 32 not in programs.text(runner)
    assert "LIGHTSPAN_STORE_KEY" not in programs.text(runner)  # the token has the key


# --- the page ---------------------------------------------------------------------------------
PAGE = "guides/runners.md"


def test_a_trainer_and_two_runners_take_nine_commands() -> None:
    trainer, runner = [text for kind, _, text in blocks(PAGE) if kind == "sh"]
    assert len(trainer.splitlines()) + 2 * len(runner.splitlines()) == 9
    assert ".venv/bin/lightspan runner --join 10.0.0.5:41234/" in runner


def test_the_example_of_the_page(programs: Programs) -> None:
    """Check that the page's trainer and two runners train its app on one machine."""
    files = {name: text for _, name, text in blocks(PAGE) if name}
    here = files["train.py"].replace("Hosts(16)", 'Hosts(16, address="127.0.0.1")')
    here = here.replace("steps=12", "steps=1").replace('"start"', f'"{programs.folder}/start"')
    here = here.replace("runs/first", f"{programs.folder}/run")
    (programs.folder / "train.py").write_text(here)
    (programs.folder / "headlines.py").write_text(files["headlines.py"])
    trainer = programs.start(sys.executable, programs.folder / "train.py")
    join = programs.says(trainer, r"lightspan runner --join (\S+) headlines:answer")
    command = [sys.executable, "-m", "lightspan.cli", "runner", "--join", join]
    options = ["--app-dir", programs.folder, "headlines:answer"]
    runners = [programs.start(*command, *options) for _ in range(2)]
    assert re.search(r"^held-out reward: ", programs.ends(trainer), re.MULTILINE)
    for runner in runners:
        assert " is complete" in programs.ends(runner)


def test_messages_on_the_page_are_those_that_are_printed() -> None:
    sources = [
        *ROOT.glob("packages/cluster/src/*/*.py"),
        *ROOT.glob("packages/gateway/src/**/*.py"),
    ]
    texts = "".join(re.sub(r'"\s*f?"', "", path.read_text()) for path in sources)
    page = (ROOT / "docs" / PAGE).read_text().partition("## If something does not fit")[2]
    rows = re.findall(r"^\| `(.*?)` ", page, re.MULTILINE)
    assert len(rows) == 8
    places = {
        "HOST:PORT": "{join.place}",
        "runner NAME has another": "{name} has another",
        "NAME is … s behind": "{peer.peer_id} is {abs(seconds):.0f} s ",
    }
    for row in rows:
        text = row.removesuffix("…")
        for on_page, in_source in places.items():
            text = text.replace(on_page, in_source)
        assert text in texts, row


# --- network namespaces -----------------------------------------------------------------------
def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Create three network namespaces: a trainer's, and two that reach the trainer's only."""
    names = [f"ls-{os.getpid()}-{part}" for part in ("gpu", "a", "b")]
    gpu = names[0]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(names[1:], start=1):
            link, net = f"ls{number}", f"10.77.{number}"
            ip("link", "add", link, "netns", gpu, "type", "veth", "peer", link, "netns", name)
            for place, address in ((gpu, f"{net}.1"), (name, f"{net}.2")):
                ip("-n", place, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", place, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "via", f"{net}.1")
        ip("-n", gpu, "route", "add", "default", "dev", "ls1")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        reason = getattr(error, "stderr", "") or error
        pytest.skip(f"this machine does not permit network namespaces: {reason}")
    yield names
    _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_three_machines(tmp_path: Path, programs: Programs, machines: list[str]) -> None:
    """Check that two hosts work for a trainer whose machine they reach at the printed port."""
    gpu, *hosts = (["ip", "netns", "exec", name] for name in machines)
    model = tiny_model(tmp_path / "model", seed=0)
    trainer = train(programs, model, prefix=gpu)
    join = programs.says(trainer, LINE)
    assert join.startswith("10.77.1.1:")
    runners = [programs.runner(join, "--slots", "2", prefix=host) for host in hosts]
    text = programs.ends(trainer)
    assert text.count(" joined: 2 attempts at once") == 2, text
    for runner in runners:
        printed = programs.ends(runner)
        assert " is complete" in printed
        assert "attempts claimed: 0," not in printed.splitlines()[-1]
