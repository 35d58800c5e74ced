"""The texts that the agent reads.

A prompt shows one state, not the history: the rules, the result of the last call, an empty line,
and the observation, on which the right choice depends alone. The texts are short, because every
token costs time on a laptop.
"""

from __future__ import annotations

RULES = (
    "Take the crown. Call one tool. What is lit leads to the nearest thing to take. "
    "A key works once. A slide goes one way."
)
"""System message of the agent."""
SAID_NOTHING = "Call a tool."
"""Text in place of a call's result if the model called no tool."""


def describe(told: str, observation: str) -> str:
    """Return the user message: the result of the last call, and the observation."""
    return f"{told}\n\n{observation}"


def observation_of(prompt: str) -> str:
    """Return the observation of a prompt; it is equal for two calls in the same state."""
    return prompt.rpartition("\n\n")[2]
