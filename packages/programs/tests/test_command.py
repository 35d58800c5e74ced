"""Test `Command`: invalid options, the environment, rewards, and the end of programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan import Command
from lightspan.capture.context import AttemptContext
from lightspan.errors import AppError, ConfigError
from lightspan.runners.app import App, as_app, load_app
from lightspan.runners.program import ProgramError
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.reward import parse_reward
from lightspan.schema.routing import Route, Routing, Rule, Target, make_routing
from lightspan_programs import system
from lightspan_programs.environment import program_environment
from lightspan_programs.process import Ended, Tail, Watchdog, guarding, run_program
from lightspan_programs.reward import last_error, last_line, printable
from lightspan_testing.wait import until

TEXTS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


def shell(script: str, **options: Any) -> Command:
    return Command(["sh", "-c", script], **options)


def tail(text: str | bytes, limit: int = 8192) -> Tail:
    written = Tail(limit)
    written.add(text if isinstance(text, bytes) else text.encode())
    return written


async def outcome(command: Command, task: Any = None) -> tuple[Outcome, str]:
    """Run a program that must fail; return the outcome and the message of its error."""
    with pytest.raises(ProgramError) as failed:
        await command(task)
    return failed.value.outcome, str(failed.value)


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status != "Z"


# --- what a command may be ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arguments": "node app.js"},
            r"a command is a list of texts, not 'node app.js': write \['node', 'app.js'\], "
            r"or \['sh', '-c', 'node app.js'\] for a shell",
        ),
        ({"arguments": []}, r"needs a program, such as \['node', 'app.js'\]"),
        ({"arguments": ["a", 5]}, "arguments of a command holds 5: each must be a text"),
        ({"arguments": ["a\0b"]}, "each must be a text"),
        ({"task": "stdin"}, "task='stdin': use one of 'file', 'environment'"),
        ({"reward": "stdout"}, "reward='stdout': use one of 'last_line', 'exit'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ({"env": {"OPENAI_BASE_URL": "x"}}, "cannot set 'OPENAI_BASE_URL': lightspan sets it"),
        ({"env": {"A=B": "x"}}, "cannot set 'A=B'"),
        ({"env": {"SEARCH_KEY": "x"}}, "cannot hold 'SEARCH_KEY', because a command is written to"),
        ({"agents": ["writer", None]}, "agents of a command holds None"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Command(**{"arguments": ["node", "app.js"], **options})


@given(
    st.builds(
        Command,
        st.lists(st.text(TEXTS), min_size=1).filter(lambda arguments: bool(arguments[0])),
        task=st.sampled_from(["file", "environment"]),
        reward=st.sampled_from(["last_line", "exit"]),
        timeout_s=st.none() | st.floats(0.1, 1e6),
        agents=st.lists(st.text(TEXTS)),
        cwd=st.none() | st.just("/tmp") | st.builds(Path, st.just("somewhere")),
        env=st.dictionaries(st.sampled_from(["MAX_TOKENS", "A"]), st.just("ü")),
    )
)
def test_a_command_travels_as_text(command: Command) -> None:
    assert Command.from_reference(command.reference) == command


def test_agents_that_are_known_by_their_system_prompts() -> None:
    agents = {"title": system("Generate a title*"), "notes": system("*memory*")}
    command = Command(["true"], agents=agents)
    again = Command.from_reference(command.reference)
    assert again == command
    paths = again.agent_paths()
    assert [(path, getattr(path, "system", None)) for path in paths] == [
        ("app", None),
        ("title", "Generate a title*"),
        ("notes", "*memory*"),
    ]
    routing = make_routing({"app": "policy"}, "base", "policy").naming(paths)
    routing = routing.validating_at(0.5)
    rules = [(rule.pattern, rule.system) for rule in routing.rules]
    assert rules[:3] == [("app", ""), ("title", "Generate a title*"), ("notes", "*memory*")]
    assert msgspec.json.decode(msgspec.json.encode(routing), type=Routing) == routing


def test_patterns_of_system_prompts_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"system\('\*'\) needs a text"):
        system("*")
    with pytest.raises(ConfigError, match=r'write agents=\{"NAME": system\("PATTERN\*"\)\}'):
        Command(["true"], agents={"title": "Generate*"})  # type: ignore[dict-item]


def test_a_reference_says_what_is_not_the_default() -> None:
    assert Command(["node", "app.js"]).reference == 'command:{"arguments":["node","app.js"]}'
    with pytest.raises(AppError, match=r"'command:\{\"argument\":1\}' is no command"):
        load_app('command:{"argument":1}')
    with pytest.raises(AppError, match="is no command"):
        Command.from_reference("command:node app.js")
    with pytest.raises(AppError, match="'command:app' cannot be imported"):  # a module's name
        load_app("command:app")


def test_an_app_made_of_a_command() -> None:
    app = as_app(shell("echo 1", agents="writer"))
    assert app.is_async
    assert app.program is not None
    assert app.program.agent_paths() == ("writer",)
    assert load_app(app.reference).function == app.function
    assert App(alive).program is None


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("")
    for command, message in {
        Command(["no-such-program"]).reference: "'no-such-program' is not on the PATH: install it",
        Command(["./app.js"], cwd=tmp_path).reference: "'./app.js' is not there, or not executable",
        Command(["sh"], cwd=tmp_path / "gone").reference: "gone' does not exist here",
    }.items():
        with pytest.raises(AppError, match=message):
            load_app(command)
    (tmp_path / "app.js").chmod(0o755)
    load_app(Command(["./app.js"], cwd=tmp_path).reference)


# --- what a program finds -----------------------------------------------------------------------
def test_the_environment_is_the_users_without_secrets_of_ours() -> None:
    judge = LLM(base_url="http://judge", model="big", api_key_env="JUDGE_KEY")
    scope = AttemptContext(
        rollout_id="ro-1",
        attempt_id="at-1",
        mode=Mode.VAL,
        gateway_url="http://127.0.0.1:8123",
        call_token="the-token",
        routing=Routing(rules=[Rule("judge", Target(route=Route.ENDPOINT, endpoint=judge))]),
    )
    inherited = {
        "PATH": "/bin",
        "SEARCH_KEY": "users",
        "OPENAI_API_KEY": "users-too",
        "OPENAI_API_BASE": "http://elsewhere",
        "ANTHROPIC_API_KEY": "users-too",
        "ANTHROPIC_BASE_URL": "http://elsewhere",
        "JUDGE_KEY": "ours",
        "LIGHTSPAN_STORE": "postgres://user:password@host",
        "LIGHTSPAN_API_KEY": "ours",
    }
    assert program_environment(
        inherited, {"MORE": "1"}, scope, "policy", {"LIGHTSPAN_TASK": "5"}
    ) == {
        "PATH": "/bin",
        "SEARCH_KEY": "users",
        "MORE": "1",
        "OPENAI_BASE_URL": "http://127.0.0.1:8123/v1",
        "OPENAI_API_BASE": "http://127.0.0.1:8123/v1",
        "OPENAI_API_KEY": "the-token",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8123",
        "ANTHROPIC_API_KEY": "the-token",
        "LIGHTSPAN_GATEWAY_URL": "http://127.0.0.1:8123",
        "LIGHTSPAN_MODEL": "policy",
        "LIGHTSPAN_MODE": "val",
        "LIGHTSPAN_ROLLOUT_ID": "ro-1",
        "LIGHTSPAN_ATTEMPT_ID": "at-1",
        "LIGHTSPAN_TASK": "5",
    }


def test_neither_a_token_nor_a_proxy_of_the_users_reaches_the_gateway() -> None:
    """Check the variables by which Anthropic's clients find their token, and those for proxies.

    Older clients send ANTHROPIC_AUTH_TOKEN in addition to the key.
    """
    scope = AttemptContext(
        rollout_id="r", attempt_id="a", gateway_url="http://[::1]:9", call_token="the-token"
    )
    inherited = {
        "ANTHROPIC_AUTH_TOKEN": "users",
        "HTTPS_PROXY": "http://proxy:3128",
        "no_proxy": "localhost",
    }
    variables = program_environment(inherited, {}, scope, "", {})
    assert variables["ANTHROPIC_AUTH_TOKEN"] == variables["ANTHROPIC_API_KEY"] == "the-token"
    assert variables["no_proxy"] == variables["NO_PROXY"] == "localhost,::1"
    variables = program_environment({}, {}, scope, "", {})
    assert not {"ANTHROPIC_AUTH_TOKEN", "no_proxy", "NO_PROXY"} & variables.keys()


async def test_the_task_in_a_file_of_its_own() -> None:
    task = {"text": "ünïcode", "deep": [1, None]}
    script = (
        "import json, os, sys\n"
        "path = os.environ['LIGHTSPAN_TASK_FILE']\n"
        "task = json.load(open(path, encoding='utf-8'))\n"
        f"assert task == {task!r}, task\n"
        "assert 'LIGHTSPAN_TASK' not in os.environ\n"
        "assert sys.stdin.read() == ''\n"
        "modes = [os.stat(name).st_mode for name in (path, os.path.dirname(path))]\n"
        "print(path)\n"
        "print(json.dumps({'reward': modes[0] & 0o777, 'folder': modes[1] & 0o777}))\n"
    )
    command = Command([sys.executable, "-c", script])
    async with guarding() as watchdog:
        assert await command(task) == {"reward": 0o600, "folder": 0o700}
        assert list(watchdog.folder.iterdir()) == []
    assert not watchdog.folder.exists()


async def test_the_task_in_the_environment() -> None:
    command = shell('test -z "$LIGHTSPAN_TASK_FILE" && echo "$LIGHTSPAN_TASK"', task="environment")
    assert await command({"reward": 0.25}) == {"reward": 0.25}
    failure = await outcome(command, "x" * 140_000)
    assert failure == (
        Outcome.APP_ERROR,
        "the task has 140002 bytes, more than fit into an environment variable: use a file "
        '(task="file")',
    )


async def test_folder_and_variables(tmp_path: Path) -> None:
    command = shell('pwd >&2; test "$PWD" = "$WANT"', reward="exit", cwd=tmp_path)
    assert await command(None) == 0.0
    there = Command(command.arguments, reward="exit", cwd=tmp_path, env={"WANT": str(tmp_path)})
    assert await there(None) == 1.0


# --- what an ending means -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0.5", 0.5),
        ("hello\n-1e-3\n\n  \n", -1e-3),
        ("1.\r\n", 1.0),
        (".5", 0.5),
        ("+3", 3.0),
        ("\ufeff0.5", 0.5),
        ("true", 1.0),
        ('{"style": true}', 1.0),
        ('{"length": 3, "reward": true}', 1.0),
        ("nan", None),
        ("-Infinity", None),
        ('{"reward": NaN}', None),
        ("1" + "0" * 5000, None),
        ('{"reward": 1' + "0" * 5000 + "}", None),
    ],
)
async def test_the_last_line_is_the_reward(
    written: str, value: float | None, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(written)
    reward = parse_reward(await shell("cat text", cwd=tmp_path)(None))
    assert reward is not None
    assert reward.value == value
    assert await shell("echo null")(None) is None


_LINE = "the program's last line"
_LONG = "the last line of the program's output is longer than 8192 bytes"
_WRITE = "write a number, or a JSON object of named numbers, as the last line of stdout"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", f"the program wrote no line to stdout: {_WRITE}"),
        ("0.5\ndone", f"{_LINE} 'done': that is no reward; {_WRITE}"),
        ("1_000", f"{_LINE} '1_000': that is no reward; {_WRITE}"),
        ('{"style": 1, "length": 3}', "which of 'style', 'length' is the reward? Give"),
        ("[1]", f"{_LINE} '[1]': a reward must be a number or a bool, or None or a mapping"),
        ("[" * 5000, f"…': that is no reward; {_WRITE}"),
        ("\x1b[2J\xff", f"'\\x1b[2J\xff': that is no reward; {_WRITE}"),
        ("1" * 9000, f"{_LONG}: {_WRITE}"),
        ("1" + " " * 9000, f"{_LONG}: {_WRITE}"),
    ],
)
async def test_a_last_line_that_is_no_reward(written: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(written)
    what, text = await outcome(shell("cat text", cwd=tmp_path))
    assert what is Outcome.BAD_REWARD
    assert message in text


async def test_exit_statuses() -> None:
    assert await shell("exit 0", reward="exit")(None) == 1.0
    assert await shell("exit 1", reward="exit")(None) == 0.0
    for reward in ("exit", "last_line"):
        assert await outcome(shell("echo 1; exit 2", reward=reward)) == (
            Outcome.APP_ERROR,
            "the program ended with exit status 2",
        )
        assert await outcome(shell("echo 1; kill -9 $$", reward=reward)) == (
            Outcome.APP_ERROR,
            "the program was ended by SIGKILL",
        )
    assert (await outcome(shell("echo 1; exit 1")))[1] == "the program ended with exit status 1"
    assert (await outcome(shell("kill -40 $$")))[1] == "the program was ended by signal 40"


NODE = (
    "app.js:1\nthrow new Error('no such table')\n^\n\nError: no such table\n    at f (app.js:1)\n"
)


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("", ""),
        ("first\nlast\n\n", "last"),
        (f"{NODE}    at error (x.js)\n\nNode.js v20.20.2\n", "Error: no such table"),
        ("Traceback:\n  File x\nValueError: y\n", "ValueError: y"),
    ],
)
def test_what_a_program_complains_of(stderr: str, expected: str) -> None:
    assert last_error(stderr) == expected


async def test_a_failure_says_what_the_program_complained_of() -> None:
    _, text = await outcome(Command([sys.executable, "-c", "raise ValueError('x' * 1000)"]))
    assert text == f"the program ended with exit status 1: ValueError: {'x' * 188}…"


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 60))
def test_a_tail_is_the_end(chunks: list[bytes], limit: int) -> None:
    end, whole = Tail(limit), b"".join(chunks)
    for chunk in chunks:
        end.add(chunk)
    assert (end.data, end.count) == (whole[-limit:], len(whole))
    assert end.is_whole == (end.data == whole)


def test_lines_that_are_not_kept_whole() -> None:
    assert last_line(tail("12345", 5)) == "12345"
    assert last_line(tail("012345", 5)) == ""
    assert last_line(tail("0\n2345", 5)) == "2345"
    assert last_line(tail("0     ", 5)) == ""
    assert last_line(tail("     ", 5)) is None


def test_output_is_shown_without_terminal_codes_and_without_the_token() -> None:
    written = tail(b"\x1b[31mred\r\n\xff\0 key=secret-token\n")
    assert printable(written, "secret-token") == "\\x1b[31mred\n\ufffd\\x00 key=<call token>\n"
    assert printable(tail("x" * 30, 10)) == "[20 bytes before this are not kept]\nxxxxxxxxxx"


# --- how it ends --------------------------------------------------------------------------------
STUBBORN = """
trap '' TERM
sh -c 'trap "" TERM; echo $$ > grandchild; while :; do sleep 0.1; done' &
while :; do sleep 0.1; done
"""


@pytest.fixture
def watchdog() -> Any:
    watchdog_process = Watchdog()
    yield watchdog_process
    watchdog_process.close()


async def stubborn(
    watchdog: Watchdog, folder: Path, timeout_s: float | None = None, grace_s: float = 600
) -> Ended:
    return await run_program(
        ["/bin/sh", "-c", STUBBORN],
        watchdog=watchdog,
        stdout=Tail(),
        stderr=Tail(),
        env=dict(os.environ),
        cwd=str(folder),
        timeout_s=timeout_s,
        grace_s=grace_s,
    )


async def grandchild(folder: Path) -> int:
    path = folder / "grandchild"
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


async def test_a_timeout_ends_a_grandchild_that_ignores_sigterm(
    watchdog: Watchdog, tmp_path: Path
) -> None:
    started = time.monotonic()
    ending = asyncio.create_task(stubborn(watchdog, tmp_path, timeout_s=0.5, grace_s=0.3))
    pid = await grandchild(tmp_path)
    assert (await ending).timed_out
    assert time.monotonic() - started > 0.8  # the limit, SIGTERM, the grace, SIGKILL
    await until(lambda: not alive(pid))


async def test_cancelling_twice_kills_at_once(watchdog: Watchdog, tmp_path: Path) -> None:
    """Check that the second cancellation does not wait for the grace period."""
    running = asyncio.create_task(stubborn(watchdog, tmp_path))
    pid = await grandchild(tmp_path)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not alive(pid))


async def test_a_program_that_ends_on_sigterm_has_time_to(tmp_path: Path) -> None:
    script = (
        "trap 'sleep 0.3; echo good > bye; exit 0' TERM; echo > ready; while :; do sleep 0.1; done"
    )
    running = asyncio.create_task(shell(script, cwd=tmp_path)(None))
    await until((tmp_path / "ready").exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (tmp_path / "bye").read_text() == "good\n"


async def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path) -> None:
    """Check that a child process is ended, and that its open stdout does not delay the program's
    end.
    """
    script = "sh -c 'echo $$ > grandchild; sleep 600' & until [ -s grandchild ]; do :; done; echo 1"
    assert await shell(script, cwd=tmp_path)(None) == 1.0
    pid = await grandchild(tmp_path)
    await until(lambda: not alive(pid))


async def test_who_leaves_the_group_holds_nothing_up(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "sleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(sleeper.pid, file=open('left', 'w'))\n"
        "print(1)\n"
    )
    assert await Command([sys.executable, "-c", code], cwd=tmp_path)(None) == 1.0
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


async def test_huge_and_binary_output_is_bounded() -> None:
    out, err = Tail(), Tail()
    code = (
        "import sys\n"
        "for _ in range(400):\n"
        "    sys.stdout.buffer.write(bytes(range(256)) * 256)\n"
        "    sys.stderr.buffer.write(b'\\xff' * 65536)\n"
        "print('\\n0.5')\n"
    )
    async with guarding() as watchdog:
        ended = await run_program(
            [sys.executable, "-c", code], watchdog=watchdog, stdout=out, stderr=err, env={}
        )
    assert ended == Ended(0, False)
    assert (out.count, err.count) == (400 * 65536 + 5, 400 * 65536)
    assert len(out.data) == len(err.data) == 8192
    assert last_line(out) == "0.5"


async def test_many_at_once_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """Check 24 programs, each of which waits until all have started."""
    script = f'echo > "{tmp_path}/$LIGHTSPAN_TASK"; ' + (
        f'while [ "$(ls {tmp_path} | wc -l)" -lt 24 ]; do sleep 0.1; done; echo "$LIGHTSPAN_TASK"'
    )
    command = shell(script, task="environment")
    rewards = await asyncio.gather(*(command(number) for number in range(24)))
    assert rewards == [float(number) for number in range(24)]


async def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the failed start is an infrastructure failure, not one of the program."""

    def refuse(*_: Any, **options: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    what, text = await outcome(shell("echo 1"))
    assert what is Outcome.INFRASTRUCTURE
    assert "could not be started: [Errno 11] Resource temporarily unavailable" in text


async def test_no_descriptor_is_left() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    for _ in range(5):
        await shell("echo 1")(None)
        await outcome(shell("sleep 9", timeout_s=0.01))
    assert open_files() == before


async def test_a_dead_watchdog_is_replaced() -> None:
    async with guarding() as first:
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not first.is_alive)
        assert await shell("echo 1")(None) == 1.0
        async with guarding() as second:
            assert second is not first
        assert not second.folder.exists()
    assert not first.folder.exists()


async def test_the_watchdog_ends_what_is_left(watchdog: Watchdog, tmp_path: Path) -> None:
    """Close the watchdog's pipe while a program runs, as if this process had died."""
    (watchdog.folder / "task.json").write_text("{}")
    program = asyncio.create_task(stubborn(watchdog, tmp_path))
    pid = await grandchild(tmp_path)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(watchdog.pid, name)  # which the watchdog blocks
    pipe, watchdog.pipe = watchdog.pipe, os.open(os.devnull, os.O_WRONLY)
    assert watchdog.is_alive
    os.close(pipe)
    assert (await program).status == -signal.SIGKILL
    await until(lambda: not alive(pid))
    await until(lambda: not watchdog.is_alive)
    assert not watchdog.folder.exists()


# --- which agents are answered ------------------------------------------------------------------
def routing_check(routing: Routing, agents: list[str]) -> None:
    Command(["app"], agents=agents).check_routing(routing)


def test_agents_that_nobody_answers() -> None:
    writer = Rule("writer", Target(route=Route.POLICY, policy="policy"))
    routing = Routing(rules=[writer])
    routing_check(routing, ["writer", "team/writer"])
    message = (
        r"the command's agents \['planner'\] are neither optimised nor frozen to a model, so "
        r"lightspan's endpoint refuses their calls: set frozen=\"base\", \"shared\" or an LLM"
    )
    with pytest.raises(ConfigError, match=message):
        routing_check(routing, ["planner", "writer"])
    base = Routing(rules=[writer], default=Target(route=Route.BASE, policy="base"))
    routing_check(base, ["planner", "writer"])
