"""Parsed requests, answers and validation of fields for all dialects (APIs).

Nothing here does I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, NamedTuple, Self, cast

import msgspec

from lightspan.errors import ContextOverflowError, DataError, ModelError
from lightspan.protocols.engine import ChatTokenizer, ImageTokenizer
from lightspan.schema import semconv as c
from lightspan.schema.images import PromptImage
from lightspan.schema.media import is_media
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects.constraints import CONSTRAINING, Constraint
from lightspan_gateway.dialects.image_parts import IMAGE_TYPES, ImagePart
from lightspan_gateway.dialects.sse import Events

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64
"""Maximum number of stop strings: each is searched for after every token."""
SUPPORTED_BY_ALL: Final = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "top_k", "stop"}
)
"""Fields that every dialect supports."""
DEFAULTS_OF_ALL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "seed": (None,),
}
"""Unsupported field → values that have the same effect as leaving the field out."""
IGNORED: Final = frozenset(
    {
        *("user", "metadata", "client_metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    }
)
"""Fields that are accepted and ignored, because they do not affect the answer."""
ANSWER_FIELDS: Final = frozenset(
    {
        *("logit_bias", "stop_token_ids", "stop_sequences", "logits_processors", "samplers"),
        *("sampling_params", "generation_config", "options", "extra_body", "vllm_xargs"),
        *("messages", "input", "prompt", "prefix", "suffix", "documents", "chat_template"),
        *("truncation", "truncation_strategy", "include", "modalities", "audio"),
    }
)
"""Fields, besides numbers, that say how to sample, what the prompt is or what an answer holds."""
FORBIDDEN_TEMPLATE_OPTIONS: Final = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("messages", "tools", "max_length", "padding", "truncation", "tokenize"),
        *("tokenizer_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    }
)
"""Options of the chat template that a request must not set.

With them a request could make the gateway run a template of its own, or truncate the prompt.
"""

Message = dict[str, Any]
Conversation = list[Message]
"""Messages of a conversation, without the instructions at its start (system messages)."""


# --- requests and answers -------------------------------------------------------------------
class Prompt(NamedTuple):
    """The token ids of a prompt, and the images whose placeholders are among them."""

    ids: list[int]
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished answer to a prompt. A request with `n` = 3 gets three choices per prompt."""

    index: int
    message: dict[str, Any]
    finish_reason: str
    token_ids: Sequence[int]
    token_bytes: Sequence[bytes]
    """UTF-8 bytes of each token, which may have a part of a character; empty unless
    log-probabilities are requested."""
    logprobs: Sequence[float]
    stop: str | None = None
    """The stop string that ended the choice; None if there is none."""
    text_offsets: Sequence[int] = ()
    """Offset of each token's text in the choice's text; set if log-probabilities are requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a finished call: all choices of all its prompts."""

    response_id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt; the choices of a prompt are adjacent."""

    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        answer = sum(len(choice.token_ids) for choice in self.choices)
        total = prompt + answer
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": total}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ABC):
    """A parsed request of one API. It also writes the answer in the format of that API."""

    prompt_field: ClassVar[str]
    """Name of the field that holds the prompt."""
    limit_field: ClassVar[str] = "max_tokens"
    """Name of the field that limits the tokens of an answer."""
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str] = "chatcmpl-"
    """Prefix of the response id, before the call id."""
    framing: ClassVar[type[Events]] = Events
    """Class that formats the chunks of a stream as server-sent events."""

    model: str
    sampling: Sampling
    constraint: Constraint | None = None
    """The requested response format and tool choice; None if any answer is valid."""
    grammar: str = ""
    """`constraint` as a grammar for the model's family (see `grammars`); empty if `constraint` is
    None."""
    parse_tools: bool = False
    include_usage: bool = False
    n: int = 1
    """Number of choices per prompt."""
    logprobs: bool = False
    token_ids: bool = False
    overrides: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Field → (requested value, used value)."""
    previous: str | None = None
    """Id of the earlier response that the request continues (Responses API); None if there is none.
    """

    @property
    def count(self) -> int:
        """The number of prompts."""
        return 1

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> list[Prompt]:
        """Render the prompts. Slow: call it in a thread.

        Raises:
            ApiError: 400 naming the field that is empty, malformed or too long.
        """

    @abstractmethod
    def without_prompt(self) -> Self:
        """Return a copy without the fields that only the method `prompts` reads, to free memory."""

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the JSON of an unstreamed answer."""

    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the first chunks of a choice's stream.

        Args:
            base: fields of every chunk (see `head`).
            index: index of the choice.
            prompt: token ids of the choice's prompt.
        """
        return iter(())

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks of the stream that precede the text of the choice `index`."""
        return iter(())

    @abstractmethod
    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        """Return the chunk with new `text` of the choice `index`."""

    @abstractmethod
    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the final chunks of the stream, which follow the text of all choices."""

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the call's span that are not in the request's body."""
        return {}

    def after(self, before: Conversation) -> ModelRequest:
        """Return a copy of this request that continues an earlier conversation.

        The earlier messages are inserted after the instructions of this request. If the API has no
        field `previous` (the id of an earlier response), the request itself is returned.

        Args:
            before: the messages up to and including the response whose id is `previous`.
        """
        return self

    def conversation(self, answer: Answer) -> Conversation | None:
        """Return the messages of the request and its answer, which a later request may continue.

        The result is None if the API has no requests that continue an earlier answer.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(ModelRequest):
    """A request whose prompt is chat messages, rendered by the model's chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def plain_messages(self) -> list[Message]:
        """Return the messages in the form that chat templates expect.

        Raises:
            ApiError: 400 if a message is malformed, or is neither text nor an image that was
                checked.
        """
        name = self.prompt_field
        return [plain_message(message, f"{name}[{n}]") for n, message in enumerate(self.messages)]

    def prompts(self, tokenizer: ChatTokenizer) -> list[Prompt]:
        name, plain = self.prompt_field, self.plain_messages()
        if not plain:
            raise bad_request(f"'{name}' is empty: there is nothing to answer", name)
        options, limit = self.template_options or None, tokenizer.context_length
        has_images = any(isinstance(message["content"], list) for message in plain)
        vision = cast(ImageTokenizer, tokenizer) if has_images else None
        try:
            if vision is None:
                ids = tokenizer.render(plain, self.tools, template_options=options, most=limit)
                return [Prompt(ids)]
            rendered = vision.render_images(plain, self.tools, template_options=options, most=limit)
            return [Prompt(*rendered)]
        except (ModelError, DataError) as error:
            raise bad_request(str(error), name) from error
        except ContextOverflowError as error:
            raise too_long(error, name) from error

    def without_prompt(self) -> Self:
        return replace(self, messages=[], tools=None, template_options={})


def head(response_id: str, created: int, model: str, kind: str) -> dict[str, Any]:
    """Return the fields that the answer and the chunks of a stream have in common.

    Args:
        response_id: id of the answer.
        created: Unix time of the call in seconds.
        model: name of the model.
        kind: value of the field `object`, such as `chat.completion`.
    """
    return {"id": response_id, "object": kind, "created": created, "model": model}


def token_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """Return the log-probability of each token, in the form of chat completions and Responses."""
    return [
        {
            "token": octets.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(octets),
            "top_logprobs": [],
        }
        for octets, logprob in zip(choice.token_bytes, choice.logprobs, strict=True)
    ]


# --- fields ---------------------------------------------------------------------------------
Types = Mapping[str, tuple[type, ...]]
Defaults = Mapping[str, tuple[Any, ...]]
"""Unsupported field → values that have the same effect as leaving the field out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """Rules for the fields in a request of one dialect."""

    types: Types
    supported: frozenset[str]
    defaults: Defaults
    nested: Mapping[str, Defaults] = field(default_factory=dict)
    """Field whose value is an object → defaults of the fields of that object.

    A field of the object that has no entry in `Defaults` has the defaults None and "none".
    """
    refused: tuple[str, ...] = ()
    """Fields that are refused in every mode, because the prompt depends on them."""
    max_tokens: tuple[str, ...] = ("max_tokens",)
    """Fields that limit the tokens of an answer; the first one that is set applies."""
    default_max_tokens: int | None = None
    stop: str = "stop"
    """Name of the field with the stop strings."""


SHARED_TYPES: Final[Types] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (int, float)),
    **dict.fromkeys(("top_k", "n", "max_tokens", "seed", "top_logprobs"), (int,)),
    **dict.fromkeys(("stream", "return_token_ids"), (bool,)),
    **dict.fromkeys(("stream_options", "logit_bias", "chat_template_kwargs"), (dict,)),
    "model": (str,),
}
"""Field → valid types. Includes unsupported fields: training ignores their values, but refuses a
value of another type."""
_MAX_INTEGER: Final = 2**63 - 1
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (-2, 2)),
    "seed": (-(2**63), 2**64 - 1),
    **dict.fromkeys(("n", "best_of"), (1, MAX_CHOICES)),
    **dict.fromkeys(("logprobs", "top_logprobs"), (0, 20)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (1, _MAX_INTEGER)),
    "max_output_tokens": (1, _MAX_INTEGER),
}


def check_fields(body: Mapping[str, Any], rules: FieldRules) -> dict[str, Any]:
    """Check types and ranges of a request's fields; return unsupported fields and their values.

    An unsupported field whose value is its default is not returned. A field of a nested object is
    named `object.field`.

    Raises:
        ApiError: 400 naming the field that is invalid or in `rules.refused`.
    """
    for key, types in rules.types.items():
        value = body.get(key)
        if value is None:
            continue
        is_wrong_bool = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or is_wrong_bool:
            expected = " or ".join(kind.__name__ for kind in types)
            raise bad_request(f"'{key}' must be {expected}, not {value!r}", key)
        low, high = _RANGES.get(key, (float("-inf"), float("inf")))
        if isinstance(value, int | float) and not low <= value <= high:
            raise bad_request(f"'{key}' must be between {low:g} and {high:g}, not {value!r}", key)
    for key in rules.refused:
        if body.get(key):
            raise bad_request(f"'{key}' cannot be honoured by this endpoint; leave it out", key)
    accepted = rules.supported | IGNORED
    unsupported = {
        key: value
        for key, value in body.items()
        if key not in accepted and value not in rules.defaults.get(key, (None,))
    }
    for key, defaults in rules.nested.items():
        for name, value in (body.get(key) or {}).items():
            path = f"{key}.{name}"
            if path not in rules.supported and value not in defaults.get(name, (None, "none")):
                unsupported[path] = value
    return unsupported


def read_fields(
    body: Mapping[str, Any],
    rules: FieldRules,
    mode: Mode,
    forced: Sampling | None,
    adjust: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Check a request's fields, and return the arguments common to all `ModelRequest` classes.

    Args:
        body: the request.
        rules: rules of the dialect.
        mode: mode of the rollout; in validation only the temperature of `forced` applies.
        forced: sampling parameters that the algorithm sets (`Target`); None to use those of
            the request. The handler applies `max_tokens`, in every mode.
        adjust: function that may add or remove entries in the dict of unsupported fields; None if
            there are none to edit.

    Raises:
        ApiError: 400 for an invalid field, and for an unsupported field in `CONSTRAINING`. In
            validation, or if `forced` is None, also for every other unsupported field that
            `is_refused`.
    """
    unsupported = check_fields(body, rules)
    if adjust is not None:
        adjust(unsupported)
    refused = unsupported.keys() & CONSTRAINING
    if forced is None or mode is Mode.VAL:
        refused = refused or {key for key, value in unsupported.items() if is_refused(key, value)}
    for key in sorted(refused):
        raise cannot_honour(
            key, unsupported[key], None if key in CONSTRAINING else c.UNSUPPORTED_PARAMETER
        )
    requested = sampling = _requested_sampling(body, rules)
    if forced is not None and mode is Mode.VAL:
        sampling = msgspec.structs.replace(requested, temperature=forced.temperature)
    elif forced is not None:
        sampling = msgspec.structs.replace(
            forced, max_tokens=requested.max_tokens, stop=requested.stop
        )
    pairs = {
        key: (getattr(requested, key), getattr(sampling, key))
        for key in ("temperature", "top_p", "top_k")
        if body.get(key) is not None
    }
    fields = {
        "model": body.get("model") or "",
        "sampling": sampling,
        "overrides": {
            **{key: (value, None) for key, value in unsupported.items()},
            **{key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
        },
        "include_usage": bool((body.get("stream_options") or {}).get("include_usage")),
        "n": int(body.get("n") or 1) if "n" in rules.supported else 1,
        "token_ids": bool(body.get("return_token_ids")),
    }
    if "chat_template_kwargs" in rules.supported:
        fields["template_options"] = _template_options(body)
    return fields


def is_refused(key: str, value: Any) -> bool:
    """Return whether an unsupported field is refused where the request sets the sampling.

    That is in evaluations and in `lightspan serve`. A field that says nothing of the sampling, the
    prompt or the answer is ignored there too, such as `reasoning_effort`, which only one provider's
    models support. Programs send new fields of that kind with each version, as objects and texts.
    An unknown number or true/false may be a sampling parameter, so it is refused.
    """
    return key in ANSWER_FIELDS or isinstance(value, int | float)


def _requested_sampling(body: Mapping[str, Any], rules: FieldRules) -> Sampling:
    name = rules.stop
    stop = body.get(name)
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise bad_request(f"'{name}' must be a non-empty string or an array of them", name)
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' has {len(stops):,} strings; at most {MAX_STOPS}", name)
    temperature, top_p = body.get("temperature"), body.get("top_p")
    limits = (body[field] for field in rules.max_tokens if body.get(field))
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=max(0, body.get("top_k") or 0),
        max_tokens=next(limits, rules.default_max_tokens),
        stop=tuple(stops),
    )


def _template_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = body.get("chat_template_kwargs") or {}
    for key in sorted(options.keys() & FORBIDDEN_TEMPLATE_OPTIONS):
        name = f"chat_template_kwargs.{key}"
        raise bad_request(f"'{name}' must not be set by a request; leave it out", name)
    return options


def cannot_honour(key: str, value: Any, error_type: str | None = None) -> ApiError:
    """Return the HTTP error 400 for a request field that cannot be honoured.

    Args:
        key: name of the field.
        value: value of the field.
        error_type: type of the error in the call's span; None for the error's code or status.
    """
    message = f"'{key}' = {value!r} cannot be honoured by this engine; leave it out"
    return ApiError(400, message, param=key, error_type=error_type)


# --- messages -------------------------------------------------------------------------------
def plain_message(message: Any, where: str) -> dict[str, Any]:
    """Convert a message for chat templates: content to text, tool arguments to objects.

    Content with images that were checked becomes a list of parts.

    Args:
        message: the message, in the form of chat completions.
        where: name of the message in errors.

    Raises:
        ApiError: 400 if the message is malformed, or is neither text nor such images.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"{where} must have a 'role'", f"{where}.role")
    if message["role"] == "function" or message.get("function_call"):
        key = "role" if message["role"] == "function" else "function_call"
        raise bad_request(
            f"'{where}.{key}' = {message[key]!r} cannot be honoured by this engine: send "
            "'tool_calls', and their results with the role 'tool' and 'tool_call_id'",
            f"{where}.{key}",
        )
    # "developer" is OpenAI's newer name, which templates of other models ignore or refuse
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


def too_long(error: ContextOverflowError, field: str) -> ApiError:
    """Return the HTTP 400 for a prompt that is longer than the context."""
    return bad_request(f"{error}; shorten the {field}", field, c.CONTEXT_OVERFLOW)


def images_advice(kind: object, expected: str) -> str:
    """Return the end of the error for a part that is refused; empty unless it is an image.

    Args:
        kind: type of the part.
        expected: type of the parts that are images in this API.
    """
    if kind not in IMAGE_TYPES.values():
        return ""
    return (
        f"; images ({expected!r}) need a policy with a vision model, such as Qwen2.5-VL, and the "
        "embedded engine"
    )


def _content(content: Any, where: str) -> str | list[Any] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or an array of parts", where)
    texts = []
    has_images = any(isinstance(part, ImagePart) for part in content)
    for number, part in enumerate(content):
        if isinstance(part, ImagePart):
            continue
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"{where}[{number}]"
            code = c.UNSUPPORTED_CONTENT if is_media(part) else None
            advice = images_advice(kind, "image_url")
            raise bad_request(
                f"{named} is of type {kind!r}: only text is understood{advice}", named, code
            )
        texts.append(part["text"])
    return content if has_images else "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must have a function with a name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _arguments.decode(arguments or "{}")
        except (
            msgspec.DecodeError,
            RecursionError,
        ):  # malformed: pass it to the template unchanged
            return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


_arguments: Final = msgspec.json.Decoder(dict[str, Any])
