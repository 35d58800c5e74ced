"""Chat tokenizers of vision models. Importing this module loads neither torch nor Pillow."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightspan.errors import DataError, ModelError
from lightspan.protocols.engine import ImageTokenizer
from lightspan.schema.images import Image, PromptImage
from lightspan.schema.media import decode_base64
from lightspan_torch.engine.hub import Origin
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_torch.vision.processor import ImageProcessor, PreparedImage, load_image_processor

log = logging.getLogger(__name__)

_DATA_URL: Final = re.compile(r"data:(image/[\w.+-]+)((?:;[^;,]*)*);base64,", re.IGNORECASE)
_PROBE: Final = "lightspan sample"


class VisionTokenizer(TransformersTokenizer, ImageTokenizer):
    """A transformers tokenizer with the image processor of its model.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        images: the image processor.
        options: as for `TransformersTokenizer`.
    """

    def __init__(self, tokenizer: Any, images: ImageProcessor, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.images = images

    def render_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        files: list[Image] = []
        chat = [_with_marks(message, files) for message in messages]
        if not files:
            ids = self.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                template_options=template_options,
                most=most,
            )
            return ids, ()
        prepared = [self.images.prepare(file.digest, file.data) for file in files]
        encode = partial(self._encode, prepared)
        ids = self._render(chat, tools, add_generation_prompt, template_options, encode, most)
        return ids, self._runs(ids, files, prepared)

    def encode_images(
        self, text: str, files: Sequence[Image]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids and images of a text in which a mark stands for each image.

        Args:
            text: the text, with `self.images.mark` for each image.
            files: the images, in order.

        Raises:
            DataError: an image cannot be decoded.
            ModelError: there are more or fewer marks than images.
        """
        prepared = [self.images.prepare(file.digest, file.data) for file in files]
        ids = self._encode(prepared, text, most=None)
        return ids, self._runs(ids, files, prepared)

    def _encode(
        self, prepared: Sequence[PreparedImage], text: str, *, most: int | None
    ) -> list[int]:
        parts = text.split(self.images.mark)
        if len(parts) != len(prepared) + 1:
            raise ModelError(
                f"the chat has {len(prepared)} images, and the chat template of {self.name} wrote "
                f"{len(parts) - 1} times {self.images.mark!r}. It leaves images of some roles out "
                "(put them into a user's message), or a text of the chat has this token"
            )
        images = [*(image.text for image in prepared), ""]
        whole = "".join(part + image for part, image in zip(parts, images, strict=True))
        return self.encode(whole, most=most)

    def _runs(
        self, ids: Sequence[int], files: Sequence[Image], prepared: Sequence[PreparedImage]
    ) -> tuple[PromptImage, ...]:
        """Return the runs of placeholders among the ids of a prompt.

        Raises:
            ModelError: the ids have other placeholders than those of the images.
        """
        runs: list[PromptImage] = []
        place = 0
        for file, image in zip(files, prepared, strict=True):
            first = 0
            for length in image.runs:
                start = _index(ids, self.images.image_id, place)
                place = start + length
                if list(ids[start:place]) != [self.images.image_id] * length:
                    raise ModelError(self._other_placeholders)
                runs.append(
                    PromptImage(
                        digest=file.digest,
                        grid=image.grid,
                        start=start,
                        length=length,
                        first=first,
                        data=file.data,
                    )
                )
                first += length
        if _index(ids, self.images.image_id, place) < len(ids):
            raise ModelError(self._other_placeholders)
        return tuple(runs)

    @property
    def _other_placeholders(self) -> str:
        return (
            f"the prompt has other placeholders {self.images.names.image!r} than those of its "
            "images: remove this token from the texts of the chat"
        )

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        parts = message.get("content")
        if isinstance(parts, _Parts):
            return {**super()._plain({**message, "content": ""}), "content": list(parts)}
        plain = super()._plain(message)
        if self._needs_lists and isinstance(plain.get("content"), str):
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return plain

    @functools.cached_property
    def _needs_lists(self) -> bool:
        """Whether the chat template drops a content that is a text, not a list of parts."""
        if not self._template(with_tools=False):
            return False
        message = {"role": "user", "content": _PROBE}
        try:
            return _PROBE not in self._apply([message], None, add_generation_prompt=False)
        except Exception:  # Jinja runs the model author's code
            return True


def _index(ids: Sequence[int], wanted: int, start: int) -> int:
    """Return the index of the first id `wanted` from `start` on; the number of ids if none is."""
    try:
        return ids.index(wanted, start)
    except ValueError:
        return len(ids)


class _Parts(list[dict[str, Any]]):
    """The parts of a message with images, in the form that chat templates take."""


def _with_marks(message: Mapping[str, Any], files: list[Image]) -> Mapping[str, Any]:
    """Return a message in which each image is a part without bytes; append the images to `files`.

    A message without images is returned as it is.

    Raises:
        DataError: a part is an image, but has no `data:` URL with valid base64.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
        return message
    parts = _Parts()
    for part in content:
        if _is_image(part):
            files.append(image_of(part))
            parts.append({"type": "image"})
        elif isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ModelError("a part of the content is neither text nor an image")
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def image_of(part: Mapping[str, Any]) -> Image:
    """Return the image of a part of a message of the type `image_url`.

    Raises:
        DataError: the part has no `data:` URL of an image with valid base64.
    """
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    found = _DATA_URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or found is None:
        raise DataError(
            "an image of a chat must be a data: URL with base64, such as data:image/png;base64,…; "
            f"this one begins with {str(url)[:40]!r}"
        )
    try:
        data = decode_base64(url[found.end() :])
    except ValueError as error:
        raise DataError(f"the base64 of an image is damaged: {error}") from error
    return Image.of(data, found[1].lower())


def vision_tokenizer(
    tokenizer: Any, origin: Origin, config: Any, **options: Any
) -> VisionTokenizer | None:
    """Return the tokenizer of a vision model; None if its image processor cannot be loaded.

    The reason is logged, and the model can still be used for text.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        origin: where the model is.
        config: configuration of the model.
        options: as for `TransformersTokenizer`.
    """
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(origin.folder)
    try:
        images = load_image_processor(origin, config, tokenizer)
    except ModelError as error:
        log.warning("images are refused: %s", error)
        return None
    return VisionTokenizer(tokenizer, images, **options)


def _processor_template(folder: Path) -> str | None:
    """Return the chat template that older models have next to their processor; None without one."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    template = json.loads(file.read_bytes()).get("chat_template")
    return template if isinstance(template, str) else None
