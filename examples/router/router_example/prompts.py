"""What the app's agents read and how their answers are understood.

A small pretrained model does as it is shown rather than as it is told, so each agent is shown a few
messages with their answers, as earlier turns of the chat. There are few of them and they are short,
because the model trained on a laptop pays for every token.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_example.phrasings import DEPARTMENTS

MODEL_VARIABLE = "ROUTER_MODEL"
DEFAULT_MODEL = "gpt-5-mini"
"""What is asked, unless the variable names another one."""

ROUTE = f"Which department: {', '.join(DEPARTMENTS)}?"
ROUTED = (
    ("My toy box is broken.", "repair"),
    ("My shirt has not arrived yet.", "delivery"),
    ("There is a mistake on my bill for the rug.", "payment"),
    ("I want to send the mug back and get my money.", "return"),
)
"""What the router is shown: messages about products that no task is about."""

ANSWER = "Which product?"
ANSWERED = (
    ("My toy box is broken.", "toy box"),
    ("My shirt has not arrived yet.", "shirt"),
)
"""What the answerer is shown."""

TEXTS = {
    "payment": "our accountants look into it and write to you within two days.",
    "delivery": "we ask the carrier where it is and write to you today.",
    "return": "here is a label with which you can send it back for free.",
    "repair": "our workshop writes to you today with a date.",
}
"""What a department answers, after the product."""
OTHERWISE = "somebody reads your message and writes to you."

_AROUND = " \t\n\"'.,!"
"""What an answer may be wrapped in."""


def route_prompt(message: str) -> list[tuple[str, str]]:
    """Ask for the department: roles and texts."""
    return _shown(ROUTE, ROUTED, message)


def answer_prompt(message: str) -> list[tuple[str, str]]:
    """Ask for the product: roles and texts."""
    return _shown(ANSWER, ANSWERED, message)


def parse_department(reply: str) -> str | None:
    """The department that a reply names and nothing else; None if it does not."""
    said = reply.strip(_AROUND).lower()
    return said if said in DEPARTMENTS else None


def parse_product(reply: str) -> str:
    """The product that a reply names, without an article."""
    said = reply.strip(_AROUND).lower()
    for article in ("the ", "a ", "an "):
        said = said.removeprefix(article)
    return said


def compose(department: str | None, product: str) -> str:
    """What the customer gets."""
    text = OTHERWISE if department is None else TEXTS[department]
    return f"About your {product}: {text}"


def _shown(system: str, examples: Sequence[tuple[str, str]], message: str) -> list[tuple[str, str]]:
    turns = [("system", system)]
    for asked, said in examples:
        turns += [("user", asked), ("assistant", said)]
    return [*turns, ("user", message)]
