"""Identify agents by their system prompts, such as one that writes titles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightspan.schema.genai_messages import mappings_in
from lightspan.schema.routing import Routing


def agent_of_prompt(routing: Routing, body: Mapping[str, Any]) -> str | None:
    """Return the agent whose pattern of system prompts matches a request; None if none does.

    The first rule that matches applies. A pattern matches if the whole system prompt, or one of its
    parts, has that form. `*` in a pattern matches any text, also several lines.

    Args:
        routing: rules, of which some have a pattern (`Rule.system`).
        body: the request, in any API.
    """
    rules = [rule for rule in routing.rules if rule.system]
    if not rules:
        return None
    texts = list(_system_texts(body))
    texts.append("\n".join(texts))
    for rule in rules:
        pattern = re.compile(".*".join(map(re.escape, rule.system.split("*"))), re.DOTALL)
        if any(pattern.fullmatch(text.strip()) for text in texts):
            return rule.pattern
    return None


def _system_texts(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a request's system prompt."""
    yield from _texts(body.get("system"))
    yield from _texts(body.get("instructions"))
    for key in ("messages", "input"):
        for message in mappings_in(body.get(key)):
            if message.get("role") in ("system", "developer"):
                yield from _texts(message.get("content"))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in mappings_in(content):
        if isinstance(part.get("text"), str):
            yield part["text"]
