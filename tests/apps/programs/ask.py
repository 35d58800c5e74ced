"""A Python program with the plain OpenAI client. It needs no package of lightspan."""

import json
import os
import sys

import openai

with open(os.environ["LIGHTSPAN_TASK_FILE"]) as file:
    number = json.load(file)["number"]
gateway = os.environ["LIGHTSPAN_GATEWAY_URL"]


def ask(client: openai.OpenAI, model: str, text: str) -> str:
    """Return the model's answer."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}]
    )
    return reply.choices[0].message.content or ""


usual = openai.OpenAI()
planner = openai.OpenAI(base_url=f"{gateway}/agents/planner/v1")
writer = openai.OpenAI(base_url=f"{gateway}/agents/team/writer/v1")
print(ask(planner, "any", f"plan {number}"), file=sys.stderr)
print(ask(writer, "any", f"write {number}"), file=sys.stderr)
print(ask(usual, "editor", f"edit {number}"), file=sys.stderr)
print(ask(usual, os.environ["LIGHTSPAN_MODEL"], f"{number}"))
assert not any(name.partition(".")[0] == "lightspan" for name in sys.modules)
