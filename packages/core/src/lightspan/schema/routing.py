"""Which model call goes where: patterns on agent paths, and the routes that they choose.

An *agent path* names the agents from the outermost to the acting one, joined by `/`
(`team/writer`); a `/` inside a name is written `%2F`. The unnamed agent is `app`.

A pattern without `/` matches the innermost name, a pattern with `/` the whole path; `*` matches
within one name, `**` crosses levels. Everything else is literal: `write_query` never matches
`rewrite_query`. A `/` that belongs to a name is `%2F` in a pattern too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode
from lightspan.schema.semconv import UNNAMED_AGENT
from lightspan.schema.token_records import Sampling

BASE_POLICY: Final = "base"
"""The policy name of the starting weights, for agents frozen as `"base"`."""


class AgentPaths(NamedTuple):
    """The agents of an app that can be optimised: what an adapter's `agents(app)` returns."""

    paths: tuple[str, ...]
    """Agent paths, in the order of the app."""
    complete: bool
    """Whether no other agent can appear at run time."""


def join_path(names: Iterable[str]) -> str:
    """The agent path of these names; `app` for none."""
    escaped = [name.replace("%", "%25").replace("/", "%2F") for name in names]
    return "/".join(escaped) or UNNAMED_AGENT


def split_path(path: str) -> list[str]:
    """The names of an agent path."""
    return [part.replace("%2F", "/").replace("%25", "%") for part in path.split("/")]


def agent_name(path: str) -> str:
    """The innermost name of an agent path."""
    return split_path(path)[-1]


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern matches the agent path (see the module)."""
    if "/" in pattern or pattern == "**":
        return _regex(pattern).fullmatch(path) is not None
    return _regex(pattern).fullmatch(path.rpartition("/")[2]) is not None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    pattern = re.sub("%(?!2F|25)", "%25", pattern)  # as `join_path` writes it
    parts = re.split(r"((?<![^/])\*\*/|/\*\*(?![^/])|\*\*|\*)", pattern)
    return re.compile("".join(_GLOB.get(part) or re.escape(part) for part in parts), re.DOTALL)


_GLOB: Final = {
    "**/": "(?:.*/)?",
    "/**": "(?:/.*)?",
    "**": ".*",
    "*": "[^/]*",
}


class Route(StrEnum):
    """Where a call goes."""

    POLICY = "policy"
    """The trained policy: the call is selected."""
    BASE = "base"
    """Our engine with the starting weights."""
    SHARED = "shared"
    """Our engine with the moving weights, untrained."""
    ENDPOINT = "endpoint"
    """A given endpoint, through the gateway."""
    APP = "app"
    """Where the app pointed it, untouched but recorded."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A route, and the policy or endpoint at its end."""

    route: Route
    policy: str = ""
    """For `policy` and `shared`."""
    endpoint: LLM | None = None
    """For `endpoint`."""
    sampling: Sampling | None = None
    """What training samples with, whatever the app asked (train mode, trained policies)."""
    validate_temperature: float | None = None
    """What validation samples at, whatever the app asked (val mode, trained policies)."""

    @property
    def selected(self) -> bool:
        return self.route is Route.POLICY

    def forced(self, mode: Mode) -> Sampling | None:
        """What the app does not choose in a rollout of this mode: in validation the temperature
        alone, else all of the sampling. None: it chooses."""
        if not self.selected:
            return None
        if mode is not Mode.VAL:
            return self.sampling
        if self.validate_temperature is None:
            return None
        return Sampling(temperature=self.validate_temperature)


class Rule(msgspec.Struct, frozen=True):
    """Where the calls of the agents that a pattern matches go."""

    pattern: str
    target: Target

    def matches(self, path: str) -> bool:
        """Whether the agent at this path is meant."""
        return matches(self.pattern, path)


class Routing(msgspec.Struct, frozen=True, kw_only=True, tag="routing"):
    """An ordered table of rules; the first that matches decides, else `default`."""

    rules: list[Rule] = msgspec.field(default_factory=list)
    gateway_url: str = ""
    """Origin of the gateway that serves the routes; runners read it here."""
    default: Target = Target(route=Route.APP)

    @property
    def serves(self) -> bool:
        """Whether any call is to go through the gateway."""
        targets = [self.default, *(rule.target for rule in self.rules)]
        return any(target.route is not Route.APP for target in targets)

    def target(self, path: str) -> Target:
        """Where the call of the agent at this path goes."""
        for rule in self.rules:
            if rule.matches(path):
                return rule.target
        return self.default

    def choose_name(self, names: Sequence[str]) -> str:
        """Return the name of an agent that a rule's pattern matches alone, else the first."""
        for rule in self.rules:
            for segment in rule.pattern.split("/"):
                known = [name for name in names if matches(segment, join_path([name]))]
                if known and len(known) < len(names):
                    return known[0]
        return names[0]

    def naming(self, paths: Iterable[str]) -> Routing:
        """The same routes with a rule for each of these agents, so that a request that names one of
        them as its model is that agent's."""
        rules = [Rule(path, self.target(path)) for path in paths if "*" not in path]
        return msgspec.structs.replace(self, rules=[*rules, *self.rules])

    def validating_at(self, temperature: float | None) -> Routing:
        """The same routes, the trained policies sampled at this temperature in validation; None:
        at what the app asks."""
        rules = [
            msgspec.structs.replace(
                rule,
                target=msgspec.structs.replace(rule.target, validate_temperature=temperature),
            )
            for rule in self.rules
        ]
        return msgspec.structs.replace(self, rules=rules)

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """Patterns of trained policies that match none of the paths (an error of the user's)."""
        agents = list(paths)
        return [
            rule.pattern
            for rule in self.rules
            if rule.target.selected and not any(map(rule.matches, agents))
        ]


def frozen_target(frozen: str | LLM | None, policy: str) -> Target:
    """Where the calls of an agent go that `frozen=` is said of.

    Raises:
        ValueError: a string other than "base" and "shared".
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
                f"frozen={frozen!r}: use None (the call goes where the app pointed it), "
                '"base" (the starting weights), "shared" (the moving weights) or an LLM'
            )


def make_routing(
    optimize: Mapping[str, str],
    frozen: str | LLM | Mapping[str, str | LLM | None] | None,
    default_policy: str,
    sampling: Sampling | None = None,
) -> Routing:
    """The routing table of `optimize=` (pattern → policy) and `frozen=`.

    The more specific pattern comes first, so that naming an agent beats matching it: literal before
    glob, a whole path before a name, more literal characters before fewer.
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
