"""The adapter with the real framework, the real OpenAI client and a real HTTP server.

What every adapter must do is in test_crewai_suite.py; here is what is CrewAI's own.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

pytest.importorskip("crewai")

import crewai.llm as crewai_llm
import openai
from crewai import LLM, Agent, BaseLLM, Crew, Process, Task
from crewai.events import BaseEventListener, CrewKickoffStartedEvent, crewai_event_bus
from crewai.flow.flow import Flow, and_, listen, router, start
from crewai.project import CrewBase, agent, crew, task
from crewai.tools import BaseTool, tool
from pydantic import BaseModel

import lightspan
from lightspan import scope
from lightspan.lightning.episode import build_episode
from lightspan.lightning.selection import Rejection, cover
from lightspan.records import Attempt, AttemptStatus, Rollout
from lightspan.routing import make_routing
from lightspan.scope import Scope, open_scope
from lightspan.spans import Span, SpanKind
from lightspan.testing.adapter_suite import tree
from lightspan.testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan.testing.stage import POLICY, ROOT_ID, Part, Stage
from lightspan_crewai import LightspanListener, _hook, agents, instrument, uninstrument

# CrewAI warns of fields of its own that it reads itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    # It never closes its clients: an asynchronous one outlives its event loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]


ROOT = Path(__file__).parents[2]


# --- helpers --------------------------------------------------------------------------------
@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """What CrewAI left unclosed is found here, where it is known, and not when pytest ends."""
    yield
    gc.collect()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("fine") as running:
        yield running


WATCHED = (
    (type(crewai_event_bus), "emit"),
    (Crew, "akickoff"),
    (Agent, "kickoff_async"),
    (Flow, "kickoff_async"),
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = [vars(owner).get(name) for owner, name in WATCHED]
    with instrument():
        yield
    assert [vars(owner).get(name) for owner, name in WATCHED] == before
    assert _hook.resolve not in scope.resolvers()
    assert _hook._watches == []


class Captured:
    """The spans of one attempt."""

    def __init__(self, **more: Any) -> None:
        self.scope = Scope(
            rollout_id="r", attempt_id=uuid.uuid4().hex, root_span_id=ROOT_ID, **more
        )
        self.spans: list[Span] = []

    def close(self) -> None:
        self.scope.recorder.give_up()
        self.spans = self.scope.recorder.drain()
        assert self.scope.recorder.damages() == []

    @property
    def tree(self) -> list[str]:
        return tree(self.spans)

    def one(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


@contextmanager
def captured(**more: Any) -> Iterator[Captured]:
    result = Captured(**more)
    with open_scope(result.scope):
        yield result
    result.close()


def llm_of(server: Any, **more: Any) -> Any:
    more = {"provider": "openai", "max_retries": 0, **more}
    return LLM("m", base_url=server.url, api_key="key", **more)


def an_agent(server: ScriptedServer, role: str, **more: Any) -> Agent:
    more = {"llm": llm_of(server), "max_retry_limit": 0, **more}
    return Agent(role=role, goal="g", backstory="b", **more)


def a_task(agent: Agent | None = None, **more: Any) -> Task:
    return Task(**{"description": "d", "expected_output": "e", "agent": agent, **more})


def crew_of(*agents: Agent, **more: Any) -> Crew:
    return Crew(agents=list(agents), tasks=[a_task(one) for one in agents], **more)


def calls(name: str, arguments: str = "{}") -> Callable[[Request], Reply | str]:
    """A model that calls the tool once, then answers."""

    def script(request: Request) -> Reply | str:
        names = [one["function"]["name"] for one in request.body.get("tools") or ()]
        if name in names and all(said["role"] != "tool" for said in request.messages):
            return Reply(tool_calls=[ToolCall(name=name, arguments=arguments, call_id="call_7")])
        return "fine"

    return script


WRITER = ["invoke_agent writer @writer", "  chat @writer"]


# --- roles ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("optimize", "name"),
    [("{topic} analyst", "{topic} analyst"), ("rain analyst", "rain analyst")],
)
def test_a_role_template_is_selected_in_both_forms(
    server: ScriptedServer, optimize: str, name: str
) -> None:
    routing = make_routing({optimize: "policy"}, None, "policy")
    app = crew_of(an_agent(server, "{topic} analyst\n"), an_agent(server, "other"))
    with captured(routing=routing) as run:
        app.kickoff(inputs={"topic": "rain"})
        app.kickoff(inputs={"topic": "sun"})
    sun = name if "{" in name else "{topic} analyst"
    assert run.tree == [
        f"invoke_agent {name} @{name}",
        f"  chat @{name}",
        "invoke_agent other @other",
        "  chat @other",
        f"invoke_agent {sun} @{sun}",
        f"  chat @{sun}",
        "invoke_agent other @other",
        "  chat @other",
    ]
    routes = {span.attributes["lightspan.route"] for span in run.spans if span.kind == "llm"}
    assert routes == {"policy", "app"}
    assert agents(app).paths == ("{topic} analyst", "other")


def test_a_filled_role_reaches_the_gateway() -> None:
    """Whole token records, for the agents that a pattern on the filled role selects."""
    with Stage() as stage:
        part = Part({"rain analyst": ["Wet."], "editor": ["Very wet."]})
        played = stage.open(part, through_gateway=True)
        routing = make_routing({"rain analyst": "policy"}, "shared", "policy")
        object.__setattr__(played.scope, "routing", routing)
        some = [
            Agent(
                role=role,
                goal="g",
                backstory=backstory,
                llm=llm_of(stage),
            )
            for role, backstory in (("{topic} analyst", "Z"), ("editor", "Z"))
        ]
        part.marks = {"You are rain analyst": "rain analyst", "You are editor": "editor"}  # type: ignore[misc]
        tasks = [a_task(one, description=f"Please do {played.tag}") for one in some]
        with open_scope(played.scope):
            Crew(agents=some, tasks=tasks).kickoff(inputs={"topic": "rain"})
        stage.close(played)
        assert tree(played.spans) == [
            "invoke_agent rain analyst @rain analyst",
            "  chat @rain analyst",
            "invoke_agent editor @editor",
            "  chat @editor",
        ]
        asked = stage.brain.of(played.tag)
        said = [(a.prompt_ids, stage.engine.ids(a.turn.text)) for a in asked]
        assert [(r.prompt_ids, r.response_ids) for r in played.records] == said
        assert [r.agent_path for r in played.records] == ["rain analyst", "editor"]
        assert stage.brain.problems == []


def test_an_agent_renamed_while_running(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer")

    def rename(step: Any) -> None:
        writer.role = "poet"

    writer.step_callback = rename
    with captured() as run:
        crew_of(writer).kickoff()
    assert run.tree == WRITER


def test_names_of_crews(server: ScriptedServer) -> None:
    @CrewBase
    class Press:
        agents_config: ClassVar[dict[str, Any]] = {}
        tasks_config: ClassVar[dict[str, Any]] = {}

        @agent
        def writer(self) -> Agent:
            return an_agent(server, "writer")

        @task
        def write(self) -> Task:
            return a_task(self.writer())

        @crew
        def crew(self) -> Crew:
            return Crew(agents=self.agents, tasks=self.tasks)

    with captured() as run:
        Press().crew().kickoff()
        crew_of(an_agent(server, "writer"), name="news/desk").kickoff()
    press = "Press/writer" if Press().crew().name == "Press" else "writer"  # since 1.14
    found = [line.strip() for line in run.tree if "chat" in line]
    assert found == [f"chat @{press}", "chat @news%2Fdesk/writer"]
    assert agents(Press().crew()).paths == (press,)


# --- crews ----------------------------------------------------------------------------------
DELEGATED = [
    "invoke_agent Crew Manager @Crew Manager",
    "  chat @Crew Manager",
    "  execute_tool delegate_work_to_coworker @Crew Manager",
    "    invoke_agent writer @Crew Manager/writer",
    "      chat @Crew Manager/writer",
    "  chat @Crew Manager",
]


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_hierarchical_crew(is_own: bool, is_async: bool) -> None:
    ask = '{"task": "t", "context": "c", "coworker": "writer"}'
    with ScriptedServer(calls("delegate_work_to_coworker", ask)) as server:
        manager: dict[str, Any] = {"manager_llm": llm_of(server)}
        if is_own:
            manager = {"manager_agent": an_agent(server, "chief")}
        writer = an_agent(server, "writer")
        app = Crew(agents=[writer], tasks=[a_task()], process=Process.hierarchical, **manager)
        names = agents(app)
        with captured() as run:
            asyncio.run(app.akickoff()) if is_async else app.kickoff()
    chief = "chief" if is_own else "Crew Manager"
    assert run.tree == [line.replace("Crew Manager", chief) for line in DELEGATED]
    assert names == ((chief, f"{chief}/writer"), True)


def test_a_manager_acts_for_the_agent_of_the_task() -> None:
    """Events of model calls name the task's own agent there."""
    with ScriptedServer("fine") as server:
        writer = an_agent(server, "writer")
        app = Crew(
            agents=[writer],
            tasks=[a_task(writer)],
            process=Process.hierarchical,
            manager_llm=llm_of(server),
        )
        with captured() as run:
            app.kickoff()
    assert run.tree == ["invoke_agent Crew Manager @Crew Manager", "  chat @Crew Manager"]


def test_threaded_tasks_overlap(server: ScriptedServer) -> None:
    both = threading.Barrier(2, timeout=20)

    def script(request: Request) -> str:
        if "join" not in request.last_text:
            both.wait()
        return "fine"

    with ScriptedServer(script) as server:
        left, right, last = (an_agent(server, name) for name in ("left", "right", "last"))
        tasks = [
            a_task(left, async_execution=True),
            a_task(right, async_execution=True),
            a_task(last, description="join"),
        ]
        with captured() as run:
            Crew(agents=[left, right, last], tasks=tasks).kickoff()
    assert sorted(run.tree[:4]) == [
        "  chat @left",
        "  chat @right",
        "invoke_agent left @left",
        "invoke_agent right @right",
    ]
    assert run.tree[4:] == ["invoke_agent last @last", "  chat @last"]


def test_kickoff_for_each(server: ScriptedServer) -> None:
    app = crew_of(an_agent(server, "{topic} writer"))
    with captured() as run:
        app.kickoff_for_each(inputs=[{"topic": "rain"}, {"topic": "sun"}])
    assert run.tree == ["invoke_agent {topic} writer @{topic} writer", "  chat @{topic} writer"] * 2


def test_a_crew_that_streams(server: ScriptedServer) -> None:
    app = crew_of(an_agent(server, "writer", llm=llm_of(server, stream=True)), stream=True)
    with captured() as run:
        answer: Any = app.kickoff()
        text = "".join(chunk.content for chunk in answer)
        assert answer.result.raw == text == "fine"
    assert run.tree == WRITER
    assert server.requests[0].body["stream"] is True


def test_several_crews_at_once(server: ScriptedServer) -> None:
    """32 attempts in 32 threads, each with a crew of its own whose prompt says its number."""

    def one(number: int) -> tuple[int, list[str], list[str]]:
        app = crew_of(an_agent(server, f"writer {number}"), an_agent(server, f"checker {number}"))
        with captured() as run:
            app.kickoff()
        prompts = [str(s.attributes["gen_ai.input.messages"]) for s in run.spans if s.kind == "llm"]
        return number, run.tree, prompts

    with ThreadPoolExecutor(32) as pool:
        for number, found, prompts in pool.map(one, range(32)):
            names = [f"writer {number}", f"checker {number}"]
            assert found == [
                line for n in names for line in (f"invoke_agent {n} @{n}", f"  chat @{n}")
            ]
            assert all(f"You are {n}." in p for n, p in zip(names, prompts, strict=True))


class Poem(BaseModel):
    title: str


def test_what_follows_a_task_belongs_to_its_agent() -> None:
    """Output that is converted by a model, and a guardrail that is a function."""
    seen: list[str] = []

    def script(request: Request) -> str:
        text = str(request.messages)
        return '{"title": "Rain"}' if "title" in text else "no poem"

    def check(output):  # type: ignore[no-untyped-def]  # CrewAI reads annotations
        seen.append(lightspan.emit.current_agent() or "")
        return len(seen) > 1, "again"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            Crew(agents=[writer], tasks=[a_task(writer, guardrail=check)]).kickoff()
            Crew(agents=[writer], tasks=[a_task(writer, output_pydantic=Poem)]).kickoff()
    assert seen == ["writer", "writer"]
    paths = {span.attributes["lightspan.agent.path"] for span in run.spans}
    assert paths == {"writer"}
    assert run.tree[:3] == ["invoke_agent writer @writer", "  chat @writer", "  chat @writer"]
    assert len([s for s in run.spans if s.kind == "llm"]) == len(server.requests)


def test_a_guardrail_that_is_a_text() -> None:
    """It is an agent of CrewAI's own; what it refuses is written again."""
    verdicts = ['{"valid": false, "feedback": "Longer."}', '{"valid": true, "feedback": null}']

    def script(request: Request) -> str:
        return verdicts.pop(0) if "Guardrail Agent" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            Crew(agents=[writer], tasks=[a_task(writer, guardrail="It is short.")]).kickoff()
    assert verdicts == []
    assert run.tree == [
        "invoke_agent writer @writer",
        "  chat @writer",
        "  invoke_agent Guardrail Agent @writer/Guardrail Agent",
        "    chat @writer/Guardrail Agent",
        "  chat @writer",
        "  invoke_agent Guardrail Agent @writer/Guardrail Agent",
        "    chat @writer/Guardrail Agent",
    ]
    assert len(server.requests) == 4


def test_a_crew_that_plans() -> None:
    plan = '{"list_of_plans_per_task": [{"task_number": 1, "task": "d", "plan": "Rhyme."}]}'

    def script(request: Request) -> str:
        return plan if "Task Execution Planner" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        app = crew_of(an_agent(server, "writer"), planning=True, planning_llm=llm_of(server))
        with captured() as run:
            app.kickoff()
    assert run.tree == [
        "invoke_agent Task Execution Planner @Task Execution Planner",
        "  chat @Task Execution Planner",
        *WRITER,
    ]
    assert "Rhyme." in server.requests[-1].last_text
    assert len(server.requests) == 2


def test_an_agent_alone(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer")
    with captured() as run:
        writer.kickoff("hello")
        asyncio.run(writer.kickoff_async("hello"))
    assert run.tree == WRITER * 2
    assert agents(writer) == (("writer",), True)


# --- flows ----------------------------------------------------------------------------------
def test_a_flow(server: ScriptedServer) -> None:
    """Direct calls, a crew, an agent; a router, and two methods at once."""
    llm = llm_of(server)
    press = crew_of(an_agent(server, "writer"), name="press")
    scout = an_agent(server, "scout")
    url = server.url

    class Book(Flow[Any]):
        @start()
        def plan(self) -> Any:
            return llm.call("plan")

        @router(plan)
        def choose(self) -> str:
            return "go"

        @listen("go")
        async def look(self) -> Any:
            return await scout.kickoff_async("look")

        @listen("go")
        def write(self) -> Any:
            return press.copy().kickoff().raw

        @listen(and_(look, write))
        def finish(self) -> Any:
            return openai.OpenAI(base_url=url, api_key="k").chat.completions.create(
                model="m", messages=[{"role": "user", "content": "finish"}]
            )

    with captured() as run:
        Book().kickoff()
    expected = [
        "invoke_agent Book @Book",
        "  invoke_agent plan @Book/plan",
        "    chat @Book/plan",
        "  invoke_agent choose @Book/choose",
        "  invoke_agent look @Book/look",
        "    invoke_agent scout @Book/look/scout",
        "      chat @Book/look/scout",
        "  invoke_agent write @Book/write",
        "    invoke_agent press @Book/write/press",
        "      invoke_agent writer @Book/write/press/writer",
        "        chat @Book/write/press/writer",
        "  invoke_agent finish @Book/finish",
        "    chat @Book/finish",
    ]
    assert sorted(run.tree) == sorted(expected)
    assert run.tree[:4] == expected[:4]
    assert agents(Book) == (
        (
            "Book/plan",
            "Book/choose",
            "Book/look/scout",
            "Book/write/press/writer",
            "Book/finish",
        ),
        True,
    )


def test_a_flow_that_says_little(server: ScriptedServer) -> None:
    llm = llm_of(server)

    class Quiet(Flow[Any]):
        suppress_flow_events = True

        @start()
        def plan(self) -> Any:
            return llm.call("plan")

    with captured() as run:
        Quiet().kickoff()
    (line,) = (line.strip() for line in run.tree if "chat" in line)
    assert line in ("chat @Quiet", "chat @Quiet/plan")  # the latter up to 1.13


# --- failures -------------------------------------------------------------------------------
def test_a_failing_agent_is_tried_again_and_the_flow_around_it_stays() -> None:
    """Every failed call is told of twice; CrewAI's own stack loses the flow over it."""
    answers = [Reply(status=400, text="no")] * 3

    def script(request: Request) -> Reply | str:
        return answers.pop() if answers and "crew" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer", max_retry_limit=3)
        press = Crew(agents=[writer], tasks=[a_task(writer, description="crew")], name="press")
        llm = llm_of(server)

        class Book(Flow[Any]):
            @start()
            def write(self) -> Any:
                press.kickoff()
                return llm.call("afterwards")

        with captured() as run:
            Book().kickoff()
    assert run.tree == [
        "invoke_agent Book @Book",
        "  invoke_agent write @Book/write",
        "    invoke_agent press @Book/write/press",
        "      invoke_agent writer @Book/write/press/writer",
        "        chat @Book/write/press/writer error",
        "        chat @Book/write/press/writer error",
        "        chat @Book/write/press/writer error",
        "        chat @Book/write/press/writer",
        "    chat @Book/write",
    ]


def test_a_crew_that_fails_leaves_nothing_behind() -> None:
    with ScriptedServer([Reply(status=400, text="no"), "fine"]) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            with pytest.raises(openai.BadRequestError):
                crew_of(writer, name="first").kickoff()
            assert lightspan.emit.current_agent() == "app"
            crew_of(writer, name="second").kickoff()
    assert run.tree == [
        "invoke_agent first @first error",
        "  invoke_agent writer @first/writer error",
        "    chat @first/writer error",
        "invoke_agent second @second",
        "  invoke_agent writer @second/writer",
        "    chat @second/writer",
    ]
    assert "no" in run.one("invoke_agent first").status_message


async def test_a_crew_that_times_out_leaves_nothing_behind() -> None:
    """In the same task: CrewAI tells nothing of it."""
    release = threading.Event()

    def script(request: Request) -> str:
        if "slow" in str(request.messages):
            release.wait(20)
        return "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        slow = Crew(agents=[writer], tasks=[a_task(writer, description="slow")], name="slow one")
        with captured() as run:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await slow.akickoff()
            assert lightspan.emit.current_agent() == "app"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await an_agent(server, "scout").kickoff_async("slow")
            await crew_of(an_agent(server, "other"), name="next").akickoff()
            release.set()
            await asyncio.get_running_loop().shutdown_default_executor()
    found = [line for line in run.tree if "chat" not in line]
    assert found == [
        "invoke_agent slow one @slow one unset",
        "  invoke_agent writer @slow one/writer unset",
        "invoke_agent scout @scout unset",
        "invoke_agent next @next",
        "  invoke_agent other @next/other",
    ]
    assert run.tree[-1] == "    chat @next/other"


def test_a_time_limit(server: ScriptedServer) -> None:
    """The agent then works in a thread of CrewAI's."""
    with captured() as run:
        crew_of(an_agent(server, "writer", max_execution_time=60)).kickoff()
    assert run.tree == WRITER


def test_an_attempt_that_ends_early(server: ScriptedServer) -> None:
    """What had begun is recorded when the attempt ends; the next attempt knows nothing of it."""
    with captured() as run:
        _hook.note(_hook.Start(_hook.Kind.CREW, 1, _hook._plain("lost")))
        assert lightspan.emit.current_agent() == "lost"
    assert run.tree == ["invoke_agent lost @lost unset"]
    _hook._open.set(None)
    left = Captured()
    token = scope.set_acting(scope.Acting(left.scope, parent_span_id=ROOT_ID))
    _hook.note(_hook.Start(_hook.Kind.CREW, 1, _hook._plain("lost")))
    scope.reset_acting(token)
    with captured() as run:
        crew_of(an_agent(server, "writer")).kickoff()
    assert run.tree == WRITER


# --- tools ----------------------------------------------------------------------------------
class Opaque:
    def __repr__(self) -> str:
        return "<an object>"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("x" * 100_000, "x" * 65_536 + "… (100000 characters)"),
        (b"\x00\xff", "b'\\x00\\xff'"),
        ({"a": Opaque()}, "{'a': <an object>}"),
        ("日本", "日本"),
        (None, "None"),
        (7, "7"),
    ],
    ids=["huge", "binary", "object", "unicode", "none", "number"],
)
def test_what_tools_return(result: Any, text: str) -> None:
    @tool
    def look(q: str) -> Any:
        """Look."""
        return result

    with ScriptedServer(calls("look", '{"q": "é"}')) as server, captured() as run:
        crew_of(an_agent(server, "scout", tools=[look])).kickoff()
    assert run.tree == [
        "invoke_agent scout @scout",
        "  chat @scout",
        "  execute_tool look @scout",
        "  chat @scout",
    ]
    span = run.one("execute_tool look")
    assert span.attributes["gen_ai.tool.call.arguments"] == '{"q": "é"}'
    assert span.attributes["gen_ai.tool.call.result"] == text


def test_a_failing_tool_of_an_agent_without_native_tools() -> None:
    """CrewAI tries a tool three times there, and asks the model in between for nothing."""
    tries: list[str] = []

    @tool
    def look(q: str) -> str:
        """Look."""
        tries.append(q)
        raise LookupError("nothing")

    def script(request: Request) -> str:
        if len(request.messages) <= 2:
            return 'Thought: look\nAction: look\nAction Input: {"q": "x"}'
        return "Thought: I now know\nFinal Answer: fine"

    class NoTools(type(llm_of(_Nowhere()))):  # type: ignore[misc]
        def supports_function_calling(self) -> bool:
            return False

    with ScriptedServer(script) as server:
        llm = NoTools(model="m", base_url=server.url, api_key="k", max_retries=0)
        with captured() as run:
            crew_of(an_agent(server, "scout", tools=[look], llm=llm)).kickoff()
    tools = [line for line in run.tree if "execute_tool" in line]
    assert tools == ["  execute_tool look @scout error"] * 3
    assert tries == ["x"] * 6  # CrewAI calls it twice each time
    others = [line for line in run.tree if "execute_tool" not in line]
    assert others == ["invoke_agent scout @scout", "  chat @scout", "  chat @scout"]


class _Nowhere:
    url = "http://127.0.0.1:9/v1"


def test_a_model_asked_in_a_tool(server: ScriptedServer) -> None:
    """By CrewAI's client, by a raw one, and by a crew."""
    with ScriptedServer(calls("ask")) as server:
        client = openai.OpenAI(base_url=server.url, api_key="k")
        inner = crew_of(an_agent(server, "helper"), name="help")

        class Ask(BaseTool):
            name: str = "ask"
            description: str = "Ask."

            def _run(self) -> str:
                llm_of(server).call("one")
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "two"}]
                )
                with lightspan.agent("idea"):
                    llm_of(server).call("three")
                return str(inner.kickoff().raw)

        app = crew_of(an_agent(server, "scout", tools=[Ask()]))
        with captured() as run:
            app.kickoff()
    assert run.tree == [
        "invoke_agent scout @scout",
        "  chat @scout",
        "  execute_tool ask @scout",
        "    chat @scout",
        "    chat @scout",
        "    invoke_agent idea @scout/idea",
        "      chat @scout/idea",
        "    invoke_agent help @scout/help",
        "      invoke_agent helper @scout/help/helper",
        "        chat @scout/help/helper",
        "  chat @scout",
    ]
    assert agents(app).complete is False


# --- clients --------------------------------------------------------------------------------
class Posting(BaseLLM):
    """A client of the user's own that tells nobody what it does."""

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        if "fail" in str(messages):
            raise ConnectionError("down")
        return "fine"

    async def acall(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return self.call(messages)


def test_a_client_that_bypasses_the_sdk_is_recorded_as_structure(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer", llm=Posting(model="mine"))
    own = Posting.call
    with captured(routing=POLICY) as run:
        crew_of(writer).kickoff()
    assert run.tree == WRITER
    span = run.one("chat mine")
    assert "lightspan.call.id" in span.attributes
    assert "You are writer" in str(span.attributes["gen_ai.input.messages"])
    assert "fine" in str(span.attributes["gen_ai.output.messages"])
    assert Posting.call is not own
    uninstrument()
    assert Posting.call is own

    rollout = Rollout(rollout_id="r", task={}, task_id="t")
    attempt = Attempt(
        rollout_id="r",
        attempt_id=run.scope.attempt_id,
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
    )
    episode = build_episode(attempt, rollout, run.spans, [])
    (entry,) = cover(episode, POLICY).rejected
    assert entry.rejection is Rejection.NO_TOKENS


def test_a_bypassing_client_that_fails(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer", llm=Posting(model="mine"))
    with captured() as run, pytest.raises(ConnectionError):
        Crew(agents=[writer], tasks=[a_task(writer, description="fail")]).kickoff()
    assert run.tree == ["invoke_agent writer @writer error", "  chat @writer error"]
    assert run.one("chat mine").attributes["error.type"] == "ConnectionError"


def test_a_client_of_the_users_own_that_uses_the_sdk(server: ScriptedServer) -> None:
    class Own(BaseLLM):
        def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            client = openai.OpenAI(base_url=server.url, api_key="k")
            said = [{"role": "user", "content": messages}]
            said = messages if isinstance(messages, list) else said
            answer = client.chat.completions.create(model="m", messages=said)
            return answer.choices[0].message.content or ""

    with captured() as run:
        crew_of(an_agent(server, "writer", llm=Own(model="mine"))).kickoff()
    assert run.tree == WRITER
    assert len(server.requests) == 1
    assert "gen_ai.response.id" in run.one("chat m").attributes


@pytest.fixture
def litellm() -> Any:
    return pytest.importorskip("litellm")


@pytest.mark.filterwarnings("ignore")  # litellm's own
@pytest.mark.parametrize("is_streamed", [False, True])
def test_litellms_openai_route(litellm: Any, server: ScriptedServer, is_streamed: bool) -> None:
    llm = LLM("openai/m", base_url=server.url, api_key="key", is_litellm=True, stream=is_streamed)
    assert type(llm) is LLM
    with captured() as run:
        crew_of(an_agent(server, "writer", llm=llm)).kickoff()
    assert run.tree == WRITER
    assert [span.attributes["lightspan.call.id"] for span in run.spans if span.kind == "llm"]
    assert len(server.requests) == 1


@pytest.mark.filterwarnings("ignore")  # litellm's own
def test_litellms_other_routes(litellm: Any, server: ScriptedServer) -> None:
    llm = LLM("deepseek/m", base_url=server.url, api_key="key", is_litellm=True)
    with captured() as run:
        crew_of(an_agent(server, "writer", llm=llm)).kickoff()
    assert len(server.requests) == 1
    assert run.tree == WRITER
    (span,) = (span for span in run.spans if span.kind is SpanKind.LLM)
    assert span.attributes["lightspan.route"] == "app"


def test_hosted_vllm(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hosted_vllm" not in getattr(crewai_llm, "SUPPORTED_NATIVE_PROVIDERS", ()):
        pytest.skip("this version reaches vLLM through litellm only")
    monkeypatch.setenv("VLLM_BASE_URL", server.url)
    llm = LLM("hosted_vllm/m", api_key="key", additional_params={"extra_body": {"top_k": 5}})
    with captured() as run:
        crew_of(an_agent(server, "writer", llm=llm)).kickoff()
    assert run.tree == WRITER
    assert server.requests[0].body["top_k"] == 5


# --- installing -----------------------------------------------------------------------------
def test_the_listener_is_instrument(server: ScriptedServer) -> None:
    uninstrument()
    own = vars(type(crewai_event_bus))["emit"]
    listener = LightspanListener()
    assert isinstance(listener, BaseEventListener)
    assert vars(type(crewai_event_bus))["emit"] is not own
    LightspanListener()
    with captured() as run:
        crew_of(an_agent(server, "writer")).kickoff()
    assert run.tree == WRITER
    uninstrument()
    assert vars(type(crewai_event_bus))["emit"] is own


def test_handlers_of_the_users_own_are_called(server: ScriptedServer) -> None:
    seen: list[str] = []
    done = threading.Event()
    with crewai_event_bus.scoped_handlers():

        @crewai_event_bus.on(CrewKickoffStartedEvent)
        def note(source: Any, event: Any) -> None:
            seen.append(event.crew_name)
            done.set()

        with captured() as run:
            crew_of(an_agent(server, "writer"), name="press").kickoff()
        assert done.wait(10)
    assert seen == ["press"]
    assert len(run.spans) == 3


def test_somebody_wraps_what_we_wrapped(server: ScriptedServer) -> None:
    """Their wrapper stays when we leave, and ours inside it does nothing any more."""
    bus = type(crewai_event_bus)
    ours, seen = bus.emit, []

    def emit(self: Any, source: Any, event: Any) -> Any:
        seen.append(event.type)
        return ours(self, source, event)

    uninstrument()
    own = bus.emit
    instrument()
    ours = bus.emit
    bus.emit = emit  # type: ignore[method-assign]
    try:
        uninstrument()
        assert bus.emit is emit
        with captured() as run:
            crew_of(an_agent(server, "writer")).kickoff()
        assert [line.strip() for line in run.tree] == ["chat @app"]
        assert "task_started" in seen
    finally:
        bus.emit = own  # type: ignore[method-assign]


def test_an_error_of_ours_damages_the_attempt_and_nothing_else(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(_hook, "begin", broken)
    result = Captured()
    with open_scope(result.scope):
        assert crew_of(an_agent(server, "writer")).kickoff().raw == "fine"
    assert "lightspan_crewai: RuntimeError: a bug" in result.scope.recorder.damages()


def test_outside_a_scope_nothing_happens(server: ScriptedServer) -> None:
    crew_of(an_agent(server, "writer")).kickoff()
    assert _hook._open.get() is None


# --- agents() -------------------------------------------------------------------------------
def test_agents_of_an_app_that_makes_agents(server: ScriptedServer) -> None:
    class Book(Flow[Any]):
        @start()
        def write(self) -> Any:
            return crew_of(Agent(role="hidden", goal="g", backstory="b")).kickoff()

        @listen(write)
        def check(self) -> Any:
            return LLM("m").call("check")

    assert agents(Book) == (("Book/write", "Book/check"), False)
    assert agents(Book()) == agents(Book)


def test_agents_by_their_settings(server: ScriptedServer) -> None:
    boss = an_agent(server, "boss", allow_delegation=True)
    writer = an_agent(server, "writer")
    tasks = [a_task(boss), a_task(writer, guardrail="is short", output_file=None)]
    assert agents(Crew(agents=[boss, writer], tasks=tasks)) == (
        ("boss", "writer", "writer/Guardrail Agent", "boss/writer"),
        True,
    )
    assert agents(a_task(writer)).paths == ("writer",)
    assert agents([writer, boss]).paths == ("writer", "boss")
    assert agents(crew_of(writer, planning=True)).paths == ("Task Execution Planner", "writer")


# --- the package ----------------------------------------------------------------------------
def test_the_readme(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "packages/crewai/README.md").read_text()
    app, of_rollout = (block.split("```")[0] for block in text.split("```python\n")[1:])
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    module = ModuleType("haiku")
    monkeypatch.setitem(sys.modules, "haiku", module)
    exec(app, module.__dict__)
    names: dict[str, Any] = {"__name__": "haiku_rollout"}
    exec(of_rollout, names)
    assert str(agents(module.crew)) in text
    with captured() as run:
        assert names["haiku"].function({"season": "winter", "topic": "rain"}) == 0.0
    assert [line.strip() for line in run.tree if "chat" in line] == [
        "chat @{season} poet",
        "chat @editor",
    ]
    assert "winter poet" in str(server.requests[0].messages)
