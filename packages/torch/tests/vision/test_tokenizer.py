"""Chats with images as token ids, and images as a model's inputs."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightspan.errors import ContextOverflowError, DataError, ModelError
from lightspan.lightning.rows import common_prefix
from lightspan.schema.images import Image, PromptImage, prompt_key
from lightspan_testing.tiny_vision import (
    VISION_FAMILIES,
    VisionFamily,
    image_chat,
    image_part,
    picture,
    tiny_vision_model,
)
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.vision.features import Vision
from lightspan_torch.vision.processor import decoded
from lightspan_torch.vision.tokenizer import VisionTokenizer, image_of

NAMES = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "gemma3": "Gemma3Processor",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(family: VisionFamily) -> Path:
        return tiny_vision_model(tmp_path_factory.mktemp(family) / "model", seed=1, family=family)

    return make


@pytest.fixture(scope="module")
def tokenizer(folders: Any) -> VisionTokenizer:
    loaded = load_tokenizer(folders("qwen2_5_vl"))
    assert isinstance(loaded, VisionTokenizer)
    return loaded


def own_processor(family: VisionFamily, folder: Path) -> Any:
    """Return transformers' processor of a family, without its video processor.

    That one would need torchvision.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin

    own: Any = getattr(transformers, NAMES[family])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if family == "gemma3":
        tokens = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        for name, token in tokens.items():
            setattr(tokenizer, f"{name}_token", token)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        return own(AutoImageProcessor.from_pretrained(folder), tokenizer, image_seq_length=16)

    class WithoutVideos(own):  # type: ignore[misc]
        def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
            self.image_token = "<image>" if family == "smolvlm" else "<|image_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.fake_image_token = "<fake_token_around_image>"
            self.global_image_token = "<global-img>"
            self.image_seq_len = 4
            self.video_token = self.video_token_id = None
            ProcessorMixin.__init__(self, image_processor, tokenizer)

    return WithoutVideos(AutoImageProcessor.from_pretrained(folder), tokenizer)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_ids_and_pixels_are_those_of_transformers(family: VisionFamily, folders: Any) -> None:
    from PIL import Image as Pillow

    folder = folders(family)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, VisionTokenizer)
    files = [picture(), picture("blue", (56, 84)), picture("green", (30, 30))]
    chat = image_chat("Look ", files[0], " and ", files[1], files[2], " what?")
    ids, images = tokenizer.render_images(chat)
    content = [
        {"type": "image"} if part["type"] == "image_url" else part for part in chat[0]["content"]
    ]
    text = tokenizer.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    opened = [Pillow.open(io.BytesIO(file)) for file in files]
    expected = own_processor(family, folder)(text=[text], images=[opened], return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    prepared = [tokenizer.images.prepare(Image.of(file, "").digest, file) for file in files]
    pixels = [each.inputs["pixel_values"] for each in prepared]
    whole = np.concatenate(pixels, axis=1 if family == "smolvlm" else 0)
    assert np.array_equal(whole, expected["pixel_values"])
    assert [image.digest for image in images if image.first == 0] == [
        Image.of(file, "").digest for file in files
    ]
    for image in images:
        run = ids[image.start : image.start + image.length]
        assert run == [tokenizer.images.image_id] * image.length
    assert sum(image.length for image in images) == ids.count(tokenizer.images.image_id)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_orientation_and_transparency(tokenizer: VisionTokenizer) -> None:
    """A photo is turned as its EXIF data say, and what is transparent is white."""
    from PIL import Image as Pillow

    wide = Pillow.open(io.BytesIO(picture())).convert("RGB")
    exif = Pillow.Exif()
    exif[0x0112] = 6
    turned = encoded(wide, exif=exif)
    upright = encoded(wide.rotate(-90, expand=True))
    clear = Pillow.new("RGBA", wide.size, (0, 0, 0, 0))
    white = Pillow.new("RGB", wide.size, "white")
    pairs = [(turned, upright), (encoded(clear), encoded(white))]
    for first, second in pairs:
        a, b = (tokenizer.images.prepare(Image.of(x, "").digest, x) for x in (first, second))
        assert a.grid == b.grid
        assert np.array_equal(a.inputs["pixel_values"], b.inputs["pixel_values"])
    assert tokenizer.render_images(image_chat(turned))[1][0].grid == (6, 4)


def test_grey_of_16_bits_keeps_its_shades() -> None:
    """A scan of grey paper with dark ink is not a white page."""
    from PIL import Image as Pillow

    paper = np.full((4, 6), 50_000, np.uint16)
    paper[1], paper[2, :3] = 9_000, 300
    shades = [[195] * 6, [35] * 6, [1] * 3 + [195] * 3, [195] * 6]
    scan = Pillow.fromarray(paper)
    for data in (encoded(scan), encoded(scan, "TIFF"), encoded(scan.convert("I"), "TIFF")):
        image = decoded("0" * 64, data)
        assert image.mode == "RGB"
        assert np.asarray(image)[..., 0].tolist() == shades
    clear = np.asarray(decoded("0" * 64, encoded(scan, transparency=9_000)))
    assert clear[..., 1].tolist() == [shades[0], [255] * 6, shades[2], shades[3]]


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "P transparent", "RGB", "RGBA", "CMYK", "YCbCr", "turned"]
)
def test_modes_become_the_pixels_of_transformers(mode: str) -> None:
    from PIL import Image as Pillow, ImageOps
    from transformers.image_transforms import convert_to_rgb

    whole = Pillow.effect_mandelbrot((40, 30), (-2, -1, 1, 1), 20).convert("RGB")
    whole.paste("red", (5, 5, 20, 10))
    whole.putalpha(Pillow.linear_gradient("L").resize(whole.size))
    exif = Pillow.Exif()
    exif[0x0112] = 8
    data = {
        "P transparent": lambda: encoded(whole.convert("P"), transparency=0),
        "CMYK": lambda: encoded(whole.convert("RGB").convert("CMYK"), "JPEG"),
        "YCbCr": lambda: encoded(whole.convert("RGB").convert("YCbCr"), "JPEG"),
        "turned": lambda: encoded(whole.convert("RGB"), "JPEG", exif=exif),
    }.get(
        mode, lambda: encoded((whole if mode.endswith("A") else whole.convert("RGB")).convert(mode))
    )()
    opened: Any = ImageOps.exif_transpose(Pillow.open(io.BytesIO(data)))
    expected = convert_to_rgb(opened, return_numpy=True)
    assert np.array_equal(np.asarray(decoded("0" * 64, data)), expected)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "cannot be decoded"),
        (picture()[:-60], "cannot be decoded"),
        (picture(size=(4000, 10)), "aspect ratio .* got 400.0: crop it, pad it or split it"),
    ],
)
def test_damaged_images_are_named(tokenizer: VisionTokenizer, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        tokenizer.render_images(image_chat(data, "?"))
    assert Image.of(data, "").digest[:12] in str(raised.value)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO!!!!Rw=="}},
        {"type": "image_url", "image_url": "data:text/plain;base64,QQ=="},
        {"type": "image_url"},
    ],
)
def test_images_that_are_no_data_urls(tokenizer: VisionTokenizer, part: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"data: URL|base64"):
        tokenizer.render_images([{"role": "user", "content": [part]}])


def test_images_in_url_safe_base64() -> None:
    url = "data:image/png;base64,iVBOR___----_w%3D%3D"
    image = image_of({"type": "image_url", "image_url": {"url": url}})
    assert image.data == b"\x89PNG\xff\xff\xfb\xef\xbe\xff"


def test_a_placeholder_in_a_text_is_refused(tokenizer: VisionTokenizer) -> None:
    """A text cannot take an image's place."""
    with pytest.raises(ModelError, match=r"has 1 images, and .* wrote 2 times"):
        tokenizer.render_images(image_chat("<|image_pad|>", picture()))
    ids, images = tokenizer.render_images(image_chat("<|image_pad|> alone"))
    assert images == ()
    assert tokenizer.images.image_id in ids


def test_images_that_the_template_leaves_out(folders: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else 'x' }}{% endfor %}"
    folder = tiny_vision_model(tmp_path, seed=1, template=template)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, VisionTokenizer)
    with pytest.raises(ModelError, match=r"has 1 images, and .* wrote 0 times"):
        tokenizer.render_images(image_chat(picture()))


def test_a_template_that_takes_lists_alone(tmp_path: Path) -> None:
    """Some templates drop a content that is a text, which would be lost in silence."""
    template = (
        "{% for m in messages %}{{ m.role }}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    folder = tiny_vision_model(tmp_path, seed=1, family="smolvlm", template=template)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.render([{"role": "user", "content": "Hello"}])) == "userHello"


def test_a_long_prompt_is_refused_early(tokenizer: VisionTokenizer) -> None:
    chat = image_chat("word " * 60_000, picture())
    with pytest.raises(ContextOverflowError):
        tokenizer.render_images(chat, most=100)


def test_images_of_a_tool_result(tokenizer: VisionTokenizer) -> None:
    """The template of the tiny model writes every message's parts."""
    chat = [
        {"role": "user", "content": "?"},
        {"role": "tool", "tool_call_id": "1", "content": [image_part(picture())]},
    ]
    _, images = tokenizer.render_images(chat)
    assert [image.grid for image in images] == [(4, 6)]


PIECES = st.lists(st.sampled_from(["red", "blue", "tall", 7, 8, 9]), max_size=5)


@given(PIECES, PIECES)
@settings(max_examples=60, deadline=None)
def test_numbers_share_as_far_as_keys_do(first: list[Any], second: list[Any]) -> None:
    """Prompts with images of equal size have a common prefix exactly where their keys have one."""
    vision = loaded_vision()
    prompts = [prompt_of(each) for each in (first, second)]
    seen = [vision.prompt(*prompt).ids for prompt in prompts]
    keys = [
        prompt_key(np.array(ids, "<i4").tobytes(), images) if ids else b""
        for ids, images in prompts
    ]
    words = [[key[at : at + 4] for at in range(0, len(key), 4)] for key in keys]
    assert common_prefix(*seen) == common_prefix(*words)  # type: ignore[arg-type]


@cache
def loaded_vision() -> Vision:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tiny_vision_model(folder, seed=1)
        tokenizer = load_tokenizer(folder)
        assert isinstance(tokenizer, VisionTokenizer)
        return Vision(load_model(folder), tokenizer.images)


def prompt_of(pieces: list[Any]) -> tuple[list[int], tuple[PromptImage, ...]]:
    files = {
        "red": (picture(), (4, 6)),
        "blue": (picture("blue"), (4, 6)),
        "tall": (picture("red", (56, 84)), (6, 4)),
    }
    ids: list[int] = []
    images = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        data, grid = files[piece]
        digest = Image.of(data, "").digest
        images.append(
            PromptImage(digest=digest, grid=grid, start=len(ids) + 1, length=6, data=data)
        )
        ids += [5, *[loaded_vision().processor.image_id] * 6]
    return ids, tuple(images)
