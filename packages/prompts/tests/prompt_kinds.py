"""Kinds of rendered instructions, with the parts that a candidate may and may not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

REACT_TOOLS = """
You ONLY have access to the following tools, and should NEVER make up tools that are not listed \
here:

Tool Name: look
Tool Arguments: {'what': {'description': None, 'type': 'str'}}
Tool Description: Look something up.

IMPORTANT: Use the following format in your response:

```
Thought: you should always think about what to do
Action: the action to take, only one name of [look], just the name, exactly as it's written.
Action Input: the input to the action, just a simple JSON object, enclosed in curly braces
Observation: the result of the action
```

Once all necessary information is gathered, return the following format:

```
Thought: I now know the final answer
Final Answer: the final answer to the original input question
```"""
NOUNS = (
    "tariff ledger harbour violet engine sparrow granite meadow cipher lantern orchard velvet "
    "turbine compass monsoon archive quartz falcon saddle beacon"
)
WORDS = NOUNS.split()


def _prose(n: int, count: int) -> str:
    return " ".join(random.Random(f"{n}/{count}").choices(WORDS, k=count))


class Kind(NamedTuple):
    """A kind of instructions."""

    text: Callable[[int], str]
    """Text of call `n`."""
    kept: Callable[[int], list[str]] = lambda n: []
    """Parts that no candidate may change."""
    free: tuple[str, ...] = ()
    """Parts that a candidate may change."""


KINDS: dict[str, Kind] = {
    # as frameworks send them
    "crewai inputs": Kind(
        lambda n: (
            f"You are Researcher of {_prose(n, 2)}. You know every archive of it.\n"
            f"Your personal goal is: Find out about {_prose(n, 3)} by the end of the day"
        ),
        lambda n: [_prose(n, 2), _prose(n, 3)],
        ("You know every archive of it.",),
    ),
    "crewai react": Kind(
        lambda n: f"You are Scout. You look first.\nYour personal goal is: Answer{REACT_TOOLS}",
        lambda n: ["Tool Arguments: {'what'", "Action Input: the input", "Final Answer: the final"],
        ("You look first.", "NEVER make up tools"),
    ),
    "langgraph retrieval": Kind(
        lambda n: (
            "You are an assistant for question-answering tasks. Use the following pieces of "
            "retrieved context to answer the question. If you don't know the answer, just say that "
            f"you don't know.\n\n{_prose(n, 60)}\n\n{_prose(n + 1000, 40)}"
        ),
        lambda n: [_prose(n, 60), _prose(n + 1000, 40)],
        ("just say that you don't know.",),
    ),
    # as people write them
    "date and time": Kind(
        lambda n: f"Today is Tuesday, November {n % 28 + 1}, 2026, {n % 12}:30 PM. Be polite.",
        lambda n: [f"November {n % 28 + 1}, 2026"],
        ("Be polite.",),
    ),
    "one day": Kind(  # all calls on one day
        lambda n: "You plan trips. It is 2026-11-24 09:15:00 UTC now. Say when to leave.",
        lambda n: ["2026-11-24 09:15:00 UTC"],
        ("Say when to leave.",),
    ),
    "ids": Kind(
        lambda n: f"Ticket 1f0e7b1c-9a4d-4f0e-8d3a-{n:012d} of client {10**7 + n}: write to them.",
        lambda n: [f"1f0e7b1c-9a4d-4f0e-8d3a-{n:012d}", f"{10**7 + n}"],
        ("write to them.",),
    ),
    "paths": Kind(
        lambda n: f"You edit files under /srv/work/{_prose(n, 1)}/src only. Read README.md first.",
        lambda n: [f"/srv/work/{_prose(n, 1)}/src"],
        ("Read README.md first.",),
    ),
    "json form": Kind(
        lambda n: 'Judge the text. Answer as {"verdict": "<good or bad>", "why": "…"} and no more.',
        lambda n: ['{"verdict": "<good or bad>", "why": "…"}'],
        ("Judge the text.",),
    ),
    "tools in tags": Kind(
        lambda n: (
            "Use tools.\n<tools>\n- look(what)\n- count(what)\n</tools>\nThink before you act"
        ),
        lambda n: ["<tools>\n- look(what)\n- count(what)\n</tools>"],
        ("Think before you act",),
    ),
    "bullets": Kind(
        lambda n: (
            "What you remember of the user:\n"
            + "".join(f"- {_prose(n * 10 + line, 5)}\n" for line in range(n % 4 + 1))
            + "\nAnswer in the language of the user, briefly and to the point."
        ),
        lambda n: [_prose(n * 10, 5)],
        ("Answer in the language of the user, briefly and to the point.",),
    ),
    "a name": Kind(
        lambda n: f"You talk to {_prose(n, 1).title()}, who is here since {2000 + n % 20}. Help.",
        lambda n: [_prose(n, 1).title()],
        ("You talk to ",),
    ),
    "braces of its own": Kind(
        lambda n: f"Fill {{name}} and {{{{x}}}} in yourself, for a letter on {_prose(n, 3)}. Sign.",
        lambda n: [_prose(n, 3)],
        ("Fill {name} and {{x}} in yourself",),
    ),
    "other scripts": Kind(
        lambda n: (
            f"あなたは翻訳者です。文脈: {_prose(n, 4)}。\n"
            "丁寧に、簡潔に、そして正確に訳してください。"
        ),
        lambda n: [_prose(n, 4)],
        ("丁寧に、簡潔に、そして正確に訳してください。",),
    ),
}
