"""How to start the coding agents that `CodingAgent` knows by name.

Each is an entry point of the group `lightspan.programs` whose value is a `ProgramSpec`. Another
distribution adds a program by such an entry point. `docs/guides/coding-agents.md` has the versions
that were run.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Final

import msgspec

from lightspan.errors import ConfigError
from lightspan.plugins import installed_plugins, load_plugin
from lightspan_programs.command import SystemPrompt

GROUP: Final = "programs"
"""Kind of the entry points: `lightspan.programs`."""
PLACEHOLDERS: Final = (
    *("INSTRUCTION", "WORKSPACE", "HOME", "LIGHTSPAN_MODEL", "LIGHTSPAN_GATEWAY_URL"),
    *("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
)
"""Names that `$NAME` may contain in a `ProgramSpec`."""


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to start a program on one instruction.

    In all texts but `install`, `$NAME` stands for a value of the attempt: the task's `INSTRUCTION`,
    the folders `WORKSPACE` and `HOME`, and the variables `LIGHTSPAN_MODEL`,
    `LIGHTSPAN_GATEWAY_URL`, `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`. `$$` is a dollar sign.

    Raises:
        ConfigError: a text has another `$NAME`, or a file is not inside HOME.
    """

    arguments: tuple[str, ...]
    """The program and its arguments."""
    files: dict[str, str] = {}
    """Path in HOME → text of the file."""
    env: dict[str, str] = {}
    """Further environment variables, such as switches for telemetry and updates."""
    agents: dict[str, SystemPrompt] = {}
    """Agent → pattern of its system prompts, for calls besides the main conversation."""
    install: str = ""
    """What installs the program, for error messages."""

    def __post_init__(self) -> None:
        if not self.arguments:
            raise ConfigError("the arguments of a program are empty: begin with its name")
        for text in (*self.arguments, *self.files.values(), *self.env.values()):
            check_placeholders(text)
        for path in self.files:
            check_relative(path, "a file in HOME")


def check_placeholders(text: str) -> None:
    """Raise `ConfigError` unless `text` has only the placeholders of `ProgramSpec`."""
    template = string.Template(text)
    names = template.get_identifiers() if template.is_valid() else ["?"]
    if unknown := [name for name in names if name not in PLACEHOLDERS]:
        raise ConfigError(
            f"{text!r} of a program has ${unknown[0]}: use one of "
            f"{', '.join(f'${name}' for name in PLACEHOLDERS)}, or $$ for a dollar sign"
        )


def check_relative(path: str, what: str) -> None:
    """Raise `ConfigError` unless `path` stays inside the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise ConfigError(f"{what} has the path {path!r}: give a relative path without '..'")


def find_spec(name: str) -> ProgramSpec:
    """Return the program that an installed distribution calls `name`.

    Raises:
        ConfigError: no distribution has such a program, or its entry point is none.
    """
    known = installed_plugins(GROUP)
    if name not in known:
        raise ConfigError(
            f"no coding agent is called {name!r}; known: {', '.join(known) or 'none'}. Describe "
            "another one by a ProgramSpec, or run it as Command([...])"
        )
    spec = load_plugin(GROUP, name)
    if not isinstance(spec, ProgramSpec):
        raise ConfigError(
            f"the entry point {known[name].value!r} of the coding agent {name!r} must be a "
            f"ProgramSpec, not {type(spec).__name__}"
        )
    return spec


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with its placeholders replaced; those without a value become empty."""
    return string.Template(text).substitute({**dict.fromkeys(PLACEHOLDERS, ""), **values})
