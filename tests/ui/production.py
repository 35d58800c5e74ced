"""Record a small service in a store, as production does: `python production.py STORE`.

The texts come from a scripted server; the SDK, the recording and the store are real. Some texts try
to break out of the page that shows them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

import openai

import lightspan
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

ATTACKS: Final = (
    "<script>document.title='broken'; alert(1)</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "<svg onload=alert(1)><a href='javascript:alert(1)'>x</a>",
    "[a](javascript:alert(1)) ![b](https://example.invalid/b.png) https://example.invalid/c",
    "right \u202eto left\u202c, zero\u200bwidth, \u0000 nul",
    "half \ud83d a letter",
    "</pre></article><iframe src=https://example.invalid></iframe>",
    "' onmouseover='alert(1)",
)
LONG: Final = "long " * 2_000_000
"""A text of 10 MB."""
QUESTIONS: Final = ("Where is my parcel?", "Refund order 17", "Do you ship to Oslo?")


class AttackError(Exception):
    """An error of the app whose message is an attack."""


def answer(request: Request) -> Reply:
    """Answer with a tool call first, and with the question's own text afterwards."""
    text = request.last_text
    if text.startswith("Refund") and len(request.messages) == 1:
        return Reply(tool_calls=[ToolCall(name="refund", arguments='{"order": 17}')])
    if text in ATTACKS:
        return Reply(text=text, tool_calls=[ToolCall(name=text, arguments=text)])
    return Reply(text=f"About {text!r}: done." if text in QUESTIONS else text)


def main(store: str) -> None:
    """Record an attempt per question and per attack."""
    with ScriptedServer(answer) as server:
        client = openai.OpenAI(base_url=server.url, api_key="sk-of-the-app")
        recording = lightspan.record(store, service="shop")
        for number, text in enumerate((*QUESTIONS * 4, LONG, *ATTACKS)):
            is_attack = text in ATTACKS
            suppressed = (UnicodeEncodeError, AttackError)  # the SDK cannot send half a letter
            with contextlib.suppress(*suppressed), lightspan.agent(text if is_attack else "helper"):
                lightspan.emit_annotation({"user": f"user-{number % 3}", "tags": [text[:20]]})
                client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": text}]
                )
                if is_attack:
                    raise AttackError(text)
        recording.close()


if __name__ == "__main__":
    main(sys.argv[1])
