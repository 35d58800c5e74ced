"""Command: a program in any language as an app.

Every attempt is a process of its own. It finds its task in a file or in the environment, and an
endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, as any OpenAI client does, or in
`ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`; how it ends, or the last line that it writes, is the
reward. Nothing of lightspan is needed in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

import msgspec

from lightspan.capture.context import AgentContext, current_agent, make_span
from lightspan.errors import AppError, ConfigError
from lightspan.runners.command.environment import (
    OURS,
    TASK_FILE_VARIABLE,
    TASK_VARIABLE,
    program_environment,
)
from lightspan.runners.command.process import Ended, Tail, Watchdog, guarding, run_program
from lightspan.runners.command.reward import (
    ProgramError,
    failure,
    reward_by_exit,
    reward_by_last_line,
    shown,
)
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Outcome, new_id
from lightspan.schema.redaction import is_secret
from lightspan.schema.routing import Route, Routing
from lightspan.schema.spans import Attributes, SpanKind, SpanStatus, now_ns

TaskIn = Literal["file", "environment"]
RewardBy = Literal["last_line", "exit"]

PREFIX: Final = "command:"
"""How the reference of a command begins."""
MAX_VARIABLE_LENGTH: Final = 128 * 1024 - 1
"""Bytes of one environment variable, with its name, that Linux accepts."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program in any language as an app: `Trainer(…).fit(Command(["node", "app.js"]), train)`.

    Each attempt starts the program once, in a session of its own. It finds

    - its task, as JSON, in the file that `LIGHTSPAN_TASK_FILE` names or in `LIGHTSPAN_TASK`;
    - the endpoint that answers its model calls in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and for
      Anthropic's clients in `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. The key opens this
      attempt's model calls and nothing else, and only until the attempt ends;
    - `LIGHTSPAN_MODEL`, the policy's name, for clients that must name a model; `LIGHTSPAN_MODE`
      (`train`, `val`, `dev`), `LIGHTSPAN_ROLLOUT_ID` and `LIGHTSPAN_ATTEMPT_ID`;
    - your own environment otherwise, without other variables of lightspan's and without the keys
      of endpoints that answer for frozen agents.

    Agents are told apart by the URL, `$LIGHTSPAN_GATEWAY_URL/agents/NAME/v1` (a path such as
    `team/writer` is a name too; Anthropic's clients add the `/v1` themselves), or by the model that
    a request names; calls without either are those of the agent `app`. `optimize=` and `frozen=`
    choose among them as among any others. With `frozen=None` an agent's calls belong where the
    program itself points them; lightspan's endpoint does not know that place and refuses them.

    The reward is, with `reward="last_line"`, the last line of stdout that is not blank: a number,
    `true`, `false`, `null` (no reward), or a JSON object of named numbers. The exit status must be
    0 then. With `reward="exit"` status 0 is 1.0 and status 1 is 0.0, as with `test`, `grep` and
    most test runners. Any other status, and a signal, is a failure of the app and no reward of 0.
    An uncaught exception of Python or Node.js ends with status 1 too: use `"last_line"` to tell it
    from a reward of 0.

    What the program leaves running ends with it. The end of its stdout and stderr is kept for
    `lightspan inspect`.

    Args:
        arguments: the program and its arguments; no shell is involved.
        task: where the program finds its task.
        reward: how the program tells its reward.
        timeout_s: seconds after which the program and all that it started are ended; the
            algorithm's `timeout_s` holds as well.
        agents: every agent path that the program names by URL or model, where that is known. A
            name in `optimize=` that is not among them is an error at once, and `optimize="*"`
            tells models of these names apart.
        cwd: the program's working folder; None for the runner's.
        env: further variables. Keys belong in the environment itself: these are written to files.

    Raises:
        ConfigError: an option that cannot be honoured.
    """

    arguments: Sequence[str]
    task: TaskIn = "file"
    reward: RewardBy = "last_line"
    timeout_s: float | None = None
    agents: str | Sequence[str] = ()
    cwd: str | Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            raise ConfigError(
                f"a command is a list of texts, not {self.arguments!r}: write ['node', 'app.js'], "
                f"or {['sh', '-c', self.arguments]!r} for a shell"
            )
        agents = [self.agents] if isinstance(self.agents, str) else self.agents
        _check_texts("arguments", self.arguments)
        _check_texts("agents", agents)
        _check_texts("env", [*self.env, *self.env.values()])
        if not self.arguments or not self.arguments[0]:
            raise ConfigError("a command needs a program, such as ['node', 'app.js']")
        for name, value, choices in (
            ("task", self.task, get_args(TaskIn)),
            ("reward", self.reward, get_args(RewardBy)),
        ):
            if value not in choices:
                raise ConfigError(f"{name}={value!r} of a command: use {' or '.join(choices)}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} of a command must be above 0, or None")
        for name in self.env:
            _check_variable(name)
        values: dict[str, Any] = {
            "arguments": tuple(self.arguments),
            "agents": tuple(agents),
            "env": dict(self.env),
            "cwd": None if self.cwd is None else os.fspath(self.cwd),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # --- how it travels -------------------------------------------------------------------
    @property
    def reference(self) -> str:
        """The command as a text that `from_reference` reads."""
        values = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) not in (None, (), {}, each.default)
        }
        return PREFIX + msgspec.json.encode(values).decode()

    @classmethod
    def from_reference(cls, reference: str) -> Self:
        """The inverse of `reference`.

        Raises:
            AppError: the text is no command.
        """
        try:
            values = msgspec.json.decode(reference.removeprefix(PREFIX), type=dict[str, Any])
            return cls(**values)
        except (msgspec.MsgspecError, TypeError, ConfigError) as error:
            raise AppError(f"{reference!r} is no command: {error}") from error

    # --- before an attempt ----------------------------------------------------------------
    def check(self) -> None:
        """Check that the program is there.

        Raises:
            AppError: there is no such program here, or no such working folder.
        """
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise AppError(f"the command's working folder {str(self.cwd)!r} does not exist here")
        self._program()

    def _program(self) -> str:
        """The path of the program."""
        name = self.arguments[0]
        if os.sep in name:
            path = shutil.which(Path(self.cwd or os.curdir, name).absolute())
        else:
            path = shutil.which(name, path=self.env.get("PATH"))
        if path is None:
            where = "is not there, or not executable" if os.sep in name else "is not on the PATH"
            raise AppError(f"the command's program {name!r} {where}: install it, or give its path")
        return os.path.abspath(path)

    def opened(self) -> AbstractAsyncContextManager[object]:
        """One watchdog for all attempts, for as long as the block runs."""
        return guarding()

    # --- an attempt -----------------------------------------------------------------------
    async def __call__(self, task: Json, llm: LLM | None = None) -> Any:
        """Run the program on one task.

        Returns:
            What it gave as its reward (see `lightspan.schema.reward.parse_reward`).

        Raises:
            ProgramError: it failed, ran too long, or gave no reward.
        """
        arguments = [self._program(), *self.arguments[1:]]
        current = current_agent()
        run = _Run(self, arguments, current)
        try:
            async with guarding() as watchdog:
                with self._where(task, watchdog) as variables:
                    env = program_environment(
                        os.environ,
                        self.env,
                        None if current is None else current.scope,
                        llm.model if llm is not None else "",
                        variables,
                    )
                    ended = await run.until_the_end(watchdog, env)
        except OSError as error:
            raise ProgramError(
                f"the program {arguments[0]!r} could not be started: {error}",
                Outcome.INFRASTRUCTURE,
            ) from error
        if ended.timed_out:
            raise ProgramError(f"the program ran longer than {self.timeout_s:g} s", Outcome.TIMEOUT)
        if self.reward == "exit":
            return reward_by_exit(ended, run.complaints)
        return reward_by_last_line(ended, run.stdout, run.complaints, run.secret)

    @contextmanager
    def _where(self, task: Json, watchdog: Watchdog) -> Iterator[dict[str, str]]:
        """The variables that say where the task is; it is there as long as the block runs."""
        data = msgspec.json.encode(task)
        if self.task == "environment":
            size = len(TASK_VARIABLE) + 1 + len(data)
            if size > MAX_VARIABLE_LENGTH:
                raise ProgramError(
                    f"the task has {len(data)} bytes, more than fit into an environment variable: "
                    'give it in a file (task="file")'
                )
            yield {TASK_VARIABLE: data.decode()}
            return
        path = watchdog.folder / f"{new_id('task')}.json"
        with open(path, "xb", opener=_private) as file:
            file.write(data)
        try:
            yield {TASK_FILE_VARIABLE: str(path)}
        finally:
            path.unlink(missing_ok=True)


class _Run:
    """One run of the program, with its output and the span that records it."""

    def __init__(
        self, command: Command, arguments: Sequence[str], current: AgentContext | None
    ) -> None:
        self.stdout = Tail()
        self.stderr = Tail()
        self._command = command
        self._arguments = arguments
        self._current = current

    @property
    def complaints(self) -> str:
        """What is kept of stderr, for people."""
        return shown(self.stderr, self.secret)

    @property
    def secret(self) -> str:
        """The call token, which must not get into messages and spans."""
        return self._current.scope.call_token if self._current is not None else ""

    async def until_the_end(self, watchdog: Watchdog, env: Mapping[str, str]) -> Ended:
        started, ended = now_ns(), None
        try:
            ended = await run_program(
                self._arguments,
                watchdog=watchdog,
                stdout=self.stdout,
                stderr=self.stderr,
                env=env,
                cwd=None if self._command.cwd is None else str(self._command.cwd),
                timeout_s=self._command.timeout_s,
            )
            return ended
        finally:
            if self._current is not None:
                self._record(self._current, started, ended)

    def _record(self, current: AgentContext, started: int, ended: Ended | None) -> None:
        attributes: Attributes = {
            c.COMMAND_ARGUMENTS: list(self._command.arguments),
            c.COMMAND_STDOUT: shown(self.stdout, self.secret),
            c.COMMAND_STDERR: self.complaints,
        }
        if ended is not None:
            attributes[c.COMMAND_STATUS] = ended.status
        good = ended is not None and ended.status == 0
        name = f"command {Path(self._command.arguments[0]).name}"
        span = make_span(
            current,
            name,
            SpanKind.OPERATION,
            attributes,
            start_ns=started,
            end_ns=now_ns(),
            status=SpanStatus.OK if good else SpanStatus.ERROR,
            status_message="" if good else _how(ended, self.complaints),
        )
        current.scope.recorder.add(span)


def check_served(routing: Routing, agents: Sequence[str]) -> None:
    """Check that lightspan's endpoint answers every agent that a command names there.

    Raises:
        ConfigError: the calls of one belong where the app points them.
    """
    lost = [path for path in agents if routing.target(path).route is Route.APP]
    if lost:
        raise ConfigError(
            f"the command's agents {lost} are neither optimised nor frozen to a model, so "
            'lightspan\'s endpoint refuses their calls: say frozen="base", "shared" or an LLM for '
            "them, or leave those out of agents= whose calls the program sends elsewhere itself"
        )


def _how(ended: Ended | None, stderr: str) -> str:
    if ended is None:
        return "it was stopped"
    return "it ran too long" if ended.timed_out else str(failure(ended, stderr))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _check_texts(name: str, values: Sequence[object]) -> None:
    for value in values:
        if not isinstance(value, str) or "\0" in value or not _is_unicode(value):
            raise ConfigError(f"{name} of a command holds {value!r}: each must be a text")


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, which no file can hold."""
    return text.encode(errors="ignore").decode() == text


def _check_variable(name: str) -> None:
    if not name or "=" in name or name.startswith(OURS):
        raise ConfigError(f"env of a command cannot set {name!r}: lightspan sets it, or it is none")
    if is_secret(name):
        raise ConfigError(
            f"env of a command cannot hold {name!r}, because a command is written to files: set it "
            "in the environment of the runner, which the program inherits"
        )
