"""Chat tokenizers: messages → ids, ids → text.

`TransformersTokenizer` wraps a tokenizer of transformers with its Jinja chat template.
Importing this module loads neither torch nor transformers; `load_tokenizer` does.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from lightspan.errors import ConfigError, ContextOverflowError, ModelError
from lightspan.protocols.engine import ChatTokenizer, ToolParserName
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN, PYTHON_TAG
from lightspan.schema.validation import check_date
from lightspan_torch.engine.hub import cannot_load, locate

TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""End-of-turn tokens of the common chat formats: ChatML (Qwen), Llama 3, Phi, Gemma."""

DEFAULT_CONTEXT: Final = 4096
"""Context of a model whose configuration states none."""

TEMPLATE_DATE: Final = datetime.date(2024, 7, 26)
"""What templates that ask for the date are told: the day that Llama's template names where it has
no clock. With the real one, prompts would change at midnight: turns of one chat would not share
their prefix, and two runs of one seed would differ."""

TOOL_MARKERS: Final = (CALL_OPEN, CALL_CLOSE, PYTHON_TAG)
"""What tool calls begin or end with: shown to their parser, even where it is a special token."""

FAR: Final = 2
"""Times as many ids as anybody can use: so many may be in the pieces of a text before it is given
up. Cutting a text adds ids where it is cut, a few; a text in the gateway would need 2,048 of them
at every cut to be given up although it fits, as it has at most 32 bytes for each id that does."""
_PIECE: Final = 2**16
"""Letters of a piece: the library holds some 250 bytes for each while it works."""


class TransformersTokenizer(ChatTokenizer):
    """A transformers tokenizer, with what its model's configuration adds to it.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        name: the model's name or path, for error messages.
        context_length: longest sequence of the model.
        eos_ids: ids that end a turn, beside the tokenizer's own and the known end-of-turn tokens.
        tool_parser: which parser reads the model's tool calls; None for the one of the format that
            its chat template teaches it.
        date: what chat templates that ask for today's date are told.

    Raises:
        ConfigError: an unknown tool parser; a date that is none.
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
            raise ConfigError(f"tool_parser={tool_parser!r} is none of {parsers}")
        check_date("template_date", date)
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "") or "the model")
        self._context_length = context_length
        self._eos_ids = frozenset(eos_ids) | _turn_ends(tokenizer)
        self._tool_parser = tool_parser
        self._calendar = _calendar(date)
        self._hidden = _hidden_ids(tokenizer)
        self._texts: dict[int, str] = {}

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def tool_parser(self) -> ToolParserName:
        return self._tool_parser or _parser_of(self._template(with_tools=True))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        template = self._template(with_tools=bool(tools))
        options = dict(template_options or {})
        if not template:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template: use an instruction-tuned "
                "model, or set `tokenizer.chat_template` and save the tokenizer"
            )
        if tools and not _TOOLS.search(template):
            raise ModelError(
                f"the chat template of {self.name} has no place for tools: the model would never "
                "see them. Use a model that was trained to call tools, or describe them in the "
                "messages and leave `tools` out"
            )
        if tools and self._tool_parser is None:
            _check_readable(template, self.name)
        is_text = _only_reaches_template(options) and _is_backends_own(type(self.tokenizer))
        try:
            rendered = self.tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._calendar + template if _CLOCK in template else template,
                add_generation_prompt=add_generation_prompt,
                tokenize=not is_text,
                return_dict=False,
                **options,
            )
            return self.encode(rendered, most=most) if is_text else list(rendered)
        except ContextOverflowError:
            raise
        except Exception as error:  # Jinja runs the model author's code: anything may come out
            raise ModelError(
                f"the chat template of {self.name} refuses these messages "
                f"({', '.join(str(message.get('role')) for message in messages)}): {error}"
            ) from error

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """The ids that `transformers` makes of the text, without the rest that it makes.

        It has the library in Rust hand out every token as a text, with its place, and copies ids,
        types and masks into lists. Freeing those texts alone holds all of Python in one step, for
        50 ns a token: 0.12 s of CPU for 3 MB, where handing out the ids takes 0.03 s.
        """
        backend = _plain_backend(self.tokenizer)
        if backend is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        if most is not None and len(text) > max(_PIECE, 2 * FAR * most):  # the rest costs little
            _check_length(backend, text, most)
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; without special tokens it still has those that mark tool calls."""
        hidden = self._hidden if skip_special_tokens else ()
        return str(
            self.tokenizer.decode(
                [token for token in ids if token not in hidden],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def _template(self, *, with_tools: bool) -> str:
        """The chat template that is used; empty if there is none."""
        if not self.tokenizer.chat_template:
            return ""
        return str(self.tokenizer.get_chat_template(tools=[] if with_tools else None))


def load_tokenizer(
    model: str | Path,
    *,
    tool_parser: ToolParserName | None = None,
    date: datetime.date = TEMPLATE_DATE,
) -> TransformersTokenizer:
    """The tokenizer of a folder or of a model on the Hugging Face hub. Runs no remote code.

    Args:
        tool_parser, date: see `TransformersTokenizer`.

    Raises:
        ModelError: it is not there, cannot be fetched or cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    origin = locate(model, "tokenizer")
    try:
        config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("configuration", origin, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin.folder, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("tokenizer", origin, error) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # transformers 5 makes up an empty one
        raise cannot_load("tokenizer", origin, FileNotFoundError("there are no tokenizer files"))
    return TransformersTokenizer(
        tokenizer,
        name=origin.name,
        context_length=context_length(config),
        eos_ids=_configured_eos(origin.folder, config),
        tool_parser=tool_parser,
        date=date,
    )


def context_length(config: Any) -> int:
    """The longest sequence that a model configuration allows."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT)


def _configured_eos(folder: Path, config: Any) -> set[int]:
    """End-of-sequence ids of the generation configuration and of the model configuration."""
    from transformers import GenerationConfig

    ids = _as_ids(getattr(config.get_text_config(), "eos_token_id", None))
    with contextlib.suppress(OSError):  # a model need not have a generation configuration
        ids |= _as_ids(GenerationConfig.from_pretrained(folder).eos_token_id)
    return ids


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(item) for item in value}


def _turn_ends(tokenizer: Any) -> set[int]:
    """The tokenizer's own end of sequence and the known end-of-turn tokens that it has."""
    added = tokenizer.get_added_vocab()
    ends = {int(added[token]) for token in TURN_ENDS if token in added}
    return ends | _as_ids(tokenizer.eos_token_id)


def _hidden_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens that no text shows: all but those that mark tool calls."""
    added = tokenizer.added_tokens_decoder
    special = {token for token, entry in added.items() if entry.special}
    special |= set(tokenizer.all_special_ids)
    shown = {token for token, entry in added.items() if entry.content in TOOL_MARKERS}
    return frozenset(special - shown)


# --- ids alone ------------------------------------------------------------------------------
_STEPS: Final = ("apply_chat_template", "__call__", "encode", "_encode_plus")
"""What a class of tokenizers may do in its own way between a chat and its ids."""


def _is_backends_own(kind: type) -> bool:
    """Whether this class leaves all of it to transformers, and transformers to its backend."""
    from transformers import TokenizersBackend

    return issubclass(kind, TokenizersBackend) and all(
        getattr(kind, step) is getattr(TokenizersBackend, step) for step in _STEPS
    )


def _plain_backend(tokenizer: Any) -> Any:
    """The backend that gives the ids which the tokenizer would; None if it might give others: of a
    text cut or filled up, or with its special tokens taken apart."""
    if not _is_backends_own(type(tokenizer)):
        return None
    backend = tokenizer.backend_tokenizer
    is_plain = (
        backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
    return backend if is_plain else None


def _check_length(backend: Any, text: str, most: int) -> None:
    """Raise `ContextOverflowError` if a text has far more ids than can be used, without making all
    of them: 4 MB take seconds and a gigabyte."""
    count = 0
    for start in range(0, len(text), _PIECE):
        [piece] = backend.encode_batch_fast(
            [text[start : start + _PIECE]], add_special_tokens=False
        )
        count += len(piece)
        if count > FAR * most:
            raise ContextOverflowError(
                f"the prompt has far more tokens than the model's context holds, which is {most:,}"
            )


# --- templates ------------------------------------------------------------------------------
_CLOCK: Final = "strftime_now"
_FOREIGN_FORMATS: Final = ("<function=", "<arg_key>")
"""In the templates of Qwen3-Coder and GLM, whose tool calls have arguments in tags, not in JSON."""
_TOOLS: Final = re.compile(r"\btools\b")


def _only_reaches_template(options: Mapping[str, Any]) -> bool:
    """Whether none of these options is one of transformers' own, of how texts become ids."""
    return not options or options.keys() & _own_options() <= {"documents"}


@functools.cache
def _own_options() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without an empty `tool_calls`: Llama's template only looks whether the key is
    there."""
    return {key: value for key, value in message.items() if key != "tool_calls" or value}


def _parser_of(template: str) -> ToolParserName:
    """The parser of the format of tool calls that a chat template teaches the model."""
    if CALL_OPEN in template:
        return "hermes"
    if "<|start_header_id|>" in template or PYTHON_TAG in template:
        return "llama"
    return "json"


def _check_readable(template: str, name: str) -> None:
    """Raise `ModelError` if the template teaches a format of tool calls that no parser reads."""
    foreign = [marker for marker in _FOREIGN_FORMATS if marker in template]
    if foreign:
        raise ModelError(
            f"{name} writes tool calls as {foreign[0]}…, which no tool parser here reads: they "
            f"would stay text. There are {', '.join(get_args(ToolParserName))}; choose one with "
            "tool_parser= if the model was trained to write that"
        )


def _calendar(date: datetime.date) -> str:
    """Jinja that puts this date in place of the clock that transformers gives to templates."""
    moment = datetime.datetime.combine(date, datetime.time())
    texts = {f"%{code}": moment.strftime(f"%{code}") for code in "aAbBdmyYjHIMSp"}
    texts |= {"%-d": str(date.day), "%-m": str(date.month)}
    steps = "".join(f" | replace('{code}', '{text}')" for code, text in texts.items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{steps} }}}}{{% endmacro +%}}"
