"""A Python program with Anthropic's plain client. It needs no package of lightspan."""

import json
import os
import sys

import anthropic

with open(os.environ["LIGHTSPAN_TASK_FILE"]) as file:
    number = json.load(file)["number"]
gateway = os.environ["LIGHTSPAN_GATEWAY_URL"]


def ask(client: anthropic.Anthropic, model: str, text: str) -> str:
    """Return the model's streamed answer."""
    said = [{"role": "user", "content": text}]
    with client.messages.stream(model=model, max_tokens=50, messages=said) as stream:
        return "".join(stream.text_stream)


usual = anthropic.Anthropic()
planner = anthropic.Anthropic(base_url=f"{gateway}/agents/planner")
writer = anthropic.Anthropic(base_url=f"{gateway}/agents/team/writer")
print(ask(planner, "any", f"plan {number}"), file=sys.stderr)
print(ask(writer, "any", f"write {number}"), file=sys.stderr)
print(ask(usual, "editor", f"edit {number}"), file=sys.stderr)
print(ask(usual, os.environ["LIGHTSPAN_MODEL"], f"{number}"))
assert not any(name.partition(".")[0] == "lightspan" for name in sys.modules)
