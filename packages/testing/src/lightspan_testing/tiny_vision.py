"""Tiny random vision models, with real BPE tokenizers, image processors and chat templates.

Nothing is downloaded. The families differ in how an image becomes tokens:

- `qwen2_5_vl`: 28 by 28 pixels are one token, and positions are three-dimensional.
- `qwen3_vl`: as above, and features are added to the hidden states after the first layers too.
- `smolvlm`: an image is cut into tiles of 56 by 56 pixels, each of which has 4 tokens.
- `gemma3`: an image has 16 tokens, which attend to one another in both directions.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from lightspan.schema.images import PromptImage
from lightspan_testing.tiny import TEXTS, tiny_tokenizer

VisionFamily = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3"]
VISION_FAMILIES: Final[tuple[VisionFamily, ...]] = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3")

_QWEN_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TILES: Final = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_TOKENS: Final[Mapping[str, tuple[str, ...]]] = {
    "qwen2_5_vl": _QWEN_TOKENS,
    "qwen3_vl": _QWEN_TOKENS,
    "smolvlm": ("<image>", "<fake_token_around_image>", "<global-img>", *_TILES),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
_MARKS: Final = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
}
_TEMPLATE: Final = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- 'MARK' }}
{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Chat template of all families, with another mark in the place of an image for each."""


def tiny_vision_model(
    folder: str | Path,
    *,
    seed: int,
    family: VisionFamily = "qwen2_5_vl",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    context: int = 512,
    vocabulary: int = 400,
    texts: Iterable[str] = TEXTS,
    template: str = "",
    max_pixels: int = 112 * 112,
    scale: float = 0.1,
    tied: bool | None = None,
) -> Path:
    """Build a random vision model; save it, its tokenizer and its image processor in `folder`.

    Args:
        folder: folder of the new model.
        seed: seed of the random weights; equal arguments give equal weights.
        family: family whose architecture and image processor to imitate.
        hidden: hidden size of the text part.
        layers: number of layers of the text part.
        heads: number of query heads of the text part.
        context: maximum number of tokens.
        vocabulary: number of tokens of the tokenizer, without those for images.
        texts: training texts of the tokenizer.
        template: a chat template; empty for one that writes images where they are in a message.
        max_pixels: maximum number of pixels of an image (`qwen2_5_vl`, `qwen3_vl`).
        scale: standard deviation of the weights; larger than usual, so that errors show.
        tied: whether the output layer is the embeddings; None for what the family does.

    Returns:
        The folder.
    """
    import torch
    import transformers

    from lightspan_torch.engine.weights import without_bars

    folder = Path(folder)
    tokenizer = tiny_tokenizer(tuple(texts), vocabulary, None)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS[family])})
    tokenizer.chat_template = template or _TEMPLATE.replace("MARK", _MARKS[family])
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": context,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = _CONFIGS[family](text, tokenizer.convert_tokens_to_ids, hidden // heads)
    if tied is not None:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        make: Any = transformers.AutoModelForImageTextToText.from_config
        model = make(config)
        for parameter in model.parameters():  # so that none are zeros or ones
            parameter.add_(0.02 * torch.randn(parameter.shape))
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(family, max_pixels).save_pretrained(folder)
    return folder


def picture(
    colour: str = "red", size: tuple[int, int] = (84, 56), bars: Sequence[int] = (20, 40)
) -> bytes:
    """Return a PNG file of a few bars.

    Args:
        colour: colour of the bars.
        size: width and height.
        bars: heights of the bars.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for place, height in enumerate(bars):
        draw.rectangle((5 + 20 * place, size[1] - height, 18 + 20 * place, size[1]), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    """Return a PNG file as a part of a chat message."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def image_chat(*parts: bytes | str) -> list[dict[str, Any]]:
    """Return a chat with one message of a user, whose parts are texts and PNG files."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def image_logits(model: Any, ids: Sequence[int], images: Sequence[PromptImage]) -> Any:
    """Return the logits of a plain forward pass for ids with images, [ids, vocabulary].

    transformers' image processor makes the model's inputs from the image files. A placeholder that
    is not one of `images` was sampled: the model gets its embedding.

    Args:
        model: the model, loaded by `lightspan_torch.engine.weights.load_model` from its folder.
        ids: the ids.
        images: the images, with their bytes.
    """
    import torch
    import transformers
    from PIL import Image, ImageOps

    image_id = model.config.image_token_id
    kinds = torch.zeros(1, len(ids), dtype=torch.int64)
    for image in images:
        kinds[0, image.start : image.start + image.length] = 1
    whole = torch.tensor([list(ids)])
    sampled = (whole == image_id) & (kinds == 0)
    arguments = {"input_ids": whole.masked_fill(sampled, 0)}
    known = inspect.signature(type(model).forward).parameters
    if images:
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in known:
                arguments[name] = kinds
        files = [io.BytesIO(image.data) for image in images if image.first == 0]
        opened = [ImageOps.exif_transpose(Image.open(file)).convert("RGB") for file in files]
        load: Any = transformers.AutoImageProcessor.from_pretrained
        processor = load(model.name_or_path)
        made = processor(images=[opened], return_tensors="pt")
        arguments |= {name: value for name, value in made.items() if name in known}
    layer = model.get_input_embeddings()
    own = layer(torch.tensor([image_id]))

    def embed(module: Any, inputs: Any, output: Any) -> Any:
        return torch.where(sampled[..., None], own, output)

    hook = layer.register_forward_hook(embed) if sampled.any() else None
    try:
        return model(**arguments).logits[0]
    finally:
        if hook is not None:
            hook.remove()


def _image_processor(family: str, max_pixels: int) -> Any:
    import transformers

    sizes: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen2_5_vl": ("Qwen2VLImageProcessor", {"min_pixels": 784, "max_pixels": max_pixels}),
        "qwen3_vl": ("Qwen2VLImageProcessor", {"min_pixels": 784, "max_pixels": max_pixels}),
        "smolvlm": (
            "SmolVLMImageProcessor",
            {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        ),
        "gemma3": ("Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}),
    }
    name, options = sizes[family]
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind(**options)


def _rope(head: int) -> dict[str, Any]:
    """Return rotary embeddings with three-dimensional positions for heads of a size."""
    half = head // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}


def _qwen2_5_vl(text: dict[str, Any], of: Any, head: int) -> Any:
    import transformers

    config: Any = transformers.Qwen2_5_VLConfig  # type: ignore[attr-defined]
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": text["hidden_size"],
        "num_heads": 2,
        "intermediate_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return config(
        text_config={**text, "rope_parameters": _rope(head)},
        vision_config=vision,
        **_qwen_ids(of),
    )


def _qwen3_vl(text: dict[str, Any], of: Any, head: int) -> Any:
    import transformers

    config: Any = transformers.Qwen3VLConfig  # type: ignore[attr-defined]
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": text["hidden_size"],
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 14,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {**_rope(head), "mrope_interleaved": True}
    return config(
        text_config={**text, "head_dim": head, "rope_parameters": rope},
        vision_config=vision,
        **_qwen_ids(of),
    )


def _qwen_ids(of: Any) -> dict[str, Any]:
    names = ("vision_start", "vision_end", "image", "video")
    return {f"{name}_token_id": of(token) for name, token in zip(names, _QWEN_TOKENS, strict=True)}


def _siglip() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }


def _smolvlm(text: dict[str, Any], of: Any, head: int) -> Any:
    import transformers

    config: Any = transformers.SmolVLMConfig  # type: ignore[attr-defined]
    return config(
        text_config={**text, "model_type": "llama", "head_dim": head},
        vision_config=_siglip(),
        image_token_id=of("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _gemma3(text: dict[str, Any], of: Any, head: int) -> Any:
    import transformers

    config: Any = transformers.Gemma3Config  # type: ignore[attr-defined]
    return config(
        text_config={
            **text,
            "head_dim": head,
            "query_pre_attn_scalar": head,
            "sliding_window": 8,
            "layer_types": [
                ("sliding_attention", "full_attention")[layer % 2]
                for layer in range(text["num_hidden_layers"])
            ],
        },
        vision_config=_siglip(),
        image_token_index=of("<image_soft_token>"),
        boi_token_index=of("<start_of_image>"),
        eoi_token_index=of("<end_of_image>"),
        mm_tokens_per_image=16,
    )


_CONFIGS: Final = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
}
