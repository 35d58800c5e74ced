"""The texts that the app's agents read, and functions that read their answers.

A small pretrained model imitates examples better than it follows instructions. So each agent's
prompt has a few messages with their answers, as earlier turns of the chat. They are few and short,
because every token costs time on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_example.phrasings import DEPARTMENTS

MODEL_VARIABLE = "ROUTER_MODEL"
DEFAULT_MODEL = "gpt-5-mini"
"""Name of the model, unless the variable ROUTER_MODEL names another."""

ROUTE = f"Which department: {', '.join(DEPARTMENTS)}?"
ROUTED = (
    ("My toy box is broken.", "repair"),
    ("My shirt has not arrived yet.", "delivery"),
    ("There is a mistake on my bill for the rug.", "payment"),
    ("I want to send the mug back and get my money.", "return"),
)
"""Example messages for the router; no task is about their products."""

ANSWER = "Which product?"
ANSWERED = (
    ("My toy box is broken.", "toy box"),
    ("My shirt has not arrived yet.", "shirt"),
)
"""Example messages for the answerer."""

TEXTS = {
    "payment": "our accountants look into it and write to you within two days.",
    "delivery": "we ask the carrier where it is and write to you today.",
    "return": "here is a label with which you can send it back for free.",
    "repair": "our workshop writes to you today with a date.",
}
"""Department → its answer, which follows the product."""
OTHERWISE = "somebody reads your message and writes to you."

_AROUND = " \t\n\"'.,!"
"""Characters that are removed from both ends of an answer."""


def route_prompt(message: str) -> list[tuple[str, str]]:
    """Return the prompt that asks for the department, as (role, text) pairs."""
    return _shown(ROUTE, ROUTED, message)


def answer_prompt(message: str) -> list[tuple[str, str]]:
    """Return the prompt that asks for the product, as (role, text) pairs."""
    return _shown(ANSWER, ANSWERED, message)


def parse_department(reply: str) -> str | None:
    """Return the department if `reply` is the name of one and nothing else, else None."""
    said = reply.strip(_AROUND).lower()
    return said if said in DEPARTMENTS else None


def parse_product(reply: str) -> str:
    """Return the product that a reply names, in lower case and without an article."""
    said = reply.strip(_AROUND).lower()
    for article in ("the ", "a ", "an "):
        said = said.removeprefix(article)
    return said


def compose(department: str | None, product: str) -> str:
    """Return the answer to the customer; None for `department` gives a general answer."""
    text = OTHERWISE if department is None else TEXTS[department]
    return f"About your {product}: {text}"


def _shown(system: str, examples: Sequence[tuple[str, str]], message: str) -> list[tuple[str, str]]:
    turns = [("system", system)]
    for asked, said in examples:
        turns += [("user", asked), ("assistant", said)]
    return [*turns, ("user", message)]
