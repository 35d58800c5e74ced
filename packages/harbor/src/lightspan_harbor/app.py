"""The app that is a trial of Harbor: an agent, in a sandbox, on a task, scored by its verifier."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from lightspan.capture.context import AgentContext, current_agent, make_span
from lightspan.capture.emit import emit_message
from lightspan.errors import AppError, ConfigError
from lightspan.runners.program import Program, ProgramError
from lightspan.runners.protocol import FOLDER_VARIABLE
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, Outcome, new_id
from lightspan.schema.redaction import is_secret
from lightspan.schema.resources import NamedResources
from lightspan.schema.routing import Routing
from lightspan.schema.spans import SpanKind, SpanStatus, now_ns
from lightspan.schema.validation import check_whole
from lightspan_harbor.trial_host import Reply, Request, TrialHost, hosting
from lightspan_programs.command import Command, SystemPrompt
from lightspan_programs.environment import program_environment

PREFIX: Final = "harbor:"
"""Prefix of a trial's reference."""
FOLDER: Final = "trials"
"""Folder of the trials, in that of the run."""

_TASK_FIELDS: Final = ("path", "git_url", "git_commit_id", "name", "ref")
"""Fields of a task that name it for Harbor."""
_ANTHROPIC: Final = ("claude-code",)
"""Agents that speak Anthropic's API."""


@dataclass(frozen=True, slots=True)
class HarborTrial(Program):
    """A trial of Harbor as an app: `Trainer(…).fit(trial(agent="mini-swe-agent"), HarborTasks(…))`.

    Each attempt is one trial: Harbor starts a sandbox, runs the agent in it with the attempt's
    endpoint and key, and scores its work by the task's verifier. The verifier's `reward` is the
    reward, its other named rewards are dimensions. If the agent exceeds its time limit of the task,
    the verifier scores what it has done. A sandbox that does not start is a failure of the
    infrastructure, so the rollout is retried, and stays unscored.

    Trajectory and logs are kept in the folder `trials` of the run; `lightspan inspect` shows where.
    Trials run in a process next to each runner, so that sandboxes are removed if the runner is
    killed. Harbor is needed where the runners are (`LocalRunners(python=…)`), with Python 3.12.

    An agent is named as for `Command`: by the model of a request, or by its system prompt. All
    other calls belong to the agent `app`.

    Args:
        agent: name of an agent of Harbor, such as `"mini-swe-agent"`, `"codex"`, `"claude-code"`
            or `"terminus-2"`; or `"module:Class"` of your own.
        environment: name of a kind of sandbox, such as `"docker"`, `"podman"`, `"daytona"` or
            `"modal"`; or `"module:Class"` of your own. An agent that is installed in the sandbox
            must be able to reach the gateway from there: see `Trainer(gateway=)`.
        model: the agent's model where no policy is trained, such as `"openai/gpt-5-mini"`; its key
            is in the runner's environment. None: the policy.
        provider: API that the agent speaks with the policy, `"openai"` or `"anthropic"`; None for
            that of the agent.
        options: the agent's options, such as `{"max_turns": 20}` (`harbor agent schema NAME`).
        env: further environment variables of the agent, such as those that name a small model for
            side calls. They are written to files, so keys belong in the runner's environment.
        agents: names of further agents, or `{"title": system("Generate a title*")}`.
        prompts: name of a prompt → its place, for `GEPA` and other searches for prompts:
            `"instruction"` appends it to the task; `"skill"` makes it the `SKILL.md` of a skill;
            `"option:NAME"` sets an option of the agent, such as its system prompt; everything else
            is a file, such as `"AGENTS.md"` in the sandbox's working folder.
        running: maximum number of agents at work per runner process. The sandboxes of its further
            attempts are started ahead of their turn. None: all of them work.
        memory_mb: memory of all local sandboxes of a runner process together. A trial waits until
            the memory that its task asks for is free. None: three quarters of the free memory.
        config: further fields of Harbor's `TrialConfig`, such as `{"timeout_multiplier": 2}`.
        folder: folder of the trials; None for the run's.

    Raises:
        ConfigError: an option has an invalid value.
    """

    agent: str
    environment: str = "docker"
    model: str | None = None
    provider: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    agents: str | Sequence[str] | Mapping[str, SystemPrompt] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    running: int | None = None
    memory_mb: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("agent", "environment"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f'{name}={value!r} of a trial: give a name, such as "docker"')
        if self.provider not in (None, "openai", "anthropic"):
            raise ConfigError(f'provider={self.provider!r} of a trial: use "openai" or "anthropic"')
        for name in ("running", "memory_mb"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name in self.env:
            if is_secret(name):
                raise ConfigError(
                    f"env of a trial cannot hold {name!r}, because a trial is written to files: "
                    "set it in the environment of the runner"
                )
        values: dict[str, Any] = {
            "agents": Command(["harbor"], agents=self.agents).agents,
            "folder": None if self.folder is None else os.path.abspath(self.folder),
        }
        for name in ("options", "env", "prompts", "config"):
            values[name] = dict(getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        try:
            msgspec.json.encode([self.options, self.config])
        except TypeError as error:
            raise ConfigError(f"options and config of a trial must be JSON: {error}") from error

    # --- the reference --------------------------------------------------------------------
    @property
    def reference(self) -> str:
        """The trial's options as text. `from_reference` makes an equal trial from it."""
        values = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) not in (None, (), {}, option.default)
        }
        return PREFIX + msgspec.json.encode(values).decode()

    @classmethod
    def from_reference(cls, reference: str) -> Self:
        """Return the trial with the given `reference`.

        Raises:
            AppError: `reference` is not the reference of a trial.
        """
        try:
            return cls(**msgspec.json.decode(reference.removeprefix(PREFIX), type=dict[str, Any]))
        except (msgspec.MsgspecError, TypeError, ConfigError) as error:
            raise AppError(f"{reference!r} is no trial of Harbor: {error}") from error

    # --- before an attempt ----------------------------------------------------------------
    def check(self) -> None:
        """Raise an error unless Harbor is installed here.

        Raises:
            AppError: Harbor is not installed.
        """
        if importlib.util.find_spec("harbor") is None:
            raise AppError(
                "a trial needs Harbor where the runners are: `pip install harbor` with Python 3.12 "
                "or newer there, or name that environment: runners=LocalRunners(8, python=…)"
            )

    def check_routing(self, routing: Routing) -> None:
        """Raise an error unless the gateway answers the calls of all `agents`.

        Raises:
            ConfigError: the gateway would refuse the calls of an agent, or no model answers.
        """
        self._command().check_routing(routing)
        if not routing.serves and self.model is None:
            raise ConfigError(
                "no policy answers this agent's calls: name its model, such as "
                f'trial(agent={self.agent!r}, model="openai/gpt-5-mini")'
            )

    def agent_paths(self) -> Sequence[str]:
        """Return the paths of all agents; empty if they are unknown."""
        return self._command().agent_paths()

    def _command(self) -> Command:
        """Return a command with the same agents, which are named in the same way."""
        agents: Any = self.agents
        if agents and not isinstance(agents, Mapping):
            agents = tuple(dict.fromkeys((c.UNNAMED_AGENT, *agents)))  # it makes all other calls
        return Command(["harbor"], agents=agents)

    def opened(self) -> AbstractAsyncContextManager[TrialHost]:
        """Return a context manager that keeps one host process for all attempts."""
        return hosting(self._folder())

    # --- an attempt -----------------------------------------------------------------------
    async def __call__(
        self, task: Json, llm: LLM | None = None, resources: NamedResources | None = None
    ) -> Any:
        """Run one trial.

        Args:
            task: the task (`HarborTasks`).
            llm: the endpoint of the agent's calls; None for the agent's own.
            resources: resources of the algorithm, some of which may be prompts.

        Returns:
            The verifier's rewards by name.

        Raises:
            ProgramError: the trial failed, or gave no reward.
        """
        agent = current_agent()
        start_ns = now_ns()
        attempt_id = new_id("trial") if agent is None else agent.scope.attempt_id
        request = self._request(task, attempt_id, llm, resources or {}, agent)
        reply = None
        try:
            async with hosting(self._folder()) as host:
                reply = await host.run(request)
        finally:
            if agent is not None:
                self._record(agent, start_ns, request, reply)
        if reply.outcome is not Outcome.OK:
            raise ProgramError(reply.message, reply.outcome)
        rewards = dict(reply.rewards)
        return rewards.popitem()[1] if len(rewards) == 1 else rewards

    def _request(
        self,
        task: Json,
        attempt_id: str,
        llm: LLM | None,
        resources: NamedResources,
        agent: AgentContext | None,
    ) -> Request:
        """Return what the host needs to run a trial.

        Raises:
            ProgramError: the task is none of Harbor's, or a prompt has no place.
        """
        if not isinstance(task, dict) or not any(task.get(name) for name in ("path", "name")):
            raise ProgramError(
                f"the task {task!r:.100} is no Harbor task: use HarborTasks(FOLDER), or objects "
                'with "path" or "name"'
            )
        prompts = {x: r.text for x, r in resources.items() if isinstance(r, PromptTemplate)}
        unplaced = sorted(prompts.keys() - self.prompts.keys())
        if unplaced:
            raise ProgramError(
                f"the prompts {unplaced} have no place in the trial: name it, such as "
                f'trial(prompts={{{unplaced[0]!r}: "AGENTS.md"}})'
            )
        model, variables = self.model, dict(self.env)
        if llm is not None:
            provider = self.provider or ("anthropic" if self.agent in _ANTHROPIC else "openai")
            model = f"{provider}/{llm.model}"
            scope = None if agent is None else agent.scope
            # LiteLLM in the sandbox would look for a list of prices on the web, for many seconds
            variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables}
            variables |= program_environment({}, {}, scope, llm.model, {})
        config = merged(
            {
                "task": {name: task[name] for name in _TASK_FIELDS if task.get(name)},
                "trial_name": attempt_id,
                "trials_dir": str(self._folder()),
                "agent": {
                    **_named(self.agent),
                    "model_name": model,
                    "kwargs": self.options,
                    "env": variables,
                },
                "environment": {
                    "import_path" if ":" in self.environment else "type": self.environment
                },
            },
            self.config,
        )
        return Request(
            id=attempt_id,
            config=config,
            prompts=[(name, self.prompts[name], text) for name, text in prompts.items()],
            running=self.running,
            memory_mb=self.memory_mb,
        )

    def _folder(self) -> Path:
        return Path(self.folder or Path(os.environ.get(FOLDER_VARIABLE, ""), FOLDER)).absolute()

    def _record(
        self, agent: AgentContext, start_ns: int, request: Request, reply: Reply | None
    ) -> None:
        """Add the span of a trial to the attempt, with the path of its files.

        Args:
            agent: context in which the app was called.
            start_ns: start, nanoseconds since the epoch.
            request: the trial.
            reply: its end; None if it was stopped.
        """
        secret = agent.scope.call_token
        lines = [f"files: {Path(request.config['trials_dir'], request.id)}"]
        if reply is not None and reply.trajectory:
            lines.append(f"trajectory: {reply.trajectory}")
        if reply is not None and reply.verifier_output:
            lines.append(f"verifier: {reply.verifier_output}")
        output = "\n".join(lines)
        message = "it was stopped" if reply is None else reply.message
        is_ok = reply is not None and reply.outcome is Outcome.OK
        span = make_span(
            agent,
            f"harbor {self.agent}",
            SpanKind.OPERATION,
            {
                c.COMMAND_STDOUT: output.replace(secret, "***") if secret else output,
                c.COMMAND_STDERR: message.replace(secret, "***") if secret else message,
            },
            start_ns=start_ns,
            end_ns=now_ns(),
            status=SpanStatus.OK if is_ok else SpanStatus.ERROR,
            status_message="" if is_ok else message,
        )
        agent.scope.recorder.add(span)
        if request.prompts and reply is not None and reply.steps:  # for a reflection model
            emit_message(reply.steps.replace(secret, "***") if secret else reply.steps)


trial = HarborTrial


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the fields of `more`, which wins; objects are merged field by field."""
    result = dict(base)
    for name, value in more.items():
        old = result.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _named(agent: str) -> dict[str, str]:
    return {"import_path" if ":" in agent else "name": agent}
