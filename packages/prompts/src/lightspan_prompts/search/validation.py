"""Options that every search for prompts has, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from lightspan.errors import ConfigError, how_to_install
from lightspan.runners.app import INJECTED
from lightspan.schema.llm import LLM
from lightspan.schema.pricing import Price
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.resources import ROUTING
from lightspan.schema.validation import check_number, check_url


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


def check_optimize(
    algorithm: str, patterns: Sequence[str], prompts: Mapping[str, PromptTemplate]
) -> None:
    """Raise `ConfigError` if these are no names of agents and prompts, or there is nothing to learn
    at all."""
    if not patterns and not prompts:
        raise ConfigError(
            f"{algorithm} has no prompt to learn: give prompts={{name: PromptTemplate(…)}}, which "
            'the app takes as arguments, or optimize=["agent"], whose instructions are found in '
            "its calls"
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
    _ = llm.api_key  # raises where the variable is not set


def check_prices(max_cost: float | None, prices: Mapping[str, Price], asked: Sequence[LLM]) -> None:
    """Raise `ConfigError` for a budget of money that cannot be kept: the prices of models that are
    sure to be asked are missing. Those of the app's are seen when it asks."""
    if not isinstance(prices, Mapping):
        raise ConfigError(f"prices={prices!r:.100}: use {{model: Price(input=…, output=…)}}")
    for model, price in prices.items():
        if not isinstance(price, Price):
            raise ConfigError(f"prices[{model!r}]={price!r:.100}: use Price(input=…, output=…)")
    if max_cost is None:
        if prices:
            raise ConfigError("prices= are for max_cost=, which is not given: give both, or none")
        return
    check_number("max_cost", max_cost, above=0)
    missing = sorted({llm.model for llm in asked} - prices.keys())
    if missing:
        raise ConfigError(
            f"max_cost={max_cost:g} needs the price of every model that is asked, and prices= has "
            f"none for {', '.join(map(repr, missing))}: Price(input=…, output=…), of a million "
            "tokens"
        )


class Numbers(Protocol):
    """What each search has beside its own options."""

    selection: float
    failure_reward: float
    reflection_timeout_s: float
    patience_s: float
    timeout_s: float | None
    perfect_reward: float | None


def check_numbers(given: Numbers) -> None:
    """Raise `ConfigError` for one that is out of its range."""
    check_number("selection", given.selection, above=0, below=1)
    check_number("failure_reward", given.failure_reward)
    check_number("reflection_timeout_s", given.reflection_timeout_s, above=0)
    check_number("patience_s", given.patience_s, low=0)
    if given.timeout_s is not None:
        check_number("timeout_s", given.timeout_s, above=0)
    if given.perfect_reward is not None:
        check_number("perfect_reward", given.perfect_reward)


def check_installed(algorithm: str, modules: Sequence[str]) -> None:
    """Raise `ModuleNotFoundError` if one of these is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(
                f"{algorithm} needs {module!r}: {how_to_install('prompts')}", name=module
            )
