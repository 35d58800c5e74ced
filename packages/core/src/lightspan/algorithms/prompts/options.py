"""Options that every search for prompts has, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lightspan.errors import ConfigError, how_to_install
from lightspan.runners.app import INJECTED
from lightspan.schema.checks import check_url
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.resources import ROUTING


def check_prompts(prompts: Mapping[str, PromptTemplate]) -> None:
    """Raise `ConfigError` if these are not templates that an app can get as arguments."""
    taken = {*INJECTED, ROUTING} - {"prompt"}
    for name, template in prompts.items():
        if not isinstance(template, PromptTemplate):
            raise ConfigError(
                f"prompts[{name!r}] is a {type(template).__name__}: use PromptTemplate(text)"
            )
        if not name.isidentifier() or name in taken:
            raise ConfigError(
                f"prompts[{name!r}]: the app gets it as an argument of this name, and that is "
                + ("taken" if name in taken else "no name of an argument")
            )


def check_optimize(patterns: Sequence[str], prompts: Mapping[str, PromptTemplate]) -> None:
    """Raise `ConfigError` if these are no names of agents and prompts, or there is nothing to learn
    at all."""
    if not patterns and not prompts:
        raise ConfigError(
            "GEPA has no prompt to learn: give prompts={name: PromptTemplate(…)}, which the app "
            'takes as arguments, or optimize=["agent"], whose instructions are found in its calls'
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"optimize={list(patterns)!r:.200}: {pattern!r:.50} is no name")
        if pattern in prompts:
            raise ConfigError(f"{pattern!r} is in prompts and in optimize: keep it in one of them")


def check_reflection(name: str, llm: Any) -> None:
    """Raise `ConfigError` if this is no endpoint that can be asked, its key included: before any
    rollout."""
    if not isinstance(llm, LLM):
        raise ConfigError(f"{name}={llm!r:.100}: use LLM(base_url=…, model=…)")
    check_url(llm.base_url, f"the {name} model's base URL")
    llm.api_key()


def check_installed(algorithm: str, modules: Sequence[str]) -> None:
    """Raise `ModuleNotFoundError` if one of these is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"{algorithm} needs {module!r}: {how_to_install('prompts')}", name=module
            )
