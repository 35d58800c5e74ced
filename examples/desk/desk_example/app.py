"""An ordinary app that says which department a customer's message is for: one call of a model.

Its prompt is written as chats often are: a line that begins with `system:`, `user:` or `assistant:`
begins a turn. The one that it has says too little: it was written for a larger model.
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
"""What an answer may be wrapped in."""


def route(message: str, prompt: str = PROMPT, model: str | None = None) -> str | None:
    """The department that a message is for; None: the model named none that there is.

    The endpoint is that of OPENAI_BASE_URL, its key that of OPENAI_API_KEY.
    """
    reply = _client(os.environ.get("OPENAI_BASE_URL")).chat.completions.create(
        model=model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        messages=turns(prompt, message),
        temperature=0,
        max_tokens=4,
    )
    return parse_department(reply.choices[0].message.content or "")


def turns(prompt: str, message: str) -> list[Any]:
    """The turns of a prompt; what is no turn is the user's. A message begins none."""
    made: list[Any] = []
    for part in filter(str.strip, _BEGINS.split(prompt)):
        turn = _TURN.fullmatch(part)
        role, text = ("user", part) if turn is None else turn.groups()
        made.append({"role": role, "content": text.strip().replace("{message}", message)})
    return made


def parse_department(reply: str) -> str | None:
    """The department that a reply names and nothing else; None if it does not."""
    said = reply.strip(_AROUND).lower()
    return said if said in DEPARTMENTS else None


@cache
def _client(base_url: str | None) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url)
