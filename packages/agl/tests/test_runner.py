"""Tests of LitAgentRunner, as the examples use it for debugging."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

import lightspan_agl as agl
from lightspan.errors import AppError, ConfigError, DataError, RewardError, UnsupportedError
from lightspan.production.redact import map_text
from lightspan.schema.spans import SpanKind
from lightspan_agl._agent_transport import MainLLM, as_app
from lightspan_agl._dev import DevSummary
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

TOOLS: Any = [{"type": "function", "function": {"name": "rooms", "parameters": {"type": "object"}}}]


@agl.rollout
def books(task: Any, llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    text = prompt_template.format(**task)
    with openai.OpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": text}], tools=TOOLS
        )
    return 0.5


@agl.rollout
async def emits(task: Any) -> None:
    agl.emit_reward(task["n"])


@agl.rollout
def emits_and_returns(task: Any) -> float:
    agl.emit_reward(0.25)
    return 0.5


@agl.rollout
def fails(task: Any) -> float:
    raise ValueError("no")


async def test_a_step_leaves_messages_and_the_reward() -> None:
    def answer(request: Request) -> Reply:
        return Reply(tool_calls=[ToolCall(name="rooms", call_id="c1")])

    runner = agl.LitAgentRunner[Any](agl.AgentOpsTracer())
    store = agl.InMemoryLightningStore()
    with ScriptedServer(answer) as server, runner.run_context(agent=books, store=store):
        resources: agl.NamedResources = {
            "main_llm": agl.LLM(endpoint=server.url, model="gpt"),
            "prompt": agl.PromptTemplate(template="for {n}", engine="f-string"),
        }
        rollout = await runner.step({"n": 2}, resources=resources)
    assert rollout.status == "succeeded"
    spans = await store.query_spans(rollout.rollout_id)
    assert agl.find_final_reward(spans) == 0.5
    [conversation] = agl.TraceToMessages().adapt(spans)
    user, assistant = conversation["messages"]
    assert user == {"role": "user", "content": "for 2"}
    [call] = assistant["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c1", "rooms")
    assert conversation["tools"] == TOOLS


@agl.rollout
def chooses(task: Any, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "x"}], n=2
        )
    return 0.5


async def test_each_choice_of_a_call_is_a_message() -> None:
    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with (
        ScriptedServer(lambda request: ["a", "b"]) as server,
        runner.run_context(agent=chooses, store=store),
    ):
        llm = agl.LLM(endpoint=server.url, model="gpt")
        rollout = await runner.step({}, resources={"main_llm": llm})
    [conversation] = agl.TraceToMessages().adapt(await store.query_spans(rollout.rollout_id))
    roles = [(m["role"], m["content"]) for m in conversation["messages"]]
    assert roles == [("user", "x"), ("assistant", "a"), ("assistant", "b")]


async def test_a_developer_message_keeps_its_role() -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        with openai.OpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
            client.chat.completions.create(
                model=llm.model,
                messages=[
                    {"role": "developer", "content": "short"},
                    {"role": "system", "content": "kind"},
                    {"role": "user", "content": "x"},
                ],
            )
        return 0.5

    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with (
        ScriptedServer(lambda request: "a") as server,
        runner.run_context(agent=agent, store=store),
    ):
        llm = agl.LLM(endpoint=server.url, model="gpt")
        rollout = await runner.step({}, resources={"main_llm": llm})
    [conversation] = agl.TraceToMessages().adapt(await store.query_spans(rollout.rollout_id))
    assert [m["role"] for m in conversation["messages"]] == [
        *("developer", "system", "user", "assistant"),
    ]


async def test_the_agent_sees_the_metadata_of_its_queued_rollout_alone() -> None:
    seen = []

    @agl.rollout
    def agent(task: Any, rollout: agl.Rollout) -> float:
        seen.append(rollout.metadata)
        return 1.0

    runner, store = agl.LitAgentRunner[Any](max_rollouts=2), agl.InMemoryLightningStore()
    await store.enqueue_rollout("a", metadata={"split": "easy"})
    await store.enqueue_rollout("b")
    with runner.run_context(agent=agent, store=store):
        await runner.iter()
    assert seen == [{"split": "easy"}, {}]


class VLLM(BaseHTTPRequestHandler):
    """A server that answers as vLLM does with `return_token_ids`."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
        if body.get("stream"):
            head["object"] = "chat.completion.chunk"
            parts: list[Any] = [("hi", [7], None), (" you", [8], None), ("", [], "stop")]
            chunks = [
                {
                    **head,
                    **({"prompt_token_ids": [1, 2, 3]} if text == "hi" else {}),
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": text},
                            "finish_reason": end,
                            "token_ids": ids,
                        }
                    ],
                }
                for text, ids, end in parts
            ]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self.answer("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))
            return
        message = {"role": "assistant", "content": "hi you"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [7, 8]}
        whole = {**head, "prompt_token_ids": [1, 2, 3], "choices": [choice]}
        self.answer("application/json", json.dumps(whole))

    def answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """Start `VLLM`; return its base URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), VLLM) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@agl.rollout
def asks_vllm(task: Any, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hello"}],
            stream=task,
            extra_body={"return_token_ids": True},
        )
        if task:
            list(answer)
    return 1.0


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_ids_of_endpoints_are_recorded(streamed: bool, vllm: str) -> None:
    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with runner.run_context(agent=asks_vllm, store=store):
        resources: agl.NamedResources = {"main_llm": agl.LLM(endpoint=vllm, model="m")}
        rollout = await runner.step(streamed, resources=resources)
    spans = await store.query_spans(rollout.rollout_id)
    [call] = [span for span in spans if span.kind is SpanKind.LLM]
    assert call.attributes["lightspan.call.token_ids"] == "[[1,2,3],[7,8]]"
    redacted = map_text(call, str.upper)
    assert redacted.attributes["lightspan.call.token_ids"] == "[]"


async def test_emitted_rewards_and_failures() -> None:
    runner, store = agl.LitAgentRunner[Any](agl.OtelTracer()), agl.InMemoryLightningStore()
    with runner.run_context(agent=emits, store=store):
        rollout = await runner.step({"n": 0.25})
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25
    with runner.run_context(agent=emits_and_returns, store=store):
        rollout = await runner.step({})
    spans = await store.query_spans(rollout.rollout_id)
    assert [s.attributes.get("lightspan.reward.value") for s in spans][-2:] == [0.25, 0.5]
    assert agl.find_final_reward(spans) == 0.5
    with runner.run_context(agent=fails, store=store):
        rollout = await runner.step({"n": 1})
    assert rollout.status == "failed"
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None
    with pytest.raises(ConfigError, match="run_context"):
        await runner.step({"n": 1})


async def test_tasks_are_json_as_in_training() -> None:
    @agl.rollout
    def agent(task: Any) -> float:
        seen.append(task)
        return 1.0

    seen: list[Any] = []
    runner, store = agl.LitAgentRunner[Any](max_rollouts=1), agl.InMemoryLightningStore()
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        rollout = await runner.step({"z": "a", "b": {"y": (3, 4), "a": 1}})
        await store.enqueue_rollout({"z": 1, "a": 2})
        await runner.iter()
        for task in ({"a": math.nan}, object()):
            with pytest.raises(DataError, match=r"^input is not JSON: .*A task is made of dicts"):
                await runner.step(task)
        with pytest.raises(DataError, match=r"^input\['a'\] has the key \(1, 2\)"):
            await runner.step({"a": {(1, 2): 3}})
    expected = [{"z": "a", "b": {"y": [3, 4], "a": 1}}, {"z": 1, "a": 2}]
    assert repr(seen) == repr(expected)  # with the keys in order
    assert rollout.input == seen[0]
    assert [each.status for each in await store.query_rollouts()] == ["succeeded"] * 2


class Counts(agl.LitAgent[Any]):
    """An agent that keeps what it did, as agents of the original's debugging tutorial do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.bonus = [0]

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.seen.append(task)
        return float(len(self.seen) + self.bonus[0])


class Notes(agl.Hook):
    def __init__(self) -> None:
        self.agents: list[Any] = []

    def on_rollout_end(self, *, agent: Any, **others: Any) -> None:  # type: ignore[override]
        """Note the agent; a method that is not async is called too."""
        self.agents.append(agent)


async def test_the_runner_uses_the_callers_agent() -> None:
    agent, notes, store = Counts(), Notes(), agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](max_rollouts=2)
    with runner.run_context(agent=agent, store=store, hooks=notes):
        await runner.step("a")
        queued = [await store.enqueue_rollout(task) for task in ("b", "c")]
        await runner.iter()
        agent.bonus[0] = 10
        last = await runner.step("d")
    rewards = [
        agl.find_final_reward(await store.query_spans(rollout.rollout_id))
        for rollout in (*queued, last)
    ]
    assert rewards == [2, 3, 14]
    assert agent.seen == ["a", "b", "c", "d"]
    assert [each is agent for each in notes.agents] == [True] * 4


def test_trainers_use_the_callers_agent() -> None:
    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        queued = [(await store.enqueue_rollout(task)).rollout_id for task in "ab"]
        await store.wait_for_rollouts(rollout_ids=queued)

    agent = Counts()
    agl.Trainer(algorithm=algorithm).fit(agent)
    prompt = agl.PromptTemplate(template="x")
    agl.Trainer(initial_resources={"p": prompt}).dev(agent, ["c"])
    assert agent.seen == ["a", "b", "c"]
    # what rollouts changed is no reason to refuse the agent, and what the user changed is
    as_app(agent, MAIN)
    agent.bonus[0] = 1
    with pytest.raises(AppError, match="the agent Counts: bonus was set or changed"):
        as_app(agent, MAIN)


MAIN = MainLLM(model="m", sampling={"train": {}, "val": {}})


async def test_resources_are_bound_when_a_rollout_is_queued() -> None:
    @agl.rollout
    async def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        return float(prompt_template.template)

    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](max_rollouts=4)
    early = await store.enqueue_rollout(0)  # before there are any resources
    queued = []
    for text in "123":
        update = await store.add_resources({"p": agl.PromptTemplate(template=text)})
        queued.append(await store.enqueue_rollout(0))
        assert queued[-1].resources_id == update.resources_id
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        await runner.iter()
    spans = [await store.query_spans(each.rollout_id) for each in (*queued, early)]
    assert [agl.find_final_reward(each) for each in spans] == [1, 2, 3, 3]


async def test_each_rollout_has_its_own_resources() -> None:
    @agl.rollout
    def agent(task: Any, llm: agl.LLM) -> float:
        llm.model = "changed"
        return float(llm.sampling_parameters.pop("temperature", -1.0))

    llm = agl.LLM(endpoint="http://h/v1", model="m", sampling_parameters={"temperature": 0.5})
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any]()
    update = await store.add_resources({"main_llm": llm})
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        rollouts = [await runner.step(number) for number in range(2)]
    spans = [await store.query_spans(each.rollout_id) for each in rollouts]
    assert [agl.find_final_reward(each) for each in spans] == [0.5, 0.5]
    assert update.resources["main_llm"] == llm
    trainer = agl.Trainer(initial_resources={"main_llm": llm})
    summary = await asyncio.to_thread(trainer.dev, agent, [0, 1])  # type: ignore[arg-type]
    assert (summary.rewards, llm.model) == ([0.5, 0.5], "m")  # type: ignore[union-attr]


async def test_a_rollout_in_which_nothing_was_recorded_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @agl.rollout
    def agent(task: Any) -> None:
        if task == "emit":
            agl.emit_reward(1.0)

    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](max_rollouts=3)
    for task in ("emit", "", ""):
        await store.enqueue_rollout(task)
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        await runner.iter()
    [record] = [each for each in caplog.records if "no reward and no call" in each.message]
    assert "workers of a global queue" in record.message


async def spans_of(function: Callable[[], Any], returned: float | None = None) -> list[agl.Span]:
    """Return the spans of a rollout that calls a function."""

    @agl.rollout
    def agent(task: Any) -> float | None:
        function()
        return returned

    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        rollout = await runner.step({})
    assert rollout.status == "succeeded"
    return await store.query_spans(rollout.rollout_id)


@pytest.mark.parametrize(
    ("annotation", "reward"),
    [
        ({"reward": 0.44, "why": "x"}, 0.44),
        ({"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.33}, 0.33),
        ({"agentlightning.reward": [{"name": "a", "value": 2}, {"name": "b", "value": 1}]}, 2.0),
        ({"reward": "good"}, None),
        ({"nested": {"reward": 1.0}}, None),
    ],
)
async def test_annotations_with_the_name_of_a_reward_are_rewards(
    annotation: dict[str, Any], reward: float | None
) -> None:
    assert agl.find_final_reward(await spans_of(lambda: agl.emit_annotation(annotation))) == reward


async def test_a_reward_that_is_not_a_number_is_nan() -> None:
    returned = await spans_of(lambda: agl.emit_reward(1.0), returned=math.nan)
    emitted = await spans_of(lambda: agl.emit_reward(math.nan))
    for spans in (returned, emitted):
        reward = agl.find_final_reward(spans)
        assert reward is not None
        assert math.isnan(reward)


async def test_a_warning_names_a_reward_that_is_not_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for value, how in ((math.inf, "returned"), (math.nan, "emitted")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lightspan_agl"):
            if how == "returned":
                spans = await spans_of(lambda: agl.emit_reward(1.0), returned=value)
            else:
                spans = await spans_of(lambda value=value: agl.emit_reward(value))  # type: ignore[misc]
        [line] = [record.getMessage() for record in caplog.records]
        text = f"has no reward: NaN, infinity or more than 1e+100 was {how}"
        assert line.startswith(f"rollout {spans[0].rollout_id} {text}")


def test_dev_warns_once_of_rewards_that_are_not_numbers(caplog: pytest.LogCaptureFixture) -> None:
    @agl.rollout
    def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        return float(task["reward"])

    resources: agl.NamedResources = {"p": agl.PromptTemplate(template="x")}
    tasks = [{"id": n, "reward": text} for n, text in enumerate(("0.5", "inf", "-inf"))]
    with caplog.at_level(logging.WARNING, "lightspan_agl"):
        summary = agl.Trainer(initial_resources=resources).dev(agent, tasks)
    assert isinstance(summary, DevSummary)
    assert summary.rewards == [0.5, None, None]
    text = "task 1-1 has no reward: NaN, infinity or more than 1e+100 was returned"
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [text]


@pytest.mark.parametrize(
    ("emit", "kind"),
    [
        (lambda: agl.emit_message(3), TypeError),  # type: ignore[arg-type]
        (lambda: agl.emit_exception("text"), TypeError),  # type: ignore[arg-type]
        (lambda: agl.emit_object(object()), RuntimeError),
        (lambda: agl.emit_object({1, 2}), RuntimeError),
        (lambda: agl.emit_annotation({"a": object()}), ValueError),
        (lambda: agl.emit_annotation({"a": [1, {"b": None}]}), ValueError),
        (lambda: agl.emit_annotation({1: "a"}), ValueError),  # type: ignore[dict-item]
        (lambda: agl.emit_reward({"a": 1.0}), RewardError),
        (lambda: agl.emit_reward(None), TypeError),  # type: ignore[arg-type]
        (lambda: agl.emit_reward({"a": None}, primary_key="a"), RewardError),  # type: ignore[dict-item]
    ],
)
def test_emitters_refuse_what_the_original_refuses(
    emit: Callable[[], Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        emit()


async def test_emitters_return_their_span() -> None:
    spans: list[Any] = []

    def emit() -> None:
        spans.append(agl.emit_reward(0.5))
        spans.append(agl.emit_annotation({"a": 1}))
        spans.append(agl.emit_object(b"x"))
        unrecorded.extend(emitted(False))
        spans.append(agl.emit_object("last"))

    def emitted(propagate: bool) -> list[Any]:
        return [
            agl.emit_reward({"a": 0.5, "b": 1.0}, primary_key="b", propagate=propagate),
            agl.emit_annotation({"tag": {"of": 1}}, propagate=propagate),
            agl.emit_annotation({"reward": 0.25}, propagate),
            agl.emit_object({"c": 1}, {"d": 2}, propagate),
        ]

    unrecorded: list[Any] = []
    recorded = await spans_of(emit)
    assert all(span in recorded for span in spans)
    assert not any(span in recorded for span in unrecorded)
    assert len({span.attempt_id for span in [*spans, *unrecorded]}) == 1
    # outside a rollout
    assert emitted(True) == [None] * 4
    alone = emitted(False)
    assert [span.attempt_id for span in alone] == [""] * 4
    for span, other in zip(unrecorded, alone, strict=True):
        assert (span.name, span.kind) == (other.name, other.kind)
        same = {**other.attributes, "lightspan.agent.path": ""}
        assert {**span.attributes, "lightspan.agent.path": ""} == same
    assert agl.find_final_reward(alone) == 0.25


async def test_the_first_of_several_resources_is_used_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @agl.rollout
    def agent(task: Any, prompt_template: agl.PromptTemplate) -> float:
        return float(prompt_template.template)

    resources: agl.NamedResources = {
        "a": agl.PromptTemplate(template="1"),
        "b": agl.PromptTemplate(template="2"),
    }
    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with (
        caplog.at_level(logging.WARNING, "lightspan_agl"),
        runner.run_context(agent=agent, store=store),  # type: ignore[arg-type]
    ):
        for _ in range(2):
            rollout = await runner.step({}, resources=resources)
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 1.0
    [line] = [record.getMessage() for record in caplog.records]
    assert "several resources are a PromptTemplate: 'a' is used, and 'b' only" in line


async def test_missing_attributes_have_hints() -> None:
    lines: dict[str, str] = {}

    class Looks(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            assert self.get_tracer() is self.tracer
            assert self.get_runner() is runner
            assert (rollout.end_time, rollout.attempt.metadata) == (None, None)
            assert resources["p"].model_dump() == {
                "resource_type": "prompt_template",
                "template": "x",
                "engine": "f-string",
            }
            for owner, name in (
                *((self, n) for n in ("trainer", "get_trainer")),
                (rollout, "config"),
                *((rollout.attempt, n) for n in ("worker_id", "last_heartbeat_time")),
            ):
                with pytest.raises(AttributeError) as caught:
                    getattr(owner, name)
                lines[name] = str(caught.value)
            return 1.0

    runner = agl.LitAgentRunner[Any]()
    with runner.run_context(agent=Looks(), store=agl.InMemoryLightningStore()):
        rollout = await runner.step("a", resources={"p": agl.PromptTemplate(template="x")})
    assert rollout.status == "succeeded"
    assert lines["trainer"] == (
        "Looks has no 'trainer': use the argument `rollout`; agents do not see the Trainer that "
        "runs them"
    )
    assert lines["config"].startswith("AttemptedRollout has no 'config': rollouts are not retried")
    assert lines["worker_id"].startswith("Attempt has no 'worker_id': runners are threads")
    with pytest.raises(AttributeError, match="Looks has no 'runner': use the argument"):
        Looks().get_runner()
    with pytest.raises(AttributeError, match=r"^'Looks' object has no attribute 'other'$"):
        Looks().other  # type: ignore[attr-defined]  # noqa: B018


def test_arguments_of_the_original(capsys: pytest.CaptureFixture[str]) -> None:
    llm = agl.LLM(resource_type="llm", endpoint="http://x/v1", model="m")
    assert llm.model_dump() == {
        "endpoint": "http://x/v1",
        "model": "m",
        "api_key": None,
        "sampling_parameters": {},
        "resource_type": "llm",
    }
    agl.AgentOpsTracer(agentops_managed=True)
    assert "AgentOpsTracer: without effect: agentops_managed=True" in capsys.readouterr().out
    for adapter in (agl.TracerTraceToTriplet(), agl.LlmProxyTraceToTriplet()):
        with pytest.raises(UnsupportedError, match=r"\.adapt\(spans\): use Trainer\(adapter="):
            adapter.adapt([])
    assert agl.TraceToMessages()([]) == []
