"""Chat tokenizers: messages → ids, ids → text.

`TransformersTokenizer` wraps a tokenizer of transformers with its Jinja chat template.
`IncrementalDecoder` turns ids that arrive one by one into text deltas. Importing this module loads
neither torch nor transformers; `load_tokenizer` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.engines import ChatTokenizer
from lightspan.errors import ModelError

TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""End-of-turn tokens of the common chat formats: ChatML (Qwen), Llama 3, Phi, Gemma."""

DEFAULT_CONTEXT: Final = 4096
"""Context of a model whose configuration states none."""

_REPLACEMENT: Final = "\ufffd"


class TransformersTokenizer(ChatTokenizer):
    """A transformers tokenizer and what its model's configuration says of it.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        name: the model's name or path, for error messages.
        context_length: longest sequence of the model.
        eos_ids: ids that end a turn, beside the tokenizer's own and the known end-of-turn tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str = "",
        context_length: int = DEFAULT_CONTEXT,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "") or "the model")
        self._context_length = context_length
        self._eos_ids = frozenset(eos_ids) | _turn_ends(tokenizer)
        self._texts: dict[int, str] = {}

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def context_length(self) -> int:
        return self._context_length

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {self.name} has no chat template: use an instruction-tuned "
                "model, or set `tokenizer.chat_template` and save the tokenizer"
            )
        try:
            ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **dict(template_options or {}),
            )
        except Exception as error:  # Jinja runs the model author's code: anything may come out
            raise ModelError(
                f"the chat template of {self.name} refuses these messages "
                f"({', '.join(str(message.get('role')) for message in messages)}): {error}"
            ) from error
        return list(ids)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(
            self.tokenizer.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def token_text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text


class IncrementalDecoder:
    """Ids → text deltas whose concatenation is the text of all ids.

    Text that more ids may still change, such as half a UTF-8 character, is held back until they
    arrive or `flush` is called. Only a window of recent ids is decoded again at each push (the
    window starts one delta back, because the text of an id may depend on its left neighbour).
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        """Where the window starts."""
        self._read = 0
        """Ids before this one have their text out, but for `_early` more characters."""
        self._base = ""
        """Text of the ids from `_start` to `_read`."""
        self._early = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids settle."""
        self._ids.extend(ids)
        window = self._decode(self._start)
        stable = window.rstrip(_REPLACEMENT)
        out = len(self._base) + self._early
        if len(stable) <= out or not window.startswith(self._base):
            return ""
        delta = stable[out:]
        if len(stable) < len(window):
            self._early += len(delta)
            return delta
        self._start, self._read, self._early = self._read, len(self._ids), 0
        self._base = self._decode(self._start)
        return delta

    def flush(self) -> str:
        """The rest, incomplete characters shown as U+FFFD. The decoder is then at its end."""
        window = self._decode(self._start)
        delta = window[len(self._base) + self._early :]
        self._start, self._read, self._early = self._read, len(self._ids), 0
        self._base = self._decode(self._start)
        return delta

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip)


def load_tokenizer(model: str | Path) -> TransformersTokenizer:
    """The tokenizer of a folder or of a model on the Hugging Face hub. Runs no remote code.

    Raises:
        ModelError: it is not there, cannot be fetched or cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer

    name = check_model_path(model)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("configuration", name, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise cannot_load("tokenizer", name, error) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # transformers 5 makes up an empty one
        raise cannot_load("tokenizer", name, FileNotFoundError("there are no tokenizer files"))
    return TransformersTokenizer(
        tokenizer,
        name=name,
        context_length=context_length(config),
        eos_ids=_configured_eos(name, config),
    )


def check_model_path(model: str | Path) -> str:
    """The model's name, or its path after a look whether the folder is there.

    Raises:
        ModelError: a path that is not a folder with a `config.json`.
    """
    name = str(model)
    path = Path(name).expanduser()
    looks_local = isinstance(model, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    if not (looks_local or path.is_dir()):
        return name
    if not path.is_dir():
        raise ModelError(f"the model folder {name} does not exist")
    if not (path / "config.json").is_file():
        raise ModelError(f"the folder {name} is not a model: it has no config.json")
    return str(path)


def cannot_load(what: str, name: str, error: BaseException) -> ModelError:
    """An error that says what could not be loaded, from where, and why."""
    where = "from its folder" if Path(name).is_dir() else "from the Hugging Face hub"
    reason = " ".join(str(error).split())[:600]
    return ModelError(f"cannot load the {what} of {name} {where}: {reason}")


def context_length(config: Any) -> int:
    """The longest sequence that a model configuration allows."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT)


def _configured_eos(name: str, config: Any) -> set[int]:
    """End-of-sequence ids of the generation configuration and of the model configuration."""
    from transformers import GenerationConfig

    found = _as_ids(getattr(config.get_text_config(), "eos_token_id", None))
    try:
        generation = GenerationConfig.from_pretrained(name)
    except OSError:  # there need not be one
        return found
    return found | _as_ids(generation.eos_token_id)


def _as_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(value)} if isinstance(value, int) else {int(item) for item in value}


def _turn_ends(tokenizer: Any) -> set[int]:
    """The tokenizer's own end of sequence and the known end-of-turn tokens that it has."""
    added = tokenizer.get_added_vocab()
    known = {int(added[token]) for token in TURN_ENDS if token in added}
    return known | _as_ids(tokenizer.eos_token_id)


__all__ = [
    "IncrementalDecoder",
    "TransformersTokenizer",
    "cannot_load",
    "check_model_path",
    "context_length",
    "load_tokenizer",
]
