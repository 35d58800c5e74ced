"""A help desk in LangGraph that knows nothing of lightspan.

It has two agents, whose prompts are filled in as usual, and uses LangChain's cache. The model's
endpoint is `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import datetime
import os
from typing import Any, TypedDict

from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

ROUTER = """You are the router of a help desk.
Today is {today}.

What is known of the customer:
{records}

Say which desk the mail is for."""
CLERK = "You are a clerk of the {desk} desk. Be brief."

set_llm_cache(InMemoryCache())


class Mail(TypedDict, total=False):
    text: str
    records: list[str]
    desk: str
    answer: str


def chat() -> ChatOpenAI:
    return ChatOpenAI(model="own", base_url=os.environ["OPENAI_BASE_URL"], max_retries=0)


def router(state: Mail) -> dict[str, Any]:
    told = ROUTER.format(
        today=datetime.datetime.now(datetime.UTC).date().isoformat(),
        records="\n".join(f"- {line}" for line in state["records"]),
    )
    return {"desk": chat().invoke([("system", told), ("user", state["text"])]).text}


def clerk(state: Mail) -> dict[str, Any]:
    told = CLERK.format(desk=state["desk"] if len(state["desk"]) < 20 else "front")
    return {"answer": chat().invoke([("system", told), ("user", state["text"])]).text}


def build() -> Any:
    graph: Any = StateGraph(Mail)
    graph.add_node("router", router)
    graph.add_node("clerk", clerk)
    graph.add_edge(START, "router")
    graph.add_edge("router", "clerk")
    graph.add_edge("clerk", END)
    return graph.compile()


graph = build()
