"""A tiny random Qwen2 model with a real BPE tokenizer and chat template, for tests.

Nothing is downloaded. The template is of the Hermes kind that Qwen2.5 uses: `<tools>` in the system
message, `<tool_call>` around a call, `<tool_response>` around a result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
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
"""What the tokenizer is trained on unless the caller brings texts."""

CHAT_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer a call as <tool_call>{"name": …, "arguments": …}</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' %}
{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def tiny_model(
    folder: str | Path,
    *,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    context: int = 512,
    vocabulary: int = 400,
    texts: Iterable[str] = TEXTS,
    template: str | None = CHAT_TEMPLATE,
    scale: float = 0.1,
) -> Path:
    """Build and save the model and its tokenizer; returns the folder.

    Args:
        seed: of the random weights; equal arguments give equal weights.
        scale: standard deviation of the weights. Larger than usual, so that an untrained model's
            distributions are not flat and errors show.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lightspan.engines.transformers import quiet_unless_terminal

    folder = Path(folder)
    tokenizer = tiny_tokenizer(tuple(texts), vocabulary, template)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with quiet_unless_terminal():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(texts: Sequence[str], vocabulary: int, template: str | None) -> Any:
    """A byte-level BPE tokenizer: every text in Unicode's composed form (NFC) round-trips.

    A `Qwen2Tokenizer`, because that is what `AutoTokenizer` makes of any tokenizer that lies beside
    a Qwen2 model.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    rules = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
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
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


_tokenizer = tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "TEXTS", "tiny_model", "tiny_tokenizer"]
