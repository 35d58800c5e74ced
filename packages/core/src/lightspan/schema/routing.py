"""Route model calls to destinations, by patterns on agent paths.

An *agent path* is a text such as `team/writer`: the names of nested agents, from the outermost to
the acting agent, joined by `/`. A `/` inside a name is written `%2F`, in a pattern too. The path of
an agent without a name is `app`.

A pattern without `/` is compared with the innermost name, a pattern with `/` with the whole path.
`*` matches any text within one name, `**` any text. All other characters are literal, so
`write_query` never matches `rewrite_query`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from lightspan.schema.llm import LLM
from lightspan.schema.semconv import UNNAMED_AGENT
from lightspan.schema.token_records import Sampling

BASE_POLICY: Final = "base"
"""Name of the policy with the weights before training. Agents with `frozen="base"` use it."""


class AgentPaths(NamedTuple):
    """The paths of the agents in an app, as an adapter's function `agents(app)` returns them."""

    paths: tuple[str, ...]
    """Agent paths, in the order in which the adapter finds them in the app."""
    complete: bool
    """Whether no further agent can appear at run time."""


def join_path(names: Iterable[str]) -> str:
    """Join the names of nested agents, the outermost first, to an agent path.

    Return `app` if there are no names.
    """
    escaped = [name.replace("%", "%25").replace("/", "%2F") for name in names]
    return "/".join(escaped) or UNNAMED_AGENT


def split_path(path: str) -> list[str]:
    """Return the names of the agents in an agent path, the outermost first."""
    return [part.replace("%2F", "/").replace("%25", "%") for part in path.split("/")]


def agent_name(path: str) -> str:
    """Return the innermost name of an agent path."""
    return split_path(path)[-1]


def matches(pattern: str, path: str) -> bool:
    """Return whether the pattern matches the agent path (see the module)."""
    has_levels = "/" in pattern or pattern == "**"
    return _regex(pattern).fullmatch(path if has_levels else path.rpartition("/")[2]) is not None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    pattern = re.sub("%(?!2F|25)", "%25", pattern)  # as `join_path` writes it
    parts = re.split(r"((?<![^/])\*\*/|/\*\*(?![^/])|\*\*|\*)", pattern)
    return re.compile("".join(_GLOB.get(part) or re.escape(part) for part in parts), re.DOTALL)


_GLOB: Final = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*"}


class Route(StrEnum):
    """The destination of a model call."""

    POLICY = "policy"
    """The policy's current weights; the call is trained."""
    BASE = "base"
    """The starting weights, in the training's engine."""
    SHARED = "shared"
    """The policy's current weights; the call is not trained."""
    ENDPOINT = "endpoint"
    """An endpoint that the user configured (an `LLM`), through the gateway."""
    APP = "app"
    """The app's own endpoint; the call is only recorded."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The destination of an agent's calls: a route, with its policy or endpoint."""

    route: Route
    policy: str = ""
    """Name of the policy whose weights answer the call; empty for the routes `endpoint` and
    `app`."""
    endpoint: LLM | None = None
    """The endpoint of the route `endpoint`; None for the other routes."""
    sampling: Sampling | None = None
    """Sampling of the route `policy` in training, which overrides the app's; its `max_tokens`
    applies in validation too. None keeps the app's sampling."""
    validate_temperature: float | None = None
    """Temperature of the route `policy` in validation. None keeps the app's temperature."""

    @property
    def selected(self) -> bool:
        return self.route is Route.POLICY


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """The destination of the calls of all agents that a pattern matches."""

    pattern: str
    target: Target
    system: str = ""
    """Glob of system prompts: calls with such a prompt that name no agent belong to the agent
    `pattern`. Empty for none."""

    def matches(self, path: str) -> bool:
        """Return whether the rule applies to an agent path."""
        return matches(self.pattern, path)


class Routing(msgspec.Struct, frozen=True, kw_only=True, tag="routing"):
    """Rules that choose the destination of each agent's calls.

    The first rule that matches the agent applies. If none matches, `default` applies.
    """

    rules: list[Rule] = msgspec.field(default_factory=list)
    gateway_url: str = ""
    """Scheme, host and port of the gateway that serves the routes. Runners use it."""
    default: Target = Target(route=Route.APP)

    @property
    def targets(self) -> list[Target]:
        """The destinations of all rules, and the default one."""
        return [*(rule.target for rule in self.rules), self.default]

    @property
    def serves(self) -> bool:
        """Whether the calls of any agent go to the gateway instead of the app's own endpoint."""
        return any(target.route is not Route.APP for target in self.targets)

    def target(self, path: str) -> Target:
        """Return the destination of the calls of the agent at `path`."""
        for rule in self.rules:
            if rule.matches(path):
                return rule.target
        return self.default

    def naming(self, paths: Iterable[str]) -> Routing:
        """Return a copy with one more rule for each of `paths`; no destination changes.

        The pattern of such a rule is the path of an agent, so requests can give the path as the
        name of their model. Paths that contain `*` get no rule. A path with an attribute `system`
        (`lightspan_programs.system`) sets `Rule.system`.
        """
        names = [path for path in paths if "*" not in path]
        rules = [Rule(str(name), self.target(name), getattr(name, "system", "")) for name in names]
        return replace(self, rules=[*rules, *self.rules])

    def validating_at(self, temperature: float | None) -> Routing:
        """Return a copy that samples with `temperature` in validation; None for the app's own."""
        targets = [replace(rule.target, validate_temperature=temperature) for rule in self.rules]
        pairs = zip(self.rules, targets, strict=True)
        return replace(self, rules=[replace(rule, target=target) for rule, target in pairs])

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Return the patterns of agents to train that match none of `paths`."""
        agents = list(paths)
        return [
            rule.pattern
            for rule in self.rules
            if rule.target.selected and not any(map(rule.matches, agents))
        ]


def frozen_target(frozen: str | LLM | None, policy: str) -> Target:
    """Return the destination of the calls of a frozen agent.

    Args:
        frozen: value of the option `frozen=` for the agent.
        policy: name of the policy whose weights are used if `frozen` is `"shared"`.

    Raises:
        ValueError: `frozen` is a string other than "base" and "shared".
    """
    match frozen:
        case None:
            return Target(route=Route.APP)
        case "base":
            return Target(route=Route.BASE, policy=BASE_POLICY)
        case "shared":
            return Target(route=Route.SHARED, policy=policy)
        case LLM():
            return Target(route=Route.ENDPOINT, endpoint=frozen)
        case _:
            raise ValueError(
                f"frozen={frozen!r}: use None (the call goes to the app's own endpoint), "
                '"base" (the starting weights), "shared" (the current weights) or an LLM'
            )


def make_routing(
    optimize: Mapping[str, str],
    frozen: str | LLM | Mapping[str, str | LLM | None] | None,
    default_policy: str,
    sampling: Sampling | None = None,
) -> Routing:
    """Return the rules that route model calls, made from the options `optimize` and `frozen`.

    More specific patterns come first: patterns without `*` before patterns with `*`, whole paths
    before names, more literal characters before fewer.

    Args:
        optimize: pattern of agents to train → name of their policy.
        frozen: destination of the calls of all other agents, or a mapping of pattern → destination.
        default_policy: name of the policy whose weights are used for `frozen="shared"`.
        sampling: sampling of the trained policies; None keeps the app's sampling.
    """
    selected = [
        Rule(pattern, Target(route=Route.POLICY, policy=name, sampling=sampling))
        for pattern, name in optimize.items()
    ]
    if isinstance(frozen, Mapping):
        explicit = [Rule(p, frozen_target(value, default_policy)) for p, value in frozen.items()]
        default = frozen_target(None, default_policy)
    else:
        explicit, default = [], frozen_target(frozen, default_policy)
    rules = sorted([*explicit, *selected], key=lambda rule: _specificity(rule.pattern))
    return Routing(rules=rules, default=default)


def _specificity(pattern: str) -> tuple[bool, bool, int]:
    return "*" in pattern, "/" not in pattern, -len(pattern.replace("*", ""))
