"""Compute the GenAI attributes of a model call from its request and its answer, streamed or whole.

The SDK instrumentation and the gateway use this module, so that both record a call in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from lightspan.schema import anthropic_messages, genai_messages, openai_responses, semconv as c
from lightspan.schema.genai_messages import MAPPING, joined_text, mappings_in
from lightspan.schema.spans import Attributes

END: Final = "[DONE]"
"""Text of the event with which OpenAI's streams of chats end."""
CUT: Final = "the stream ended before the answer: it has no finish reason"
"""Message about a stream that has ended although its answer is not `complete`."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class StreamedAnswer:
    """Assemble a whole answer from the chunks of a streamed answer, as OpenAI's SDK does.

    The chunks belong to a chat or text completion, or are events of the Responses or Messages API.

    Args:
        choices: the number of choices that the request asks for.
    """

    def __init__(self, choices: int = 1) -> None:
        self.irregular_field = ""
        """The first field that clients assemble in different ways, such as `tool_calls.id`; empty
        if there is none."""
        self.is_done = False
        """Whether the event `END` has arrived."""
        self._requested = choices
        self._events: (
            openai_responses.StreamedResponse | anthropic_messages.StreamedMessage | None
        ) = None
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: Any) -> None:
        """Add a chunk: a mapping, or a pydantic model of the SDK. Never raises."""
        try:
            dump = getattr(chunk, "model_dump", None)
            data = chunk if dump is None else dump(exclude_unset=True, warnings=False)
            self._add(data)
        except (AttributeError, TypeError, ValueError):  # a field of another type
            self._note("chunk")

    def _add(self, data: Mapping[str, Any]) -> None:
        kind = str(data.get("type", ""))
        if kind.startswith("response."):
            self._events = self._events or openai_responses.StreamedResponse()
        elif kind.startswith(("message_", "content_block_")):
            self._events = self._events or anthropic_messages.StreamedMessage()
        if self._events is not None:
            self._events.add(data)
            return
        for key in ("id", "model", "usage", "prompt_token_ids"):
            if data.get(key) is not None:
                self._top[key] = data[key]
        for choice in data.get("choices") or ():
            self._add_choice(choice)

    def _note(self, field: str) -> None:
        self.irregular_field = self.irregular_field or field

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        new: dict[str, Any] = {"message": {"role": "assistant"}, "calls": {}, "token_ids": []}
        whole = self._choices.setdefault(int(choice.get("index") or 0), new)
        delta = choice.get("delta") or {}
        content = delta.get("content", choice.get("text"))  # of a chat, of a text completion
        if content is None:
            content = (delta.get("audio") or {}).get("transcript")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        texts = {"content": content, "refusal": delta.get("refusal"), "reasoning_content": thought}
        for name, value in texts.items():
            if text := self._text(value, name):
                whole["message"][name] = whole["message"].get(name, "") + text
        first = [{"index": 0, "function": call} for call in [delta.get("function_call")] if call]
        for call in (*(delta.get("tool_calls") or ()), *first):
            self._add_call(whole["calls"], call)
        if choice.get("finish_reason"):
            whole["finish_reason"] = choice["finish_reason"]
        if isinstance(ids := choice.get("token_ids"), list | tuple):
            whole["token_ids"] += ids

    def _text(self, value: Any, field: str) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        self._note(field)
        return joined_text(value) or genai_messages.dump_json(value)

    def _add_call(self, calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]) -> None:
        index = _call_index(calls, delta)
        function = delta.get("function") or delta.get("custom") or {}
        is_next = index in calls or index == len(calls)
        # without an index, clients that merge by it join all calls
        if not is_next or not isinstance(delta.get("index"), int | None if index == 0 else int):
            self._note("tool_calls.index")
        empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(index, empty)
        name, whole = function.get("name") or "", call["function"]
        if call["id"] and delta.get("id") and delta.get("index") is not None:
            self._note("tool_calls.id")  # of another call, or repeated
        if whole["name"] and name and (whole["arguments"] or name == whole["name"]):
            self._note("tool_calls.function.name")
            name = "" if name == whole["name"] else name
        call["id"] = call["id"] or delta.get("id")
        whole["name"] += name
        arguments = function.get("arguments", function.get("input"))
        whole["arguments"] += self._text(arguments, "tool_calls.function")

    @property
    def complete(self) -> bool:
        """Whether the stream has been marked as ended, or every requested choice has.

        After that a stream may still bring the token usage, but no more text.
        """
        if self._events is not None:
            return self.is_done or self._events.ended
        ended = [whole for whole in self._choices.values() if whole.get("finish_reason")]
        return self.is_done or len(ended) >= max(self._requested, len(self._choices))

    def answer(self) -> dict[str, Any]:
        """Return the answer received so far, in the form that it would have without streaming."""
        answer = self._answer() if self._events is None else self._events.answer()
        if _has_halves(answer):  # a stream may cut a surrogate pair in two
            answer = json.loads(json.dumps(answer, default=str))  # joins the halves
            if _has_halves(answer):
                self._note("half of a character")
        return answer

    def _answer(self) -> dict[str, Any]:
        choices = []
        for index, whole in sorted(self._choices.items()):
            calls = [call for _, call in sorted(whole["calls"].items())]
            message = {**whole["message"], **({"tool_calls": calls} if calls else {})}
            choice = {"index": index, "message": message, "token_ids": whole["token_ids"] or None}
            choices.append({**choice, "finish_reason": whole.get("finish_reason")})
        return {**self._top, "choices": choices}


def _has_halves(answer: Mapping[str, Any]) -> bool:
    return _SURROGATE.search(json.dumps(answer, ensure_ascii=False, default=str)) is not None


def problem_of(answer: Mapping[str, Any]) -> str:
    """Return why a whole answer of an endpoint is none, as a message; empty if it is one.

    A response or a message may have no content. A response may have failed, or be made in the
    background.
    """
    status, error = answer.get("status"), answer.get("error")
    if error or (isinstance(status, str) and status not in ("completed", "incomplete")):
        message = error.get("message") if isinstance(error, MAPPING) else error
        return f"the answer is no completion: {message or f'its status is {status!r}'}"
    if answer.get("choices") or "output" in answer or "content" in answer:
        return ""
    return "the answer has no choices, output or content"


def _call_index(calls: Mapping[int, Mapping[str, Any]], delta: Mapping[str, Any]) -> int:
    """Return the index of the tool call to which a delta belongs.

    Some servers omit `index`. Then a new id, or a name without an id, begins a new call, and any
    other delta belongs to the call that began last.
    """
    index, call_id = delta.get("index"), delta.get("id")
    if isinstance(index, int) or not calls:
        return index if isinstance(index, int) else 0
    latest = max(calls)
    if call_id:
        return next((n for n, call in calls.items() if call["id"] == call_id), latest + 1)
    begins = (delta.get("function") or {}).get("name") and calls[latest]["function"]["name"]
    return latest + 1 if begins else latest


def requested_choices(body: Mapping[str, Any]) -> int:
    """Return how many choices a request asks for: `n` times the number of its prompts."""
    n = body.get("n")
    prompts = _prompts_of(body["prompt"]) if "prompt" in body else [None]
    return (n if isinstance(n, int) else 1) * len(prompts)


def request_attributes(body: Mapping[str, Any]) -> Attributes:
    """Return the GenAI attributes of a request: chat, text completion, response or message."""
    dialect = None
    if openai_responses.is_response(body):
        dialect = openai_responses
    elif anthropic_messages.is_message_request(body):
        dialect = anthropic_messages
    completes_text = dialect is None and "prompt" in body and "messages" not in body
    plain = {
        c.OPERATION_NAME: "text_completion" if completes_text else "chat",
        c.REQUEST_MODEL: body.get("model"),
        c.REQUEST_STREAM: body.get("stream"),
        c.REQUEST_TEMPERATURE: body.get("temperature"),
        c.REQUEST_TOP_P: body.get("top_p"),
        c.REQUEST_MAX_TOKENS: body.get("max_completion_tokens")
        or body.get("max_tokens")
        or body.get("max_output_tokens"),
        c.REQUEST_SEED: body.get("seed"),
        c.REQUEST_CHOICES: body.get("n"),
        c.OPENINFERENCE_KIND: "LLM",
    }
    attributes: Attributes = {key: value for key, value in plain.items() if value is not None}
    prompt = _prompts_of(body["prompt"]) if completes_text else body.get("messages")
    if dialect is not None:
        prompt = dialect.messages_of(body, openai_responses.as_it_is)
    if dialect is openai_responses:
        attributes |= dialect.context_attributes(body)
    # The body is not validated yet, so fields that should be lists may be anything.
    if prompt is not None:
        messages = prompt if isinstance(prompt, list | tuple) else [prompt]
        attributes[c.INPUT_MESSAGES] = genai_messages.dump(messages)
    tools = body.get("tools") or body.get("functions")
    if tools:
        if dialect is not None and isinstance(tools, list | tuple):
            tools = dialect.tools_to_chat(tools)
        attributes[c.TOOL_DEFINITIONS] = genai_messages.dump_json(tools)
    return attributes


def _prompts_of(prompt: Any) -> list[dict[str, Any]]:
    """Convert the prompts of a text completion to user messages.

    The content of a prompt that consists of token ids is the JSON of the ids.
    """
    is_single = not isinstance(prompt, list | tuple) or all(isinstance(i, int) for i in prompt)
    prompts = [prompt] if is_single else prompt
    texts = (text if isinstance(text, str) else genai_messages.dump_json(text) for text in prompts)
    return [{"role": "user", "content": text} for text in texts]


ANSWER_FIELDS: Final[dict[str, Any]] = {
    **dict.fromkeys(("id", "model", "usage", "prompt_token_ids", "error"), True),
    "choices": {"__all__": {"index", "message", "text", "finish_reason", "token_ids"}},
    **dict.fromkeys(("output", "status", "incomplete_details"), True),  # of a response
    **dict.fromkeys(("type", "content", "stop_reason"), True),  # of a message
}
"""The fields of an answer that `answer_attributes` and `problem_of` read, in the form of pydantic's
`include`. Other fields, such as log-probabilities, may be many times as long."""


def answer_attributes(answer: Mapping[str, Any]) -> Attributes:
    """Return the GenAI attributes of a chat or text completion, response or message."""
    if anthropic_messages.is_message(answer):
        answer = anthropic_messages.completion_of(answer)
    elif "output" in answer and "choices" not in answer:
        answer = openai_responses.completion_of(answer)
    choices = mappings_in(answer.get("choices"))
    reasons = [str(choice.get("finish_reason") or "") for choice in choices]
    usage = answer["usage"] if isinstance(answer.get("usage"), MAPPING) else {}
    plain = {
        c.RESPONSE_ID: answer.get("id"),
        c.RESPONSE_MODEL: answer.get("model"),
        c.INPUT_TOKENS: usage.get("prompt_tokens"),
        c.OUTPUT_TOKENS: usage.get("completion_tokens"),
    }
    attributes: Attributes = {k: v for k, v in plain.items() if isinstance(v, str | int)}
    if choices:
        ids = [answer.get("prompt_token_ids"), *(choice.get("token_ids") for choice in choices)]
        if any(ids):
            attributes[c.TOKEN_IDS] = genai_messages.dump_json(ids)
        if any(reasons):
            attributes[c.FINISH_REASONS] = [*reasons]
        attributes[c.OUTPUT_MESSAGES] = genai_messages.dump(
            {**_message_of(choice), "finish_reason": choice.get("finish_reason")}
            for choice in choices
        )
    return attributes


def _message_of(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    if "text" in choice:
        return {"role": "assistant", "content": choice["text"]}
    message = choice.get("message")
    return message if isinstance(message, MAPPING) else {}
