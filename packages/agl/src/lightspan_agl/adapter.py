"""Adapters: selection of agents, and conversion of spans into messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final, TypedDict

from lightspan.errors import UnsupportedError
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Span, SpanKind
from lightspan_agl._agent_match import globs_of
from lightspan_agl._unsupported import TRIPLETS, refuse_names as _refuse_names

__all__ = ["LlmProxyTraceToTriplet", "TraceToMessages", "TracerTraceToTriplet"]
__getattr__ = _refuse_names(__name__)


_OPTIONS: Final = ("agent_match", "repair_hierarchy")
"""Options of `TracerTraceToTriplet`."""


class TracerTraceToTriplet:
    """The adapter of `VERL`: selects the agents to train.

    Args:
        agent_match: a regular expression searched in agents' names. It may use plain text, `^`,
            `$`, `.*` and `|`. None selects all agents.
        repair_hierarchy: has no effect, because lightspan knows the agent of each model call. If it
            is False, a note is printed when training starts.
        options: other options of Agent Lightning, all of which are refused.

    Raises:
        UnsupportedError: `agent_match` has other syntax, or there is another option.
    """

    def __init__(
        self, agent_match: str | None = None, repair_hierarchy: bool = True, **options: Any
    ) -> None:
        if options:
            names = ", ".join(f"{name}={value!r}" for name, value in options.items())
            near = {name: get_close_matches(name, _OPTIONS, cutoff=0.8) for name in options}
            if meant := [f"{found[0]!r} for {name!r}" for name, found in near.items() if found]:
                raise UnsupportedError(
                    f"TracerTraceToTriplet({names}): unknown; did you mean {', '.join(meant)}?"
                )
            raise UnsupportedError(
                f"TracerTraceToTriplet({names}): leave it out. Calls are recorded with their "
                "agents and tokens, and the reward is the rollout's; for rewards of single calls "
                "there is lightspan.LightningRL(credit=)"
            )
        self.agent_match = agent_match
        self.repair_hierarchy = repair_hierarchy
        globs_of(agent_match)

    def adapt(self, source: Any, /) -> Any:
        """Raise `UnsupportedError`: lightspan makes no triplets from spans."""
        raise UnsupportedError(f"{type(self).__name__}.adapt(spans): {TRIPLETS}")

    __call__ = adapt


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """The adapter of `VERL` that selects every agent."""

    def __init__(self) -> None:
        super().__init__()


class Conversation(TypedDict):
    """One model call in the JSON format in which OpenAI takes examples for fine-tuning."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class TraceToMessages:
    """Convert spans of model calls into chat messages.

    Images, sounds and files are parts with the type `blob` or `uri`, which OpenAI's fine-tuning
    does not take: spans have references in place of them. Reasoning is in `reasoning_content`.
    """

    def adapt(self, source: Sequence[Span], /) -> list[Conversation]:
        """Return the conversation of each model call, in the order of the spans.

        The answers of a call with several choices follow one another, as in Agent Lightning.
        """
        return [_conversation(span) for span in source if span.kind is SpanKind.LLM]

    __call__ = adapt


def _conversation(span: Span) -> Conversation:
    tools = json.loads(str(span.attributes.get(c.TOOL_DEFINITIONS, "null")))
    sent = genai_messages.input_messages_of(span.attributes)
    recorded = json.loads(str(span.attributes.get(c.INPUT_MESSAGES, "[]")))
    for message, original in zip(sent, recorded, strict=True):
        if original["role"] == "developer":  # is `system` in `sent`
            message["role"] = "developer"
    return {
        "messages": [
            *sent,
            *genai_messages.output_messages_of(span.attributes),
        ],
        "tools": tools or None,
    }
