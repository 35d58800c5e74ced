"""Tests of apps that connect to a serving gateway by `lightspan.connect`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan.capture import context, sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import AttemptContext
from lightspan.capture.emit import agent, emit_reward
from lightspan.capture.entry import open_scope
from lightspan.errors import ConfigError
from lightspan.production.connect import ENDPOINT_VARIABLE, KEY_VARIABLE
from lightspan.schema import semconv as c
from lightspan_gateway.serving.public_access import (
    PublicAccess,
    ServingGateway,
)
from lightspan_testing.attempts import read_recorded
from lightspan_testing.gateway_suite import MESSAGES
from lightspan_testing.scripted import Reply, ScriptedServer
from tests.serving.gateways import (
    serving,
)


@contextmanager
def in_thread(**options: Any) -> Iterator[ServingGateway]:
    """Run a serving gateway in a separate thread with its own event loop."""
    gateways: list[ServingGateway] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(**options) as gateway:
            gateways.append(gateway)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(20)
        yield gateways[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def served() -> Iterator[ServingGateway]:
    with in_thread() as gateway:
        yield gateway


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """Run the endpoint of the app's own client."""
    with ScriptedServer(lambda request: Reply(text="from elsewhere")) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (ENDPOINT_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


def say(client: openai.OpenAI, who: str | None) -> str:
    if who is None:
        answer = client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    else:
        with agent(who):
            answer = client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    return str(answer.choices[0].message.content)


def app_client(elsewhere: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=elsewhere.url,
        api_key="app-key",
        organization="app-org",
        default_headers={"x-app": "1"},
        max_retries=0,
    )


EXPECTED = {
    "writer": "I am sql",
    "planner": "I am plan",
    "checker": "I am base",
    "helper": "from elsewhere",
    None: "from elsewhere",
}


def test_one_line_sends_each_agent_to_its_policy(
    served: ServingGateway, elsewhere: ScriptedServer
) -> None:
    """Check one client for all agents, which is made before `connect`."""
    with app_client(elsewhere) as client:
        assert {who: say(client, who) for who in EXPECTED} == dict.fromkeys(
            EXPECTED, "from elsewhere"
        )
        with lightspan.connect(served.url) as connection:
            assert connection.url == served.url
            assert {who: say(client, who) for who in EXPECTED} == EXPECTED
        assert say(client, "writer") == "from elsewhere"
    own = {"sql": 1, "plan": 1, "base": 1}
    counts = {policy: n for item in served.usage.summary().values() for policy, n in item.items()}
    assert counts == own
    assert {request.headers["authorization"] for request in elsewhere.requests} == {
        "Bearer app-key"
    }


def test_work_in_a_pool_goes_to_the_policy_of_its_agent(
    served: ServingGateway, elsewhere: ScriptedServer
) -> None:
    """Check pools that are made before `connect`, also in a node of LangGraph, which its adapter
    finds by a resolver.
    """
    pytest.importorskip("langchain_openai")
    import lightspan_langgraph
    from packages.langgraph.tests.langgraph_apps import USER, chat, graph_of

    with ThreadPoolExecutor(1) as pool, app_client(elsewhere) as client:
        pool.submit(int).result()  # the thread is older than the connection

        async def in_executor(work: Callable[[], str]) -> str:
            return await asyncio.get_running_loop().run_in_executor(pool, work)

        work = partial(say, client, None)
        with lightspan.connect(served.url):
            with agent("writer"):
                assert pool.submit(work).result() == "I am sql"
                assert asyncio.run(in_executor(work)) == "I am sql"
            assert pool.submit(work).result() == "from elsewhere"
            model = chat(elsewhere)

            def writer(state: Any) -> dict[str, Any]:
                return {"messages": [pool.submit(model.invoke, "go").result()]}

            lightspan_langgraph.instrument()
            try:
                done = graph_of(("writer", writer)).invoke(USER)
            finally:
                lightspan_langgraph.uninstrument()
            assert done["messages"][-1].text == "I am sql"
        assert pool.submit(work).result() == "from elsewhere"
    assert state.thread_patches == []


def test_nothing_of_the_apps_client_travels(
    elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers: list[dict[str, str]] = []
    original = PublicAccess.authenticate

    async def authenticate(self: PublicAccess, request: Any) -> Any:
        headers.append({key.lower(): value for key, value in request.headers.items()})
        return await original(self, request)

    monkeypatch.setattr(PublicAccess, "authenticate", authenticate)
    monkeypatch.setenv("OPENAI_PROJECT_ID", "app-project")
    with in_thread() as served, lightspan.connect(served.url), app_client(elsewhere) as client:
        assert say(client, "writer") == "I am sql"
    [asked, called] = headers
    assert asked["authorization"] == "Bearer"
    assert called["authorization"] == "Bearer none"
    assert called[c.HEADER_AGENT] == "writer"
    values = {value for item in headers for value in item.values()}
    assert not any(own in value for value in values for own in ("app-key", "app-org", "app-pro"))
    assert not {"x-app", "openai-organization", "openai-project", "cookie"} & called.keys()
    assert elsewhere.requests == []


def test_what_a_connected_app_says_can_be_recorded(
    served: ServingGateway, elsewhere: ScriptedServer, tmp_path: Path
) -> None:
    """Check that the app's process records the calls of all agents, because the server does not."""
    url = f"sqlite:{tmp_path / 'production.db'}"
    with (
        lightspan.connect(served.url),
        lightspan.record(url),
        app_client(elsewhere) as client,
    ):
        assert {who: say(client, who) for who in EXPECTED} == EXPECTED
        with agent("writer"):
            streamed = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert [chunk for chunk in streamed if chunk.choices]
    attempts = read_recorded(url)
    answers = [item.answered[0].answer for item in attempts]
    assert answers == [*EXPECTED.values(), "I am sql"]
    calls = [item.calls[0].attributes for item in attempts]
    assert [(call[c.AGENT_PATH], str(call[c.ROUTE])) for call in calls] == [
        ("writer", "policy"),
        ("planner", "policy"),
        ("checker", "base"),
        ("helper", "app"),
        ("app", "app"),
        ("writer", "policy"),
    ]
    assert context.current_context() is None


def test_the_servers_key(elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_thread(key="the servers key") as served, app_client(elsewhere) as client:
        monkeypatch.setenv("MY_KEY", "the servers key")
        with lightspan.connect(f"{served.url}/v1/", api_key_env="MY_KEY"):
            assert say(client, "writer") == "I am sql"
        monkeypatch.setenv(KEY_VARIABLE, "the servers key")
        with lightspan.connect(served.url):
            assert say(client, "writer") == "I am sql"
        monkeypatch.setenv(KEY_VARIABLE, "app-key")
        with pytest.raises(ConfigError, match=f"rejects the key: set {KEY_VARIABLE}"):
            lightspan.connect(served.url)
    assert elsewhere.requests == []


def test_a_scope_comes_first(served: ServingGateway, elsewhere: ScriptedServer) -> None:
    """Check that the algorithm's routing replaces that of `connect` in a training."""
    context = AttemptContext(rollout_id="ro", attempt_id="at")
    with lightspan.connect(served.url), app_client(elsewhere) as client:
        with open_scope(context):
            assert say(client, "writer") == "from elsewhere"
        assert say(client, "writer") == "I am sql"
        assert emit_reward(1.0) is not None  # goes nowhere
    kinds = [span.kind for span in context.recorder.drain()]
    assert kinds == ["llm", "agent"]


def test_connections_nest_and_end_once(served: ServingGateway, elsewhere: ScriptedServer) -> None:
    with in_thread(script="the other") as other, app_client(elsewhere) as client:
        first = lightspan.connect(served.url)
        second = lightspan.connect(other.url)
        assert say(client, "writer") == "the other"
        second.close()
        second.close()
        assert say(client, "writer") == "I am sql"
        first.close()
        assert say(client, "writer") == "from elsewhere"


def test_the_environment_names_the_server(
    served: ServingGateway, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with app_client(elsewhere) as client:
        with lightspan.connect() as connection:
            assert connection.url is None
            assert say(client, "writer") == "from elsewhere"
            assert not sdk_instrumentation.installed()
        monkeypatch.setenv(ENDPOINT_VARIABLE, served.url)
        with lightspan.connect():
            assert say(client, "writer") == "I am sql"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
        ("127.0.0.1:8000", "is not an endpoint: give a URL such as"),
        ("http://me:secret@127.0.0.1", "is not an endpoint"),
    ],
)
def test_a_server_that_is_not_there(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lightspan.connect(url)


def test_a_server_of_another_kind(elsewhere: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match="is not a `lightspan serve` of this version"):
        lightspan.connect(elsewhere.url)
    with pytest.raises(ConfigError, match="api_key_env='NO_SUCH'"):
        lightspan.connect(elsewhere.url, api_key_env="NO_SUCH")


def trace_ids_of(gateway: ServingGateway) -> list[str]:
    [session] = gateway.access.sessions()
    return [call.info.trace_id for call in session.calls.values()]


def test_the_calls_of_a_run_of_the_app_share_a_trace(served: ServingGateway) -> None:
    with lightspan.connect(served.url), openai.OpenAI(api_key="-", max_retries=0) as client:

        def ask() -> None:
            client.chat.completions.create(model="any", messages=MESSAGES)

        for _ in range(2):
            with agent("team"):
                with agent("writer"):
                    ask()
                with agent("planner"):
                    ask()
                assert lightspan.current_attempt_id() is None
        with agent("writer"):
            ask()
    first, second, third, fourth, fifth = trace_ids_of(served)
    assert (first, third) == (second, fourth)
    assert len({first, third, fifth}) == 3


def test_a_connected_app_is_routed_inside_an_agent(served: ServingGateway) -> None:
    """Check that caches of frameworks know that a trained model answers."""
    with lightspan.connect(served.url), agent("writer"):
        current = context.current_agent()
        assert current is not None
        assert current.is_routed
        assert not current.scope.is_rollout


def test_the_calls_of_a_run_of_a_graph_share_a_trace(served: ServingGateway) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    import lightspan_langgraph

    model = ChatOpenAI(model="any", base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke("Hello")]}

    builder = StateGraph(MessagesState)
    for before, name in ((START, "writer"), ("writer", "planner")):
        builder.add_node(name, ask)
        builder.add_edge(before, name)
    graph = builder.add_edge("planner", END).compile()
    lightspan_langgraph.instrument()
    with lightspan.connect(served.url):
        graph.invoke({"messages": []})
        asyncio.run(graph.ainvoke({"messages": []}))
    [session] = served.access.sessions()
    paths = [call.info.agent_path for call in session.calls.values()]
    assert paths == ["writer", "planner"] * 2
    first, second, third, fourth = trace_ids_of(served)
    assert first == second != third == fourth
