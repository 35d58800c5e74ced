"""A LangChain agent with a tool that runs queries; one of the queries fails."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import lightspan
import lightspan_langgraph

lightspan_langgraph.instrument()


@tool
def sql(query: str) -> str:
    """Run a query."""
    if "nowhere" in query:
        raise ValueError("no such table: nowhere")
    return "[[1]]"


@wrap_tool_call  # type: ignore[arg-type]
def report_errors(request: Any, handler: Any) -> Any:
    """Return a tool's error to the model, as agents usually do."""
    try:
        return handler(request)
    except ValueError as error:
        return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")


model = ChatOpenAI(model="any", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("unused"))
agent = create_agent(model, [sql], name="writer", middleware=[report_errors])


@lightspan.rollout
def solve(task: dict[str, Any]) -> float:
    """Run the agent; the task contains the reward."""
    agent.invoke({"messages": [("user", task["q"])]})
    return float(task["reward"])
