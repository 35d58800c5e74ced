"""OpenAI's chat dialect, and what its dialects share: requests in, answers and chunks out. Pure.

`lightspan.gateway.completions` and `lightspan.gateway.responses` are the other dialects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec

from lightspan.engines import ChatTokenizer
from lightspan.errors import ModelError
from lightspan.gateway.errors import ApiError, bad_request
from lightspan.records import Mode, Sampling

MAX_CHOICES: Final = 128

HONOURED: Final = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "logprobs",
        "return_token_ids",
        "chat_template_kwargs",
    }
)
IGNORED: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Fields that say nothing of the answer."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "top_logprobs": (0, None),
    "seed": (None,),
    "response_format": ({"type": "text"}, None),
    "min_p": (0, None),
    "guided_json": (None,),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
}
"""Fields that cannot be honoured, with the values that ask for nothing."""
STEERING: Final = frozenset(
    {
        *("reasoning_effort", "verbosity"),
        *("reasoning.effort", "reasoning.mode", "reasoning.context"),
        *("reasoning.summary", "reasoning.generate_summary", "text.verbosity"),
    }
)
"""Fields that steer the newest models of one provider, chat's and the Responses API's.

Frameworks send them by themselves for the model name that an app was written with; no open model
has them, and none of them says how to sample. So they are set aside in every mode and shown as
overrides, where a field that says how to sample is refused in validation."""
OURS_TO_RENDER: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Template options that no request sets: a template of its own would run in the gateway, a
truncated prompt would not be what the app said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ABC):
    """A request that asks a model, understood; it knows how its dialect words the answer."""

    asks_with: ClassVar[str]
    """The field that holds the prompt."""
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str] = "chatcmpl-"
    """What a response id begins with, before the call id."""
    is_numbered: ClassVar[bool] = False
    """Whether the events of a stream have types and numbers, and no `[DONE]` after them."""

    model: str
    sampling: Sampling
    parse_tools: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    """Choices per prompt."""
    logprobs: bool = False
    token_ids: bool = False
    overrides: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Field → (what the app asked, what is used)."""

    @property
    def count(self) -> int:
        """How many prompts there are."""
        return 1

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        """The token ids of each prompt.

        Raises:
            ApiError: 400 naming the field.
        """

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """The unstreamed answer, with no field that was not asked for."""

    def opening(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """What a stream begins with, for a choice."""
        return iter(())

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """What comes before the first text of a choice."""
        return iter(())

    @abstractmethod
    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        """A chunk with new text of a choice."""

    @abstractmethod
    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What can only be said at the end."""

    def attributes(self) -> dict[str, Any]:
        """What its span says of the request beside what the body says."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ModelRequest):
    """A chat request."""

    asks_with: ClassVar[str] = "messages"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        options = self.template_options or None
        try:
            return [tokenizer.render(self.messages, self.tools, template_options=options)]
        except ModelError as error:
            raise bad_request(str(error), "messages") from error

    def body(self, answer: Answer) -> dict[str, Any]:
        return completion(self, answer)

    def opening(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        yield delta_chunk(base, index, {"role": "assistant", "content": ""})

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        return delta_chunk(base, index, {"content": text})

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        return last_chunks(self, answer, base)


def parse_chat(body: Any, *, mode: Mode, forced: Sampling | None) -> ChatRequest:
    """Understand a request.

    Args:
        body: the decoded JSON.
        mode: of the rollout. In train and dev mode, for a trained policy (`forced` given), sampling
            is the algorithm's and what cannot be honoured is overridden; otherwise it is refused,
            but for what is `STEERING`.
        forced: the algorithm's sampling.

    Raises:
        ApiError: 400 naming the field.
    """
    if not isinstance(body, dict):
        raise bad_request("the request body must be a JSON object")
    messages = _messages(body)
    check_types(body, _TYPES)
    sampling, overrides = decide_sampling(
        body,
        asked_sampling(body),
        unsupported(body, HONOURED, NEUTRAL) | _unsupported_tool_options(body),
        None if mode is Mode.VAL else forced,
    )
    tools = body.get("tools") or None
    return ChatRequest(
        **shared_fields(body),
        messages=messages,
        sampling=sampling,
        tools=tools,
        parse_tools=tools is not None and body.get("tool_choice") != "none",
        logprobs=bool(body.get("logprobs")),
        template_options=template_options(body),
        overrides=overrides,
    )


def as_in_training(
    body: Mapping[str, Any], forced: Sampling
) -> tuple[dict[str, Any], Mapping[str, tuple[Any, Any]]]:
    """The request with the sampling of training, for an endpoint (a dry run), and the overrides.

    Raises:
        ApiError: 400 naming the field.
    """
    chat = parse_chat(body, mode=Mode.TRAIN, forced=forced)
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    used = {
        "temperature": chat.sampling.temperature,
        "top_p": chat.sampling.top_p if chat.sampling.top_p < 1 else None,
        "top_k": chat.sampling.top_k or None,
        limit: chat.sampling.max_tokens,
    }
    kept = {key: value for key, value in body.items() if key not in chat.overrides}
    return kept | {key: value for key, value in used.items() if value is not None}, chat.overrides


def shared_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """What every dialect reads alike."""
    stream = bool(body.get("stream"))
    return {
        "model": body.get("model") or "",
        "stream": stream,
        "include_usage": stream and bool((body.get("stream_options") or {}).get("include_usage")),
        "n": int(body.get("n") or 1),
        "token_ids": bool(body.get("return_token_ids")),
    }


def decide_sampling(
    body: Mapping[str, Any],
    asked: Sampling,
    impossible: Mapping[str, Any],
    forced: Sampling | None,
) -> tuple[Sampling, dict[str, tuple[Any, Any]]]:
    """The sampling to use, and what of the request it overrides.

    Args:
        body: the request.
        asked: the sampling that it asks for.
        impossible: fields that cannot be honoured, with their values.
        forced: the algorithm's sampling, in training.

    Raises:
        ApiError: 400, nothing is forced and a field cannot be honoured (`STEERING` apart).
    """
    overrides = {key: (value, None) for key, value in impossible.items()}
    if forced is None:
        for key in sorted(impossible.keys() - STEERING)[:1]:
            raise cannot_honour(key, impossible[key])
        return asked, overrides
    sampling = _forced(asked, forced)
    return sampling, overrides | _sampling_overrides(body, asked, sampling)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a non-empty array", "messages")
    return [plain_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def plain_message(message: Any, where: str) -> dict[str, Any]:
    """A message as chat templates expect it: plain text, arguments of tool calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"{where} must have a 'role'", f"{where}.role")
    plain = {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls")
    if calls is None:
        return plain
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls must be an array", f"{where}.tool_calls")
    named = f"{where}.tool_calls"
    return {**plain, "tool_calls": [_call(c, f"{named}[{n}]") for n, c in enumerate(calls)]}


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or an array of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_request(
                f"{where} has a part of type {kind!r}: only text is understood", where
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must have a function with a name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _arguments.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):  # malformed: the template gets it as it is
            return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


_arguments: Final = msgspec.json.Decoder(dict[str, Any])


Types = Mapping[str, tuple[type, ...]]

SHARED_TYPES: Final[Types] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "n": (int,),
    "max_tokens": (int,),
    "stream": (bool,),
    "stream_options": (dict,),
    "model": (str,),
}
_TYPES: Final[Types] = {
    **SHARED_TYPES,
    "max_completion_tokens": (int,),
    "logprobs": (bool,),
    "tools": (list,),
    "chat_template_kwargs": (dict,),
}
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, float("inf")),
    "max_completion_tokens": (1, float("inf")),
    "max_output_tokens": (1, float("inf")),
}


def check_types(body: Mapping[str, Any], fields: Types) -> None:
    """Refuse fields of another type, or out of range."""
    for key, types in fields.items():
        value = body.get(key)
        if value is None:
            continue
        wrong_bool = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or wrong_bool:
            expected = " or ".join(kind.__name__ for kind in types)
            raise bad_request(f"'{key}' must be {expected}, not {value!r}", key)
        low, high = _RANGES.get(key, (float("-inf"), float("inf")))
        if isinstance(value, int | float) and not low <= value <= high:
            raise bad_request(f"'{key}' must be between {low:g} and {high:g}, not {value!r}", key)


def template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a request gives to the chat template (`chat_template_kwargs`).

    Raises:
        ApiError: one that is not for a request to set.
    """
    options: Mapping[str, Any] = body.get("chat_template_kwargs") or {}
    for key in sorted(options.keys() & OURS_TO_RENDER):
        field = f"chat_template_kwargs.{key}"
        raise bad_request(f"'{field}' is not for a request to set; leave it out", field)
    return options


def asked_sampling(body: Mapping[str, Any]) -> Sampling:
    """The sampling that a request asks for."""
    temperature = body.get("temperature")
    top_p = body.get("top_p")
    top_k = body.get("top_k")
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=max(0, top_k or 0),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        stop=_stop(body.get("stop")),
    )


def _stop(stop: Any) -> tuple[str, ...]:
    several = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(several, list) or not all(isinstance(s, str) and s for s in several):
        raise bad_request("'stop' must be a non-empty string or an array of them", "stop")
    return tuple(several)


def _forced(asked: Sampling, forced: Sampling) -> Sampling:
    limits = [limit for limit in (asked.max_tokens, forced.max_tokens) if limit is not None]
    longest = min(limits) if limits else None
    return msgspec.structs.replace(forced, max_tokens=longest, stop=asked.stop)


def _sampling_overrides(
    body: Mapping[str, Any], asked: Sampling, used: Sampling
) -> dict[str, tuple[Any, Any]]:
    pairs = {
        key: (getattr(asked, key), getattr(used, key))
        for key in ("temperature", "top_p", "top_k")
        if body.get(key) is not None
    }
    pairs["max_tokens"] = (asked.max_tokens, used.max_tokens)
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def unsupported(
    body: Mapping[str, Any], honoured: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Fields that ask for what cannot be honoured, with their values."""
    return {
        key: value
        for key, value in body.items()
        if key not in honoured
        and key not in IGNORED
        and not any(value == nothing for nothing in neutral.get(key, (None,)))
    }


def _unsupported_tool_options(body: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        found["tool_choice"] = choice
    if body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = False
    return found


def cannot_honour(key: str, value: Any) -> ApiError:
    """The refusal of a field that says what sampling cannot do."""
    return bad_request(f"'{key}' = {value!r} cannot be honoured by this engine; leave it out", key)


# --- answers --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A finished choice."""

    index: int
    message: dict[str, Any]
    finish_reason: str
    token_ids: Sequence[int]
    token_texts: Sequence[str]
    logprobs: Sequence[float]
    text_offsets: Sequence[int] = ()
    """Where each token's text begins in the choice's text (with log-probabilities)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished call; a retry is answered from it."""

    response_id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompts: Sequence[Sequence[int]]
    """Ids of each prompt; the choices of one stand together."""

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        answer = sum(len(choice.token_ids) for choice in self.choices)
        total = prompt + answer
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": total}


def completion(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """The unstreamed body, with no field that was not asked for."""
    body: dict[str, Any] = {
        **head(answer.response_id, answer.created, answer.model, "chat.completion"),
        "choices": [_choice(request, choice) for choice in answer.choices],
        "usage": answer.usage(),
    }
    if request.token_ids:
        body["prompt_token_ids"] = list(answer.prompts[0])
    return body


def head(response_id: str, created: int, model: str, kind: str) -> dict[str, Any]:
    """What a completion and its chunks begin with."""
    return {"id": response_id, "object": kind, "created": created, "model": model}


def _choice(request: ChatRequest, choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": choice.index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice) if request.logprobs else None,
    }
    if request.token_ids:
        body["token_ids"] = list(choice.token_ids)
    return body


def _logprobs(choice: Choice) -> dict[str, Any]:
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(choice.token_texts, choice.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def delta_chunk(base: Mapping[str, Any], index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    """A chunk in mid-stream."""
    return {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def last_chunks(
    request: ChatRequest, answer: Answer, base: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """What can only be said at the end: tool calls, finish reasons, log-probs, usage."""
    for choice in answer.choices:
        for number, call in enumerate(choice.message.get("tool_calls") or ()):
            yield delta_chunk(base, choice.index, {"tool_calls": [{"index": number, **call}]})
        end: dict[str, Any] = {
            "index": choice.index,
            "delta": {},
            "finish_reason": choice.finish_reason,
        }
        if request.logprobs:
            end["logprobs"] = _logprobs(choice)
        if request.token_ids:
            end["token_ids"] = list(choice.token_ids)
        extra = {"prompt_token_ids": list(answer.prompts[0])} if request.token_ids else {}
        yield {**base, **extra, "choices": [end]}
    if request.include_usage:
        yield {**base, "choices": [], "usage": answer.usage()}
