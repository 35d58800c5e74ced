"""Build a small vision model: a Qwen2.5-VL of 0.8 million parameters with random weights.

Tokenizer, image processor and model are saved as an ordinary transformers folder. Patches and
tokens of an image are as wide as in the published models: 14 and 28 pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (  # type: ignore[attr-defined]
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
)

from lightspan_examples.small_model import Chat, build_tokenizer, model_config
from lightspan_torch.engine.weights import without_bars

IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"
BEFORE: Final = "<|vision_start|>"
AFTER: Final = "<|vision_end|>"
PATCH: Final = 14
MERGED: Final = 2
"""Patches per side of a token."""
CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with images, as in Qwen2.5-VL; there are no tools and no default system message."""


def build_model(
    directory: str | Path,
    chats: Iterable[Chat],
    *,
    seed: int = 0,
    vocabulary: int = 896,
    context: int = 512,
) -> None:
    """Save an untrained model, a tokenizer trained on the text of `chats`, and an image processor.

    Args:
        directory: folder of the model.
        vocabulary: size of the tokenizer's vocabulary.
        context: maximum number of tokens of a prompt with its answer.
    """
    texts = [_without_images(chat) for chat in chats]
    tokenizer = build_tokenizer(texts, vocabulary=vocabulary, context=context)
    tokenizer.add_tokens([IMAGE, VIDEO, BEFORE, AFTER], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGED,
        min_pixels=(2 * PATCH * MERGED) ** 2,
        max_pixels=(8 * PATCH * MERGED) ** 2,
    )
    processor.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(vision_config(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with without_bars():
        model.save_pretrained(directory)


def vision_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """Return the architecture. Its text part is that of the other examples, with narrower MLPs."""
    text: Any = model_config(tokenizer).to_dict()
    kept = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    hidden = text["hidden_size"]
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in (
            ("image_token_id", IMAGE),
            ("video_token_id", VIDEO),
            ("vision_start_token_id", BEFORE),
            ("vision_end_token_id", AFTER),
        )
    }
    return Qwen2_5_VLConfig(
        text_config={
            **{key: text[key] for key in kept},
            "intermediate_size": 2 * hidden,
            "rope_parameters": rotary,
        },
        vision_config={
            "depth": 2,
            "hidden_size": hidden // 2,
            "out_hidden_size": hidden,
            "intermediate_size": hidden,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "window_size": 8 * PATCH,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=True,
        **ids,
    )


def _without_images(chat: Chat) -> Chat:
    """Return a chat whose messages are texts, for the training of a tokenizer."""
    messages = []
    for message in chat["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        messages.append({**message, "content": content})
    return {"messages": messages}
