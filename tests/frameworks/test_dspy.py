"""Test DSPy, whose spans name no agent: lightspan wraps its modules and tools.

Its models are called by LiteLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import lightspan
import lightspan_otel as otel
from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import agent_name
from lightspan.schema.spans import SpanKind
from lightspan_otel import framework_patches
from lightspan_testing.adapter_harness import Part, Played, Stage, Turn
from lightspan_testing.adapter_suite.scenario_runner import play
from lightspan_testing.adapter_suite.scenarios import App, Model, count, instructions, look
from lightspan_testing.attempts import path_of
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.uncaptured_requests import requests_of
from tests.frameworks.framework_pages import check_page
from tests.frameworks.suite import PROVIDER, FrameworkSuite, columns

dspy = pytest.importorskip("dspy")
litellm = pytest.importorskip("litellm")
instrumentation = pytest.importorskip("openinference.instrumentation.dspy")

pytestmark = [
    # LiteLLM, of a type of its own
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
    # LiteLLM, which looks at all attributes of what is streamed, those of Pydantic's past too
    pytest.mark.filterwarnings(
        r"ignore:(The|Accessing the) .* attribute.* is deprecated:DeprecationWarning"
    ),
]


def said(**fields: str) -> str:
    """Return a text in the format that DSPy's adapter parses."""
    lines = [f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()]
    return "\n\n".join([*lines, "[[ ## completed ## ]]"])


def calls(tool: str, arguments: str) -> Turn:
    """Return an answer with which ReAct calls a tool."""
    fields = {"next_thought": "Ask.", "next_tool_name": tool, "next_tool_args": arguments}
    return Turn(text=said(**fields))


METHODS = [(owner, name) for owner in (dspy.Module, dspy.Tool) for name in ("__call__", "acall")]
"""Methods of DSPy that lightspan wraps."""

FINISH = calls("finish", "{}")
HAS_ENGINES = "engine" in inspect.signature(dspy.LM.__init__).parameters
ENGINE: dict[str, Any] = {"engine": "litellm"} if HAS_ENGINES else {}
"""Option of a DSPy version with clients of its own by which it uses LiteLLM; else empty."""


class Builder:
    def __init__(self, model: Model) -> None:
        self.model = dspy.LM(
            f"openai/{model.name}",
            api_base=model.base_url,
            api_key=model.api_key,
            num_retries=model.max_retries,
            cache=False,
            **ENGINE,
        )
        self.stream = model.stream

    def signature(self, name: str) -> Any:
        return dspy.Signature("question -> answer", instructions(name))

    def predictor(self, name: str) -> Any:
        return dspy.Predict(self.signature(name))

    def react(self, name: str, tools: Sequence[Any]) -> Any:
        return dspy.ReAct(self.signature(name), tools=list(tools))

    async def asked(self, program: Any, text: str) -> str:
        with dspy.context(lm=self.model):
            if not self.stream:
                return str((await program.acall(question=text)).answer)
            streamed = dspy.streamify(program, is_async_program=True)
            return str([each async for each in streamed(question=text)][-1].answer)

    def alone(self, program: Any, tree: str, **more: Any) -> App:
        async def run(text: str) -> str:
            return await self.asked(program, text)

        def run_sync(text: str) -> str:
            with dspy.context(lm=self.model):
                return str(program(question=text).answer)

        return App(run=run, run_sync=run_sync, tree=tree, **more)

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        return self.alone(
            self.predictor("writer"),
            "invoke_agent Predict @Predict\n  chat @Predict",
            says={"writer": [said(answer="A draft of {task}.")]},
            names={"writer": "Predict"},
        )

    def team(self) -> App:
        """Return a program of two predictors, one of them two levels down."""
        build = self

        class Team(dspy.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.write = dspy.ChainOfThought(build.signature("writer"))
                self.check = build.predictor("checker")

            def forward(self, question: str) -> Any:
                self.write(question=question)
                return self.check(question=question)

            async def aforward(self, question: str) -> Any:
                await self.write.acall(question=question)
                return await self.check.acall(question=question)

        tree = """
            invoke_agent Team @Team
              invoke_agent write.predict @Team/write.predict
                chat @Team/write.predict
              invoke_agent check @Team/check
                chat @Team/check
        """
        says = {
            "writer": [said(reasoning="So.", answer="A draft of {task}.")],
            "checker": [said(answer="{task} is good.")],
        }
        names = {"writer": "write.predict", "checker": "check"}
        return self.alone(Team(), tree, says=says, names=names)

    def parallel(self) -> App:
        build, roles = self, ("planner", "left", "right", "joiner")

        class Fork(dspy.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.parts = {name: build.predictor(name) for name in roles}

            async def aforward(self, question: str) -> Any:
                async def ask(name: str) -> Any:
                    return await self.parts[name].acall(question=question)

                await ask("planner")
                await asyncio.gather(ask("left"), ask("right"))
                return await ask("joiner")

        agents = [f"parts['{name}']" for name in roles]
        lines = [f"  invoke_agent {name} @Fork/{name}\n    chat @Fork/{name}" for name in agents]
        program = Fork()

        return App(
            run=lambda text: self.asked(program, text),
            tree="\n".join(["invoke_agent Fork @Fork", *lines]),
            says={
                name: [Turn(text=said(answer=f"{name} of {{task}}."), delay_s=0.05)]
                for name in roles
            },
            names=dict(zip(roles, agents, strict=True)),
        )

    def parallel_tools(self) -> App:
        """Return a program with two tool calls, one after the other, because ReAct makes one at
        a time.
        """
        tree = """
            invoke_agent ReAct @ReAct
              invoke_agent react @ReAct/react
                chat @ReAct/react
              execute_tool look @ReAct
              invoke_agent react @ReAct/react
                chat @ReAct/react
              execute_tool count @ReAct
              invoke_agent react @ReAct/react
                chat @ReAct/react
              execute_tool finish @ReAct
              invoke_agent extract.predict @ReAct/extract.predict
                chat @ReAct/extract.predict
        """
        asks = '{"what": "seven"}'
        extracted = said(reasoning="So.", answer="Seven, for {task}.")
        says = {"scout": [calls("look", asks), calls("count", asks), FINISH, extracted]}
        return self.alone(self.react("scout", [look, count]), tree, says=says)

    def agent_as_tool(self) -> App:
        """Return a program that another program calls in a tool."""
        inner, model = self.predictor("expert"), self.model

        def ask(task: str) -> str:
            """Ask the expert."""
            with dspy.context(lm=model):
                return str(inner(question=task).answer)

        async def wait_for(task: str) -> str:
            """Ask the expert."""
            with dspy.context(lm=model):
                return str((await inner.acall(question=task)).answer)

        # what is streamed is waited for in the loop
        expert = dspy.Tool(wait_for if self.stream else ask, name="expert")

        tree = """
            invoke_agent ReAct @ReAct
              invoke_agent react @ReAct/react
                chat @ReAct/react
              execute_tool expert @ReAct
                invoke_agent Predict @ReAct/Predict
                  chat @ReAct/Predict
              invoke_agent react @ReAct/react
                chat @ReAct/react
              execute_tool finish @ReAct
              invoke_agent extract.predict @ReAct/extract.predict
                chat @ReAct/extract.predict
        """
        says = {
            "boss": [
                calls("expert", '{"task": "help with {task}"}'),
                FINISH,
                said(reasoning="So.", answer="Thanks: {task}."),
            ],
            "expert": [said(answer="It is seven, {task}.")],
        }
        names = {"expert": "Predict"}
        return self.alone(self.react("boss", [expert]), tree, says=says, names=names)

    def model_error(self) -> App:
        return self.alone(
            self.predictor("writer"),
            "invoke_agent Predict @Predict error\n  chat @Predict error",
            names={"writer": "Predict"},
            raises=Exception,
        )


class TestDSPy(FrameworkSuite):
    name = "dspy"
    builder = Builder
    instrumentor = "dspy.DSPyInstrumentor"
    names_agents = False

    def patched(self) -> Any:
        """Return, for each method in `METHODS`, whether lightspan wraps it."""
        files = [vars(owner)[name].__code__.co_filename for owner, name in METHODS]
        return [file == framework_patches.__file__ for file in files]

    def check_names(self, played: Played, app: App) -> None:
        """Check names, where both predictors of a ReAct get the instructions of the whole."""
        for span in played.llm_spans:
            prompt = str(span.attributes[c.INPUT_MESSAGES])
            if "trajectory" in prompt:
                name = "react" if "next_tool_name" in prompt else "extract.predict"
                assert path_of(span) == f"ReAct/{name}"
            else:
                who = Part({}).agent_of(prompt) or ""
                assert agent_name(path_of(span)) == app.names.get(who, who)

    @pytest.mark.parametrize("scenario", ["single", "team"])
    def test_an_app_that_is_traced_already(self, stage: Stage, scenario: str, mode: str) -> None:
        """Check DSPy's modules in addition to OpenInference's spans, which name no agent.

        Tools of this DSPy fail where this OpenInference traces them and warnings are errors.
        """
        with self.telling(PROVIDER), otel.instrument(PROVIDER), otel.instrument(self.name):
            app = self.app(stage, scenario, mode)
            played = play(stage, app, scenario, mode, through_gateway=True)
            self.check(played, scenario, app, stage)


# --- LiteLLM's providers --------------------------------------------------------------------
SEEN = (
    *("openai", "azure", "cerebras", "custom_openai", "dashscope", "deepinfra", "hyperbolic"),
    *("litellm_proxy", "llamafile", "lm_studio", "moonshot", "novita", "nvidia_nim"),
    *("perplexity", "sambanova", "vercel_ai_gateway"),
)
"""Model prefixes for which LiteLLM uses the OpenAI SDK."""
PAST = {
    **dict.fromkeys(
        (
            *("azure_ai", "databricks", "deepseek", "fireworks_ai", "groq", "hosted_vllm"),
            *("huggingface", "mistral", "openrouter", "together_ai", "xai"),
        ),
        "/chat/completions",
    ),
    "anthropic": "/v1/messages",
    "gemini": "/models/m:generateContent",
    "ollama": "/api/generate",
    "ollama_chat": "/api/chat",
}
"""Model prefix for which LiteLLM uses its own HTTP clients → end of the URL."""


def input_messages_of(provider: str, mode: str) -> tuple[list[str], Any, str]:
    """Return (spans of model calls, requests that bypass the SDKs, URL of the server)."""
    scope = AttemptContext(rollout_id="r", attempt_id="a", mode=Mode.DEV)
    with ScriptedServer("said") as server, open_scope(scope), lightspan.agent("writer"):
        more: Any = {"api_base": server.url, "api_key": "key", "max_retries": 0, "timeout": 20}
        more |= {"messages": [{"role": "user", "content": "go"}], "model": f"{provider}/m"}
        # the server speaks OpenAI's API and Anthropic's only, so others' answers are no answers
        with contextlib.suppress(litellm.APIConnectionError, litellm.BadRequestError):
            if mode == "sync":
                litellm.completion(**more)
            else:
                asyncio.run(litellm.acompletion(**more))
    spans = scope.recorder.drain()
    uncaptured = [[*request, count] for request, count in requests_of(spans).items()]
    calls = [span.name for span in spans if span.kind is SpanKind.LLM]
    return calls, uncaptured, server.url


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    yield
    sdk_instrumentation.uninstall()
    gc.collect()  # here, where what LiteLLM leaves is known


OF_LITELLM = (
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings(  # an event loop that it begins and never closes
        "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning",
        "ignore:Exception ignored in. <function BaseEve:pytest.PytestUnraisableExceptionWarning",
    ),
)


def of_litellm(test: Any) -> Any:
    """Mark a test of LiteLLM alone."""
    for mark in OF_LITELLM:
        test = mark(test)
    return test


@of_litellm
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("provider", SEEN)
def test_litellm_by_the_openai_sdk(provider: str, mode: str) -> None:
    assert input_messages_of(provider, mode)[:2] == (["chat m"], [])


@of_litellm
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("provider", PAST)
def test_litellm_past_it(provider: str, mode: str) -> None:
    calls, past, url = input_messages_of(provider, mode)
    assert calls == []
    assert past == [["writer", "litellm", "m", f"{url}{PAST[provider]}", 1]]


@of_litellm
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_litellm_asks_the_responses_api_past_it(mode: str) -> None:
    """Check that the Responses API is called without the SDK, whatever the model's prefix.

    DSPy's `model_type="responses"` and ADK's `openai/responses/` use it.
    """
    calls, past, url = input_messages_of("openai/responses", mode)
    assert calls == []
    assert past == [["writer", "litellm", "m", f"{url}/responses", 1]]


def test_the_page(tmp_path: Path) -> None:
    check_page("dspy", tmp_path, [said(price="42"), said(answer="42 euros.")])


pytest_generate_tests = columns
