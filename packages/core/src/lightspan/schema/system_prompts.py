"""The instructions that an agent's request carries: found, and others put in their place.

They are the first message of a chat completion, where that is a system or developer message; the
`instructions` of a response; Anthropic's `system`. Whatever the app sends otherwise (further system
messages, several parts, a prompt that the provider keeps) is left alone, for a reason that has a
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.schema.prompts import LearnedPrompt, PromptTemplate, filled_as
from lightspan.schema.routing import matches

Body = Mapping[str, Any]
"""Of a request, as JSON."""

NO_INSTRUCTIONS: Final = "the request has no system message or instructions"
SEVERAL_PARTS: Final = "its instructions come in several parts"
LATE: Final = "a system message stands after other messages"
STORED: Final = "its prompt is stored at the provider (prompt=)"
COMPLETION: Final = "it is a text completion, which has no instructions"
OTHER_TEXT: Final = "the text is not one that was found before"
ASKS: Final = "the agent asks for its text by name (lightspan.prompt)"
NEW_AGENT: Final = "the agent made no call in the first evaluation"
OTHER_PROMPT: Final = "the app gives another text than in the first evaluation"

_ROLES: Final = ("system", "developer")
_PARTS: Final = ("text", "input_text")


class Slot(NamedTuple):
    """Where the instructions stand in a body."""

    key: str
    item: int | None
    """Which of several messages; None: the key's own value."""
    part: int | None
    """Which part of its content; None: the content is the text."""
    text: str

    def put(self, body: Body, text: str) -> Any:
        """The value of `key` with another text: a copy, of which all else is as it was."""
        value = body[self.key]
        if self.item is None:
            return _put(value, self.part, text)
        items = list(value)
        message = items[self.item]
        items[self.item] = {**message, "content": _put(message["content"], self.part, text)}
        return items


def _put(content: Any, part: int | None, text: str) -> Any:
    if part is None:
        return text
    parts = list(content)
    parts[part] = {**parts[part], "text": text}  # with its `cache_control`
    return parts


def find(body: Body) -> Slot | str:
    """Where the instructions of a request stand; else why they are left alone."""
    if "messages" not in body and body.get("prompt") is not None:
        return STORED if isinstance(body["prompt"], Mapping) else COMPLETION
    key = "messages" if "messages" in body else "input"
    items = body.get(key)
    items = items if isinstance(items, list | tuple) else ()
    systems = [number for number, item in enumerate(items) if _role(item) in _ROLES]
    own = [name for name in ("instructions", "system") if body.get(name)]
    if own:
        if systems or len(own) > 1:
            return SEVERAL_PARTS
        return _slot(own[0], None, body[own[0]])
    if not systems:
        return NO_INSTRUCTIONS
    if systems != [0]:
        return SEVERAL_PARTS if systems == [*range(len(systems))] else LATE
    content = items[0].get("content") if isinstance(items[0], Mapping) else None
    return _slot(key, 0, content)


def _role(item: Any) -> Any:
    # an app may send the SDK's own objects back, such as what the model said
    return item.get("role") if isinstance(item, Mapping) else getattr(item, "role", None)


def _slot(key: str, item: int | None, content: Any) -> Slot | str:
    if isinstance(content, str):
        return Slot(key, item, None, content) if content.strip() else NO_INSTRUCTIONS
    if not isinstance(content, list | tuple) or not content:
        return NO_INSTRUCTIONS
    part = content[0]
    is_text = isinstance(part, Mapping) and part.get("type") in _PARTS
    if len(content) > 1 or not is_text or not isinstance(part.get("text"), str):
        return SEVERAL_PARTS
    return Slot(key, item, 0, part["text"])


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """What the instructions of one agent are, and what they are to be."""

    agent: str
    """Its path."""
    template: str
    text: str
    """Another template with the same placeholders."""

    def of(self, text: str) -> str | None:
        """What is to be sent for this text; None: it is none of the template."""
        values = PromptTemplate(self.template).match(text)
        if values is None:
            return None
        return text if self.text == self.template else PromptTemplate(self.text).format(**values)


class Reading(NamedTuple):
    """What a request says to its model, and what it is to say."""

    original: str | None
    """The instructions that the app gave it; None where they cannot be replaced."""
    sent: str | None = None
    """What is to be sent in their place; it may be equal. None: the original is sent."""
    reason: str = ""
    """Why it is, unless they are only looked at."""
    slot: Slot | None = None

    @property
    def is_changed(self) -> bool:
        """Whether another text is to be sent."""
        return self.sent is not None and self.sent != self.original


class Instructions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="instructions"
):
    """What the agents of an attempt are told: travels with its resources.

    Args:
        surveyed: patterns of agents and of prompts whose texts are written down.
        rewrites: of agents, each path once.
        prompts: those that the app asks for by name (`lightspan.prompt`).
        left_out: agents that match a pattern and have no rewrite, and why.
    """

    surveyed: list[str] = msgspec.field(default_factory=list)
    rewrites: list[Rewrite] = msgspec.field(default_factory=list)
    prompts: dict[str, LearnedPrompt] = msgspec.field(default_factory=dict)
    left_out: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_survey(self) -> bool:
        """Whether texts are only written down: of prompts all, for who asks in vain for one."""
        return bool(self.surveyed) and not self.rewrites and not self.prompts

    def concerns(self, path: str) -> bool:
        """Whether the agent at this path, or the prompt of this name, is one of those meant."""
        return (
            any(rewrite.agent == path for rewrite in self.rewrites)
            or path in self.prompts
            or any(matches(pattern, path) for pattern in self.surveyed)
        )

    def read(self, path: str, body: Body) -> Reading | None:
        """What the request of the agent at this path is to say; None: nothing is meant for it."""
        rewrite = next((each for each in self.rewrites if each.agent == path), None)
        if rewrite is None and not any(matches(pattern, path) for pattern in self.surveyed):
            return None
        slot = find(body)
        if isinstance(slot, str):
            return Reading(None, reason=slot)
        if rewrite is None:
            reason = "" if self.is_survey else self.left_out.get(path, NEW_AGENT)
            return Reading(slot.text, reason=reason, slot=slot)
        sent = rewrite.of(slot.text)
        return Reading(slot.text, sent, "" if sent is not None else OTHER_TEXT, slot)

    def text_of(self, name: str, text: str) -> Reading | None:
        """The same of a prompt that the app asks for."""
        learned = self.prompts.get(name)
        if learned is None:
            return Reading(text) if self.is_survey else None
        if learned.before.template != text:
            return Reading(text, reason=OTHER_PROMPT)
        if learned.after == learned.before:
            return Reading(text, text)
        # one with placeholders is filled by the app, braces and all
        after = learned.after
        return Reading(text, filled_as(text, after.template) if after.fields else after.format())
