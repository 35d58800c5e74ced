"""Handwritten prompts that the scripted reflection proposes to the search.

A small model imitates examples better than it follows instructions. Prompts with instructions alone
therefore help it little; prompts with example messages and answers, as earlier turns of the chat,
help it more or less. The search does not know which prompts are which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Shown = Sequence[tuple[str, str]]
"""Pairs of a message and its department; their products occur in no task."""

_FOUR: Final[Shown] = (
    ("My toy box is broken.", "repair"),
    ("My shirt has not arrived yet.", "delivery"),
    ("There is a mistake on my bill for the rug.", "payment"),
    ("I want to send the mug back and get my money.", "return"),
)
_EIGHT: Final[Shown] = (
    *_FOUR,
    ("The zip of my jacket came off.", "repair"),
    ("When does the parcel with my bowl come?", "delivery"),
    ("My card was charged too much for the vase.", "payment"),
    ("May I exchange the scarf for another size?", "return"),
)
_TWELVE: Final[Shown] = (
    *_EIGHT,
    ("The clock makes a noise and stops.", "repair"),
    ("The courier did not ring.", "delivery"),
    ("Please send me the invoice for the desk.", "payment"),
    ("The hat is the wrong colour; I want a refund.", "return"),
)
_OTHERS: Final[Shown] = (
    ("When will my parcel arrive?", "delivery"),
    ("My card was charged twice.", "payment"),
    ("My toy box is broken.", "repair"),
    ("I want to send the mug back.", "return"),
    ("The courier did not bring the bowl.", "delivery"),
    ("The invoice for the vase is wrong.", "payment"),
    ("The clock does not work any more.", "repair"),
    ("Can I exchange the scarf?", "return"),
)


def _shown(told: str, messages: Shown) -> str:
    """Return a prompt with instructions `told`, and with answered `messages` as earlier turns."""
    earlier = "".join(f"user: {message}\nassistant: {answer}\n" for message, answer in messages)
    return f"system: {told}\n{earlier}user: {{message}}"


def _told(told: str) -> str:
    return f"system: {told}\nuser: {{message}}"


_WHICH: Final = "Which department: payment, delivery, return, repair?"
_WHAT: Final = (
    "Topics: payment (cards, bills, prices), delivery (parcels, couriers, arrival), return "
    "(sending back, refunds, exchange), repair (broken, faulty)."
)

GOOD: Final = _shown(_WHICH, _EIGHT)
"""Prompt with which the searches of `--good-seed` begin; it is good already."""

CANDIDATES: Final = (
    # told: the model answers the customer, or talks about the message
    _told("You are a helpful assistant of a shop. Be polite and brief."),
    _told("You route mail. Think step by step about who is to see to this message."),
    _told(_WHICH),
    _told("Answer with one word: payment, delivery, return or repair."),
    _told("Classify the message as payment, delivery, return or repair. Say nothing else."),
    _told("You are an expert in customer service with twenty years of experience."),
    _told("Never apologise. Never greet. Name the department and stop."),
    _told(f"{_WHAT} Answer with the topic alone."),
    _told("IMPORTANT: your answer must be exactly one of payment, delivery, return, repair!"),
    _told('Answer as JSON: {"department": "payment|delivery|return|repair"}'),
    "To which department does this message go: payment, delivery, return or repair? {message}",
    "user: {message}\nWhich of payment, delivery, return and repair is this about?",
    "user: Message: {message}\nDepartment:",
    _told("The message is from a customer. Decide whether it is urgent, and for whom it is."),
    _told("Summarise the message in a few words, then name the department."),
    # examples, told rather than shown
    _told(f"{_WHICH}\n" + "\n".join(f"{message} -> {answer}" for message, answer in _EIGHT)),
    _told(
        f"{_WHICH}\n"
        + "\n\n".join(f"Message: {message}\nDepartment: {answer}" for message, answer in _FOUR)
    ),
    # shown: it answers in the form that is asked for, and is right more or less often
    _shown(_WHICH, _FOUR[:1]),
    _shown(_WHICH, _FOUR[:2]),
    _shown(_WHICH, _FOUR),
    _shown(_WHICH, _OTHERS),
    _shown(_WHAT, _OTHERS),
    _shown(_WHICH, _TWELVE),
    GOOD,
)
