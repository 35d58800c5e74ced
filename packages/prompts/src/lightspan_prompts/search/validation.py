"""Validation of the options that all prompt searches have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lightspan.errors import ConfigError, how_to_install
from lightspan.runners.app import INJECTED
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.resources import ROUTING
from lightspan.schema.validation import check_number, check_url
from lightspan_prompts.pricing import Price


def check_prompts(prompts: Mapping[str, PromptTemplate]) -> None:
    """Raise `ConfigError` unless all `prompts` are templates that an app can take as arguments."""
    reserved = {*INJECTED, ROUTING} - {"prompt"}
    for name, template in prompts.items():
        if not isinstance(template, PromptTemplate):
            raise ConfigError(
                f"prompts[{name!r}] is a {type(template).__name__}: use PromptTemplate(text)"
            )
        if not name.isidentifier() or name in reserved:
            raise ConfigError(
                f"prompts[{name!r}]: the app takes it as an argument, and this name is "
                + ("reserved" if name in reserved else "no identifier")
            )


def check_optimize(
    algorithm: str, patterns: Sequence[str], prompts: Mapping[str, PromptTemplate]
) -> None:
    """Raise `ConfigError` if there are neither patterns nor prompts, or if a pattern is invalid.

    A pattern is invalid if it is empty, not a text, or also a name in `prompts`.
    """
    if not patterns and not prompts:
        raise ConfigError(
            f"{algorithm} has no prompt to learn: give prompts={{name: PromptTemplate(…)}} for "
            'arguments of the app, or optimize=["agent"] for the instructions of its agents'
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"optimize={list(patterns)!r:.200}: {pattern!r:.50} is no name")
        if pattern in prompts:
            raise ConfigError(f"{pattern!r} is in prompts and in optimize: keep it in one of them")


def check_reflection(name: str, llm: Any) -> None:
    """Raise `ConfigError` unless `llm` is an endpoint whose API key is set.

    `name` is the option that has this value; the message names it.
    """
    if not isinstance(llm, LLM):
        raise ConfigError(f"{name}={llm!r:.100}: use LLM(base_url=…, model=…)")
    check_url(llm.base_url, f"the base URL of {name}=")
    _ = llm.api_key  # raises where the variable is not set


def check_prices(
    max_cost: float | None, prices: Mapping[str, Price], models: Sequence[LLM]
) -> None:
    """Raise `ConfigError` if `max_cost` is set and a reflection model has no price.

    The prices of the app's models are checked later, when the app calls them.
    """
    if not isinstance(prices, Mapping):
        raise ConfigError(f"prices={prices!r:.100}: use {{model: Price(input=…, output=…)}}")
    for model, price in prices.items():
        if not isinstance(price, Price):
            raise ConfigError(f"prices[{model!r}]={price!r:.100}: use Price(input=…, output=…)")
    if max_cost is None:  # the cost is reported only
        return
    check_number("max_cost", max_cost, above=0)
    missing = sorted({llm.model for llm in models} - prices.keys())
    if missing:
        raise ConfigError(
            f"max_cost={max_cost:g} needs the price of every model, and prices= has none for "
            f"{', '.join(map(repr, missing))}: add Price(input=…, output=…) per million tokens"
        )


def check_installed(algorithm: str, modules: Sequence[str]) -> None:
    """Raise `ModuleNotFoundError` if one of `modules` is not installed."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"{algorithm} needs {module!r}: {how_to_install('prompts')}", name=module
            )
