"""One process of `adapter.py` and `adapters.py`: an app of one kind, in an environment with both.

    python -I peer_adapter.py FRAMEWORK AGENTS KIND URL [DEAL]

The app has `AGENTS` agents that ask the model once each, one after the other. `KIND` says what is
installed: `plain` nothing; `outside` ours with no scope open; `redirected` and `recorded` ours
inside scopes of ten runs each, whose spans go to a SQLite store; `openinference` the framework's
instrumentor (with the one of the OpenAI client where it records no model calls by itself),
`openinference+client` always with it; both with a batch processor whose exporter throws everything
away. Each line on the standard input is a number of runs; the answer is what they cost. With `stop`
behind the number it says when it is about to begin and when it has done them, and waits for a line
each time. `alone` measures, without any app, what ours does for LangGraph where no scope is open.
`DEAL` is a number: another one has types and names meet elsewhere in CPython's method cache.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

ATTEMPT: Final = 10
"""Runs in one scope."""
NAMES: Final = ("writer", "checker", "editor", "judge")
QUESTION: Final = "How many singers are there? " * 8

Run = Callable[[], Any]


# --- the apps -------------------------------------------------------------------------------
def langgraph(url: str, agents: int) -> Run:
    """A graph of nodes, each of which asks ChatOpenAI."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    model = ChatOpenAI(model="model", base_url=url, api_key=lambda: "key", max_retries=0)

    def node(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    for before, name in zip((START, *NAMES), NAMES[:agents], strict=False):
        graph.add_node(name, node)
        graph.add_edge(before, name)
    compiled = graph.compile()
    return lambda: compiled.invoke({"messages": [("user", QUESTION)]})


def autogen(url: str, agents: int) -> Run:
    """A round robin of assistants; one alone is in no team."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core import CancellationToken
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        **dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), False),
        "family": "unknown",
    }
    client = OpenAIChatCompletionClient(
        model="model", base_url=url, api_key="key", model_info=info, max_retries=0
    )
    cast = [AssistantAgent(name, client) for name in NAMES[:agents]]
    team = RoundRobinGroupChat(cast, max_turns=agents) if agents > 1 else None

    async def run() -> None:
        if team is None:
            await cast[0].on_reset(CancellationToken())
            await cast[0].run(task=QUESTION)
            return
        await team.run(task=QUESTION)
        await team.reset()

    return _in_one_loop(run)


def openai_agents(url: str, agents: int) -> Run:
    """Agents run one after the other; the SDK's own upload is off, as it is beside any endpoint."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_trace_processors
    from openai import AsyncOpenAI

    set_trace_processors([])
    client = AsyncOpenAI(base_url=url, api_key="key", max_retries=0)
    model = OpenAIChatCompletionsModel("model", client)
    cast = [Agent(name=name, instructions="Answer.", model=model) for name in NAMES[:agents]]

    async def run() -> None:
        for agent in cast:
            await Runner.run(agent, QUESTION)

    return _in_one_loop(run)


def crewai(url: str, agents: int) -> Run:
    """A sequential crew."""
    logging.disable(logging.WARNING)  # it warns at every call that it does not know the model
    from crewai import LLM, Agent, Crew, Task

    model = LLM("model", provider="openai", base_url=url, api_key="key", max_retries=0)
    cast = [
        Agent(role=name, goal="Answer.", backstory="You answer.", llm=model, max_retry_limit=0)
        for name in NAMES[:agents]
    ]
    tasks = [Task(description=QUESTION, expected_output="A number.", agent=a) for a in cast]
    crew = Crew(agents=cast, tasks=tasks)
    return crew.kickoff


def _in_one_loop(run: Callable[[], Any]) -> Run:
    """A client of a loop cannot be used in another."""
    loop = asyncio.new_event_loop()
    return lambda: loop.run_until_complete(run())


APPS: Final[Mapping[str, Callable[[str, int], Run]]] = {
    "langgraph": langgraph,
    "autogen": autogen,
    "openai_agents": openai_agents,
    "crewai": crewai,
}
CLIENT: Final = ("openai", "OpenAIInstrumentor")
INSTRUMENTORS: Final = {
    "langgraph": [("langchain", "LangChainInstrumentor")],
    "autogen": [("autogen_agentchat", "AutogenAgentChatInstrumentor")],
    "openai_agents": [("openai_agents", "OpenAIAgentsInstrumentor")],
    "crewai": [("crewai", "CrewAIInstrumentor"), CLIENT],
}
"""OpenInference's modules and classes; CrewAI's records no model calls."""


# --- the kinds ------------------------------------------------------------------------------
class Plain:
    """Nothing is installed."""

    def __init__(self, framework: str, agents: int, url: str) -> None:
        self.run = APPS[framework](url, agents)

    def many(self, runs: int) -> None:
        """That many runs."""
        for _ in range(runs):
            self.run()

    def spans(self) -> int:
        """Spans recorded so far."""
        return 0

    def calls(self) -> int:
        """Model calls among them."""
        return 0


class Outside(Plain):
    """Our adapter and shim, and no scope."""

    def __init__(self, framework: str, agents: int, url: str) -> None:
        from lightspan.capture import sdk_instrumentation

        super().__init__(framework, agents, url)
        importlib.import_module(f"lightspan_{framework}").instrument()
        sdk_instrumentation.install()


class Scoped(Plain):
    """Our adapter and shim in scopes, recording to SQLite as a runner does."""

    def __init__(self, framework: str, agents: int, url: str, *, redirected: bool) -> None:
        from lightspan.schema.routing import Route, Routing, Target
        from lightspan.stores import open_store

        super().__init__(framework, agents, url)
        importlib.import_module(f"lightspan_{framework}").instrument()
        policy = Target(route=Route.POLICY, policy="policy")
        self._routing = Routing(default=policy) if redirected else Routing()
        self._gateway = url.removesuffix("/v1") if redirected else None
        self._loop = asyncio.new_event_loop()
        folder = tempfile.mkdtemp()
        self._store = open_store(f"sqlite:///{folder}/run.db")
        self._loop.run_until_complete(self._store.open())
        self._spans = self._calls = 0

    def claims(self, count: int) -> list[Any]:
        """Attempts to run."""
        from lightspan.schema.records import Rollout, new_id

        rollouts = [Rollout(rollout_id=new_id("ro"), task={}, task_id="t") for _ in range(count)]
        self._loop.run_until_complete(self._store.enqueue(rollouts))
        return self._loop.run_until_complete(self._store.claim("bench", count, 3600))

    def many(self, runs: int) -> None:
        for claim in self._ready:
            self._attempt(claim)

    def prepare(self, runs: int) -> None:
        """What a runner has before it calls the app."""
        self._ready = self.claims(runs // ATTEMPT)

    def _attempt(self, claim: Any) -> None:
        from lightspan.capture.context import AttemptContext
        from lightspan.capture.entry import open_scope
        from lightspan.schema.records import AttemptRef

        scope = AttemptContext(
            rollout_id=claim.rollout.rollout_id,
            attempt_id=claim.attempt.attempt_id,
            gateway_url=self._gateway,
            call_token=claim.attempt.call_token,
            routing=self._routing,
        )
        with open_scope(scope):
            for _ in range(ATTEMPT):
                self.run()
        damages = scope.recorder.capture_errors()
        assert not damages, damages
        spans = scope.recorder.drain()
        self._spans += len(spans)
        self._calls += sum(span.kind == "llm" for span in spans)
        ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        self._loop.run_until_complete(self._store.add_spans(ref, spans))

    def spans(self) -> int:
        return self._spans

    def calls(self) -> int:
        return self._calls


class OpenInference(Plain):
    """The peer, with everything that it exports thrown away."""

    def __init__(self, framework: str, agents: int, url: str, *, client: bool) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            SpanExporter,
            SpanExportResult,
        )

        counted = self

        class Nowhere(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                kinds = [span.attributes.get("openinference.span.kind") for span in spans]
                counted._spans += len(spans)
                counted._calls += kinds.count("LLM")
                return SpanExportResult.SUCCESS

        self._spans = self._calls = 0
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=2**16))
        super().__init__(framework, agents, url)  # the app's own processors come before
        wanted = INSTRUMENTORS[framework]
        for name, kind in [*wanted, *([CLIENT] if client and CLIENT not in wanted else [])]:
            module = importlib.import_module(f"openinference.instrumentation.{name}")
            getattr(module, kind)().instrument(tracer_provider=self._provider)

    def many(self, runs: int) -> None:
        super().many(runs)
        self._provider.force_flush()

    def spans(self) -> int:
        return self._spans

    def calls(self) -> int:
        return self._calls


def make(framework: str, agents: int, kind: str, url: str) -> Plain:
    """The app of this kind."""
    if kind in ("redirected", "recorded"):
        return Scoped(framework, agents, url, redirected=kind == "redirected")
    if kind.startswith("openinference"):
        return OpenInference(framework, agents, url, client=kind.endswith("+client"))
    return {"plain": Plain, "outside": Outside}[kind](framework, agents, url)


def cost(app: Plain, runs: int, stop: Callable[[], object] = bool) -> dict[str, float]:
    """CPU microseconds of this process a run, the spans and the model calls that it recorded.

    Args:
        app: what is run.
        runs: how often.
        stop: called before the first and after the last.
    """
    if isinstance(app, Scoped):
        app.prepare(runs)
    spans, calls = app.spans(), app.calls()
    gc.collect()
    stop()
    start = time.process_time()
    app.many(runs)
    spent = time.process_time() - start
    stop()
    return {
        "us": spent / runs * 1e6,
        "spans": (app.spans() - spans) / runs,
        "calls": (app.calls() - calls) / runs,
    }


# --- without an app -------------------------------------------------------------------------
def alone(url: str) -> dict[str, float]:
    """CPU microseconds that ours takes a model call where no scope is open; nothing is sent."""
    from langchain_core.callbacks import CallbackManager, manager as langchain

    import lightspan_langgraph
    from lightspan.capture import sdk_instrumentation
    from lightspan.capture.patch import Patch
    from lightspan.capture.sdks import OPENAI

    run, asked = langgraph(url, 1), []
    configure = langchain._configure

    def counted(*values: Any, **more: Any) -> Any:
        asked.append(None)
        return configure(*values, **more)

    langchain._configure = counted
    run()
    langchain._configure = configure

    class Client:
        def request(self, cast_to: Any, options: Any, **more: Any) -> None: ...

    client, nothing = Client(), Client.request
    Patch(Client, "request", partial(sdk_instrumentation._sync_shim, OPENAI, nothing))
    assert Client.request is not nothing
    wrapper = _difference(
        lambda: client.request(None, None, stream=False),
        lambda: nothing(client, None, None, stream=False),
    )
    hooks: list[float] = []
    for _ in range(15):
        without = _us(CallbackManager.configure)
        with lightspan_langgraph.instrument():
            assert not CallbackManager.configure().handlers, "LangChain would call us at each run"
            hooks.append(_us(CallbackManager.configure) - without)
    hook = statistics.median(hooks) * len(asked)
    return {
        "us": wrapper + hook,
        "shim_us": wrapper,
        "adapter_us": hook,
        "configured": len(asked),
    }


def _difference(work: Callable[[], Any], base: Callable[[], Any]) -> float:
    return statistics.median([_us(work) - _us(base) for _ in range(15)])


def _us(work: Callable[[], Any], times: int = 20_000) -> float:
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times * 1e6


def deal(number: int) -> None:
    """Give the types that are made from here on other places in CPython's method cache.

    It has 4,096, chosen by the version of a type and the address of a name. Where attributes meet
    that an app asks for again and again, they evict each other for as long as the process lives:
    1.3 million instructions a run of CrewAI, as much as an adapter adds. So processes are dealt
    differently.
    """
    for _ in range(number):
        hasattr(type("Dealt", (), {}), "name")


def main() -> None:
    framework, agents, kind, url, *dealt = sys.argv[1:]
    deal(sum(map(int, dealt)))
    if kind == "alone":
        print(json.dumps(alone(url)))
        return
    ready = make(framework, int(agents), kind, url)
    cost(ready, 5 * ATTEMPT)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again: that is no cost of a call
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        runs, *waits = line.split()
        print(json.dumps(cost(ready, int(runs), _stop if waits else bool)), flush=True)


def _stop() -> None:
    """Wait for whoever counts."""
    print(json.dumps({"stopped": True}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
