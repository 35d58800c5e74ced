"""A tokenizer whose ids are bytes, and to which an image is a run of placeholders.

It needs no model and no torch. With a `ScriptedEngine` it stands for a policy that takes images.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightspan.errors import ContextOverflowError, DataError
from lightspan.protocols.engine import EngineCapabilities, ToolParserName
from lightspan.schema.images import Image, PromptImage

START: Final = 256
"""Id at the start of a message."""
END: Final = 257
"""Id at the end of a message."""
PLACEHOLDER: Final = 258
"""Id that stands for a patch of an image."""
PATCH: Final = 8
"""Width and height of a patch, in pixels."""
IMAGES: Final = EngineCapabilities(exact_tokens=True, images=("policy",))
"""Capabilities of a `ScriptedEngine` whose policy takes images."""


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes that takes images.

    An image has a placeholder for each of its patches.

    Args:
        context_length: length of the context in tokens.
    """

    tool_parser: ToolParserName = "hermes"
    eos_ids = frozenset({END})

    def __init__(self, context_length: int = 4_096) -> None:
        self.context_length = context_length

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Return the ids of a chat without images."""
        ids, _ = self.render_images(
            messages, tools, add_generation_prompt=add_generation_prompt, most=most
        )
        return ids

    def render_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of a chat, and its images."""
        ids: list[int] = []
        images: list[PromptImage] = []
        if tools:
            messages = [{"role": "tools", "content": json.dumps(tools)}, *messages]
        for message in messages:
            ids += [START, *message["role"].encode(), 10]
            for part in _parts(message):
                if isinstance(part, str):
                    ids += part.encode()
                    continue
                height, width = grid = _grid(part.data)
                place = {"start": len(ids), "length": height * width}
                images.append(PromptImage(digest=part.digest, grid=grid, data=part.data, **place))
                ids += [PLACEHOLDER] * (height * width)
            ids.append(END)
        if add_generation_prompt:
            ids += [START, *b"assistant\n"]
        if most is not None and len(ids) > most:
            raise ContextOverflowError(f"the prompt has {len(ids)} tokens, the context {most}")
        return ids, tuple(images)

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return bytes(token for token in ids if token < START).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte of an id; none for a special one."""
        return bytes([token_id]) if token_id < START else b""


def _parts(message: Mapping[str, Any]) -> list[str | Image]:
    content = message.get("content") or ""
    parts: list[str | Image] = []
    given: list[Any] = [{"text": content}] if isinstance(content, str) else content
    for part in given:
        if "text" in part:
            parts.append(part["text"])
            continue
        head, _, data = part["image_url"]["url"].partition(",")
        media_type = head.removeprefix("data:").removesuffix(";base64")
        parts.append(Image.of(base64.b64decode(data), media_type))
    calls = message.get("tool_calls") or ()
    parts += [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
    return parts


def _grid(data: bytes) -> tuple[int, int]:
    from PIL import Image as pillow, ImageOps

    try:
        width, height = ImageOps.exif_transpose(pillow.open(io.BytesIO(data))).size
    except OSError as error:
        raise DataError(f"an image cannot be decoded: {error}") from error
    return -(-height // PATCH), -(-width // PATCH)


def image_file(
    color: str = "red", size: tuple[int, int] = (20, 12), kind: str = "PNG", **options: Any
) -> bytes:
    """Return the file of an image of one colour.

    Args:
        color: name of the colour.
        size: width and height in pixels.
        kind: Pillow's name of the format.
        options: further arguments of Pillow's `save`.
    """
    from PIL import Image as pillow

    file = io.BytesIO()
    pillow.new("RGB", size, color).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """Return a `data:` URL with the bytes of an image."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
