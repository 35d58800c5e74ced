"""One process of `adapter.py` and `adapters.py`: an app of one kind, in an environment with both.

    python -I peer_adapter.py FRAMEWORK AGENTS KIND URL [DEAL]

The app has `AGENTS` agents that call the model once each, one after the other. `KIND` is the
instrumentation: `plain` is none; `outside` is ours outside of scopes; `redirected` and `recorded`
are ours in scopes of ten runs each, whose spans go to a SQLite store; `openinference` is the
framework's instrumentor of OpenInference (with that of the OpenAI client if it records no model
calls itself); `openinference+client` always has both. OpenInference has a batch processor whose
exporter discards all spans. `alone` measures, without an app, what ours does for LangGraph outside
of scopes.

Each line on the standard input is a number of runs; the process answers with their cost. If `stop`
follows the number, it prints a line before the first run and after the last, and waits for a line
each time. Another number as `DEAL` gives types and names other places in CPython's method cache.
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
"""Number of runs in one scope."""
NAMES: Final = ("writer", "checker", "editor", "judge")
QUESTION: Final = "How many singers are there? " * 8

Run = Callable[[], Any]


# --- the apps -------------------------------------------------------------------------------
def langgraph(url: str, agents: int) -> Run:
    """Return an app: a graph with a node for each agent, which calls ChatOpenAI."""
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
    """Return an app: a round-robin team of assistants; a single assistant has no team."""
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
    """Return an app: agents that run one after the other. The SDK's own upload of traces is off."""
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
    """Return an app: a sequential crew."""
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
    """Return a function that runs `run` in always the same event loop, as its client requires."""
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
"""OpenInference's (module, class) for each framework. CrewAI's records no model calls, so the one
of the OpenAI client is added."""


# --- the kinds ------------------------------------------------------------------------------
class Plain:
    """An app without instrumentation."""

    def __init__(self, framework: str, agents: int, url: str) -> None:
        self.run = APPS[framework](url, agents)

    def many(self, runs: int) -> None:
        """Run the app `runs` times."""
        for _ in range(runs):
            self.run()

    def spans(self) -> int:
        """Return the number of spans recorded so far."""
        return 0

    def calls(self) -> int:
        """Return the number of model calls recorded so far."""
        return 0


class Outside(Plain):
    """An app with our adapter and patches, but outside of any scope."""

    def __init__(self, framework: str, agents: int, url: str) -> None:
        from lightspan.capture import sdk_instrumentation

        super().__init__(framework, agents, url)
        importlib.import_module(f"lightspan_{framework}").instrument()
        sdk_instrumentation.install()


class Scoped(Plain):
    """An app with our adapter, in scopes that are recorded to SQLite as a runner does."""

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
        """Create `count` attempts, and return their claims."""
        from lightspan.schema.records import Rollout, new_id

        rollouts = [Rollout(rollout_id=new_id("ro"), task={}, task_id="t") for _ in range(count)]
        self._loop.run_until_complete(self._store.enqueue(rollouts))
        return self._loop.run_until_complete(self._store.claim("bench", count, 3600))

    def many(self, runs: int) -> None:
        for claim in self._ready:
            self._attempt(claim)

    def prepare(self, runs: int) -> None:
        """Create the attempts for `runs` runs, before the time is measured."""
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
    """An app with OpenInference's instrumentors, whose spans are discarded at export."""

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
    """Return the app of a framework with the recording `kind`."""
    if kind in ("redirected", "recorded"):
        return Scoped(framework, agents, url, redirected=kind == "redirected")
    if kind.startswith("openinference"):
        return OpenInference(framework, agents, url, client=kind.endswith("+client"))
    return {"plain": Plain, "outside": Outside}[kind](framework, agents, url)


def cost(app: Plain, runs: int, stop: Callable[[], object] = bool) -> dict[str, float]:
    """Return per run: CPU microseconds of this process, spans and model calls recorded.

    Args:
        app: the app to run.
        runs: number of runs.
        stop: called before the first run and after the last.
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
    """Return the CPU microseconds that our code adds to a model call outside of scopes.

    Nothing is sent.
    """
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
    """Make `number` types, so that later types get other places in CPython's method cache.

    The cache has 4,096 places, chosen by the version of a type and the address of a name. If
    attributes that an app uses often share a place, they evict each other as long as the process
    lives. In CrewAI this is 1.3 million instructions per run, as much as an adapter adds. So the
    processes of a benchmark are started with different numbers.
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
    """Print a line, and wait for one from the process that counts instructions."""
    print(json.dumps({"stopped": True}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
