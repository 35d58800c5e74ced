"""Tiny random models with real BPE tokenizers and chat templates, for tests.

Nothing is downloaded. The families differ in special tokens, end-of-turn ids, attention heads,
rotary scaling, and chat template.

- `qwen2`: ChatML, tools in the Hermes style of Qwen2.5: `<tools>` in the system message,
  `<tool_call>` around a call, `<tool_response>` around a result.
- `llama`: Llama 3's header tokens, tools in the first user message, a call as bare JSON with
  `parameters`, a result from `ipython`, and a template that requires today's date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

Family = Literal["qwen2", "llama"]

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIAL: Final = (
    "<|begin_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|python_tag|>",
)
PLAIN: Final = ("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<tool_response>")

TEXTS: Final = (
    "You are a helpful assistant that writes SQL queries.",
    "SELECT name, age FROM singer WHERE age > 30 ORDER BY age DESC LIMIT 1",
    "SELECT count(*) FROM concert JOIN stadium ON concert.stadium_id = stadium.id",
    "How many singers are there? What is the highest capacity?",
    'Calling {"name": "calculator", "arguments": {"expression": "12 + 7 * 3"}} now.',
    "The answer is 33. Rewrite the query; it failed with an error: no such column.",
    "Größe, naïve café, 日本語, emoji 🙂🚀 and \u2028 separators.",
)
"""Texts on which the tokenizer is trained by default."""

TEMPLATES: Final = {
    family: files("lightspan_testing").joinpath(f"chat_templates/{family}.jinja").read_text("utf-8")
    for family in ("qwen2", "llama")
}
CHAT_TEMPLATE: Final = TEMPLATES["qwen2"]


def tiny_model(
    folder: str | Path,
    *,
    seed: int,
    family: Family = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    key_heads: int | None = None,
    context: int = 512,
    vocabulary: int = 400,
    texts: Iterable[str] = TEXTS,
    template: str | None = "",
    scale: float = 0.1,
) -> Path:
    """Build a random model and its tokenizer, save both in `folder`, and return the folder.

    Args:
        folder: folder of the new model.
        seed: seed of the random weights; equal arguments give equal weights.
        family: family whose architecture, tokens and chat template to imitate.
        hidden: hidden size.
        layers: number of layers.
        heads: number of query heads.
        key_heads: heads of keys and values; None for the number of query heads.
        context: maximum number of tokens.
        vocabulary: number of tokens of the tokenizer.
        texts: training texts of the tokenizer.
        template: a chat template; None for no template, empty for the default of `family`.
        scale: standard deviation of the weights. Larger than usual, so that an untrained model's
            distributions are not flat and errors show.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lightspan_torch.engine.weights import without_bars

    folder = Path(folder)
    tokenizer = tiny_tokenizer(tuple(texts), vocabulary, template, family)
    config = _FAMILY_CONFIGS[family](
        tokenizer,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or heads,
        max_position_embeddings=context,
        initializer_range=scale,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(
    texts: Sequence[str], vocabulary: int, template: str | None, family: Family = "qwen2"
) -> Any:
    """Build a byte-level BPE tokenizer.

    Decoding what it encodes gives the same text, if the text is in composed Unicode (NFC).

    Args:
        texts: training texts.
        vocabulary: number of tokens.
        template: a chat template; None for no template, empty for the default of `family`.
        family: family of the tokenizer.
    """
    tokenizer = _TOKENIZERS[family](texts, vocabulary)
    if template is not None:
        tokenizer.chat_template = template or TEMPLATES[family]
    return tokenizer


def _qwen2_config(tokenizer: Any, **sizes: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


def _llama_config(tokenizer: Any, **sizes: Any) -> Any:
    """Return a Llama configuration with the rotary scaling of Llama 3.2.

    The scaling assumes that the model was first trained with a quarter of its context.
    """
    from transformers import LlamaConfig

    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(end) for end in ends],
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": sizes["max_position_embeddings"] // 4,
        },
        **sizes,
    )


def _qwen2_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Build a `Qwen2Tokenizer`, the class that `AutoTokenizer` uses for every Qwen2 model."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    trained = json.loads(_trained_bpe(texts, vocabulary, SPECIAL).to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return tokenizer


def _llama_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Build a tokenizer like that of Llama 3.

    It puts `<|begin_of_text|>` before plain text but not before rendered chats.
    """
    from tokenizers import decoders, processors
    from transformers import PreTrainedTokenizerFast

    bpe = _trained_bpe(texts, vocabulary, LLAMA_SPECIAL)
    bpe.decoder = decoders.ByteLevel()
    start = LLAMA_SPECIAL[0]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=start,
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
        extra_special_tokens=list(LLAMA_SPECIAL[2:]),
    )


def _trained_bpe(texts: Sequence[str], vocabulary: int, special: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    rules = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


_FAMILY_CONFIGS: Final = {"qwen2": _qwen2_config, "llama": _llama_config}
_TOKENIZERS: Final = {"qwen2": _qwen2_tokenizer, "llama": _llama_tokenizer}
