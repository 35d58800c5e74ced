"""An ordinary app that says which department a customer's message is for: one call of a model.

In its prompt, a line that begins with `system:`, `user:` or `assistant:` begins a message of the
chat. The default prompt was written for a larger model, so a small model often answers wrongly.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import openai

MODEL_VARIABLE = "DESK_MODEL"
DEFAULT_MODEL = "gpt-5-nano"

DEPARTMENTS = ("payment", "delivery", "return", "repair")
PROMPT = """\
system: You read the mail of a shop. Say who is to see to this message.
user: {message}"""

_TURN = re.compile(r"(system|user|assistant): ?(.*)", re.DOTALL)
_BEGINS = re.compile(r"^(?=(?:system|user|assistant):)", re.MULTILINE)
_AROUND = " \t\n\"'.,!*"
"""Characters that are removed from both ends of an answer."""


def route(message: str, prompt: str = PROMPT, model: str | None = None) -> str | None:
    """Return the department that a message is for; None if the model names no department.

    The client reads OPENAI_BASE_URL and OPENAI_API_KEY.

    Args:
        prompt: prompt in which `{message}` stands for the message.
        model: name of the model; None for the variable DESK_MODEL, or for `DEFAULT_MODEL`.
    """
    reply = _client(os.environ.get("OPENAI_BASE_URL")).chat.completions.create(
        model=model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        messages=turns(prompt, message),
        temperature=0,
        max_tokens=4,
    )
    return parse_department(reply.choices[0].message.content or "")


def turns(prompt: str, message: str) -> list[Any]:
    """Return the chat messages of a prompt, with `{message}` replaced by `message`.

    Text before the first line that begins with a role becomes a user message. Role names inside
    `message` begin no chat message.
    """
    made: list[Any] = []
    for part in filter(str.strip, _BEGINS.split(prompt)):
        turn = _TURN.fullmatch(part)
        role, text = ("user", part) if turn is None else turn.groups()
        made.append({"role": role, "content": text.strip().replace("{message}", message)})
    return made


def parse_department(reply: str) -> str | None:
    """Return the department if `reply` is the name of one and nothing else, else None."""
    said = reply.strip(_AROUND).lower()
    return said if said in DEPARTMENTS else None


@cache
def _client(base_url: str | None) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url)
