"""A program with Anthropic's plain client: a writer and a checker, with a tool they may call.

The reward is the share of lower-case letters in the writer's answer.
"""

import json
import os

import anthropic

with open(os.environ["LIGHTSPAN_TASK_FILE"]) as file:
    question = json.load(file)["q"]
client = anthropic.Anthropic()
TOOL = {"name": "count", "input_schema": {"type": "object", "properties": {}}}


def ask(agent: str, text: str, limit: int) -> str:
    """Return the answer of an agent."""
    answer = client.messages.create(
        model=agent,
        max_tokens=limit,
        system=f"You are the {agent}.",
        messages=[{"role": "user", "content": text}],
        tools=[TOOL],
    )
    return "".join(block.text for block in answer.content if block.type == "text")


text = ask("writer", question, 6)
ask("checker", "Is it fine?", 4)
print(sum("a" <= letter <= "z" for letter in text) / max(1, len(text)))
