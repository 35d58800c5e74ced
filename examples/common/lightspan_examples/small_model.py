"""Build a small model that trains on a laptop: a Qwen2 of 0.8 M parameters with random weights.

Tokenizer and model are saved as an ordinary transformers folder, which `AutoTokenizer` and
`AutoModelForCausalLM` load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from lightspan_torch.engine.weights import without_bars

Chat: TypeAlias = Mapping[str, Any]
"""`{"messages": [...]}`, and `"tools"` if the chat has tools."""

START = "<|im_start|>"
END = "<|im_end|>"
PAD = "<|endoftext|>"

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'Call a function with <tool_call>{"name": ..., "arguments": ...}</tool_call>.\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML, tools in the Hermes style; no message changes how the ones before it are rendered."""


def build_model(
    directory: str | Path,
    chats: Iterable[Chat],
    *,
    seed: int = 0,
    vocabulary: int = 896,
    context: int = 512,
) -> None:
    """Save an untrained model, and a tokenizer trained on the text of `chats`, in `directory`.

    Args:
        vocabulary: size of the tokenizer's vocabulary.
        context: maximum number of tokens of a prompt with its answer.
    """
    tokenizer = build_tokenizer(chats, vocabulary=vocabulary, context=context)
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with without_bars():
        model.save_pretrained(directory)


def model_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """Return the architecture of the model, with the vocabulary and context of `tokenizer`."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_tokenizer(
    chats: Iterable[Chat], *, vocabulary: int = 896, context: int = 512
) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer trained on `chats`; it can encode any other text byte by
    byte.

    It is a `Qwen2Tokenizer`, because `AutoTokenizer` loads every tokenizer in the folder of a Qwen2
    model as one. Its rules split numbers into single digits.

    Args:
        vocabulary: size of the vocabulary.
        context: maximum number of tokens of a prompt with its answer.
    """
    empty = Qwen2Tokenizer()
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = empty.backend_tokenizer.normalizer
    bpe.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(chats), trainer)
    trained = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(chats: Iterable[Chat]) -> Iterator[str]:
    """Yield the text that the chat template renders for each chat, without the template's own
    words.
    """
    for chat in chats:
        for tool in chat.get("tools") or []:
            yield json.dumps(tool)
        for message in chat["messages"]:
            yield f"{message['role']}\n{message.get('content') or ''}\n"
            for call in message.get("tool_calls") or []:
                yield f"<tool_call>\n{json.dumps(_called(call))}\n</tool_call>"


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}
