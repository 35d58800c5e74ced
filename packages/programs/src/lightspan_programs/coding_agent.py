"""CodingAgent: a coding agent in a fresh copy of a folder, and a verifier for the reward."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, get_args

import msgspec

from lightspan.capture.context import AttemptContext, current_agent
from lightspan.errors import AppError
from lightspan.runners.program import Program, ProgramError
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Outcome, new_id
from lightspan.schema.routing import Routing
from lightspan.schema.validation import check_choice
from lightspan_programs import environment
from lightspan_programs.command import (
    MAX_VARIABLE_LENGTH,
    Command,
    RewardBy,
    SystemPrompt,
    check_texts,
    check_variable,
    program_of,
    reference_of,
    task_file,
)
from lightspan_programs.execution import Execution, execute
from lightspan_programs.process import Watchdog, guarding
from lightspan_programs.reward import PROGRAM, failure, reward_by_last_line
from lightspan_programs.specs import (
    PLACEHOLDERS,
    ProgramSpec,
    check_placeholders,
    check_relative,
    fill,
    find_spec,
)

PREFIX: Final = "coding-agent:"
"""Prefix of a coding agent's reference."""
_NOT_STARTED: Final = (125, 126, 127)
"""Exit statuses of docker and podman, of shells and of `env` for a program that did not start."""
_NO_SANDBOX: Final = 125
"""Exit status of docker and podman if the container did not start."""
_BUBBLEWRAP: Final = "bwrap: "
"""Start of bubblewrap's line on stderr if it, or the program in it, did not start. The status is 1
in both cases."""
_SETUP: Final = "the setup"
_VERIFIER: Final = "the verifier"


@dataclass(frozen=True, slots=True)
class CodingAgent(Program):
    """A coding agent that is not edited, as an app: `CodingAgent("codex", verify=["pytest"])`.

    A task is a JSON object with

    - `instruction`: what the program shall do;
    - `workspace`: a folder, such as a git repository; relative to the runner's folder.

    Every attempt copies the workspace into a new folder and runs the program there, with an empty
    HOME that has the program's configuration only. Then the verifier runs in the same folder, and
    gives the reward. Both folders are removed at the end.

    The program's environment has the runner's PATH, user, language, proxies and certificates, the
    endpoint and key of this attempt (as with `Command`), and the variables of the program and of
    `env`. It has no other variable of the runner, so none of its keys. The verifier's has neither
    the endpoint nor the key, and another empty HOME.

    With `reward="exit"` status 0 of the verifier is 1.0, and any other 0.0. Statuses 125 to 127,
    and 1 after an error of bubblewrap, are errors: the verifier, or its sandbox, did not start.
    With `reward="last_line"` the last line of its stdout is the reward, as with `Command`. The
    program's own exit status is recorded, and is no reward.

    The side calls that a program is known for, such as titles of sessions, are agents of their own
    (`ProgramSpec.agents`). All others belong to the agent `app`: `optimize="app"` trains the main
    conversation only.

    Args:
        program: a name such as `"claude-code"`, `"codex"`, `"opencode"`, `"pi"`, `"qwen-code"`,
            `"mini-swe-agent"` or `"aider"`; others are added by entry points of the group
            `lightspan.programs`. Or a `ProgramSpec` of your own.
        verify: the verifier and its arguments. `LIGHTSPAN_TASK_FILE` names the task as JSON.
        reward: whether the reward is the verifier's exit status or last line.
        setup: a program that runs in the new folder before the coding agent, such as one that
            applies a patch; its failure is a failure of the attempt. It too has
            `LIGHTSPAN_TASK_FILE`. A task may then have no `workspace`: the folder is empty.
        protected: paths in the workspace, such as tests, that get back their content before the
            verifier runs.
        arguments: further arguments of the program.
        sandbox: what runs the program and the verifier in a sandbox: texts that stand before the
            arguments of both, with the placeholders `$WORKSPACE` and `$HOME`. `setup` runs outside.
        agents: as in `Command`, in place of the agents that the program is known for.
        env: further environment variables, with the placeholders of `ProgramSpec`. They are written
            to files, so they hold no keys.
        timeout_s: seconds after which the program, or the verifier, is ended; the algorithm's
            `timeout_s` applies too.

    Raises:
        ConfigError: an option has an invalid value, or no program has this name.
    """

    program: str | ProgramSpec
    verify: Sequence[str]
    reward: RewardBy = "exit"
    setup: Sequence[str] = ()
    protected: Sequence[str] = ()
    arguments: Sequence[str] = ()
    sandbox: Sequence[str] = ()
    agents: str | Sequence[str] | Mapping[str, SystemPrompt] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.program, dict):  # decoded from a reference
            object.__setattr__(self, "program", msgspec.convert(self.program, ProgramSpec))
        Command(self.verify, timeout_s=self.timeout_s)  # checks both
        for name in ("setup", "protected", "arguments", "sandbox"):
            check_texts(name, getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_choice("reward", self.reward, get_args(RewardBy))
        for path in self.protected:
            check_relative(path, "protected of a coding agent")
        for text in (*self.sandbox, *self.env.values()):
            check_placeholders(text)
        for name in self.env:
            check_variable(name)
        _ = self.spec  # an unknown name is an error here
        object.__setattr__(self, "verify", tuple(self.verify))
        object.__setattr__(self, "env", dict(self.env))
        if self.agents is not None:
            object.__setattr__(self, "agents", self._command().agents)

    @property
    def spec(self) -> ProgramSpec:
        """How to start the program."""
        return find_spec(self.program) if isinstance(self.program, str) else self.program

    @property
    def name(self) -> str:
        """Name of the program."""
        is_named = isinstance(self.program, str)
        return str(self.program) if is_named else Path(self.spec.arguments[0]).name

    def _command(self) -> Command:
        """Return a command with the same agents."""
        agents = self.spec.agents if self.agents is None else self.agents
        return Command([self.spec.arguments[0]], agents=agents)

    @property
    def reference(self) -> str:
        """The options as text. `from_reference` makes an equal coding agent from it."""
        return reference_of(PREFIX, self)

    @classmethod
    def from_reference(cls, reference: str) -> Self:
        """Return the coding agent with the given `reference`.

        Raises:
            AppError: `reference` is not the reference of a coding agent.
        """
        return program_of(PREFIX, cls, reference)

    # --- before an attempt ----------------------------------------------------------------
    def check(self) -> None:
        """Raise an error unless the programs exist on this machine.

        In a sandbox, the program and the verifier may exist there only, and are not looked for.

        Raises:
            AppError: a program does not exist.
        """
        here = [self.sandbox] if self.sandbox else [self.spec.arguments, self.verify]
        for arguments in (*here, self.setup):
            name = arguments[0] if arguments else "sh"
            if os.sep not in name and shutil.which(name) is None:
                is_agent = arguments is self.spec.arguments
                how = (is_agent and self.spec.install) or "install it, or give its path"
                raise AppError(f"the program {name!r} is not on the PATH: {how}")

    def check_routing(self, routing: Routing) -> None:
        """Raise an error unless the gateway answers the calls of all agents.

        Raises:
            ConfigError: the gateway would refuse the calls of an agent, because it is neither
                trained nor frozen to a model.
        """
        self._command().check_routing(routing)

    def agent_paths(self) -> Sequence[str]:
        """Return the paths of all agents; empty if they are unknown."""
        return self._command().agent_paths()

    def opened(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that keeps one watchdog process for all attempts."""
        return guarding()

    # --- an attempt -----------------------------------------------------------------------
    async def __call__(self, task: Json, llm: LLM | None = None) -> Any:
        """Run the program and the verifier on one task.

        Args:
            task: an object with `instruction` and `workspace`.
            llm: the endpoint; its `model` is the value of `LIGHTSPAN_MODEL`. With None that value
                is empty.

        Returns:
            The reward (see `lightspan.schema.reward.parse_reward`).

        Raises:
            ProgramError: the task is incomplete, a program could not start or ran too long, the
                setup failed, or the verifier gave no reward.
        """
        instruction, source = self._parts(task)
        agent = current_agent()
        scope = None if agent is None else agent.scope
        model = "" if llm is None else llm.model
        async with guarding() as watchdog:
            folder = watchdog.folder / new_id("try")
            try:
                attempt = _Attempt(self, task, watchdog, folder)
                await asyncio.to_thread(attempt.prepare, source)
                if self.setup:
                    await attempt.set_up()
                await attempt.run(instruction, scope, model)
                return await attempt.verify()
            except OSError as error:
                raise ProgramError(
                    f"the folder of an attempt cannot be made or read: {error}",
                    Outcome.INFRASTRUCTURE,
                ) from error
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _parts(self, task: Json) -> tuple[str, Path | None]:
        """Return the instruction and the workspace of a task.

        Raises:
            ProgramError: the task does not have them.
        """
        instruction = task.get("instruction") if isinstance(task, dict) else None
        source = task.get("workspace") if isinstance(task, dict) else None
        if not isinstance(instruction, str) or not instruction.strip("\0 \n"):
            raise ProgramError(
                'a task of a coding agent needs an "instruction", such as {"instruction": "Fix the '
                'failing test.", "workspace": "repos/calc"}'
            )
        if "\0" in instruction or len(instruction.encode()) > MAX_VARIABLE_LENGTH:
            raise ProgramError(
                f'the task\'s "instruction" cannot be an argument of a program: it has '
                f"{len(instruction.encode())} bytes, or a NUL. Write it to a file of the workspace"
            )
        if source is None and self.setup:
            return instruction, None
        if not isinstance(source, str) or not Path(source).is_dir():
            raise ProgramError(f'the task\'s "workspace" {source!r} is no folder in {os.getcwd()}')
        return instruction, Path(source)


class _Attempt:
    """The folders of one attempt, and the programs that run in them.

    Args:
        app: the coding agent.
        task: the task.
        watchdog: watchdog that ends the programs and removes the folders if this process dies.
        folder: the attempt's folder, which does not exist yet.
    """

    def __init__(self, app: CodingAgent, task: Json, watchdog: Watchdog, folder: Path) -> None:
        self._app = app
        self._task = task
        self._watchdog = watchdog
        self._folder = folder
        self._workspace = folder / "workspace"

    def prepare(self, source: Path | None) -> None:
        """Make the attempt's folders, and copy the workspace."""
        self._folder.mkdir(mode=0o700)
        if source is None:
            self._workspace.mkdir()
        else:
            shutil.copytree(source, self._workspace, symlinks=True)

    async def set_up(self) -> None:
        """Run the setup.

        Raises:
            ProgramError: it failed.
        """
        done = await self._run_plainly("setup", self._app.setup)
        if done.ended.status != 0:
            raise failure(done.ended, done.stderr, _SETUP)

    async def run(self, instruction: str, scope: AttemptContext | None, model: str) -> None:
        """Run the program.

        Raises:
            ProgramError: it could not start, or ran too long, or a protected path does not exist.
        """
        spec, home = self._app.spec, self._home("home")
        await asyncio.to_thread(self._keep)
        env = environment.clean_environment(os.environ, scope, model, home)
        values: dict[str, str] = {name: env[name] for name in PLACEHOLDERS if name in env}
        values |= {"WORKSPACE": str(self._workspace), "INSTRUCTION": instruction}
        env |= {name: fill(text, values) for name, text in {**spec.env, **self._app.env}.items()}
        for path, text in spec.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(fill(text, values), "utf-8")
        arguments = [fill(text, values) for text in spec.arguments] + list(self._app.arguments)
        done = await self._execute(self._app.name, self._sandboxed(arguments, values), env)
        self._check_started(done, PROGRAM)

    async def verify(self) -> Any:
        """Restore what is protected, run the verifier, and return the reward.

        Raises:
            ProgramError: the verifier could not start, ran too long, or gave no reward.
        """
        await asyncio.to_thread(self._restore)
        done = await self._run_plainly("verify", self._app.verify, is_sandboxed=True)
        self._check_started(done, _VERIFIER)
        if self._app.reward == "exit":
            return float(done.ended.status == 0)
        return reward_by_last_line(done.ended, done.stdout, done.stderr, what=_VERIFIER)

    async def _run_plainly(
        self, name: str, arguments: Sequence[str], *, is_sandboxed: bool = False
    ) -> Execution:
        """Run a program without an endpoint, in an empty HOME, with the task in a file."""
        home = self._home(f"home-{name}")
        values = {"WORKSPACE": str(self._workspace), "HOME": str(home)}
        env = environment.clean_environment(os.environ, None, "", home) | {
            key: fill(text, values) for key, text in self._app.env.items()
        }
        if is_sandboxed:
            arguments = self._sandboxed(arguments, values)
        # in HOME, which a sandbox shows
        with task_file(self._task, home) as variables:
            what = {"setup": _SETUP, "verify": _VERIFIER}[name]
            return await self._execute(name, arguments, env | variables, what)

    def _sandboxed(self, arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
        return [*(fill(text, values) for text in self._app.sandbox), *arguments]

    async def _execute(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], what: str = PROGRAM
    ) -> Execution:
        return await execute(
            arguments,
            watchdog=self._watchdog,
            env=env,
            cwd=str(self._workspace),
            timeout_s=self._app.timeout_s,
            name=name,
            what=what,
        )

    def _check_started(self, done: Execution, what: str) -> None:
        """Raise an error if a program, or its sandbox, did not start, or if a signal ended it.

        Raises:
            ProgramError: that is so. A sandbox that did not start is `Outcome.INFRASTRUCTURE`.
        """
        status, sandbox = done.ended.status, self._app.sandbox
        text = done.stderr.strip().rpartition("\n")[2]
        is_refused = bool(sandbox) and status == 1 and text.startswith(_BUBBLEWRAP)
        if status < 0 or status in _NOT_STARTED or is_refused:
            error = failure(done.ended, done.stderr, what)
            has_sandbox = text.startswith(f"{_BUBBLEWRAP}execvp ")  # the program is missing
            if sandbox and (status == _NO_SANDBOX or (is_refused and not has_sandbox)):
                error.outcome = Outcome.INFRASTRUCTURE
            raise error

    def _home(self, name: str) -> Path:
        """Make an empty HOME, with a folder for temporary files."""
        home = self._folder / name
        (home / environment.TEMPORARY).mkdir(parents=True)
        return home

    def _keep(self) -> None:
        """Copy what is protected.

        Raises:
            ProgramError: the workspace does not have it.
        """
        for path in self._app.protected:
            if not os.path.lexists(self._workspace / path):
                raise ProgramError(
                    f"protected={path!r}: the workspace has no such file or folder; give its path "
                    "in the workspace, without wildcards"
                )
            _copy(self._workspace / path, self._folder / "protected" / path)

    def _restore(self) -> None:
        """Put back what is protected.

        The program may have replaced a folder by a link, so no link is followed.
        """
        for path in self._app.protected:
            folder = self._workspace
            for part in Path(path).parts[:-1]:
                folder /= part
                if folder.is_symlink() or not folder.is_dir():
                    folder.unlink(missing_ok=True)
                    folder.mkdir()
            place = self._workspace / path
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            _copy(self._folder / "protected" / path, place)


def _copy(source: Path, place: Path) -> None:
    """Copy a file or a folder; do nothing if it does not exist."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, place, symlinks=True)
    elif source.exists() or source.is_symlink():
        shutil.copy2(source, place, follow_symlinks=False)
