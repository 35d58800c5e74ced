"""Test `CodingAgent`: how each program is started, the folders of an attempt, and rewards.

The programs are scripts that write down how they were started. Real programs run in
`benchmarks/coding_programs.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightspan import CodingAgent
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.capture.recorder import Recorder
from lightspan.errors import AppError, ConfigError
from lightspan.plugins import installed_plugins
from lightspan.runners.app import as_app, load_app
from lightspan.runners.program import ProgramError
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.routing import make_routing
from lightspan_programs import ProgramSpec, system
from lightspan_programs.process import guarding
from lightspan_testing.wait import until

URL = "http://127.0.0.1:8123"
RECORDER = """\
import json, os, sys
from pathlib import Path
home = Path.home()
files = [path for path in home.rglob("*") if path.is_file()]
files = {str(path.relative_to(home)): path.read_text() for path in files}
env = {name: value for name, value in os.environ.items() if name not in ("PWD", "_")}
seen = [sys.argv[1:], env, files, os.getcwd()]
Path(RECORD).write_text(json.dumps(seen))
"""
ATTEMPT = {
    "OPENAI_BASE_URL": f"{URL}/v1",
    "OPENAI_API_BASE": f"{URL}/v1",
    "OPENAI_API_KEY": "the-token",
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_API_KEY": "the-token",
    "LIGHTSPAN_GATEWAY_URL": URL,
    "LIGHTSPAN_MODEL": "policy",
    "LIGHTSPAN_MODE": "train",
    "LIGHTSPAN_ROLLOUT_ID": "ro",
    "LIGHTSPAN_ATTEMPT_ID": "at",
}
TASK = "Fix $HOME, \"please\" 'now'."

PROGRAMS: dict[str, tuple[list[str], dict[str, str], dict[str, Any]]] = {
    "aider": (
        [
            *("aider", "--model", "openai/policy", "--yes-always", "--no-check-update"),
            *("--no-analytics", "--no-show-model-warnings", "--no-show-release-notes"),
            *("--no-pretty", "--no-gitignore", "--no-detect-urls", "--message", TASK),
        ],
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {},
    ),
    "claude-code": (
        [
            *("claude", "-p", TASK, "--model", "policy", "--permission-mode", "acceptEdits"),
            *("--allowedTools", "Bash Edit Read Write"),
        ],
        {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_AUTOUPDATER": "1",
        },
        {},
    ),
    "codex": (
        [
            *("codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", TASK),
        ],
        {},
        {
            ".codex/config.toml": {
                "model": "policy",
                "model_provider": "lightspan",
                "web_search": "disabled",
                "check_for_update_on_startup": False,
                "model_providers": {
                    "lightspan": {
                        "name": "lightspan",
                        "base_url": f"{URL}/v1",
                        "env_key": "OPENAI_API_KEY",
                        "wire_api": "responses",
                    }
                },
                "features": {"multi_agent": False},
                "analytics": {"enabled": False},
            }
        },
    ),
    "mini-swe-agent": (
        ["mini", "-y", "--exit-immediately", "-m", "openai/policy", "-t", TASK],
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        {},
    ),
    "opencode": (
        ["opencode", "run", "--model", "lightspan/policy", TASK],
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        {
            ".config/opencode/opencode.json": {
                "provider": {
                    "lightspan": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": f"{URL}/v1", "apiKey": "the-token"},
                        "models": {"policy": {}},
                    }
                },
                "autoupdate": False,
                "share": "disabled",
                "permission": "allow",
            }
        },
    ),
    "pi": (
        ["pi", "-p", "--provider", "lightspan", "--model", "policy", "--no-session", TASK],
        {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        {
            ".pi/agent/models.json": {
                "providers": {
                    "lightspan": {
                        "baseUrl": f"{URL}/v1",
                        "apiKey": "OPENAI_API_KEY",
                        "api": "openai-completions",
                        "models": [{"id": "policy"}],
                    }
                }
            }
        },
    ),
    "qwen-code": (
        ["qwen", "--auth-type", "openai", "--approval-mode", "yolo", "-p", TASK],
        {"OPENAI_MODEL": "policy"},
        {
            ".qwen/settings.json": {
                "telemetry": {"enabled": False},
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
            }
        },
    ),
}
"""Program → its arguments, variables, and the parsed files in its HOME."""


class Place:
    """A folder for programs that are on the PATH, one workspace, and what a program has seen."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.workspace = folder / "repository"
        self.record = folder / "record.json"
        self.bin.mkdir()
        (self.workspace / "tests").mkdir(parents=True)
        (self.workspace / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        (self.workspace / "tests/check.py").write_text(
            "from calc import add\nassert add(2, 2) == 4\n"
        )

    def add(self, name: str, script: str = RECORDER) -> None:
        """Put a Python script on the PATH."""
        text = script.replace("RECORD", repr(str(self.record)))
        (self.bin / name).write_text(f"#!{sys.executable}\n{text}")
        (self.bin / name).chmod(0o700)

    def seen(self) -> list[Any]:
        """Return the arguments, variables, files in HOME and folder of the last recorder."""
        return list(json.loads(self.record.read_text()))

    @property
    def task(self) -> dict[str, str]:
        return {"instruction": TASK, "workspace": str(self.workspace)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{place.bin}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("HOME", "/the/users/home")
    monkeypatch.setenv("SEARCH_KEY", "the-users-key")
    monkeypatch.setenv("OPENAI_API_KEY", "the-users-key")
    return place


def scope(**options: Any) -> AttemptContext:
    options = {"rollout_id": "ro", "attempt_id": "at", "mode": Mode.TRAIN, **options}
    return AttemptContext(gateway_url=URL, call_token="the-token", **options)


LLM_OF_ATTEMPT = LLM(base_url=f"{URL}/v1", model="policy")
FIX = """\
from pathlib import Path
Path("calc.py").write_text("def add(a, b):\\n    return a + b\\n")
"""
CHECK = [sys.executable, "-B", "tests/check.py"]


def fixer(script: str = FIX, **options: Any) -> CodingAgent:
    """Return a coding agent that is a Python script."""
    spec = ProgramSpec(arguments=(sys.executable, "-c", script.replace("$", "$$")))
    return CodingAgent(spec, **{"verify": ["env", "PYTHONPATH=.", *CHECK], **options})


# --- how programs are started -------------------------------------------------------------------
def test_the_programs_that_are_known() -> None:
    assert list(installed_plugins("programs")) == sorted(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_is_started_with_its_configuration(name: str, place: Place) -> None:
    arguments, variables, files = PROGRAMS[name]
    place.add(arguments[0])
    app = CodingAgent(name, verify=["true"], arguments=["--more", "$HOME"])
    app.check()
    with open_scope(scope()):
        assert await app(place.task, LLM_OF_ATTEMPT) == 1.0
    argv, env, found, folder = place.seen()
    assert argv == [*arguments[1:], "--more", "$HOME"]
    home = env.pop("HOME")
    assert env == {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TMPDIR": f"{home}/tmp",
        **ATTEMPT,
        **variables,
    }
    read = {".toml": tomllib.loads, ".json": json.loads}
    assert {path: read[Path(path).suffix](text) for path, text in found.items()} == files
    assert Path(folder).parent == Path(home).parent
    assert not Path(folder).exists()
    assert not Path(home).exists()


async def test_variables_of_the_user_and_of_the_task(place: Place) -> None:
    """Check that `env` may name the attempt's folders, and that HOME is one per program."""
    place.add("codex")
    place.add("check", RECORDER + "print(0.5)\n")
    app = CodingAgent("codex", verify=["check"], reward="last_line", env={"CACHE": "$HOME/cache"})
    with open_scope(scope()):
        assert await app(place.task, LLM_OF_ATTEMPT) == 0.5
    argv, env, files, _ = place.seen()
    home = env.pop("HOME")
    assert argv == []
    task_file = env.pop("LIGHTSPAN_TASK_FILE")
    assert env == {  # neither the endpoint nor its key
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TMPDIR": f"{home}/tmp",
        "CACHE": f"{home}/cache",
    }
    assert files == {Path(task_file).name: json.dumps(place.task, separators=(",", ":"))}


async def test_a_sandbox_stands_before_the_program_and_the_verifier(place: Place) -> None:
    place.add("sandbox", "import os, sys; os.execvp(sys.argv[2], sys.argv[2:])")
    place.add("codex")
    app = CodingAgent("codex", verify=["true"], setup=["true"], sandbox=["sandbox", "$WORKSPACE"])
    app.check()
    recorder = Recorder()
    with open_scope(scope(recorder=recorder)):
        await app(place.task, LLM_OF_ATTEMPT)
    folder = place.seen()[3]
    commands = [span for span in recorder.spans if c.COMMAND_ARGUMENTS in span.attributes]
    assert [(span.name, span.attributes[c.COMMAND_ARGUMENTS][:3]) for span in commands] == [
        ("command setup", ["true"]),
        ("command codex", ["sandbox", folder, "codex"]),
        ("command verify", ["sandbox", folder, "true"]),
    ]


async def test_a_key_is_not_in_the_spans(place: Place) -> None:
    spec = ProgramSpec(arguments=("sh", "-c", "echo $OPENAI_API_KEY"))
    recorder = Recorder()
    with open_scope(scope(recorder=recorder)):
        await CodingAgent(spec, verify=["true"])(place.task, LLM_OF_ATTEMPT)
    [span] = [span for span in recorder.spans if span.name == "command sh"]
    assert span.attributes[c.COMMAND_ARGUMENTS] == ["sh", "-c", "echo <call token>"]
    assert span.attributes[c.COMMAND_STDOUT] == "<call token>\n"


# --- names --------------------------------------------------------------------------------------
def test_an_unknown_name() -> None:
    known = ", ".join(sorted(PROGRAMS))
    with pytest.raises(ConfigError) as raised:
        CodingAgent("cursor", verify=["true"])
    assert str(raised.value) == (
        f"no coding agent is called 'cursor'; known: {known}. Describe another one by a "
        "ProgramSpec, or run it as Command([...])"
    )


def test_a_program_of_another_distribution(tmp_path: Path) -> None:
    """Check an entry point of a distribution that this process did not import."""
    info = tmp_path / "acme_coder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-coder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lightspan.programs]\nacme = acme_coder:SPEC\nbroken = acme_coder:TEXT\n"
    )
    (tmp_path / "acme_coder.py").write_text(
        "from lightspan_programs import ProgramSpec\n"
        "SPEC = ProgramSpec(arguments=('acme', '--task', '$INSTRUCTION'), install='get acme')\n"
        "TEXT = 'acme'\n"
    )
    script = (
        "from lightspan import CodingAgent\n"
        "app = CodingAgent('acme', verify=['true'])\n"
        "print(app.reference, app.spec.arguments)\n"
        "for make in (app.check, lambda: CodingAgent('broken', verify=['true'])):\n"
        "    try:\n"
        "        make()\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        'coding-agent:{"program":"acme","verify":["true"]} '
        "('acme', '--task', '$INSTRUCTION')",
        "the program 'acme' is not on the PATH: get acme",
        "the entry point 'acme_coder:TEXT' of the coding agent 'broken' must be a ProgramSpec, not "
        "str",
    ], done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "pytest"}, "a command is a list of texts, not 'pytest'"),
        ({"verify": []}, "a command needs a program"),
        ({"reward": "status"}, "reward='status': use one of 'last_line', 'exit'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a finite number above 0"),
        ({"setup": [5]}, "setup of a command holds 5: each must be a text"),
        ({"protected": ["../tests"]}, r"path '\.\./tests': give a relative path without '\.\.'"),
        ({"protected": ["/tests"]}, "path '/tests': give a relative path"),
        ({"env": {"SEARCH_KEY": "x"}}, "cannot hold 'SEARCH_KEY', because a command is written"),
        ({"env": {"A": "$B"}}, r"'\$B' of a program has \$B: use one of \$INSTRUCTION, "),
        ({"sandbox": ["a", "$ 5"]}, r"'\$ 5' of a program has \$\?"),
        ({"agents": {"title": "x"}}, 'write agents={"NAME": system'),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodingAgent("codex", **{"verify": ["true"], **options})


def test_what_a_description_may_not_have() -> None:
    with pytest.raises(ConfigError, match=r"'\$TASK' of a program has \$TASK: use one of"):
        ProgramSpec(arguments=("a", "$TASK"))
    with pytest.raises(ConfigError, match=r"a file in HOME has the path '\.\./x'"):
        ProgramSpec(arguments=("a",), files={"../x": ""})
    with pytest.raises(ConfigError, match="the arguments of a program are empty"):
        ProgramSpec(arguments=())


@pytest.mark.parametrize(
    "app",
    [
        CodingAgent("codex", verify=["true"]),
        CodingAgent(
            ProgramSpec(
                arguments=("a", "$INSTRUCTION"),
                files={"a.toml": "$$"},
                env={"A": "1"},
                agents={"title": system("Title*")},
                install="get it",
            ),
            verify=["sh", "-c", "exit 1"],
            reward="last_line",
            setup=["git", "init"],
            protected=["tests"],
            arguments=["--fast"],
            sandbox=["bwrap", "--bind", "$HOME", "$HOME"],
            agents={"memory": system("*memory*")},
            env={"B": "2"},
            timeout_s=5,
        ),
        CodingAgent("pi", verify=["true"], agents="coder"),
    ],
)
def test_a_coding_agent_travels_as_text(app: CodingAgent) -> None:
    assert CodingAgent.from_reference(app.reference) == app
    assert as_app(app).reference == app.reference


def test_a_reference_that_is_none(place: Place) -> None:
    with pytest.raises(AppError, match="is no coding agent: no coding agent is called 'x'"):
        load_app('coding-agent:{"program":"x","verify":["true"]}')
    with pytest.raises(AppError, match="is no coding agent"):
        load_app('coding-agent:{"program":{"arguments":5},"verify":["true"]}')
    codex = CodingAgent("codex", verify=["true"])
    with pytest.raises(AppError) as raised:
        load_app(codex.reference)
    message = "the program 'codex' is not on the PATH: npm install -g @openai/codex"
    assert str(raised.value) == message
    place.add("codex")
    assert load_app(codex.reference).function == codex
    with pytest.raises(AppError, match="'no-tests' is not on the PATH: install it, or give its"):
        CodingAgent("codex", verify=["no-tests"]).check()


# --- side calls ---------------------------------------------------------------------------------
def test_side_calls_are_agents() -> None:
    app = CodingAgent("opencode", verify=["true"])
    assert list(app.agent_paths()) == ["app", "title"]
    frozen = make_routing({"app": "policy"}, "base", "policy").naming(app.agent_paths())
    app.check_routing(frozen)
    with pytest.raises(ConfigError, match=r"agents \['title'\] are neither optimised nor frozen"):
        app.check_routing(make_routing({"app": "policy"}, None, "policy"))
    assert CodingAgent("opencode", verify=["true"], agents=()).agent_paths() == ()
    assert list(CodingAgent("codex", verify=["true"]).agent_paths()) == []


# --- bubblewrap ---------------------------------------------------------------------------------
BUBBLEWRAP = ["bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid"]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.parametrize(
    ("sandbox", "verify", "result"),
    [
        ([], ["sh", "-c", "exit 1"], 0.0),
        ([], ["sh", "-c", "echo 'bwrap: x' >&2; echo no >&2; exit 1"], 0.0),
        ([], ["no-such-verifier"], (Outcome.APP_ERROR, "the verifier .* 1: bwrap: execvp no-such")),
        (
            ["--bind", "/no/such", "/x"],
            ["true"],
            (Outcome.INFRASTRUCTURE, "the program .* Can't find source path /no/such"),
        ),
    ],
)
async def test_what_does_not_start_in_bubblewrap(
    place: Place, sandbox: list[str], verify: list[str], result: Any
) -> None:
    """bubblewrap's exit status is 1 then, as that of a verifier that found a mistake."""
    app = fixer(sandbox=[*BUBBLEWRAP, *sandbox], verify=verify)
    if isinstance(result, float):
        assert await app(place.task) == result
        return
    with pytest.raises(ProgramError, match=result[1]) as raised:
        await app(place.task)
    assert raised.value.outcome is result[0]


# --- rewards ------------------------------------------------------------------------------------
async def test_the_verifier_gives_the_reward(place: Place) -> None:
    assert await fixer()(place.task) == 1.0
    assert await fixer("pass")(place.task) == 0.0
    assert await fixer("raise SystemExit(3)")(place.task) == 0.0  # the program's own status is none
    assert "a - b" in (place.workspace / "calc.py").read_text()
    assert await fixer(verify=["sh", "-c", "exit 7"])(place.task) == 0.0
    written = await fixer(verify=["echo", '{"reward": 0.5, "style": 1}'], reward="last_line")(
        place.task
    )
    assert written == {"reward": 0.5, "style": 1.0}


@pytest.mark.parametrize(
    ("options", "outcome", "message"),
    [
        ({"verify": ["sh", "-c", "exit 127"]}, Outcome.APP_ERROR, "the verifier ended with exit s"),
        ({"verify": ["sh", "-c", "kill -9 $$"]}, Outcome.APP_ERROR, "was ended by SIGKILL"),
        ({"setup": ["sh", "-c", "echo no >&2; exit 1"]}, Outcome.APP_ERROR, "exit status 1: no"),
        ({"sandbox": ["sh", "-c", "exit 125"]}, Outcome.INFRASTRUCTURE, "exit status 125"),
        ({"sandbox": ["sh", "-c", "exit 127"]}, Outcome.APP_ERROR, "exit status 127"),
        (
            {"protected": ["*.py"]},
            Outcome.APP_ERROR,
            r"protected='\*.py': the workspace has no such",
        ),
        ({"script": "raise SystemExit(126)"}, Outcome.APP_ERROR, "exit status 126"),
        ({"script": "import time; time.sleep(60)"}, Outcome.TIMEOUT, "ran longer than 2 s"),
        ({"verify": ["sleep", "60"]}, Outcome.TIMEOUT, "ran longer than 2 s"),
        ({"verify": ["true"], "reward": "last_line"}, Outcome.BAD_REWARD, "wrote no line"),
    ],
)
async def test_what_is_no_reward(
    options: dict[str, Any], outcome: Outcome, message: str, place: Place
) -> None:
    with pytest.raises(ProgramError, match=message) as raised:
        await fixer(timeout_s=2, **options)(place.task)
    assert raised.value.outcome == outcome


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Fix it.", 'needs an "instruction", such as'),
        ({"instruction": " "}, 'needs an "instruction", such as'),
        ({"instruction": "x"}, 'the task\'s "workspace" None is no folder in '),
        ({"instruction": "x", "workspace": "gone"}, "'gone' is no folder in "),
        ({"instruction": "x" * 140_000, "workspace": "/"}, "it has 140000 bytes, or a NUL"),
        ({"instruction": "a\0b", "workspace": "/"}, "it has 3 bytes, or a NUL"),
    ],
)
async def test_incomplete_tasks(task: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as raised:
        await fixer()(task)
    assert raised.value.outcome == Outcome.APP_ERROR


# --- the folders of an attempt ------------------------------------------------------------------
async def test_attempts_at_once_have_copies_of_their_own(place: Place) -> None:
    script = (
        "from pathlib import Path\n"
        "path = Path('calc.py')\n"
        "assert 'a - b' in path.read_text()\n"
        f"{FIX}"
    )
    async with guarding() as watchdog:
        assert await asyncio.gather(*(fixer(script)(place.task) for _ in range(4))) == [1.0] * 4
        assert list(watchdog.folder.iterdir()) == []


async def test_setup_makes_the_workspace() -> None:
    """Check a task without a workspace, and that the setup reads the task."""
    setup = (
        "import json, os, pathlib\n"
        "task = json.load(open(os.environ['LIGHTSPAN_TASK_FILE']))\n"
        "pathlib.Path('answer').write_text(task['answer'])\n"
    )
    script = "import os; assert 'LIGHTSPAN_TASK_FILE' not in os.environ; os.rename('answer', 'b')"
    app = fixer(script, setup=[sys.executable, "-c", setup], verify=["grep", "-q", "42", "b"])
    assert await app({"instruction": "x", "answer": "42"}) == 1.0
    assert await app({"instruction": "x", "answer": "41"}) == 0.0


CHEATS = [
    "open('tests/check.py', 'w').close()",
    "import shutil; shutil.rmtree('tests')",
    "import shutil; shutil.rmtree('tests'); open('tests', 'w').close()",
    "import shutil; shutil.rmtree('tests'); os.mkdir('fake'); os.symlink('fake', 'tests')",
]


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("path", ["tests", "tests/check.py"])
async def test_what_is_protected_is_restored(cheat: str, path: str, place: Place) -> None:
    program = f"import os\n{cheat}\nos.makedirs('fake', exist_ok=True)"
    unguarded = fixer(program, verify=["sh", "-c", "test -s tests/check.py"])
    assert await unguarded(place.task) == 0.0
    guarded = fixer(program, verify=["sh", "-c", "test -s tests/check.py"], protected=[path])
    assert await guarded(place.task) == 1.0


async def test_a_link_out_of_the_workspace_is_not_followed(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep/file").write_text("mine")
    (place.workspace / "a/deep").mkdir(parents=True)
    (place.workspace / "a/deep/file").write_text("theirs")
    cheat = f"import os, shutil; shutil.rmtree('a'); os.symlink({str(outside)!r}, 'a')"
    app = fixer(cheat, protected=["a/deep"], verify=["grep", "-q", "theirs", "a/deep/file"])
    assert await app(place.task) == 1.0
    assert (outside / "deep/file").read_text() == "mine"


async def test_what_the_program_leaves_in_home_does_not_reach_the_verifier(place: Place) -> None:
    script = "import pathlib; (pathlib.Path.home() / '.profile').write_text('x')"
    app = fixer(script, verify=["sh", "-c", 'test ! -e "$HOME/.profile"'])
    assert await app(place.task) == 1.0


async def test_folders_of_a_runner_that_died_are_removed(place: Place) -> None:
    """Check that the watchdog ends the program and removes its workspace."""
    script = (
        "import asyncio, sys\n"
        "from lightspan import CodingAgent\n"
        "app = CodingAgent.from_reference(sys.argv[1])\n"
        f"asyncio.run(app({place.task!r}))\n"
    )
    place.add("sleeper", f"{RECORDER}import time; time.sleep(600)")
    app = CodingAgent(ProgramSpec(arguments=("sleeper",)), verify=["true"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, app.reference]
    with subprocess.Popen(command, env=environment) as runner:  # noqa: ASYNC220 - until() waits
        await until(place.record.exists)
        await until(lambda: place.record.read_text().endswith("]"))
        folder = Path(place.seen()[3])
        assert folder.is_dir()
        runner.kill()
    await until(lambda: not folder.parents[1].exists())
