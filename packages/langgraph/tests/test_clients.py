"""Test model clients: those that bypass the OpenAI SDK, raw clients, and where calls go."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request as HTTPRequest, urlopen

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.content import create_image_block
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pydantic import SecretStr

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.production.record import record
from lightspan.schema.routing import make_routing
from lightspan_langgraph import instrument, uninstrument
from lightspan_testing.adapter_harness import Part, Stage
from lightspan_testing.adapter_suite.checks import check_image
from lightspan_testing.attempts import captured, path_of, read_recorded
from lightspan_testing.byte_tokenizer import image_file
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import (
    USER,
    ask_raw,
    asks,
    calls_tool,
    chat,
    graph_of,
    human,
    look,
    raw_client,
)

pytestmark = pytest.mark.usefixtures("installed_langgraph")

RED = image_file("red")


class Own(BaseChatModel):
    """A custom model client."""

    says: str = "fine"

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
        if self.says == "fail":
            raise ConnectionError("down")
        usage: Any = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
        message = AIMessage(self.says, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


def node_of(model: Any, **more: Any) -> Any:
    def work(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke([("system", "Be kind."), ("user", "go")], **more)]}

    return graph_of(("writer", work))


def test_a_client_that_bypasses_the_sdk_is_recorded_as_structure() -> None:
    with captured() as run:
        node_of(Own(metadata={"lightspan_agent": "poet"})).invoke(USER)
    assert run.tree == [
        "invoke_agent writer @writer",
        "  invoke_agent poet @writer/poet",
        "    chat Own @writer/poet",
    ]
    found = dict(run.one("chat Own").attributes)
    assert str(found.pop("lightspan.call.id")).startswith("call")
    assert found == {
        "lightspan.agent.path": "writer/poet",
        "lightspan.route": "app",
        "lightspan.call.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "Own",
        "openinference.span.kind": "LLM",
        "gen_ai.input.messages": '[{"role":"system","parts":[{"type":"text","content":"Be kind."}]'
        '},{"role":"user","parts":[{"type":"text","content":"go"}]}]',
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":'
        '"fine"}],"finish_reason":"stop"}]',
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
        "lightspan.client": "packages.langgraph.tests.test_clients.Own",
        "lightspan.client.fix": "use langchain_openai.ChatOpenAI in its place",
    }


class Waiting(Own):
    """A model client whose answer comes late."""

    seconds: float = 60

    async def _agenerate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
        await asyncio.sleep(self.seconds)
        raise AssertionError("it was not cancelled")


async def test_a_cancelled_call_that_bypasses_the_sdk_is_recorded() -> None:
    """Check a call whose end LangChain does not report."""

    async def work(state: Any) -> dict[str, Any]:
        with suppress(TimeoutError):
            await asyncio.wait_for(Waiting().ainvoke("go"), 0.05)
        return {"messages": [await Own().ainvoke("again")]}

    with captured() as run:
        await graph_of(("writer", work)).ainvoke(USER)
    assert run.one("chat Waiting").attributes["lightspan.call.outcome"] == "cancelled"
    assert run.tree == [
        "invoke_agent writer @writer",
        "  chat Waiting @writer error",
        "  chat Own @writer",
    ]


async def test_a_cancelled_call_does_not_keep_its_attempt_open(tmp_path: Path) -> None:
    with record(f"sqlite:{tmp_path / 'production.db'}") as made:
        for _ in range(2):
            with suppress(TimeoutError), lightspan.operation("ticket"):
                await asyncio.wait_for(Waiting().ainvoke("go"), 0.05)
        with suppress(TimeoutError):
            await asyncio.wait_for(Waiting().ainvoke("go"), 0.05)
        assert await asyncio.to_thread(made.flush)
        found = await asyncio.to_thread(read_recorded, f"sqlite:{tmp_path / 'production.db'}")
    assert [one.attempt.status for one in found] == ["failed", "failed", "failed"]
    outcomes = [[call.attributes["lightspan.call.outcome"] for call in one.calls] for one in found]
    assert outcomes == [["cancelled"]] * 3


class Posts(Own):
    """A model client that sends HTTP requests without the SDK."""

    base_url: str
    api_key: SecretStr = SecretStr("secret")

    def _generate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
        said = self._ask([{"role": "user", "content": messages[-1].text}])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])

    def _ask(self, messages: Any) -> str:
        body = json.dumps({"model": "writer", "messages": messages}).encode()
        headers = {
            "Authorization": f"Bearer {self.api_key.get_secret_value()}",
            "Content-Type": "application/json",
        }
        url = f"{self.base_url}/chat/completions"
        with urlopen(HTTPRequest(url, body, headers=headers)) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])


def test_a_bypassing_client_is_named_with_its_address_and_what_to_do(
    server: ScriptedServer,
) -> None:
    with captured() as run:
        node_of(Posts(base_url=server.url)).invoke(USER)
    known = run.one("chat Posts").attributes
    told = ("lightspan.client", "lightspan.client.fix", "server.address", "server.port")
    assert {key: known[key] for key in told} == {
        "lightspan.client": "packages.langgraph.tests.test_clients.Posts",
        "lightspan.client.fix": "use langchain_openai.ChatOpenAI in its place",
        "server.address": "127.0.0.1",
        "server.port": int(server.origin.rpartition(":")[2]),
    }


def test_a_client_that_asks_the_attempts_endpoint_itself_is_recorded_there(
    server: ScriptedServer,
) -> None:
    model = Posts(base_url=server.url)
    with captured(gateway_url=server.origin) as run:
        node_of(model).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer"]


@pytest.mark.parametrize(
    ("options", "through_gateway"),
    [({}, True), ({"use_responses_api": True}, True), ({}, False)],
    ids=["chat", "responses", "chat-endpoint"],
)
def test_an_image_of_a_message(
    image_stage: Stage, options: dict[str, Any], through_gateway: bool
) -> None:
    """Check LangChain's own content block, which its client writes in each API's form."""
    played = image_stage.open(Part({"writer": ["red"]}), through_gateway=through_gateway)
    block = create_image_block(base64=b64encode(RED).decode(), mime_type="image/png")
    content: Any = [{"type": "text", "text": f"You are writer. {played.text}"}, block]
    model = chat(image_stage, **options)

    def work(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke([HumanMessage(content)])]}

    with open_scope(played.scope):
        graph_of(("writer", work)).invoke(USER)
    sdk_instrumentation.close()
    image_stage.close(played)
    assert played.tree == ["invoke_agent writer @writer", "  chat m @writer"]
    check_image(image_stage, played, RED)


def test_a_bypassing_text_model() -> None:
    from langchain_core.language_models import FakeListLLM

    with captured() as run:
        FakeListLLM(responses=["fine"]).invoke("go")
    (call,) = run.spans
    assert path_of(call) == "app"
    assert '"content":"go"' in str(call.attributes["gen_ai.input.messages"])
    assert '"content":"fine"' in str(call.attributes["gen_ai.output.messages"])


def test_a_bypassing_client_that_fails() -> None:
    with captured() as run, pytest.raises(ConnectionError):
        node_of(Own(says="fail")).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer error", "  chat Own @writer error"]
    span = run.one("chat Own")
    assert span.attributes["lightspan.call.outcome"] == "error"
    assert span.attributes["error.type"] == "ConnectionError"


async def test_several_prompts_of_a_bypassing_client() -> None:
    prompts: Any = [[human("a")], [human("b")]]
    with captured() as run:
        Own().generate(prompts)
        await Own().agenerate(prompts)
        await Own().abatch(["c", "d"])
    asked = [str(span.attributes["gen_ai.input.messages"]) for span in run.spans]
    assert sorted(re.findall(r'"content":"(\w)"', "".join(asked))) == list("aabbcd")


# --- clients of the OpenAI SDK --------------------------------------------------------------
def test_a_raw_client_in_a_node_and_in_a_tool(server: ScriptedServer) -> None:
    server.script = calls_tool("deep")
    client = raw_client(server)

    @tool
    def deep() -> str:
        """Ask the raw client."""
        ask_raw(client)
        return "7"

    def work(state: Any) -> dict[str, Any]:
        ask_raw(client)
        return {}

    with captured() as run:
        graph_of(("work", work), ("scout", create_agent(chat(server), [deep]))).invoke(USER)
    assert run.tree == [
        "invoke_agent work @work",
        "  chat m @work",
        "invoke_agent scout @scout",
        "  chat m @scout",
        "  execute_tool deep @scout",
        "    chat m @scout",
        "  chat m @scout",
    ]


def test_langchain_without_a_graph(server: ScriptedServer) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{q}")]) | chat(server)
    named = chain.with_config(metadata={"lightspan_agent": "poet"})
    with captured() as run:
        chain.invoke({"q": "a"})
        named.invoke({"q": "b"})
        look.invoke({"what": "x"})
    assert run.tree == [
        "chat m @app",
        "invoke_agent poet @poet",
        "  chat m @poet",
        "execute_tool look @app",
    ]


# --- where calls go -------------------------------------------------------------------------
def test_a_trained_agent_goes_to_the_gateway_and_a_third_party_sees_no_header_of_ours(
    server: ScriptedServer,
) -> None:
    """Check that the frozen agent's request has the same headers as in an app without lightspan."""
    headers = {"x-app": "1"}
    model = chat(server, default_headers=headers)
    graph = graph_of(("draft team", asks(model)), ("checker", asks(model)))
    uninstrument()
    graph.invoke(USER)
    plain = [request.headers for request in server.requests]
    server.requests.clear()
    instrument()
    with ScriptedServer("trained") as gateway:
        routing = make_routing({"draft team": "main"}, None, "main")
        more = {"gateway_url": gateway.origin, "call_token": "secret", "routing": routing}
        with captured(**more) as run:
            graph.invoke(USER)
        sdk_instrumentation.close()
        (ours,) = gateway.requests
    (theirs,) = server.requests
    assert dict(theirs.headers) == dict(plain[1])
    assert ours.headers["x-lightspan-agent"] == "draft%20team"
    assert ours.headers["authorization"] == "Bearer secret"
    assert "x-app" not in ours.headers
    node = run.one("invoke_agent draft team")
    assert ours.headers["traceparent"] == f"00-{run.scope.trace_id}-{node.span_id}-01"
    assert run.calls == ["checker"]
