"""Triplets of a trace: each model call of the chosen agents, with what it earned."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightspan.agl import _spans as names
from lightspan.agl._adapters import TraceToTripletBase
from lightspan.agl._attributes import nested
from lightspan.agl._rewards import get_reward_value
from lightspan.agl._rollouts import Triplet
from lightspan.agl._spans import Span
from lightspan.schema import conventions as c

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

_OUTPUT: Final = names.OPERATION_OUTPUT
_INPUT: Final = names.OPERATION_INPUT
_RESPONSE_ID: Final = (c.RESPONSE_ID, f"{_OUTPUT}.id")
_PROMPT_IDS: Final = ("prompt_token_ids", f"{_OUTPUT}.prompt_token_ids")
_RESPONSE_IDS: Final = (
    "response_token_ids",
    f"{_OUTPUT}.response_token_ids.0",
    f"{_OUTPUT}.choices.0.token_ids",
    f"{_OUTPUT}.choices.0.provider_specific_fields.token_ids",
)


class RewardMatchPolicy(StrEnum):
    """Which call a reward is of."""

    FIRST_SIBLING = "first_sibling"
    """The latest call before it under the same parent."""
    FIRST_OCCURRENCE = "first_occurrence"
    """The latest call that ended before it."""


class Call(NamedTuple):
    """A model call of a chosen agent."""

    span: Span
    agent: str


class TracerTraceToTriplet(TraceToTripletBase):
    """The model calls of the chosen agents, by when they began.

    Args:
        repair_hierarchy: accepted; agents are known at the time of the call, so that nothing has to
            be repaired.
        llm_call_match: a regular expression that is searched in a span's name: a model call.
        agent_match: a regular expression that is searched in the name of the agent that called
            (`write` is found in `rewrite_query`); None for every call.
        exclude_llm_call_in_reward: leave out what a reward function asks.
        reward_match: which call a reward is of.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    def adapt(self, source: Sequence[Span | ReadableSpan], /) -> list[Triplet]:
        """The triplets; none of no span."""
        spans = [
            span if isinstance(span, Span) else Span.from_opentelemetry(span, "", "", 0)
            for span in source
        ]
        tree = _Tree(spans)
        calls = sorted(self._calls(tree), key=lambda call: call.span.start_time or 0.0)
        triplets = {call.span.span_id: triplet_of(call) for call in calls}
        if self._skip_empty_token_spans:
            triplets = {key: triplet for key, triplet in triplets.items() if _has_tokens(triplet)}
        rewarded = [call.span for call in calls if call.span.span_id in triplets]
        match = _by_sibling if self.reward_match == "first_sibling" else _by_time
        for span_id, reward in match(tree, rewarded).items():
            triplets[span_id].reward = reward
        return list(triplets.values())

    def _calls(self, tree: _Tree) -> Iterator[Call]:
        """The calls of the chosen agents, in the order of the tree."""
        seen: set[str] = set()
        first = _Place(agent="*" if self.agent_match is None else None)
        stack = [(root, first) for root in reversed(tree.roots)]
        while stack:
            span, place = stack.pop()
            response_id = _first_text(span.attributes, _RESPONSE_ID)
            if self._is_call(span, place, response_id) and response_id not in seen:
                assert place.agent is not None
                yield Call(span, place.agent)
                seen |= {response_id} if response_id is not None else set()
                place = place._replace(in_call=True)
            inner = self._inside(span, place)
            stack += [(child, inner) for child in reversed(tree.children(span))]

    def _is_call(self, span: Span, place: _Place, response_id: str | None) -> bool:
        if place.agent is None or re.search(self.llm_call_match, span.name) is None:
            return False
        if place.in_reward and self.exclude_llm_call_in_reward:
            return False
        # the same call, recorded by the layers of a client: the inner ones may have no id
        return response_id is not None or not place.in_call

    def _inside(self, span: Span, place: _Place) -> _Place:
        name = agent_name(span)
        if name is not None:
            chosen = self.agent_match is None or re.search(self.agent_match, name)
            place = place._replace(agent=name if chosen else None)
        return place._replace(in_reward=True) if _is_reward(span) else place


class _Place(NamedTuple):
    """Where in the tree a span is."""

    agent: str | None
    """The chosen agent that acts there; `*` if every call is chosen; None if none."""
    in_reward: bool = False
    in_call: bool = False


class _Tree:
    """Spans by their parents, siblings by when they began."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_time or 0.0)
        known = {span.span_id for span in spans}
        self._children: dict[str | None, list[Span]] = {}
        for span in self.spans:
            self._children.setdefault(span.parent_id, []).append(span)
        self.roots = [span for span in self.spans if span.parent_id not in known]

    def children(self, span: Span) -> list[Span]:
        return self._children.get(span.span_id, [])

    def families(self) -> Iterator[list[Span]]:
        """The children of each parent."""
        return iter(self._children.values())


def _by_time(tree: _Tree, calls: Sequence[Span]) -> dict[str, float]:
    return _matched(tree.spans, {call.span_id for call in calls})


def _by_sibling(tree: _Tree, calls: Sequence[Span]) -> dict[str, float]:
    wanted = {call.span_id for call in calls}
    families = [_matched(family, wanted) for family in tree.families()]
    return {span_id: reward for family in families for span_id, reward in family.items()}


def _matched(spans: Sequence[Span], calls: set[str]) -> dict[str, float]:
    """Each reward goes to the latest call that had ended, and has none."""
    before: list[Span] = []
    rewards: dict[str, float] = {}
    for span in spans:
        if span.span_id in calls:
            before.append(span)
        value = get_reward_value(span)
        if value is not None:
            ended = (s for s in reversed(before) if (s.end_time or 0.0) <= (span.start_time or 0.0))
            call = next((s for s in ended if s.span_id not in rewards), None)
            if call is not None:
                rewards[call.span_id] = value
    return rewards


def agent_name(span: Span) -> str | None:
    """The agent that a span says acts inside it, in whichever framework's words."""
    said = span.attributes
    candidates = (
        said.get("agent.name"),
        said.get("operation.name") if said.get("agentops.span.kind") == "agent" else None,
        said.get("recipient_agent_type"),
        said.get("langchain.chain.type"),
        said.get("executor.id"),
        said.get(f"{_INPUT}.name") if said.get("type") == "agent" else None,
        said.get("lc_name") if span.name.startswith("langchain.Chain.") else None,
        c.agent_name_of(said),
    )
    return next((str(name) for name in candidates if name is not None), None)


def _is_reward(span: Span) -> bool:
    is_function = span.attributes.get(names.OPERATION_NAME) == names.REWARD
    return get_reward_value(span) is not None or (span.name == names.OPERATION and is_function)


# --- one call -------------------------------------------------------------------------------
def triplet_of(call: Call) -> Triplet:
    """What was asked and answered, in tokens and in words; no reward."""
    said = call.span.attributes
    asked = _first_below(said, "gen_ai.prompt", f"{_INPUT}.messages")
    answered = _first_below(said, "gen_ai.completion", f"{_OUTPUT}.choices")
    request = _first_below(said, "gen_ai.request", _INPUT)
    response = _first_below(said, "gen_ai.response", _OUTPUT)
    reply = {"token_ids": _first_ids(said, _RESPONSE_IDS), "raw_content": answered}
    logprobs = said.get("logprobs.content")
    if isinstance(logprobs, str):
        reply["logprobs"] = json.loads(logprobs)
    return Triplet(
        prompt={
            "token_ids": _first_ids(said, _PROMPT_IDS),
            "raw_content": asked,
            "image_urls": list(_image_urls(asked)),
        },
        response=reply,
        metadata={
            "request": _without(request, "messages"),
            "response": _without(response, "choices", "prompt_token_ids", "response_token_ids"),
            "response_id": _first_text(said, _RESPONSE_ID),
            "agent_name": call.agent,
        },
    )


def _has_tokens(triplet: Triplet) -> bool:
    if triplet.prompt["token_ids"] and triplet.response["token_ids"]:
        return True
    log.warning("a model call without token ids is left out: %s", triplet.metadata["response_id"])
    return False


def _first_text(attributes: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((v for key in keys if isinstance(v := attributes.get(key), str)), None)


def _first_ids(attributes: Mapping[str, Any], keys: Sequence[str]) -> list[int]:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
            return list(value)
    return []


def _first_below(attributes: Mapping[str, Any], *keys: str) -> Any:
    return next((found for key in keys if (found := nested(attributes, key))), None)


def _without(values: Any, *left_out: str) -> Any:
    if not isinstance(values, dict):
        return values
    return {key: value for key, value in values.items() if key not in left_out}


def _image_urls(asked: Any) -> Iterator[str]:
    for message in asked if isinstance(asked, list) else [asked]:
        content = message.get("content") if isinstance(message, dict) else None
        for part in _parts(content):
            if isinstance(part, dict) and part.get("type") == "image_url":
                image = part.get("image_url")
                if isinstance(image, dict) and "url" in image:
                    yield image["url"]


def _parts(content: Any) -> list[Any]:
    """The parts of a message; none of plain text."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except json.JSONDecodeError:
            return []
    return content if isinstance(content, list) else []
