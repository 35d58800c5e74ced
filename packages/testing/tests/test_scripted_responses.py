"""Test the scripted server's Responses API with the OpenAI SDK."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall

CALL = ToolCall(name="look", arguments='{"what": "it"}', call_id="call_1")
FUNCTION: Any = {"type": "function", "name": "look", "parameters": {}, "strict": False}


def read(server: ScriptedServer, *, stream: bool, **more: Any) -> Any:
    body: Any = {"model": "m", "input": "hi", **more}
    with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        if not stream:
            return client.responses.create(**body)
        with client.responses.stream(**body) as events:
            for _ in events:
                pass
            return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls(stream: bool) -> None:
    reply = Reply(text="Let me see.", tool_calls=[CALL])
    with ScriptedServer(lambda request: reply) as server:
        answer = read(server, stream=stream, tools=[FUNCTION])
    message, call = answer.output
    assert answer.output_text == message.content[0].text == "Let me see."
    assert (call.call_id, call.name, call.arguments) == ("call_1", "look", '{"what": "it"}')
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (1, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut(stream: bool) -> None:
    with ScriptedServer(lambda request: Reply(text="a b", finish_reason="length")) as server:
        body: Any = {"model": "m", "input": "hi", "stream": stream}
        with openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
            answer = client.responses.create(**body)
            last = list(answer)[-1].response if stream else answer
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
