"""Command: a program in any language as an app.

Every attempt runs the program once. The program reads its task from a file or from the environment,
and its endpoint from `OPENAI_BASE_URL` and `OPENAI_API_KEY`, as every OpenAI client does, or from
`ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. Its exit status or the last line of its stdout is the
reward. The program needs no lightspan.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar, get_args

import msgspec

from lightspan.capture.context import current_agent
from lightspan.errors import AppError, ConfigError
from lightspan.runners.program import Program, ProgramError
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Outcome, new_id
from lightspan.schema.redaction import clean_text, is_secret
from lightspan.schema.routing import Route, Routing
from lightspan.schema.validation import check_choice, check_number
from lightspan_programs import environment
from lightspan_programs.execution import execute
from lightspan_programs.process import Watchdog, guarding
from lightspan_programs.reward import (
    reward_by_exit,
    reward_by_last_line,
)

TaskIn = Literal["file", "environment"]
RewardBy = Literal["last_line", "exit"]

P = TypeVar("P", bound=Program)

PREFIX: Final = "command:"
"""Prefix of a command's reference."""
MAX_VARIABLE_LENGTH: Final = 128 * 1024 - 1
"""Maximum number of bytes of an environment variable on Linux, with its name and the `=`."""


class SystemPrompt(msgspec.Struct, frozen=True):
    """A pattern of system prompts; `*` matches any text."""

    system: str


def system(pattern: str) -> SystemPrompt:
    """Return a pattern of system prompts, for an agent that its requests do not name.

    With `Command(…, agents={"title": system("Generate a title*")})`, calls belong to the agent
    `title` if their system prompt, or one part of it, begins with "Generate a title".

    Args:
        pattern: the whole text, in which `*` matches any text.

    Raises:
        ConfigError: the pattern is empty, or matches every prompt.
    """
    if not isinstance(pattern, str) or not pattern.strip("* "):
        raise ConfigError(f"system({pattern!r}) needs a text, such as 'Generate a title*'")
    return SystemPrompt(pattern)


class AgentName(str):
    """The path of an agent, with the pattern of its system prompts (`system`)."""

    __slots__ = ("system",)

    system: str

    @classmethod
    def of(cls, path: str, pattern: SystemPrompt) -> Self:
        """Return the path of the agent that `pattern` identifies."""
        name = cls(path)
        name.system = pattern.system
        return name


@dataclass(frozen=True, slots=True)
class Command(Program):
    """A program in any language as an app: `Trainer(…).fit(Command(["node", "app.js"]), train)`.

    Each attempt starts the program once, in its own session. The program's environment has

    - its task, as JSON: in the file that `LIGHTSPAN_TASK_FILE` names, or in `LIGHTSPAN_TASK`;
    - the endpoint of its model calls: `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and for Anthropic's
      clients `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. The key is valid for the model calls of
      this attempt only, and until the attempt ends;
    - `LIGHTSPAN_MODEL`, the policy's name, for clients that must name a model; `LIGHTSPAN_MODE`
      (`train`, `val`, `dev`), `LIGHTSPAN_ROLLOUT_ID` and `LIGHTSPAN_ATTEMPT_ID`;
    - the runner's other variables, without those of lightspan and without the keys of endpoints
      that answer for frozen agents.

    An agent is named by the URL `$LIGHTSPAN_GATEWAY_URL/agents/NAME/v1` (a path such as
    `team/writer` is a name too; Anthropic's clients add the `/v1` themselves) or by the model of a
    request; calls with neither belong to the agent `app`. `optimize=` and `frozen=` select these
    agents like any others. With `frozen=None` the program sends an agent's calls to an endpoint of
    its own; lightspan's endpoint refuses them.

    With `reward="last_line"` the reward is the last non-blank line of stdout: a number, `true`,
    `false`, `null` (no reward), or a JSON object of named numbers; the exit status must be 0. With
    `reward="exit"` status 0 is 1.0 and status 1 is 0.0, as with `test`, `grep` and most test
    runners. Any other status, and a signal, is a failure of the app, not a reward of 0. An uncaught
    exception of Python or Node.js ends with status 1 too: use `"last_line"` to distinguish it from
    a reward of 0.

    Processes that the program leaves running are ended with the program. The last bytes of its
    stdout and stderr are kept for `lightspan inspect`.

    Args:
        arguments: the program and its arguments; no shell is involved.
        task: whether the task is in a file or in the environment.
        reward: the source of the reward.
        timeout_s: seconds after which the program and its child processes are ended; the
            algorithm's `timeout_s` applies too.
        agents: all agent paths that the program names by URL or model; empty if unknown. If known,
            a name in `optimize=` that is not one of them is an error before the run starts, and
            with `optimize="*"` the calls whose model has such a name belong to this agent. A
            mapping of agents to `system("PATTERN")` finds them by their system prompts instead; all
            other calls belong to the agent `app`.
        cwd: the program's working folder; None for the runner's.
        env: further environment variables. They are written to files, so keys belong in the
            runner's environment instead.

    Raises:
        ConfigError: an option has an invalid value.
    """

    arguments: Sequence[str]
    task: TaskIn = "file"
    reward: RewardBy = "last_line"
    timeout_s: float | None = None
    agents: str | Sequence[str] | Mapping[str, SystemPrompt] = ()
    cwd: str | Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            raise ConfigError(
                f"a command is a list of texts, not {self.arguments!r}: write ['node', 'app.js'], "
                f"or {['sh', '-c', self.arguments]!r} for a shell"
            )
        agents: Any = [self.agents] if isinstance(self.agents, str) else self.agents
        check_texts("arguments", self.arguments)
        check_texts("agents", agents)
        check_texts("env", [*self.env, *self.env.values()])
        if not self.arguments or not self.arguments[0]:
            raise ConfigError("a command needs a program, such as ['node', 'app.js']")
        check_choice("task", self.task, get_args(TaskIn))
        check_choice("reward", self.reward, get_args(RewardBy))
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, above=0)
        for name in self.env:
            check_variable(name)
        values: dict[str, Any] = {
            "arguments": tuple(self.arguments),
            "agents": _patterns(agents) if isinstance(agents, Mapping) else tuple(agents),
            "env": dict(self.env),
            "cwd": None if self.cwd is None else os.fspath(self.cwd),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # --- the reference --------------------------------------------------------------------
    @property
    def reference(self) -> str:
        """The command's options as text. `from_reference` makes an equal command from it."""
        return reference_of(PREFIX, self)

    @classmethod
    def from_reference(cls, reference: str) -> Self:
        """Return the command with the given `reference`.

        Raises:
            AppError: `reference` is not the reference of a command.
        """
        return program_of(PREFIX, cls, reference)

    # --- before an attempt ----------------------------------------------------------------
    def check(self) -> None:
        """Raise an error unless the program exists on this machine.

        Raises:
            AppError: the program or the working folder does not exist.
        """
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise AppError(f"the command's working folder {str(self.cwd)!r} does not exist here")
        self._program()

    def _program(self) -> str:
        """Return the absolute path of the program.

        Raises:
            AppError: the program does not exist or is not executable.
        """
        name = self.arguments[0]
        if os.sep in name:
            path = shutil.which(Path(self.cwd or os.curdir, name).absolute())
        else:
            path = shutil.which(name, path=self.env.get("PATH"))
        if path is None:
            where = "is not there, or not executable" if os.sep in name else "is not on the PATH"
            raise AppError(f"the command's program {name!r} {where}: install it, or give its path")
        return os.path.abspath(path)

    def check_routing(self, routing: Routing) -> None:
        """Raise an error unless the gateway answers the calls of all `agents`.

        Raises:
            ConfigError: the gateway would refuse the calls of an agent, because it is neither
                trained nor frozen to a model.
        """
        unserved = [path for path in self.agent_paths() if routing.target(path).route is Route.APP]
        if unserved:
            raise ConfigError(
                f"the command's agents {unserved} are neither optimised nor frozen to a model, so "
                'lightspan\'s endpoint refuses their calls: set frozen="base", "shared" or an LLM '
                "for them, or leave those out of agents= whose calls the program sends elsewhere "
                "itself"
            )

    def agent_paths(self) -> Sequence[str]:
        """Return the paths of all agents; empty if they are unknown."""
        if not isinstance(self.agents, Mapping):
            return tuple(self.agents)
        named = [AgentName.of(path, pattern) for path, pattern in self.agents.items()]
        return (c.UNNAMED_AGENT, *named) if named else ()

    def opened(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that keeps one watchdog process for all attempts.

        The watchdog ends the programs if this process dies.
        """
        return guarding()

    # --- an attempt -----------------------------------------------------------------------
    async def __call__(self, task: Json, llm: LLM | None = None) -> Any:
        """Run the program on one task.

        Args:
            task: the task.
            llm: the endpoint; its `model` is the value of `LIGHTSPAN_MODEL`. With None that value
                is empty.

        Returns:
            The program's reward (see `lightspan.schema.reward.parse_reward`).

        Raises:
            ProgramError: the program could not start, failed, ran too long, or gave no reward.
        """
        arguments = [self._program(), *self.arguments[1:]]
        agent = current_agent()
        scope = None if agent is None else agent.scope
        model = llm.model if llm is not None else ""
        try:
            async with guarding() as watchdog:
                with self._task_variables(task, watchdog) as variables:
                    env = environment.program_environment(
                        os.environ, self.env, scope, model, variables
                    )
                    ended, stdout, stderr = await execute(
                        arguments,
                        watchdog=watchdog,
                        env=env,
                        cwd=None if self.cwd is None else str(self.cwd),
                        timeout_s=self.timeout_s,
                    )
        except OSError as error:
            raise ProgramError(
                f"the program {arguments[0]!r} could not be started: {error}",
                Outcome.INFRASTRUCTURE,
            ) from error
        if self.reward == "exit":
            return reward_by_exit(ended, stderr)
        return reward_by_last_line(ended, stdout, stderr, "" if scope is None else scope.call_token)

    @contextmanager
    def _task_variables(self, task: Json, watchdog: Watchdog) -> Iterator[dict[str, str]]:
        """Yield the environment variables that contain or name the task.

        With `task="file"`, the file of the task exists while the block runs.

        Raises:
            ProgramError: the task is too long for an environment variable.
        """
        if self.task == "environment":
            data = msgspec.json.encode(task)
            if len(environment.TASK_VARIABLE) + 1 + len(data) > MAX_VARIABLE_LENGTH:
                raise ProgramError(
                    f"the task has {len(data)} bytes, more than fit into an environment variable: "
                    'use a file (task="file")'
                )
            yield {environment.TASK_VARIABLE: data.decode()}
            return
        with task_file(task, watchdog.folder) as variables:
            yield variables


@contextmanager
def task_file(task: Json, folder: Path) -> Iterator[dict[str, str]]:
    """Write a task to a file in `folder` while the block runs; yield the variable that names it."""
    path = folder / f"{new_id('task')}.json"
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(msgspec.json.encode(task))
    try:
        yield {environment.TASK_FILE_VARIABLE: str(path)}
    finally:
        path.unlink(missing_ok=True)


def reference_of(prefix: str, program: Any) -> str:
    """Return the options of a program that differ from the defaults, as text."""
    values = {
        option.name: getattr(program, option.name)
        for option in fields(program)
        if getattr(program, option.name) not in (None, (), {}, option.default)
    }
    return prefix + msgspec.json.encode(values).decode()


def program_of(prefix: str, kind: type[P], reference: str) -> P:
    """Return the program of a class that has the given reference.

    Raises:
        AppError: `reference` is not that of such a program.
    """
    try:
        return kind(**msgspec.json.decode(reference.removeprefix(prefix), type=dict[str, Any]))
    except (msgspec.MsgspecError, TypeError, ConfigError) as error:
        what = prefix.rstrip(":").replace("-", " ")
        raise AppError(f"{reference!r} is no {what}: {error}") from error


def _patterns(agents: Mapping[str, Any]) -> dict[str, SystemPrompt]:
    """Return the agents of a mapping, whose patterns may be decoded from a reference.

    Raises:
        ConfigError: a value is no `system("PATTERN")`.
    """
    try:
        patterns = msgspec.convert(dict(agents), dict[str, SystemPrompt])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f'agents={agents!r} of a command: write agents={{"NAME": system("PATTERN*")}}'
        ) from error
    check_texts("agents", [pattern.system for pattern in patterns.values()])
    return patterns


def check_texts(name: str, values: Sequence[object]) -> None:
    """Raise `ConfigError` unless all `values` of the option `name` are texts."""
    for value in values:
        # lone surrogates cannot be encoded in a file
        if not isinstance(value, str) or "\0" in value or clean_text(value) != value:
            raise ConfigError(f"{name} of a command holds {value!r}: each must be a text")


def check_variable(name: str) -> None:
    """Raise `ConfigError` if `env` must not have a variable called `name`."""
    if not name or "=" in name or name.startswith(environment.RESERVED):
        raise ConfigError(
            f"env of a command cannot set {name!r}: lightspan sets it, or it is no variable name"
        )
    if is_secret(name):
        raise ConfigError(
            f"env of a command cannot hold {name!r}, because a command is written to files: set it "
            "in the environment of the runner, which the program inherits"
        )
