"""Run the adapter suite (`lightspan_testing.adapter_suite`) with CrewAI."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest

pytest.importorskip("crewai")

import openai
from crewai import LLM, Agent, Crew, Task
from crewai.events import crewai_event_bus
from crewai.flow.flow import Flow, listen, start
from crewai.llms.base_llm import BaseLLM
from crewai.tools import tool

from lightspan_crewai import _hook
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.adapter_suite import (
    OTHER_MEANS,
    AdapterSuite,
    App,
    Impossible,
    Model,
    Turn,
    broken,
    by_other_means,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.scenarios import FAILED, SCOUT, WRITER

# CrewAI warns of fields of its own that it reads itself.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="crewai")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    # It never closes its clients: an asynchronous one outlives its event loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]

TOOLS = {function.__name__: tool(function) for function in (look, count, broken)}
DELEGATES = Turn(
    calls=[
        (
            "delegate_work_to_coworker",
            '{"task": "help with {task}", "context": "none", "coworker": "expert"}',
        )
    ]
)


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Collect garbage after the module, so that warnings of CrewAI's unclosed resources appear
    here.
    """
    yield
    gc.collect()


def client(model: Model) -> LLM:
    return LLM(
        model.name,
        provider="openai",
        base_url=model.base_url,
        api_key=model.api_key,
        stream=model.stream,
        max_retries=model.max_retries,
        timeout=model.timeout_s,
    )


def an_agent(name: str, model: Model, *tools: str, **more: Any) -> Agent:
    """Return an agent that has its instructions in the system message."""
    return Agent(
        role=name,
        goal="Answer.",
        backstory=instructions(name),
        llm=client(model),
        tools=[TOOLS[name] for name in tools],
        max_retry_limit=0,
        **more,
    )


def task_of(agent: Agent, **more: Any) -> Task:
    return Task(description="{text}", expected_output="An answer.", agent=agent, **more)


def crew_of(*agents: Agent, **more: Any) -> Crew:
    return Crew(agents=list(agents), tasks=[task_of(agent) for agent in agents], **more)


def app_of(crew: Crew, tree: str, **more: Any) -> App:
    """Return the app of a crew; concurrent attempts need a crew each, because running changes
    it.
    """

    async def run(text: str) -> Any:
        return await crew.copy().akickoff(inputs={"text": text})

    def run_sync(text: str) -> Any:
        return crew.copy().kickoff(inputs={"text": text})

    return App(run=run, run_sync=run_sync, tree=tree, target=crew, **more)


def flow_app(make: type[Flow[Any]], tree: str, **more: Any) -> App:
    async def run(text: str) -> Any:
        return await make().kickoff_async(inputs={"text": text})

    def run_sync(text: str) -> Any:
        return make().kickoff(inputs={"text": text})

    return App(run=run, run_sync=run_sync, tree=tree, target=make, **more)


class Posting(BaseLLM):
    """A custom model client that does not use the OpenAI SDK, or not for every answer."""

    def __init__(self, answer: Callable[[Any], str]) -> None:
        super().__init__(model="mine")
        self._answer = answer

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return self._answer(messages)

    async def acall(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return self._answer(messages)


class TestSuite(AdapterSuite):
    framework = "crewai"
    notes_starts = (_hook, "_begin")
    silent_environment: ClassVar[Mapping[str, str]] = {
        "OTEL_SDK_DISABLED": "true",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_DISABLE_TRACKING": "true",
        "CREWAI_TRACING_ENABLED": "false",
    }

    def patched(self) -> Mapping[str, Any]:
        owners = (type(crewai_event_bus), Crew, Agent, Flow)
        names = ("emit", "aemit", "kickoff", "kickoff_async", "akickoff")
        found = {
            f"{owner.__name__}.{name}": vars(owner)[name]
            for owner in owners
            for name in names
            if name in vars(owner)
        }
        return {
            **found,
            "sync handlers": len(crewai_event_bus._sync_handlers),
            "async handlers": len(crewai_event_bus._async_handlers),
        }

    loud_environment: ClassVar[Mapping[str, str]] = {
        "CREWAI_DISABLE_TELEMETRY": "false",
        "CREWAI_DISABLE_TRACKING": "false",
    }

    program_root = "invoke_workflow crew"
    program = """
    import sys
    from crewai import LLM, Agent, Crew, Task

    llm = LLM("m", provider="openai", base_url=sys.argv[1], api_key="key")
    writer = Agent(role="writer", goal="Answer.", backstory="You are writer.", llm=llm)
    task = Task(description="{text}", expected_output="An answer.", agent=writer)
    print(Crew(agents=[writer], tasks=[task]).kickoff(inputs={"text": sys.argv[2]}).raw)
    """

    def openinference(self, **options: Any) -> AbstractContextManager[Any]:
        from tests.adapters.fixtures import openinference

        return openinference("crewai.CrewAIInstrumentor", "openai.OpenAIInstrumentor", **options)

    @pytest.mark.parametrize("scenario", ["team", "agent_as_tool"])
    def test_openinferences_event_listener_beside_it(self, stage: Stage, scenario: str) -> None:
        """Play the scenario with OpenInference's event listener, its second way to instrument
        CrewAI.
        """
        self.check_beside(stage, scenario, lambda: self.openinference(use_event_listener=True))

    def build(self, scenario: str, model: Model) -> App:
        if scenario in OTHER_MEANS:
            return self.build_own(scenario, model)
        build = getattr(self, f"build_{scenario}", None)
        if build is None:
            raise Impossible(scenario)
        return build(model)  # type: ignore[no-any-return]

    def build_single(self, model: Model) -> App:
        return app_of(crew_of(an_agent("writer", model)), WRITER)

    def build_team(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("writer", model), an_agent("checker", model)),
            """
            invoke_agent writer @writer
              chat @writer
            invoke_agent checker @checker
              chat @checker
            """,
        )

    def build_nested(self, model: Model) -> App:
        drafting = crew_of(an_agent("writer", model), an_agent("checker", model), name="drafting")
        judging = crew_of(an_agent("judge", model))

        class Contest(Flow[Any]):
            @start()
            async def draft(self) -> Any:
                return await drafting.copy().akickoff(inputs={"text": self.state["text"]})

            @listen(draft)
            async def decide(self, drafts: Any) -> Any:
                return await judging.copy().akickoff(inputs={"text": self.state["text"]})

        return flow_app(
            Contest,
            """
            invoke_agent Contest @Contest
              invoke_agent draft @Contest/draft
                invoke_agent drafting @Contest/draft/drafting
                  invoke_agent writer @Contest/draft/drafting/writer
                    chat @Contest/draft/drafting/writer
                  invoke_agent checker @Contest/draft/drafting/checker
                    chat @Contest/draft/drafting/checker
              invoke_agent decide @Contest/decide
                invoke_agent judge @Contest/decide/judge
                  chat @Contest/decide/judge
            """,
        )

    def build_parallel(self, model: Model) -> App:
        names = ("planner", "left", "right", "joiner")
        agents = [an_agent(name, model) for name in names]
        tasks = [task_of(one, async_execution=one.role in ("left", "right")) for one in agents]
        return app_of(
            Crew(agents=agents, tasks=tasks),
            "".join(
                f"""
            invoke_agent {name} @{name}
              chat @{name}"""
                for name in names
            ),
        )

    def build_tools(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("scout", model, "look")),
            SCOUT,
        )

    def build_parallel_tools(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("scout", model, "look", "count")),
            """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
            """,
        )

    def build_agent_as_tool(self, model: Model) -> App:
        boss = an_agent("boss", model, allow_delegation=True)
        expert = an_agent("expert", model, "look")
        return app_of(
            Crew(agents=[boss, expert], tasks=[task_of(boss)]),
            """
            invoke_agent boss @boss
              chat @boss
              execute_tool delegate_work_to_coworker @boss
                invoke_agent expert @boss/expert
                  chat @boss/expert
                  execute_tool look @boss/expert
                  chat @boss/expert
              chat @boss
            """,
            says={"boss": [DELEGATES, "Thanks: {task}."]},
        )

    def build_same_name(self, model: Model) -> App:
        first = crew_of(an_agent("writer", model), name="first")
        second = crew_of(an_agent("writer", model), name="second")

        async def run(text: str) -> Any:
            await first.copy().akickoff(inputs={"text": text})
            return await second.copy().akickoff(inputs={"text": text})

        def run_sync(text: str) -> Any:
            first.copy().kickoff(inputs={"text": text})
            return second.copy().kickoff(inputs={"text": text})

        return App(
            run=run,
            run_sync=run_sync,
            target=[first, second],
            tree="""
            invoke_agent first @first
              invoke_agent writer @first/writer
                chat @first/writer
            invoke_agent second @second
              invoke_agent writer @second/writer
                chat @second/writer
            """,
        )

    def build_unicode(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("Prüferin日本", model)), WRITER.replace("writer", "Prüferin日本")
        )

    def build_tool_error(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("scout", model, "broken")),
            """
            invoke_agent scout @scout
              chat @scout
              execute_tool broken @scout error
              chat @scout
            """,
        )

    def build_model_error(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("writer", model)),
            FAILED,
            raises=(openai.BadRequestError, openai.InternalServerError),
        )

    def build_retry(self, model: Model) -> App:
        return self.build_single(model)

    def build_timeout(self, model: Model) -> App:
        return app_of(
            crew_of(an_agent("writer", model)),
            FAILED,
            raises=(openai.APITimeoutError, ConnectionError),
        )

    def build_cancelled(self, model: Model) -> App:
        # Newer versions ask the model in a thread, which nobody cancels.
        is_threaded = importlib.util.find_spec("crewai.agents.agent_executor") is not None
        return app_of(
            crew_of(an_agent("writer", model)),
            f"""
            invoke_agent writer @writer unset
              chat @writer{"" if is_threaded else " error"}
            """,
        )

    def build_own(self, scenario: str, model: Model) -> App:
        writer = Agent(
            role="writer",
            goal="Answer.",
            backstory=instructions("writer"),
            llm=Posting(by_other_means(scenario, model)),
            max_retry_limit=0,
        )
        return app_of(crew_of(writer), OTHER_MEANS[scenario])
