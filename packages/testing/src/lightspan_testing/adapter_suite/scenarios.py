"""The table of scenarios, and the description of a framework's app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import openai

from lightspan.capture.context import current_context
from lightspan.capture.emit import current_attempt_id, emit_message, operation
from lightspan_testing.adapter_harness import Says, Turn

MODES: Final = ("async", "sync", "stream")
ROUTES: Final = ("app", "gateway")
CONCURRENT: Final = 32


# --- arguments of a subclass ----------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Settings with which an app creates its model client."""

    base_url: str
    api_key: str = "key"
    name: str = "m"
    stream: bool = False
    """Whether to stream model calls."""
    max_retries: int = 0
    timeout_s: float = 30.0


def instructions(name: str) -> str:
    """Return the system message of an agent."""
    return f"You are {name}."


def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 7"


def count(what: str) -> str:
    """Count the letters of a text."""
    return f"{len(what)} letters"


def broken(what: str) -> str:
    """Fail."""
    raise LookupError(f"nothing known of {what}")


BYPASSED: Final = "Done by other means."
"""Answer of a model client that does not use the OpenAI SDK."""


def bypassed() -> str:
    """Return the answer of a model client that does not use the OpenAI SDK.

    Before that, emit a message and open an operation. Neither may be recorded as a model call.
    """
    emit_message("I look for means")
    with operation("find means"):
        current_attempt_id()
    return BYPASSED


def by_other_means(scenario: str, model: Model) -> Callable[[Any], str]:
    """Return a function that answers a prompt, for an app whose client does not use the OpenAI SDK.

    The function first makes up to `Scenario.asks_first` calls with the OpenAI SDK. It returns the
    answer of the first of them that succeeds. If none succeeds, it returns `BYPASSED`.

    If the scenario is `stopped`, the function ends the attempt before, as a runner does, and as the
    end of a process does in production.
    """

    def answer(prompt: Any) -> str:
        current = current_context()
        if SCENARIOS[scenario].stopped and current is not None:
            current.scope.recorder.cancel_pending()
            return BYPASSED
        for _ in range(SCENARIOS[scenario].asks_first):
            with suppress(openai.OpenAIError):
                return _call_sdk(model, str(prompt))
        return bypassed()

    return answer


def _call_sdk(model: Model, prompt: str) -> str:
    messages: Any = [{"role": "user", "content": prompt}]
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        create = client.chat.completions.create
        if not model.stream:
            return create(model=model.name, messages=messages).choices[0].message.content or ""
        chunks = create(model=model.name, messages=messages, stream=True)
        parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        return "".join(parts)


OTHER_MEANS: Final = {
    "bypassing": """
        invoke_agent writer @writer
          chat @writer
          lightspan.message @writer unset
          find means @writer
    """,
    "fallback": """
        invoke_agent writer @writer
          chat @writer
          chat @writer error
          lightspan.message @writer unset
          find means @writer
    """,
    "recovered": """
        invoke_agent writer @writer
          chat @writer error
          chat @writer
    """,
    "stopped": """
        invoke_agent writer @writer unset
          chat @writer unset
    """,
}
"""Scenario with a custom model client → expected span tree."""

WRITER: Final = "invoke_agent writer @writer\n  chat @writer"
"""Span tree of `writer`, which answers."""
FAILED: Final = "invoke_agent writer @writer error\n  chat @writer error"
"""Span tree of `writer`, whose model fails."""
SCOUT: Final = """
    invoke_agent scout @scout
      chat @scout
      execute_tool look @scout
      chat @scout
"""
"""Span tree of `scout`, which calls the tool `look`."""
BOSS: Final = """
    invoke_agent boss @boss
      chat @boss
      execute_tool expert @boss
        invoke_agent expert @boss/expert
          chat @boss/expert
          execute_tool look @boss/expert
          chat @boss/expert
      chat @boss
"""
"""Span tree of `boss`, which calls the agent `expert` as a tool."""

LOOK: Final = Turn(calls=[("look", '{"what": "seven"}')])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario: a row of the table of tests, with what the agents answer."""

    says: Says
    """Answers of each agent, unless the app has its own."""
    about: str
    ordered: bool = True
    """Whether the order of spans is fixed; False if some are concurrent."""
    modes: Sequence[str] = MODES
    max_retries: int = 0
    timeout_s: float = 30.0
    cancelled: bool = False
    """Whether the app is cancelled during its first model call."""
    bypassing: bool = False
    """Whether the app's model client bypasses the OpenAI SDK."""
    asks_first: int = 0
    """Maximum number of OpenAI SDK calls that a custom client tries before it answers itself."""
    stopped: bool = False
    """Whether the attempt ends while a custom client is under way."""


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "single": Scenario(
        about="one agent, `writer`, answers",
        says={"writer": ["A draft of {task}."]},
    ),
    "team": Scenario(
        about="`writer`, then `checker`",
        says={"writer": ["A draft of {task}."], "checker": ["{task} is good."]},
    ),
    "nested": Scenario(
        about="a team `drafting` of `writer` and `checker` inside another, then `judge`",
        says={
            "writer": ["A draft of {task}."],
            "checker": ["{task} is good."],
            "judge": ["{task} wins."],
        },
    ),
    "parallel": Scenario(
        about="`planner`, then `left` and `right` at once, then `joiner`",
        ordered=False,
        says={
            "planner": ["Plan {task}."],
            "left": [Turn(text="Left of {task}.", delay_s=0.05)],
            "right": [Turn(text="Right of {task}.", delay_s=0.05)],
            "joiner": ["Both of {task}."],
        },
    ),
    "tools": Scenario(
        about="`scout` calls the tool `look`, then answers",
        says={"scout": [LOOK, "Seven, for {task}."]},
    ),
    "parallel_tools": Scenario(
        about="`scout` calls `look` and `count` in one answer, then answers",
        ordered=False,
        says={
            "scout": [
                Turn(calls=[("look", '{"what": "seven"}'), ("count", '{"what": "seven"}')]),
                "Seven, for {task}.",
            ]
        },
    ),
    "handoff": Scenario(
        about="`triage` hands off to `expert`, who answers",
        says={
            "triage": [Turn(calls=[("transfer_to_expert", "{}")])],
            "expert": ["Done: {task}."],
        },
    ),
    "agent_as_tool": Scenario(
        about="`boss` asks `expert` as a tool; the expert uses its own tool `look`",
        says={
            "boss": [Turn(calls=[("expert", '{"task": "help with {task}"}')]), "Thanks: {task}."],
            "expert": [LOOK, "It is seven, {task}."],
        },
    ),
    "same_name": Scenario(
        about="two agents called `writer`, told apart by their paths",
        says={"writer": ["A text for {task}."]},
    ),
    "unicode": Scenario(
        about="an agent called `Prüferin日本`",
        says={"Prüferin日本": ["Gut: {task}."]},
    ),
    "tool_error": Scenario(
        about="`scout` calls the tool `broken`, which raises",
        says={"scout": [Turn(calls=[("broken", '{"what": "it"}')]), "No luck with {task}."]},
    ),
    "model_error": Scenario(
        about="the model of `writer` fails (400); the app raises",
        says={"writer": [Turn(text="refused", status=400)]},
    ),
    "retry": Scenario(
        about="the endpoint of `writer` fails once (500) and the client tries again: one call",
        says={"writer": [Turn(text="busy", status=500), "A draft of {task}."]},
        max_retries=1,
    ),
    "timeout": Scenario(
        about="the client of `writer` gives up after 0.2 s; the app raises",
        says={"writer": [Turn(text="Late, {task}.", delay_s=0.6)]},
        timeout_s=0.2,
    ),
    "cancelled": Scenario(
        about="the app is cancelled while `writer`'s model is thinking",
        says={"writer": [Turn(text="Late, {task}.", delay_s=0.6)]},
        modes=("async", "stream"),
        cancelled=True,
    ),
    "bypassing": Scenario(
        about="`writer`'s model client, the user's own, does not use the OpenAI SDK",
        says={},
        bypassing=True,
    ),
    "fallback": Scenario(
        about="`writer`'s own model client asks the OpenAI SDK, which fails (400), then answers",
        says={"writer": [Turn(text="refused", status=400)]},
        bypassing=True,
        asks_first=1,
    ),
    "recovered": Scenario(
        about="`writer`'s own model client asks the OpenAI SDK twice, which fails once (400)",
        says={"writer": [Turn(text="refused", status=400), "A draft of {task}."]},
        asks_first=2,
    ),
    "stopped": Scenario(
        about="the attempt ends while `writer`'s own model client is thinking: one cancelled call",
        says={},
        bypassing=True,
        stopped=True,
    ),
}
"""Scenario name → scenario. Every framework plays each of them in every mode and on every route."""
IN_PRODUCTION: Final = (
    "single",
    "team",
    "nested",
    "parallel",
    "parallel_tools",
    "handoff",
    "agent_as_tool",
    "model_error",
    "cancelled",
)
"""Scenarios that are also played outside of every scope."""
REPEATED: Final = (
    "single",
    "team",
    "nested",
    "parallel",
    "tools",
    "parallel_tools",
    "handoff",
    "agent_as_tool",
    "same_name",
    "unicode",
    "tool_error",
)
"""Scenarios that are also repeated with the recorded answers, as a whole and up to each call."""
CONNECTED: Final = ("single", "team", "nested", "parallel", "agent_as_tool")
"""Scenarios that are also played with a server of trained policies."""
SEVERAL_RUNS: Final[Mapping[str, Collection[str]]] = {
    "openai_agents": ("team", "nested", "parallel"),
}
"""Framework → scenarios in which the app has to run several agents itself.

The framework has no construct for these scenarios, so in production the app groups the runs.
"""


# --- results of a subclass ------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An app of the framework for one scenario, with its expected span tree."""

    run: Callable[[str], Awaitable[Any]]
    """Run the app once on a text, which must reach every prompt. May be called repeatedly."""
    tree: str
    """The expected tree: a line per span, indented by depth, in order of start.

    `invoke_agent NAME @PATH`, `execute_tool NAME @PATH` and `chat @PATH`, followed by the status
    `error` or `unset`. Example:

        invoke_agent writer @writer
          chat @writer
    """
    target: Any = None
    """Argument of the adapter's `agents()`."""
    run_sync: Callable[[str], Any] | None = None
    """The framework's synchronous call; None for `asyncio.run` around `run`."""
    says: Says = field(default_factory=dict)
    """Agent → its answers, where they differ from the scenario's, such as other tool names."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Text in a prompt → agent, for the framework's own prompts (managers, selectors)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Agent in the prompt → last name of its path, if they differ."""
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None
    """Exceptions that `run` raises, apart from cancellation; None if it raises none."""
    close: Callable[[], Awaitable[Any]] | None = None
    """Function that closes the app's own client, in the event loop of `run`; None if there is
    none.
    """
    concurrent: bool = True
    """Whether one app may run several attempts concurrently. Otherwise each attempt needs its
    own.
    """
    complete: bool = True
    """Whether `agents()` can find out that its list of agents is complete."""


class Impossible(Exception):
    """Raised by `build` if the framework has no means to express the scenario."""


IMPOSSIBLE: Final[Mapping[str, Mapping[str, str]]] = {
    "autogen": {
        "two_event_loops/team": "AutoGen binds a team's message queue to the loop of its first run",
    },
    "crewai": {"handoff": "CrewAI has none: an agent delegates, and gets the answer back"},
}
"""Framework → key as in `AdapterTests.impossible` → reason why the framework cannot pass."""
