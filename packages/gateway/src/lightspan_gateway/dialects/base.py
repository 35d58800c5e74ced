"""What the dialects share: parsed requests, answers, and validation of fields. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import msgspec

from lightspan.errors import ContextOverflowError, ModelError
from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema import semconv as c
from lightspan.schema.media import is_media
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects.constraints import CONSTRAINING, Constraint
from lightspan_gateway.dialects.sse import Events

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64
"""Stop strings: each is searched for at every token."""
HONOURED_BY_ALL: Final = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "top_k", "stop"}
)
"""Fields that every dialect supports."""
NEUTRAL_IN_ALL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "seed": (None,),
}
"""Unsupported fields, with the values that mean the default."""
IGNORED: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Fields that do not affect the answer."""
STEERING: Final = frozenset(
    {
        *("reasoning_effort", "verbosity"),
        *("reasoning.effort", "reasoning.mode", "reasoning.context"),
        *("reasoning.summary", "reasoning.generate_summary", "text.verbosity"),
        *("thinking", "output_config.effort"),
    }
)
"""Fields that steer the newest models of one provider: chat's, the Responses and Messages API's.

Frameworks send them for the model name that an app was written with; no open model has them, and
none affects sampling. So they are ignored in every mode and shown as overrides, where an
unsupported sampling field is refused in validation."""
FORBIDDEN_TEMPLATE_OPTIONS: Final = frozenset(
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
"""Template options that a request must not set: its own template would run in the gateway, and a
truncated prompt would not be the app's."""

Message = dict[str, Any]
Conversation = list[Message]
"""Messages without instructions."""


# --- requests and answers -------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A finished choice."""

    index: int
    message: dict[str, Any]
    finish_reason: str
    token_ids: Sequence[int]
    token_texts: Sequence[str]
    logprobs: Sequence[float]
    stop: str | None = None
    """The stop string that ended it."""
    text_offsets: Sequence[int] = ()
    """Where each token's text begins in the choice's text (with log-probabilities)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a finished call, for its clients and their retries."""

    response_id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompts: Sequence[Sequence[int]]
    """Ids of each prompt; the choices of a prompt are adjacent."""

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        answer = sum(len(choice.token_ids) for choice in self.choices)
        total = prompt + answer
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": total}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ABC):
    """A parsed request, which formats the answer in its dialect."""

    asks_with: ClassVar[str]
    """The field that holds the prompt."""
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str] = "chatcmpl-"
    """Prefix of the response id, before the call id."""
    framing: ClassVar[type[Events]] = Events
    """Formats the chunks of a stream."""

    model: str
    sampling: Sampling
    constraint: Constraint | None = None
    """What the answer must be; None: anything."""
    grammar: str = ""
    """The constraint's grammar for the model that answers."""
    parse_tools: bool = False
    include_usage: bool = False
    n: int = 1
    """Choices per prompt."""
    logprobs: bool = False
    token_ids: bool = False
    overrides: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Field → (requested value, used value)."""
    previous: str | None = None
    """The id of the response that it continues, in a dialect that has these."""

    @property
    def count(self) -> int:
        """The number of prompts."""
        return 1

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        """Return the token ids of each prompt; called in a thread, since it may take long.

        Raises:
            ApiError: 400 naming the field.
        """

    @abstractmethod
    def without_prompt(self) -> Self:
        """Return the request without what only rendering needs, to free memory."""

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the unstreamed answer."""

    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the first chunks of a choice's stream."""
        return iter(())

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first text of a choice."""
        return iter(())

    @abstractmethod
    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        """Return a chunk with new text of a choice."""

    @abstractmethod
    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks after the last text."""

    def attributes(self) -> dict[str, Any]:
        """Return span attributes beyond those of the body."""
        return {}

    def after(self, before: Conversation) -> ModelRequest:
        """Return the request with the conversation up to `previous`."""
        return self

    def conversation(self, answer: Answer) -> Conversation | None:
        """Return the conversation that a request with this answer as its `previous` continues."""
        return None


def head(response_id: str, created: int, model: str, kind: str) -> dict[str, Any]:
    """Return the first fields of a completion and its chunks."""
    return {"id": response_id, "object": kind, "created": created, "model": model}


def token_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """Return the log-probabilities of a choice as chats and responses have them."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(choice.token_texts, choice.logprobs, strict=True)
    ]


# --- sampling -------------------------------------------------------------------------------
def asked_sampling(body: Mapping[str, Any], *, stop: str = "stop") -> Sampling:
    """Return the sampling that a request asks for.

    Args:
        body: the request.
        stop: the field with the stop strings.
    """
    temperature = body.get("temperature")
    top_p = body.get("top_p")
    top_k = body.get("top_k")
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=max(0, top_k or 0),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        stop=_stop(body.get(stop), stop),
    )


def _stop(stop: Any, field: str) -> tuple[str, ...]:
    several = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(several, list) or not all(isinstance(s, str) and s for s in several):
        raise bad_request(f"'{field}' must be a non-empty string or an array of them", field)
    if len(several) > MAX_STOPS:
        raise bad_request(f"'{field}' has {len(several):,} strings; at most {MAX_STOPS}", field)
    return tuple(several)


def decide_sampling(
    body: Mapping[str, Any],
    asked: Sampling,
    impossible: Mapping[str, Any],
    mode: Mode,
    forced: Sampling | None,
) -> tuple[Sampling, dict[str, tuple[Any, Any]]]:
    """Return the sampling to use, and what it overrides of the request.

    Args:
        body: the request.
        asked: the sampling that it asks for.
        impossible: fields that cannot be honoured, with their values.
        mode: of the rollout; in validation the temperature alone is forced.
        forced: the algorithm's sampling (`Target.forced`).

    Raises:
        ApiError: 400, a field that constrains the answer cannot be honoured, or any (`STEERING`
            apart) if nothing is forced.
    """
    for key in sorted(impossible.keys() & CONSTRAINING):
        raise cannot_honour(key, impossible[key])
    overrides = {key: (value, None) for key, value in impossible.items()}
    if forced is None or mode is Mode.VAL:
        for key in sorted(impossible.keys() - STEERING)[:1]:
            raise cannot_honour(key, impossible[key])
        if forced is None:
            return asked, overrides
        sampling = msgspec.structs.replace(asked, temperature=forced.temperature)
    else:
        sampling = _forced(asked, forced)
    return sampling, overrides | _sampling_overrides(body, asked, sampling)


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
    """Return the unsupported fields that have another value than the default."""
    return {
        key: value
        for key, value in body.items()
        if key not in honoured
        and key not in IGNORED
        and not any(value == nothing for nothing in neutral.get(key, (None,)))
    }


def cannot_honour(key: str, value: Any) -> ApiError:
    """Return the refusal of an unsupported field."""
    return bad_request(f"'{key}' = {value!r} cannot be honoured by this engine; leave it out", key)


# --- fields ---------------------------------------------------------------------------------
Types = Mapping[str, tuple[type, ...]]

SHARED_TYPES: Final[Types] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (int, float)),
    **dict.fromkeys(("top_k", "n", "max_tokens", "seed", "top_logprobs"), (int,)),
    **dict.fromkeys(("stream", "return_token_ids"), (bool,)),
    **dict.fromkeys(("stream_options", "logit_bias"), (dict,)),
    "model": (str,),
}
"""Also of unsupported fields: training ignores their values, but not invalid ones."""
_LARGEST: Final = 2**63 - 1
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
    "max_tokens": (1, _LARGEST),
    "max_completion_tokens": (1, _LARGEST),
    "max_output_tokens": (1, _LARGEST),
}


def check_types(body: Mapping[str, Any], fields: Types) -> None:
    """Refuse fields of a wrong type, or out of range."""
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


def shared_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that every dialect reads alike."""
    options = body.get("stream_options") or {}
    return {
        "model": body.get("model") or "",
        "include_usage": bool(options.get("include_usage")),
        "n": int(body.get("n") or 1),
        "token_ids": bool(body.get("return_token_ids")),
    }


def template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the chat template (`chat_template_kwargs`).

    Raises:
        ApiError: 400, a forbidden one.
    """
    options: Mapping[str, Any] = body.get("chat_template_kwargs") or {}
    for key in sorted(options.keys() & FORBIDDEN_TEMPLATE_OPTIONS):
        field = f"chat_template_kwargs.{key}"
        raise bad_request(f"'{field}' is not for a request to set; leave it out", field)
    return options


# --- messages -------------------------------------------------------------------------------
def plain_message(message: Any, where: str) -> dict[str, Any]:
    """Return a message as chat templates expect it: text, and tool arguments as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"{where} must have a 'role'", f"{where}.role")
    # OpenAI's newer name, which templates of other models ignore or refuse
    role = "system" if message["role"] == "developer" else message["role"]
    content = _content(message.get("content"), f"{where}.content")
    plain = {**message, "role": role, "content": content}
    calls = message.get("tool_calls")
    if calls is None:
        return plain
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls must be an array", f"{where}.tool_calls")
    named = f"{where}.tool_calls"
    return {**plain, "tool_calls": [_call(c, f"{named}[{n}]") for n, c in enumerate(calls)]}


def rendered(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
    *,
    asked_with: str,
) -> list[int]:
    """Render plain messages by the model's chat template.

    Raises:
        ApiError: 400 naming the field `asked_with`: the template refuses them, or they are far
            longer than the context.
    """
    most = tokenizer.context_length
    try:
        return tokenizer.render(messages, tools, template_options=options or None, most=most)
    except ModelError as error:
        raise bad_request(str(error), asked_with) from error
    except ContextOverflowError as error:
        raise too_long(error, asked_with) from error


def too_long(error: ContextOverflowError, field: str) -> ApiError:
    """Return the refusal of a prompt that does not fit, which names its field."""
    return bad_request(f"{error}; shorten the {field}", field, c.CONTEXT_OVERFLOW)


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or an array of parts", where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"{where}[{number}]"
            code = c.UNSUPPORTED_CONTENT if is_media(part) else None
            raise bad_request(f"{named} is of type {kind!r}: only text is understood", named, code)
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
