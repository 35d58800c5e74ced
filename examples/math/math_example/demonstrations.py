"""Imperfect demonstrations of the agent, for the warm start before reinforcement learning.

They teach the model to read the app's prompts, to call the calculator and to answer. They also
contain mistakes that reinforcement learning can remove; each kind of mistake has its own rate.
Systematic errors are frequent: left-out parentheses, an answer without the calculator, a number of
the problem as the answer. Mistakes about the meaning of a phrase (plus or minus) are rare, because
reinforcement cannot help a model that ignores the phrase altogether.
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
"""Number of demonstrations of a warm start."""

MISTAKE_RATES: Final[Mapping[Mistake, float]] = {
    "parentheses": 0.6,
    "operation": 0.08,
    "order": 0.25,
    "step": 0.1,
}
"""Mistake → its probability, in an expression in which it is possible; at most one is made."""

GUESS_RATE: Final = 0.6
"""Probability of an answer without the calculator, where a call of it is due."""

ECHO_RATE: Final = 0.3
"""Probability that the answer is a number of the problem instead of the calculator's result.

It is well below one half. A model without a preference may settle on the wrong number; whole groups
of rollouts then have no variance and teach it nothing.
"""

ANSWER_SHARE: Final = 0.45
"""Share of demonstrations that show an answer after the calculator's result; the others show the
turn before.
"""

SYSTEM: Final = "Use the calculator. End with #### and the answer."
"""System message of the app."""

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
    """Return demonstrations on newly generated problems with the words and plots of train.

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
    """Return the problem's expression as text, sometimes with a mistake."""
    for mistake, text in mistakes(problem.expression).items():
        if rng.random() < MISTAKE_RATES[mistake]:
            return text
    return write(problem.expression)


def _echo(problem: Problem, rng: random.Random) -> str:
    """Return one of the problem's numbers at random; none of them is the answer (see `worlds`)."""
    return str(rng.choice(numbers(problem.expression)))


def _result(expression: str) -> str:
    """Return the calculator's output for an expression."""
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
