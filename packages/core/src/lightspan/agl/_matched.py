"""LightningRL for agents that a regular expression finds."""

from __future__ import annotations

from typing import Any

import msgspec

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing, Rule


class MatchedRL(LightningRL):
    """Trains the agents in whose name `agent_match` is found (None: every call). The others are
    answered by the moving weights and not trained, as the tutorial describes it.

    Like the original, and unlike `LightningRL`, it goes by URL: a judge that an agent asks at an
    endpoint of its own is left alone.
    """

    def __init__(self, model: str, *, agent_match: str | None, **options: Any) -> None:
        super().__init__(model, optimize="*", frozen="shared", **options)
        self.agent_match = agent_match
        self._routing = _matched(self._routing, agent_match)

    def config(self) -> dict[str, Json]:
        return {**super().config(), "agent_match": self.agent_match}


def _matched(everything: Routing, agent_match: str | None) -> Routing:
    """The routing by URL, with the expression in place of its one pattern."""
    [rule] = everything.rules
    if agent_match is not None:
        rule = Rule(agent_match, rule.target, regex=True)
    return msgspec.structs.replace(everything, rules=[rule], by_url=True)
