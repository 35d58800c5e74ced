"""mini-swe-agent, unedited and with a short configuration, repairs a Python package in a sandbox.

    model -> command -> sandbox -> its output -> model -> ... until it submits, or `limit` calls

Only the repaired modules leave the sandbox. The tests are run on them in another one, as they were
when the session began.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

import yaml
from minisweagent import Model
from minisweagent.agents.default import DefaultAgent

from terminal_example import sandbox
from terminal_example.packages import Task

Files: TypeAlias = frozenset[tuple[str, str]]
"""Path and text of each file."""
MODEL_VARIABLE: Final = "TERMINAL_MODEL"
DEFAULT_MODEL: Final = "gpt-5-mini"
LIMIT: Final = 8
"""Maximum number of model calls in a session; three are enough."""
SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command that ends a session."""
_LOCKS: Final[dict[Files, Lock]] = {}
"""Lock of each package that was verified: of sessions that end together, one runs pytest."""


class Session(NamedTuple):
    """A session that has ended."""

    status: str
    """Why it ended: `Submitted`, `LimitsExceeded`, or the name of an error."""
    messages: list[dict[str, Any]]
    """The messages of mini-swe-agent."""
    files: dict[str, str] | None
    """Path → text of the package's modules; None if one of them cannot be read."""


@cache
def config() -> Mapping[str, dict[str, Any]]:
    """Return the configuration in `mini.yaml`."""
    text = Path(__file__).with_name("mini.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


def instruction(task: Task) -> str:
    """Return the user message of a session."""
    return f"Repair {task['function']} in {task['path']}. Its test fails:\n{task['failure']}"


def chat_model(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> Model:
    """Return mini-swe-agent's client of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; None for the environment variable TERMINAL_MODEL, or else the
            default.
        base_url: URL of the endpoint; None for OPENAI_BASE_URL.
        api_key: key of the endpoint; None for OPENAI_API_KEY.
        temperature: sampling temperature; None for the endpoint's default.
        max_tokens: maximum tokens of an answer; None for the endpoint's default.
    """
    import litellm
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    litellm.suppress_debug_info = True  # it would print a list of providers at each call
    name = model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL
    options = {
        "api_base": base_url,
        "api_key": api_key,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    given = {key: value for key, value in options.items() if value is not None}
    return LitellmTextbasedModel(
        model_name=f"openai/{name}", model_kwargs=given, **config()["model"]
    )


def repair(task: Task, model: Model, *, limit: int = LIMIT) -> Session:
    """Run a session of mini-swe-agent on a package, in a new sandbox.

    Args:
        limit: maximum number of model calls.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; a session takes at least one call")
    settings = config()
    opened = sandbox.open_sandbox({**task["files"], **task["tests"]}, **settings["environment"])
    try:
        agent = DefaultAgent(model, opened, **{**settings["agent"], "step_limit": limit})
        ended = agent.run(instruction(task))
        files = sandbox.read_files(opened.working_dir, task["files"])
    finally:
        opened.cleanup()
    return Session(ended["exit_status"], agent.messages, files)


def solved(task: Task, session: Session) -> bool:
    """Return whether a session was submitted, and pytest passes the task's tests on its modules."""
    if session.status != "Submitted" or session.files is None or session.files == task["files"]:
        return False
    files, tests = (frozenset(each.items()) for each in (session.files, task["tests"]))
    with _LOCKS.setdefault(files, Lock()):
        return _passes(files, tests)


@lru_cache(maxsize=4096)  # sessions often end with equal files, and pytest takes long to start
def _passes(files: Files, tests: Files) -> bool:
    return sandbox.passes(dict(files), dict(tests), **config()["environment"])
