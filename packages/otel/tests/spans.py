"""Spans as frameworks make them, and the current agent."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import openai
from opentelemetry.trace import Span, Tracer

from lightspan.capture import context

INVOKES = {"gen_ai.operation.name": "invoke_agent"}


def agent(tracer: Tracer, name: str, **more: Any) -> AbstractContextManager[Span]:
    """Start a span of an agent, with the attributes of the GenAI conventions."""
    attributes = {**INVOKES, "gen_ai.agent.name": name}
    return tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes, **more)


def tool(tracer: Tracer, name: str) -> AbstractContextManager[Span]:
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": f"call_{name}",
        "gen_ai.tool.call.arguments": "secret",
        "gen_ai.agent.name": "of whom it is",
    }
    return tracer.start_as_current_span(f"execute_tool {name}", attributes=attributes)


def path() -> str:
    """Return the current agent path."""
    current = context.current_agent()
    assert current is not None
    return current.path


def say(client: openai.OpenAI, text: str = "hello", **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=messages, **more)
