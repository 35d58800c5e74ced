"""A text-to-SQL agent like that of the original tutorial; only the import of `agl` differs.

`python sql_agent.py` tries the agent out on a few tasks with the endpoint OPENAI_API_BASE.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import sqlite3
from typing import Any, Dict, Literal, Optional, cast  # noqa: UP035 - as scripts of then have it

from langchain.chat_models import init_chat_model
from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

import lightspan_agl as agl

agl.setup_logging(apply_to=[__name__])

logger = logging.getLogger(__name__)


class State(MessagesState):
    """State of the graph for one question."""

    question: str
    query: str
    execution: str
    feedback: str
    num_turns: int
    messages: list[AnyMessage]


class SQLAgent:
    """An agent that writes a query, runs it, checks it, and rewrites it."""

    def __init__(self, db: str, max_turns: int, endpoint: str, replacement: dict[str, Any]) -> None:
        self.db = db
        self.max_turns = max_turns
        self.llm = init_chat_model(
            replacement["model"],
            model_provider="openai",
            openai_api_base=endpoint,
            openai_api_key=os.environ.get("OPENAI_API_KEY", "dummy"),
            temperature=replacement["temperature"],
            max_retries=0,
            max_tokens=16,
        )

    def ask(self, text: str) -> str:
        return str(self.llm.invoke([HumanMessage(content=text)]).content)

    def write_query(self, state: State) -> State:
        """Write a first query."""
        query = self.ask(f"Write SQL for: {state['question']}")
        return cast(State, {**state, "query": query, "num_turns": 1})

    def execute_query(self, state: State) -> State:
        """Run the query; return an error as the result."""
        connection = sqlite3.connect(self.db)
        try:
            execution = str(connection.execute(state["query"]).fetchmany(3))
        except (sqlite3.Error, ValueError, UnicodeError) as error:
            execution = f"Error: {error}"
        finally:
            connection.close()
        return cast(State, {**state, "execution": execution[:80]})

    def check_query(self, state: State) -> State:
        """Check the query and its result."""
        feedback = self.ask(f"Is it right? {state['query'][:80]} gave {state['execution']}")
        return cast(State, {**state, "feedback": feedback})

    def rewrite_query(self, state: State) -> State:
        """Write another query."""
        query = self.ask(f"Rewrite for: {state['question']}. {state['feedback'][:80]}")
        return cast(State, {**state, "query": query, "num_turns": state["num_turns"] + 1})

    def should_continue(self, state: State) -> Literal["__end__", "rewrite_query"]:
        """Rewrite the query unless the check finds it correct."""
        if "CORRECT" in state["feedback"] or state["num_turns"] >= self.max_turns:
            return END
        return "rewrite_query"

    def graph(self) -> CompiledStateGraph[Any]:
        """Return the compiled graph."""
        builder = StateGraph(State)
        builder.add_node(self.write_query)
        builder.add_node(self.execute_query)
        builder.add_node(self.check_query)
        builder.add_node(self.rewrite_query)

        builder.add_edge(START, "write_query")
        builder.add_edge("write_query", "execute_query")
        builder.add_edge("execute_query", "check_query")
        builder.add_conditional_edges("check_query", self.should_continue)
        builder.add_edge("rewrite_query", "execute_query")
        return builder.compile()


def evaluate_query(query: str, ground_truth: str) -> float:
    """Return how similar the queries are, a reward that varies even if no query is right."""
    return difflib.SequenceMatcher(None, query, ground_truth).ratio()


class LitSQLAgent(agl.LitAgent[Dict[str, Any]]):  # noqa: UP006
    """The agent in the form that trainers need."""

    def __init__(self, val_temperature: Optional[float] = None, max_turns: int = 2) -> None:  # noqa: UP045
        super().__init__()
        self.val_temperature = val_temperature
        self.spider_dir = os.environ.get("VERL_SPIDER_DATA_DIR", "data")
        self.max_turns = max_turns

    def rollout(
        self,
        task: Dict[str, Any],  # noqa: UP006
        resources: agl.NamedResources,
        rollout: agl.Rollout,
    ) -> float | None:
        question = task["question"]
        llm: agl.LLM = cast(agl.LLM, resources["main_llm"])
        folder = "database" if rollout.mode == "train" else "test_database"
        database = os.path.join(self.spider_dir, folder, task["db_id"], task["db_id"] + ".sqlite")
        agent = SQLAgent(
            database,
            max_turns=self.max_turns,
            endpoint=llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),  # type: ignore
            replacement=(
                {"model": llm.model, **llm.sampling_parameters}
                if rollout.mode == "train"
                else {
                    "model": llm.model,
                    "temperature": (
                        self.val_temperature
                        if self.val_temperature is not None
                        else llm.sampling_parameters.get("temperature", 0.0)
                    ),
                }
            ),
        ).graph()
        handler = self.tracer.get_langchain_handler()
        result = agent.invoke(
            {"question": question},
            {"callbacks": [handler] if handler else [], "recursion_limit": 100},
        )
        reward = evaluate_query(result["query"], task["query"])
        logger.info("[Rollout %s] Reward: %s", rollout.rollout_id, reward)
        return reward


def debug_sql_agent() -> None:
    """Try the agent out."""
    path = os.path.join(os.environ.get("VERL_SPIDER_DATA_DIR", "data"), "dev.json")
    with open(path) as file:
        tasks = json.load(file)[:10]
    trainer = agl.Trainer(
        n_workers=1,
        initial_resources={
            "main_llm": agl.LLM(
                endpoint=os.environ["OPENAI_API_BASE"],
                model="gpt-4.1-nano",
                sampling_parameters={"temperature": 0.7},
            )
        },
    )
    trainer.dev(LitSQLAgent(), tasks)


if __name__ == "__main__":
    debug_sql_agent()
