"""Test tools and model clients: their results, and model calls inside them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("crewai")

import crewai.llm as crewai_llm
import pydantic
from crewai import LLM, Agent, BaseLLM, Crew
from crewai.tools import BaseTool, tool

from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema.spans import SpanKind
from lightspan_crewai import agents, uninstrument
from lightspan_testing.adapter_harness import POLICY, Part, Stage
from lightspan_testing.adapter_suite.checks import check_image, check_untrained
from lightspan_testing.attempts import captured, tree
from lightspan_testing.byte_tokenizer import image_file
from lightspan_testing.scripted import ScriptedServer
from packages.crewai.tests.crewai_apps import (
    WARNINGS,
    WRITER,
    a_task,
    an_agent,
    calls,
    crew_of,
    llm_of,
)

pytestmark = [*WARNINGS, pytest.mark.usefixtures("installed_crewai")]


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
        "  chat m @scout",
        "  execute_tool look @scout",
        "  chat m @scout",
    ]
    span = run.one("execute_tool look")
    assert span.attributes["gen_ai.tool.call.arguments"] == '{"q": "é"}'
    assert span.attributes["gen_ai.tool.call.result"] == text


def test_a_model_asked_in_a_tool(server: ScriptedServer) -> None:
    """Check a call by CrewAI's client in a tool, and a call by a crew in a tool."""
    with ScriptedServer(calls("ask")) as server:
        inner = crew_of(an_agent(server, "helper"), name="help")

        class Ask(BaseTool):
            name: str = "ask"
            description: str = "Ask."

            def _run(self) -> str:
                llm_of(server).call("one")
                return str(inner.kickoff().raw)

        app = crew_of(an_agent(server, "scout", tools=[Ask()]))
        with captured() as run:
            app.kickoff()
    assert run.tree == [
        "invoke_agent scout @scout",
        "  chat m @scout",
        "  execute_tool ask @scout",
        "    chat m @scout",
        "    invoke_agent help @scout/help",
        "      invoke_agent helper @scout/help/helper",
        "        chat m @scout/help/helper",
        "  chat m @scout",
    ]
    assert agents(app) == (("scout", "scout/help/helper"), True)


# --- clients --------------------------------------------------------------------------------
class Posting(BaseLLM):
    """A custom model client that emits no events of CrewAI."""

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
    assert run.tree == ["invoke_agent writer @writer", "  chat mine @writer"]
    span = run.one("chat mine")
    assert "lightspan.call.id" in span.attributes
    assert "You are writer" in str(span.attributes["gen_ai.input.messages"])
    assert "fine" in str(span.attributes["gen_ai.output.messages"])
    assert span.attributes["lightspan.client"] == "packages.crewai.tests.test_clients.Posting"
    assert span.attributes["lightspan.client.fix"] == (
        'use crewai.LLM(model="openai/…") in its place'
    )
    assert Posting.call is not own
    uninstrument()
    assert Posting.call is own
    check_untrained(run)


def test_a_bypassing_client_that_fails(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer", llm=Posting(model="mine"))
    with captured() as run, pytest.raises(ConnectionError):
        Crew(agents=[writer], tasks=[a_task(writer, description="fail")]).kickoff()
    assert run.tree == ["invoke_agent writer @writer error", "  chat mine @writer error"]
    assert run.one("chat mine").attributes["error.type"] == "ConnectionError"


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
    assert tree(run.spans) == ["invoke_agent writer @writer", "  chat @writer"]
    (span,) = (span for span in run.spans if span.kind is SpanKind.LLM)
    assert span.attributes["lightspan.route"] == "app"
    assert span.attributes["lightspan.client"] == "crewai.LLM"
    assert span.attributes["lightspan.client.fix"] == (
        'name its model "openai/…": LiteLLM then uses the OpenAI SDK, which lightspan sees'
    )
    address = f"{span.attributes['server.address']}:{span.attributes['server.port']}"
    assert f"http://{address}" == server.origin


def test_hosted_vllm(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if "hosted_vllm" not in getattr(crewai_llm, "SUPPORTED_NATIVE_PROVIDERS", ()):
        pytest.skip("this version reaches vLLM through litellm only")
    monkeypatch.setenv("VLLM_BASE_URL", server.url)
    llm = LLM("hosted_vllm/m", api_key="key", additional_params={"extra_body": {"top_k": 5}})
    with captured() as run:
        crew_of(an_agent(server, "writer", llm=llm)).kickoff()
    assert run.tree == WRITER
    assert server.requests[0].body["top_k"] == 5


class Paint(pydantic.BaseModel):
    color: str


@pytest.mark.parametrize("field", ["output_json", "output_pydantic"])
def test_what_structured_tasks_ask_for(field: str) -> None:
    """Check CrewAI's part of the table in `docs/guides/structured-output.md`."""
    with ScriptedServer('{"color":"red"}') as server:
        painter = an_agent(server, "painter")
        Crew(agents=[painter], tasks=[a_task(painter, **{field: Paint})]).kickoff()
    [request] = server.requests
    assert request.body["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("through_gateway", [True, False], ids=["gateway", "endpoint"])
def test_an_image_of_a_task(image_stage: Stage, through_gateway: bool) -> None:
    """Check `input_files`, which CrewAI sends to models that it knows by name to see."""
    files = pytest.importorskip("crewai_files")
    played = image_stage.open(Part({"writer": ["red"]}), through_gateway=through_gateway)
    llm: Any = LLM(
        "gpt-4o", provider="openai", base_url=image_stage.url, api_key="key", max_retries=0
    )
    red = image_file("red")
    picture = files.ImageFile(source=files.FileBytes(data=red, filename="red.png"))
    writer = Agent(role="writer", goal="g", backstory="b", llm=llm)
    task = a_task(writer, description=played.text, input_files={"picture": picture})
    with open_scope(played.scope):
        Crew(agents=[writer], tasks=[task]).kickoff()
    sdk_instrumentation.close()
    image_stage.close(played)
    check_image(image_stage, played, red)
