"""What the agent reads.

A prompt is one state, not the story so far: the rules, what came of the last call, and after an
empty line the observation, which is all that a choice depends on. The texts are short on purpose:
the model trained on a laptop pays for every token.
"""

from __future__ import annotations

RULES = (
    "Take the crown. Call one tool. What is lit leads to the nearest thing to take. "
    "A key works once. A slide goes one way."
)
"""The instructions of the agent."""
SAID_NOTHING = "Call a tool."
"""What comes of an answer without one."""


def describe(told: str, observation: str) -> str:
    """The prompt after the rules."""
    return f"{told}\n\n{observation}"


def observation_of(prompt: str) -> str:
    """The observation in a prompt: equal for two calls in the same state."""
    return prompt.rpartition("\n\n")[2]
