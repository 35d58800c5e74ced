"""Chat tokenizers: messages → ids, ids → text.

`TransformersTokenizer` wraps a tokenizer of transformers with its Jinja chat template.
Importing this module loads neither torch nor transformers; `load_tokenizer` does.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec

from lightspan.errors import ConfigError, ContextOverflowError, DataError, ModelError
from lightspan.protocols.engine import ChatTokenizer, ToolParserName
from lightspan.schema.genai_messages import (
    CALL_CLOSE,
    CALL_OPEN,
    PYTHON_TAG,
    dump_json,
    joined_text,
)
from lightspan.schema.media import is_media, is_reference
from lightspan_torch.engine.config import check_date
from lightspan_torch.engine.hub import cannot_load, locate

log = logging.getLogger(__name__)

TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""End-of-turn tokens of the common chat formats: ChatML (Qwen), Llama 3, Phi, Gemma."""

DEFAULT_CONTEXT: Final = 4096
"""Context length, in tokens, of a model whose configuration has none."""

TEMPLATE_DATE: Final = datetime.date(2024, 7, 26)
"""Date that chat templates see as today's: Llama's own default. With the real date, prompts would
change at midnight: turns of one chat would not share a prefix, and two runs with the same seed
would differ."""

TOOL_MARKERS: Final = (
    *(CALL_OPEN, CALL_CLOSE, PYTHON_TAG, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""Texts that open, divide or close a tool call. They are decoded even if they are special tokens,
because the tool parser needs them."""

OVERLENGTH_FACTOR: Final = 2
"""A text is refused if its pieces have more ids in all than this factor times the allowed number.

Cutting a text into pieces adds a few ids at every cut. A text that fits would need 2,048 extra ids
at every cut to be refused, because the gateway admits at most 32 bytes per id.
"""
_PIECE_LENGTH: Final = 2**16
"""Number of characters in a piece; the tokenizers library takes about 250 bytes per character."""


class TransformersTokenizer(ChatTokenizer):
    """A transformers tokenizer with its model's context length and end-of-turn ids.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        name: the model's name or path, for error messages; if empty, the tokenizer's own.
        context_length: maximum tokens of a sequence.
        eos_ids: ids that end a turn, in addition to the tokenizer's own and `TURN_ENDS`.
        tool_parser: parser of the model's tool calls; None to choose it by the call that the chat
            template writes.
        date: date that chat templates see as today's.

    Raises:
        ConfigError: `tool_parser` is unknown or `date` is not a date.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str = "",
        context_length: int = DEFAULT_CONTEXT,
        eos_ids: Iterable[int] = (),
        tool_parser: ToolParserName | None = None,
        date: datetime.date = TEMPLATE_DATE,
    ) -> None:
        if tool_parser is not None and tool_parser not in get_args(ToolParserName):
            parsers = ", ".join(get_args(ToolParserName))
            raise ConfigError(f"tool_parser={tool_parser!r}: use one of {parsers}")
        check_date("template_date", date)
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "") or "the model")
        self._context_length = context_length
        self._eos_ids = frozenset(eos_ids) | _turn_ends(tokenizer)
        self._tool_parser = tool_parser
        self._date_macro = _date_macro(date)
        self._octets: dict[int, bytes] = {}
        self._lost_kinds: dict[bool, frozenset[str]] = {}

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def tool_parser(self) -> ToolParserName:
        return self._tool_parser or self._format or "json"

    @property
    def end_id(self) -> int | None:
        """Id to append to an answer that the chat template does not end; None if there is none."""
        own = _as_ids(self.tokenizer.eos_token_id) or self._eos_ids
        return min(own, default=None)

    @functools.cached_property
    def _format(self) -> ToolParserName | None:
        """Format in which the chat template writes tool calls; None if no parser reads it."""
        written = self._sample.text
        if written:
            return _format_of(written)
        return _format_of_template(self._template(with_tools=True))

    @functools.cached_property
    def _sample(self) -> _Sample:
        """A tool call as the chat template writes it."""
        for has_text, content in itertools.product((False, True), (None, "")):
            chat = _sample_chat(has_text, content)
            try:
                prompt = self._apply(chat[:1], [_OTHER_TOOL], add_generation_prompt=True)
                text = self._apply(chat, [_OTHER_TOOL], add_generation_prompt=False)
            except Exception:  # Jinja runs the model author's code
                continue
            # an object that is no JSON, or a text that is dumped as JSON, must be passed otherwise
            is_wrong = '\\"' in text if has_text else "{'key'" in text
            if _SAMPLE_NAME in text and not is_wrong:
                pairs = enumerate(zip(prompt, text, strict=False))
                start = next((place for place, (a, b) in pairs if a != b), len(prompt))
                head = _OPEN_MARK.sub("", text[:start])  # two marks may begin alike
                return _Sample(text[len(head) :], has_text, content)
        return _Sample()

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form that chat templates expect.

        Content becomes a text. Arguments of tool calls become objects, or texts if the template
        writes texts. The role `developer` becomes `system`. An empty `tool_calls` is left out,
        because Llama's template treats every message with this key as a tool call.

        Raises:
            ModelError: a part of the content is not text, such as Anthropic's `tool_use`.
        """
        plain = {key: value for key, value in message.items() if key != "tool_calls" or value}
        plain["role"] = str(getattr(message["role"], "value", message["role"]))
        if plain["role"] == "developer":  # OpenAI's newer name, which templates ignore or refuse
            plain["role"] = "system"
        content, calls = message.get("content"), plain.get("tool_calls")
        if isinstance(content, list | tuple):
            for part in content:
                if not isinstance(part, str | Mapping) or is_media(part) or is_reference(part):
                    raise ModelError("a part of the content is not text")
                if isinstance(part, Mapping) and (kind := str(part.get("type"))).startswith(
                    _FOREIGN
                ):
                    raise ModelError(
                        f"a part of the content is of type {kind!r}: give calls of tools and their "
                        "results in the form of OpenAI's chats (`tool_calls`, the role `tool`)"
                    )
            plain["content"] = joined_text(list(content))
        elif content is None and "content" in message:
            plain["content"] = self._sample.content if calls else ""
        if calls:
            plain["tool_calls"] = [_plain_call(call, self._sample.has_text) for call in calls]
        return plain

    def _apply(self, messages: Any, tools: Any, **options: Any) -> Any:
        """Render messages by the chat template.

        Args:
            messages: the messages.
            tools: the tools; None for no tools.
            options: options of `apply_chat_template`. By default it returns a text.
        """
        template = self._template(with_tools=bool(tools))
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._date_macro + template if _CLOCK in template else template,
            return_dict=False,
            **{"tokenize": False, **options},
        )

    @functools.cached_property
    def _hidden(self) -> frozenset[int]:
        """Ids of special tokens that `decode` leaves out, because they mark no tool call."""
        return _hidden_ids(self.tokenizer, self._eos_ids, self._sample.text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        return self._render(
            messages, tools, add_generation_prompt, template_options, self.encode, most
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None,
        encode: Callable[..., list[int]],
        most: int | None,
    ) -> list[int]:
        """Return the ids of a chat; see `ChatTokenizer.render`.

        Args:
            messages: the messages.
            tools: the tools; None for no tools.
            add_generation_prompt: whether the answer's beginning is added.
            template_options: options of the chat template.
            encode: function of the rendered text and of the keyword `most`, which returns the ids.
                It is `self.encode` unless the text has placeholders.
            most: maximum number of ids that the caller can use; None for no limit.
        """
        template = self._template(with_tools=bool(tools))
        options = dict(template_options or {})
        if not template:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template: use an instruction-tuned "
                "model, or set `tokenizer.chat_template` and save the tokenizer"
            )
        if tools and not _TOOLS.search(template):
            raise ModelError(
                f"the chat template of {self.name} has no place for tools: they would be left out "
                "of the prompt. Use a model that was trained to call tools, or describe them in "
                "the messages and leave `tools` out"
            )
        if tools and self._tool_parser is None and self._format is None:
            raise ModelError(self.unread_format)
        self._check_history(messages, with_tools=bool(tools))
        is_text = _has_template_options_only(options) and _is_standard(type(self.tokenizer))
        if not is_text and encode != self.encode:
            raise ModelError(
                f"images are not rendered with the template options {sorted(options)} or by a "
                f"{type(self.tokenizer).__name__}, which change how a text is encoded"
            )
        try:
            rendered = self._apply(
                [self._plain(message) for message in messages],
                [dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=not is_text,
                **options,
            )
            return encode(rendered, most=most) if is_text else list(rendered)
        except (ContextOverflowError, DataError, ModelError):
            raise
        except Exception as error:  # Jinja runs the model author's code, which raises any type
            raise ModelError(
                f"the chat template of {self.name} refuses these messages "
                f"({', '.join(str(message.get('role')) for message in messages)}): {error}"
            ) from error

    def _check_history(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> None:
        """Raise `ModelError` if the template leaves out tool calls or results that messages have.

        The forms that OpenAI's API had before `tool_calls` are refused for every template.

        Args:
            messages: the messages.
            with_tools: whether the request offers tools.
        """
        if any(one.get("function_call") or one.get("role") == "function" for one in messages):
            raise ModelError(
                "messages with 'function_call' or the role 'function' are not read: write "
                "'tool_calls', and the role 'tool' with 'tool_call_id'"
            )
        kinds = {
            _CALLS: any(message.get("tool_calls") for message in messages),
            _RESULTS: any(message.get("role") == "tool" for message in messages),
        }
        for kind in (kind for kind, is_there in kinds.items() if is_there):
            if kind in self._left_out(with_tools=with_tools):
                depends = not with_tools and kind not in self._left_out(with_tools=True)
                raise ModelError(
                    f"the chat template of {self.name} leaves {kind} out of the prompt"
                    f"{' if a request has no `tools`: send them' if depends else ''}. Use a model, "
                    "or a newer template of it, that writes them, or say in the messages' text "
                    "what was called and what came back"
                )

    def _left_out(self, *, with_tools: bool) -> frozenset[str]:
        """Return which of `_CALLS` and `_RESULTS` the template does not write into a prompt.

        What the template refuses in this check is not among them: it says so itself when it renders
        a request.
        """
        if with_tools not in self._lost_kinds:
            tools, shown = [_OTHER_TOOL] if with_tools else None, dict[str, list[bool]]()
            for has_text, content in itertools.product((False, True), (None, "")):
                chat = _sample_chat(has_text, content)
                for kind, mark, messages in (
                    (_CALLS, _SAMPLE_NAME, chat),
                    (_RESULTS, _SAMPLE_RESULT["content"], [*chat, _SAMPLE_RESULT]),
                ):
                    with contextlib.suppress(Exception):  # Jinja runs the model author's code
                        text = self._apply(messages, tools, add_generation_prompt=False)
                        shown.setdefault(kind, []).append(mark in text)
            kinds = frozenset(kind for kind, marks in shown.items() if not any(marks))
            self._lost_kinds[with_tools] = kinds
        return self._lost_kinds[with_tools]

    @property
    def guessed_format(self) -> str:
        """Why the format of tool calls is a guess; "" if it is none, or tools are refused."""
        is_set = self._tool_parser or self._format is None or self._sample.text
        if is_set or not _TOOLS.search(self._template(with_tools=True)):
            return ""
        return (
            f"the chat template of {self.name} lists tools but writes no tool calls, so they are "
            f"read as {self.tool_parser!r} (tool_parser= chooses another format), and requests "
            "whose messages have tool calls are refused. A newer template of it may write them"
        )

    @property
    def unread_format(self) -> str:
        """Why the model's tool calls cannot be read; "" if they can.

        If they cannot, requests with tools are refused with this text.
        """
        template = self._template(with_tools=True)
        if self._tool_parser or self._format or not _TOOLS.search(template):
            return ""
        written = self._sample.text or next(mark for mark in _FOREIGN_FORMATS if mark in template)
        return (
            f"{self.name} writes tool calls as {written[:120]!r}, which no tool parser here reads: "
            f"they would stay text. There are {', '.join(get_args(ToolParserName))}: use a model "
            "whose template writes one of these, choose one with tool_parser= if the model was "
            "trained to write it, or describe the tools in the messages and leave `tools` out"
        )

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Return the ids of a text, without adding special tokens such as a start of sequence.

        The Rust backend is called directly where possible. `transformers.encode` also copies every
        token's text, offsets and masks into Python lists. Freeing the texts alone holds the GIL for
        50 ns per token: 0.12 s for 3 MB, where returning the ids alone takes 0.03 s.

        Args:
            text: the text to encode.
            most: maximum number of ids that the caller can use; None for no limit.

        Raises:
            ContextOverflowError: a long text has far more than `most` ids. A text with a few more
                is encoded, and the caller must check its length.
            ModelError: the text has half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"a text has half of a surrogate pair, {text[error.start]!a}, which is no "
                "character: an emoji was cut in two where the text was made; remove the half"
            ) from error
        backend = _plain_backend(self.tokenizer)
        if backend is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        # shorter texts cost little
        if most is not None and len(text) > max(_PIECE_LENGTH, 2 * OVERLENGTH_FACTOR * most):
            _check_length(backend, text, most)
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Args:
            ids: the ids.
            skip_special_tokens: whether to leave out special tokens other than `TOOL_MARKERS`.
        """
        hidden = self._hidden if skip_special_tokens else ()
        return str(
            self.tokenizer.decode(
                [token for token in ids if token not in hidden],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        octets = self._octets.get(token_id)
        if octets is None:
            octets = self._octets[token_id] = self._token_bytes(token_id)
        return octets

    def _token_bytes(self, token_id: int) -> bytes:
        text = self.decode([token_id], skip_special_tokens=False)
        name = self.tokenizer.convert_ids_to_tokens(token_id)
        if "\N{REPLACEMENT CHARACTER}" not in text or not isinstance(name, str):
            return text.encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()

    def _template(self, *, with_tools: bool) -> str:
        """Return the chat template; "" if the tokenizer has none."""
        if not self.tokenizer.chat_template:
            return ""
        return str(self.tokenizer.get_chat_template(tools=[] if with_tools else None))


def load_tokenizer(
    model: str | Path,
    *,
    tool_parser: ToolParserName | None = None,
    date: datetime.date = TEMPLATE_DATE,
) -> TransformersTokenizer:
    """Load the tokenizer of a model in a folder or on the Hugging Face hub. Runs no remote code.

    Args:
        model: folder, or name on the hub.
        tool_parser: parser of the model's tool calls; None to choose it by the chat template.
        date: date that chat templates see as today's.

    Raises:
        ConfigError: `tool_parser` is unknown or `date` is not a date.
        ModelError: the tokenizer does not exist, cannot be fetched or cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    from lightspan_torch.vision.processor import takes_images
    from lightspan_torch.vision.tokenizer import vision_tokenizer

    origin = locate(model, "tokenizer")
    try:
        config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("configuration", origin, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin.folder, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("tokenizer", origin, error) from error
    # without tokenizer files, transformers 5 returns an empty tokenizer
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise cannot_load("tokenizer", origin, FileNotFoundError("there are no tokenizer files"))
    options: dict[str, Any] = {
        "name": origin.name,
        "context_length": context_length(config),
        "eos_ids": _configured_eos(origin.folder, config),
        "tool_parser": tool_parser,
        "date": date,
    }
    with_images = (
        vision_tokenizer(tokenizer, origin, config, **options) if takes_images(config) else None
    )
    loaded: TransformersTokenizer = with_images or TransformersTokenizer(tokenizer, **options)
    if reason := loaded.unread_format:
        _warn_once("requests with tools are refused", reason)
    elif reason := loaded.guessed_format:
        _warn_once("tool calls may not be read", reason)
    return loaded


@functools.cache
def _warn_once(effect: str, reason: str) -> None:
    log.warning("%s: %s", effect, reason)


def context_length(config: Any) -> int:
    """Return the maximum sequence length of a model, in tokens, from its configuration."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT)


def _configured_eos(folder: Path, config: Any) -> set[int]:
    """Return the end-of-sequence ids of a model's configuration and generation configuration."""
    from transformers import GenerationConfig

    ids = _as_ids(getattr(config.get_text_config(), "eos_token_id", None))
    with contextlib.suppress(OSError):  # the generation configuration is optional
        ids |= _as_ids(GenerationConfig.from_pretrained(folder).eos_token_id)
    return ids


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(item) for item in value}


def _turn_ends(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens in `TURN_ENDS` and of the end-of-sequence token.

    Tokens that the tokenizer does not have are left out.
    """
    added = tokenizer.get_added_vocab()
    ends = {int(added[token]) for token in TURN_ENDS if token in added}
    return ends | _as_ids(tokenizer.eos_token_id)


def _hidden_ids(tokenizer: Any, eos_ids: frozenset[int], call: str) -> frozenset[int]:
    """Return the ids of special tokens that `decode` leaves out, because they mark no tool call.

    Args:
        tokenizer: the tokenizer.
        eos_ids: ids that end a turn.
        call: a tool call as the chat template writes it.
    """
    added = tokenizer.added_tokens_decoder
    special = {token for token, entry in added.items() if entry.special}
    special |= set(tokenizer.all_special_ids)
    shown = {
        token
        for token, entry in added.items()
        if entry.content in TOOL_MARKERS or (entry.content in call and token not in eos_ids)
    }
    return frozenset(special - shown)


# --- encoding -------------------------------------------------------------------------------
_ENCODING_METHODS: Final = ("apply_chat_template", "__call__", "encode", "_encode_plus")
"""Methods that turn a chat into ids. A tokenizer class that overrides one may return other ids."""


def _is_standard(kind: type) -> bool:
    """Return whether a tokenizer class inherits all methods of `_ENCODING_METHODS` unchanged."""
    from transformers import TokenizersBackend

    return issubclass(kind, TokenizersBackend) and all(
        getattr(kind, method) is getattr(TokenizersBackend, method) for method in _ENCODING_METHODS
    )


def _plain_backend(tokenizer: Any) -> Any:
    """Return the tokenizer's Rust backend; None if it would give other ids than the tokenizer.

    The ids differ where the tokenizer truncates, pads, or splits special tokens in its own way.
    """
    if not _is_standard(type(tokenizer)):
        return None
    backend = tokenizer.backend_tokenizer
    is_plain = (
        backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
    return backend if is_plain else None


def _check_length(backend: Any, text: str, most: int) -> None:
    """Raise `ContextOverflowError` if a text has more than `OVERLENGTH_FACTOR` times `most` ids.

    The text is encoded piece by piece: encoding 4 MB at once takes seconds and 1 GB of memory.
    """
    count = 0
    for start in range(0, len(text), _PIECE_LENGTH):
        piece = text[start : start + _PIECE_LENGTH]
        [encoding] = backend.encode_batch_fast([piece], add_special_tokens=False)
        count += len(encoding)
        if count > OVERLENGTH_FACTOR * most:
            raise ContextOverflowError(
                f"the prompt has far more tokens than the model's context holds, which is {most:,}"
            )


# --- bytes of a token ------------------------------------------------------------------------
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Name of a token that is one byte, in the vocabularies of SentencePiece."""
_VISIBLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_INVISIBLE: Final = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTES: Final = {
    **{chr(byte): byte for byte in _VISIBLE},
    **{chr(0x100 + place): byte for place, byte in enumerate(_INVISIBLE)},
}
"""Character in a token's name → byte, in byte-level vocabularies (GPT-2's and later ones)."""


# --- templates ------------------------------------------------------------------------------
_FOREIGN: Final = ("tool_", "function_call")
"""Start of the types of parts that are calls of tools or their results in other APIs."""
_CLOCK: Final = "strftime_now"
_FOREIGN_FORMATS: Final = ("<function=", "<arg_key>", "<|tool_call_begin|>", "<|channel|>")
"""Texts in the templates of Qwen3-Coder, GLM, Kimi and gpt-oss, whose tool calls no parser reads.
"""
_TOOLS: Final = re.compile(r"\btools\b")


def _has_template_options_only(options: Mapping[str, Any]) -> bool:
    """Return whether all `options` are for the chat template.

    Other options change how the rendered text is encoded into ids.
    """
    return not options or options.keys() & _transformers_options() <= {"documents"}


@functools.cache
def _transformers_options() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _plain_call(call: Any, has_text: bool) -> Any:
    """Return a tool call with its arguments as an object, or as a text if `has_text`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    try:
        if has_text and not isinstance(arguments, str):
            arguments = dump_json(arguments or {})
        elif isinstance(arguments, str) and not has_text:
            arguments = _arguments.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):  # malformed: as the model wrote it
        pass
    return {**call, "function": {**function, "arguments": arguments}}


_arguments: Final = msgspec.json.Decoder(dict[str, Any])


# --- formats of tool calls ------------------------------------------------------------------
_SAMPLE_NAME: Final = "lightspan_sample"
_SAMPLE: Final = {"key": "any value"}
_SAMPLE_TEXT: Final = '{"key": "any value"}'
_SAMPLE_RESULT: Final = {"role": "tool", "tool_call_id": "lightspan", "content": "sample_result"}
_CALLS: Final = "tool calls"
_RESULTS: Final = "results of tools"
_OTHER_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "Another tool.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_OPEN_MARK: Final = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_MARKS: Final[Mapping[str, ToolParserName]] = {
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call▁begin｜>": "deepseek",
    "<|tool_call_start|>": "pythonic",
    "<|python_start|>": "pythonic",
    "<|tool_list_start|>": "pythonic",  # LFM2's first template writes no calls
}
"""Mark of a tool call, or of the list of tools, → format."""
_JSON_TAGS: Final = re.compile(
    r"(?:<think>.*</think>|<\|?/?tool_?calls?\|?>|```json|[\s\[])*", re.DOTALL | re.IGNORECASE
)
"""What `lightspan_gateway.tools` allows before a call in the format `json`."""


class _Sample(NamedTuple):
    """A tool call as a chat template writes it."""

    text: str = ""
    """The text; empty if the template writes no tool calls."""
    has_text: bool = False
    """Whether the template takes the arguments as text, not as an object."""
    content: str | None = None
    """What the template takes as the content of a message that is only a call."""


def _sample_chat(has_text: bool, content: str | None) -> list[dict[str, Any]]:
    """Return a question and an answer that is a tool call.

    Args:
        has_text: whether the arguments are text, not an object.
        content: content of the answer.
    """
    function = {"name": _SAMPLE_NAME, "arguments": _SAMPLE_TEXT if has_text else _SAMPLE}
    call = {"id": "lightspan", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [{"role": "user", "content": "?"}, answer]


def _format_of(call: str) -> ToolParserName | None:
    """Return the format of a tool call that a chat template wrote; None if no parser reads it."""
    for mark, name in _MARKS.items():
        if mark in call:
            return name
    if f"{_SAMPLE_NAME}(key=" in call:
        return "pythonic"
    for start in (match.start() for match in re.finditer(r"\{", call)):
        try:
            value, _ = json.JSONDecoder().raw_decode(call, start)
        except ValueError:
            continue
        before = call[:start].rstrip()
        if value.get("name") != _SAMPLE_NAME:
            continue
        if value.get("arguments") == _SAMPLE and before.endswith(CALL_OPEN):
            return "hermes"
        if value.get("arguments") == _SAMPLE and _JSON_TAGS.fullmatch(before):
            return "json"
        if value.get("parameters") == _SAMPLE:
            return "llama"
    return None


def _format_of_template(template: str) -> ToolParserName | None:
    """Guess the format of tool calls from a template's source; None if no parser reads it.

    This is for templates that do not write tool calls themselves.
    """
    if any(mark in template for mark in _FOREIGN_FORMATS):
        return None
    for mark, name in _MARKS.items():
        if mark in template:
            return name
    if CALL_OPEN in template:
        return "hermes"
    return "llama" if "<|start_header_id|>" in template or PYTHON_TAG in template else "json"


def _date_macro(date: datetime.date) -> str:
    """Return a Jinja macro by which a chat template gets `date` as today's date."""
    moment = datetime.datetime.combine(date, datetime.time())
    texts = {f"%{code}": moment.strftime(f"%{code}") for code in "aAbBdmyYjHIMSp"}
    texts |= {"%-d": str(date.day), "%-m": str(date.month)}
    filters = "".join(f" | replace('{code}', '{text}')" for code, text in texts.items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro +%}}"
