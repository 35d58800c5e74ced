"""Find and replace the instructions (system prompt) in an agent's request.

The instructions are the first message of a chat completion, if it is a system or developer message,
the `instructions` of a response, or Anthropic's `system`. Instructions in another form are not
replaced, such as further system messages, several parts, or a prompt stored at the provider. The
constants of this module name the reasons for which a request is left unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.schema.prompts import LearnedPrompt, PromptPlace, filled_as
from lightspan.schema.routing import matches

Body = Mapping[str, Any]
"""Body of a request, as JSON."""

NO_INSTRUCTIONS: Final = "the request has no system message or instructions"
SEVERAL_PARTS: Final = "its instructions come in several parts"
LATE: Final = "a system message stands after other messages"
STORED: Final = "its prompt is stored at the provider (prompt=)"
COMPLETION: Final = "it is a text completion, which has no instructions"
OTHER_TEXT: Final = "the text is not one that was found before"
ASKS: Final = "the agent asks for its text by name (lightspan.prompt)"
NEW_AGENT: Final = "the agent made no call in the first evaluation"
OTHER_PROMPT: Final = "the app gives another text than in the first evaluation"
OTHER_TEXTS: Final = (OTHER_TEXT, OTHER_PROMPT)

_ROLES: Final = ("system", "developer")
_PARTS: Final = ("text", "input_text")


class Slot(NamedTuple):
    """The position of the instructions in a body, and their text."""

    key: str
    item: int | None
    """Index, in the list `body[key]`, of the message with the instructions. None if `body[key]`
    itself is the instructions."""
    part: int | None
    """Index of the content part with the instructions; None if the content is a text."""
    text: str

    def put(self, body: Body, text: str) -> Any:
        """Return a copy of `body[self.key]` with `text` as the instructions."""
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
    parts[part] = {**parts[part], "text": text}  # keeps its `cache_control`
    return parts


def find(body: Body) -> Slot | str:
    """Return the position of a request's instructions.

    If they cannot be replaced, return the reason instead, such as `NO_INSTRUCTIONS`.
    """
    if "messages" not in body and body.get("prompt") is not None:
        return STORED if isinstance(body["prompt"], Mapping) else COMPLETION
    key = "messages" if "messages" in body else "input"
    items = body.get(key)
    items = items if isinstance(items, list | tuple) else ()
    systems = [number for number, item in enumerate(items) if _role(item) in _ROLES]
    fields = [name for name in ("instructions", "system") if body.get(name)]
    if fields:
        if systems or len(fields) > 1:
            return SEVERAL_PARTS
        return _slot(fields[0], None, body[fields[0]])
    if not systems:
        return NO_INSTRUCTIONS
    if systems != [0]:
        return SEVERAL_PARTS if systems == [*range(len(systems))] else LATE
    return _slot(key, 0, items[0].get("content") if isinstance(items[0], Mapping) else None)


def _role(item: Any) -> Any:
    # An app may send back objects of the SDK, such as the model's answer.
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


class Reading(NamedTuple):
    """The instructions in an agent's request, and the text to send in their place."""

    original: str | None
    """The app's instructions; None if they cannot be replaced."""
    sent: str | None = None
    """The text to send, which may equal the original; None to send the original."""
    reason: str = ""
    """The reason for which the original is sent although a replacement was wanted; else empty."""
    slot: Slot | None = None


class Instructions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="instructions"
):
    """The prompts to record and the prompts to replace in an attempt.

    It is one of the attempt's resources, the named values that an attempt gets.

    Args:
        surveyed: patterns of the agents and prompts whose texts are recorded.
        prompts: name → replacement of a text of the app. The text is an agent's instructions, with
            at most one replacement per agent path, or a prompt in the app's code
            (`lightspan.prompt`).
        left_out: path of an agent that a pattern matches → reason for which its instructions are
            not replaced.
    """

    surveyed: list[str] = msgspec.field(default_factory=list)
    prompts: dict[str, LearnedPrompt] = msgspec.field(default_factory=dict)
    left_out: dict[str, str] = msgspec.field(default_factory=dict)

    def concerns(self, path: str) -> bool:
        """Return whether the instructions of the agent at `path` are recorded or replaced.

        `path` may also be the name of a prompt in the app's code.
        """
        names = (learned.agent or name for name, learned in self.prompts.items())
        return path in names or any(matches(pattern, path) for pattern in self.surveyed)

    def read(self, path: str, body: Body) -> Reading | None:
        """Return the instructions in a request of the agent at `path`, and their replacement.

        Return None if this agent's instructions are neither recorded nor replaced.
        """
        learned = next((each for each in self.prompts.values() if each.agent == path), None)
        if learned is None and not any(matches(pattern, path) for pattern in self.surveyed):
            return None
        slot = find(body)
        if isinstance(slot, str):
            return Reading(None, reason=slot)
        if learned is None:
            reason = self.left_out.get(path, NEW_AGENT) if self.prompts else ""
            return Reading(slot.text, reason=reason, slot=slot)
        sent = learned.apply(slot.text)
        return Reading(slot.text, sent, "" if sent is not None else OTHER_TEXT, slot)

    def text_of(self, name: str, text: str) -> Reading | None:
        """Return the app's text of the prompt `name`, and its replacement.

        Return None if the prompt is neither recorded nor replaced. As long as `prompts` is empty,
        every prompt is recorded, so that the error for an unknown name can list the known names.

        Args:
            name: the name that the app passes to `lightspan.prompt`.
            text: the text that the app passes to `lightspan.prompt`.
        """
        learned = self.prompts.get(name)
        if learned is None or learned.place is PromptPlace.AGENT:
            return Reading(text) if self.surveyed and not self.prompts else None
        if learned.before.template != text:
            return Reading(text, reason=OTHER_PROMPT)
        # The app fills or uses the template itself, so braces that it doubles stay doubled.
        after = learned.after
        is_own = bool(after.fields) or learned.before.has_doubled_braces
        return Reading(text, filled_as(text, after.template) if is_own else after.format())
