"""Apps for dry runs whose agents a framework names: by its spans, by an adapter; and requests that
no SDK makes."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from opentelemetry.sdk.trace import TracerProvider

import lightspan
import lightspan_otel as otel

provider = TracerProvider()
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


def _ask(text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    return (
        client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        or ""
    )


def _agent(name: str, library: str) -> Any:
    """Its span, as Pydantic AI and most others make it; heard in the runner's process."""
    otel.instrument(provider)
    who = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    tracer = provider.get_tracer(library)
    return tracer.start_as_current_span(f"invoke_agent {name}", attributes=who)


@lightspan.rollout
def spans(task: dict[str, Any]) -> float:
    """Two agents, the inner one of another framework."""
    with _agent("boss", "opentelemetry-sdk"):
        _ask(task["q"])
        with _agent("writer", "some.framework"):
            return float(_ask(task["q"]))


@lightspan.rollout
def graph(task: dict[str, Any]) -> float:
    """A LangGraph of one node."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    import lightspan_langgraph

    lightspan_langgraph.instrument()
    model = ChatOpenAI(model="any", base_url="http://127.0.0.1:9/v1", api_key="unused")  # type: ignore[arg-type]

    def write(state: dict[str, Any]) -> dict[str, Any]:
        return {"text": model.invoke(state["text"]).content}

    built: Any = StateGraph(dict)
    built.add_node("writer", write)
    built.add_edge(START, "writer")
    built.add_edge("writer", END)
    return float(built.compile().invoke({"text": task["q"]})["text"])


@lightspan.rollout
def past(task: dict[str, Any]) -> float:
    """The writer asks as it should and then by httpx, as a reviewer does who is not trained."""
    body = {"model": "mine", "messages": [{"role": "user", "content": task["q"]}]}
    with lightspan.agent("writer"):
        said = _ask(task["q"])
        httpx.post(f"{task['url']}/chat/completions", json=body).raise_for_status()
    with lightspan.agent("reviewer"):
        httpx.post(f"{task['url']}/chat/completions", json=body).raise_for_status()
    return float(said)


@lightspan.rollout
def past_alone(task: dict[str, Any]) -> float:
    """The writer, whom a framework names, asks by httpx and by nothing else."""
    body = {"model": "mine", "messages": [{"role": "user", "content": task["q"]}]}
    with _agent("writer", "opentelemetry-sdk"):
        httpx.post(f"{task['url']}/chat/completions", json=body).raise_for_status()
    return 1.0
