"""Small apps that use Anthropic's SDK, directly or by LangChain."""

from __future__ import annotations

from functools import cache
from typing import Any

import anthropic
from toy_apps import letters  # type: ignore[import-not-found]

import lightspan

ENDPOINT: Any = {"base_url": "http://127.0.0.1:9", "api_key": "unused"}
client = anthropic.Anthropic(**ENDPOINT)
TOOL: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@lightspan.rollout
def plain(task: dict[str, Any]) -> float:
    """Call a writer, streamed and with a tool, and a checker."""
    asked: dict[str, Any] = {"model": "claude", "tools": [TOOL], "system": "Write."}
    said: Any = [{"role": "user", "content": task["q"]}]
    with (
        lightspan.agent("writer"),
        client.messages.stream(max_tokens=4, messages=said, **asked) as stream,
    ):
        text = "".join(stream.text_stream)
    with lightspan.agent("checker"):
        client.messages.create(model="claude", max_tokens=2, messages=said)
    return float(letters(text))


@lightspan.rollout
async def concurrent(task: dict[str, Any]) -> float:
    """Call the asynchronous client, with raw responses and streamed."""
    said: Any = [{"role": "user", "content": task["q"]}]
    asked: dict[str, Any] = {"model": "claude", "max_tokens": 4, "messages": said}
    async with anthropic.AsyncAnthropic(**ENDPOINT) as own:
        with lightspan.agent("writer"):
            async with await own.messages.create(**asked, stream=True) as stream:
                events = [event async for event in stream]
            raw = await own.messages.with_raw_response.create(**asked)
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    message: Any = await raw.parse()
    return float(letters(text + message.content[0].text))


@cache
def _graph() -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langgraph.graph import END, START, MessagesState, StateGraph

    import lightspan_langgraph

    @tool
    def look() -> str:
        """Looks."""
        return "seen"

    lightspan_langgraph.instrument()
    model: Any = ChatAnthropic(model="claude-x", max_tokens=4, **ENDPOINT)  # type: ignore[call-arg]
    with_tools = model.bind_tools([look])
    graph = StateGraph(MessagesState)
    graph.add_node("writer", lambda state: {"messages": [with_tools.invoke(state["messages"])]})
    graph.add_node("checker", lambda state: {"messages": [model.invoke("fine?")]})
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    return graph.compile()


@lightspan.rollout
def graph(task: dict[str, Any]) -> float:
    """Call `ChatAnthropic` in a LangGraph app whose messages are streamed."""
    text = ""
    asked = {"messages": [("user", task["q"])]}
    for message, metadata in _graph().stream(asked, stream_mode="messages"):
        if metadata["langgraph_node"] == "writer":
            text += message.text
    return float(letters(text))
