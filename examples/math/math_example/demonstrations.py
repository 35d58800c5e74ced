"""Imperfect demonstrations of the agent: the warm start before reinforcement learning.

They teach the model to read the app's prompts, to call the calculator and to answer, and leave it
something to learn: each kind of mistake occurs at a rate of its own. Systematic errors (left-out
parentheses, an answer without the calculator, a number of the problem given as the answer) are
frequent. What depends on a phrase (plus or minus) is mostly right, because a model that ignores
the phrase altogether can't be brought back by reinforcement.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

from math_example.calculator import CalculatorError, evaluate, format_number
from math_example.expressions import Mistake, mistakes, numbers, write
from math_example.worlds import Problem, make_problem

COUNT: Final = 16_000
"""Demonstrations of a warm start."""

MISTAKE_RATES: Final[Mapping[Mistake, float]] = {
    "parentheses": 0.6,
    "operation": 0.08,
    "order": 0.25,
    "step": 0.1,
}
"""How often a demonstrated expression makes a mistake that it leaves room for; one at most."""

GUESS_RATE: Final = 0.6
"""How often the calculator is not asked at all."""

ECHO_RATE: Final = 0.3
"""How often the answer is a number of the problem instead of the calculator's. Well below one half:
a model without a preference may settle on the wrong one, and whole groups without variance then
teach it nothing."""

ANSWER_SHARE: Final = 0.45
"""Demonstrations of the answer; the others are of the call before it."""

SYSTEM: Final = "Use the calculator. End with #### and the answer."
"""What the app says first."""

TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic exactly.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": False,
    },
}
"""The calculator as AutoGen describes it to the model."""


def demonstrate(count: int = COUNT, seed: int = 0) -> list[dict[str, Any]]:
    """Demonstrations about problems of their own, with the words and plots of train.

    Each is a chat, `{"messages": [...], "tools": [...]}`, whose last message is to be imitated.
    Equal arguments give equal lists.
    """
    rng = random.Random(f"demonstrations {seed}")
    return [_demonstration(make_problem("train", rng), rng) for _ in range(count)]


def _demonstration(problem: Problem, rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.text},
    ]
    expression = spoil(problem, rng)
    if rng.random() < ANSWER_SHARE:
        result = _result(expression)
        messages += [_call(expression), {"role": "tool", "content": result}]
        messages.append(_answer(_echo(problem, rng) if rng.random() < ECHO_RATE else result))
    elif rng.random() < GUESS_RATE:
        messages.append(_answer(_echo(problem, rng)))
    else:
        messages.append(_call(expression))
    return {"messages": messages, "tools": [TOOL]}


def spoil(problem: Problem, rng: random.Random) -> str:
    """The problem's expression as text, perhaps with a mistake."""
    for mistake, text in mistakes(problem.expression).items():
        if rng.random() < MISTAKE_RATES[mistake]:
            return text
    return write(problem.expression)


def _echo(problem: Problem, rng: random.Random) -> str:
    """One of the problem's numbers; never the answer (see `worlds`)."""
    return str(rng.choice(numbers(problem.expression)))


def _result(expression: str) -> str:
    """What the calculator says."""
    try:
        return format_number(evaluate(expression))
    except CalculatorError as error:
        return f"Error executing tool calculator: {error}"


def _call(expression: str) -> dict[str, Any]:
    arguments = json.dumps({"expression": expression})
    function = {"name": "calculator", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def _answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"#### {number}"}
