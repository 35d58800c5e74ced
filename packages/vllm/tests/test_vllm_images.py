"""Prompts with images in the vLLM engine, with a fake server that speaks vLLM's routes."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lightspan.errors import ConfigError, DataError, EngineError, ModelError, UnsupportedError
from lightspan.protocols.engine import LoRAWeights
from lightspan.schema.images import PromptImage
from lightspan_testing.engine_suite import perturbed
from lightspan_testing.image_suite import Prompt, generate_seen
from lightspan_testing.tiny_vision import (
    VisionFamily,
    image_chat,
    picture,
    tiny_vision_model,
)
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.vision.tokenizer import VisionTokenizer
from lightspan_vllm.client import Refused
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.images import image_features
from lightspan_vllm.requirements import flags_of
from lightspan_vllm.weights import ServerSpec
from packages.vllm.tests.vllm_wire import Wire


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "model"
    return tiny_vision_model(folder, seed=5, tied=True, context=256)


@asynccontextmanager
async def reading(
    folder: Path, logs: Path, server: Wire, lora: Mapping[str, int] | None = None
) -> AsyncIterator[VLLMEngine]:
    """Yield an engine of one policy, `reader`, on a fake server."""
    await server.start()
    vllm = VLLM(addresses=(server.address,), exchange=str(logs))
    engine = VLLMEngine(vllm, {"reader": folder}, lora=lora or {}, logs=logs)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        await server.stop()


def seen(folder: Path, *parts: bytes | str) -> Prompt:
    return tokenizer(folder).render_images(image_chat(*parts))


def tokenizer(folder: Path) -> VisionTokenizer:
    found = load_tokenizer(folder)
    assert isinstance(found, VisionTokenizer)
    return found


def unpacked(item: str) -> dict[str, tuple[Any, Any]]:
    """Return the tensors of an item, as vLLM's decoder reads them, and their fields."""

    def read(code: int, data: memoryview) -> bytes:
        assert code == 3
        return bytes(data)

    decoded = msgspec.msgpack.Decoder(ext_hook=read).decode(base64.b64decode(item))
    tensors = {}
    for name, value in decoded.items():
        dtype, shape, octets = value["data"]
        tensor = torch.frombuffer(bytearray(octets), dtype=getattr(torch, dtype)).reshape(shape)
        tensors[name] = (tensor, value["field"])
    return tensors


async def test_what_a_server_is_asked_for_a_prompt_with_an_image(
    qwen: Path, tmp_path: Path
) -> None:
    ids, images = prompt = seen(qwen, "See ", picture(), "?")
    server = Wire(qwen)
    async with reading(qwen, tmp_path, server) as engine:
        assert engine.capabilities.images == ("reader",)
        answer = await generate_seen(engine, prompt, max_tokens=3, top_k=4, temperature=0.7)
    assert (answer.ids, answer.logprobs) == ([11, 11, 11], [-0.5] * 3)
    (asked,) = server.asked
    (item,) = asked["features"].pop("kwargs_data")["image"]
    image = tokenizer(qwen).images.prepare(images[0].digest, images[0].data)
    pixels, pixels_field = unpacked(item)["pixel_values"]
    grid, grid_field = unpacked(item)["image_grid_thw"]
    assert torch.equal(pixels, torch.as_tensor(image.inputs["pixel_values"]))
    assert pixels_field == ["flat", {"slices": [[0, 24, None]], "dim": 0, "keep_on_cpu": False}]
    assert grid.tolist() == [1, 4, 6]
    assert grid_field == ["batched", {"keep_on_cpu": True}]
    end = asked["sampling_params"]["stop_token_ids"]
    assert end == sorted(tokenizer(qwen).eos_ids)
    assert asked == {
        "model": "the-name",
        "token_ids": ids,
        "features": {
            "mm_hashes": {"image": [f"{images[0].digest} (4, 6) 0"]},
            "mm_placeholders": {"image": [{"offset": images[0].start, "length": 6}]},
        },
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 4,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": end,
            "logprobs": 0,
            "detokenize": False,
        },
        "return_token_ids": True,
        "stream": False,
    }


async def test_prompts_without_images_take_the_other_route(qwen: Path, tmp_path: Path) -> None:
    server = Wire(qwen)
    async with reading(qwen, tmp_path, server) as engine:
        await generate_seen(engine, ([5, 6], ()), max_tokens=3)
    assert [asked["prompt"] for asked in server.asked] == [[5, 6]]


async def test_a_call_that_an_update_cuts_sends_its_images_again(
    qwen: Path, tmp_path: Path
) -> None:
    ids, _ = prompt = seen(qwen, picture(), "what?")
    server = Wire(qwen)
    server.hold.clear()  # the last token does not come before the update
    async with reading(qwen, tmp_path, server) as engine:
        task = asyncio.create_task(generate_seen(engine, prompt, max_tokens=4))
        for _ in range(3):
            await server.served.acquire()
        server.hold.set()
        server.hold = held = asyncio.Event()
        await engine.update("reader", perturbed(load_model(qwen), seed=1), 7)
        held.set()
        answer = await task
    assert answer.ids == [11, 11, 11, 12]
    assert answer.versions == [0, 0, 0, 7]
    first, again = server.asked
    assert (first["token_ids"], again["token_ids"]) == (ids, [*ids, 11, 11, 11])
    assert first["features"] == again["features"]
    embedded = "model.language_model.embed_tokens.weight"
    assert (server.loaded["lm_head.weight"] == server.loaded[embedded]).all()


async def test_an_update_of_lora_cuts_the_calls_with_images(qwen: Path, tmp_path: Path) -> None:
    """vLLM names a call by its route, so that it would not be cut by the other route's name."""
    prompt = seen(qwen, picture(), "what?")
    server = Wire(qwen, lora_rank=8, loras=2, lora_updates=True)
    server.hold.clear()
    layer = "model.language_model.layers.0.self_attn.q_proj"
    pair = (torch.zeros(4, 64), torch.zeros(64, 4))
    weights = LoRAWeights(rank=4, scale=1.0, layers={layer: pair})
    async with reading(qwen, tmp_path, server, lora={"reader": 4}) as engine:
        task = asyncio.create_task(generate_seen(engine, prompt, max_tokens=4))
        for _ in range(3):
            await server.served.acquire()
        await engine.update("reader", weights, 7)
        server.hold.set()
        answer = await task
    assert answer.ids == [51, 51, 51, 52]
    assert answer.versions == [0, 0, 0, 7]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids: [*ids[:3], 7, *ids[4:]], "id 7 instead of {0} at index 3"),
        (lambda ids: [*ids, 7], "{2} ids instead of {1}"),
    ],
)
async def test_other_ids_than_those_of_the_prompt_are_refused(
    qwen: Path, tmp_path: Path, change: Any, said: str
) -> None:
    ids, _ = prompt = seen(qwen, picture(), "what?")
    server = Wire(qwen)
    server.reads = change(ids)
    async with reading(qwen, tmp_path, server) as engine:
        with pytest.raises(Refused) as caught:
            await generate_seen(engine, prompt)
    assert said.format(ids[3], len(ids), len(ids) + 1) in str(caught.value)
    assert "has used another prompt with images than lightspan's" in str(caught.value)


async def test_a_log_probability_that_is_no_number(qwen: Path, tmp_path: Path) -> None:
    """On this route, vLLM replaces such log-probabilities by -9999."""
    ids, _ = prompt = seen(qwen, picture(), "what?")
    server = Wire(qwen)
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": -9999.0}]}}
    said = {"prompt_token_ids": ids, "choices": [choice]}
    async with reading(qwen, tmp_path, server) as engine:
        server.says["/inference/v1/generate"] = (200, msgspec.json.encode(said))
        with pytest.raises(EngineError, match="1 log-probabilities, 1 of them null, for 1 tokens"):
            await generate_seen(engine, prompt)


async def test_missing_flags_for_images_are_named(qwen: Path, tmp_path: Path) -> None:
    server = Wire(qwen, normalizes=True, tied=True)
    server.says["/inference/v1/generate"] = (403, b"Scale-out endpoints are disabled.")
    with pytest.raises(ConfigError) as caught:
        async with reading(qwen, tmp_path, server):
            pass
    untied = '{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": false}}'
    for problem in (
        "its route for prompts with images is disabled: --enable-scale-out",
        "it would normalise the pixels of images twice: --no-mm-device-do-normalize",
        f"--hf-overrides '{untied}'",
    ):
        assert problem in str(caught.value)


async def test_lora_of_the_vision_part_is_refused(qwen: Path, tmp_path: Path) -> None:
    server = Wire(qwen, lora_rank=8, loras=2, lora_updates=True)
    async with reading(qwen, tmp_path, server, lora={"reader": 4}) as engine:
        (brought,) = server.brought  # the LoRA with which the policy starts
        assert list(brought["tensors"]) == [
            f"base_model.model.model.language_model.layers.0.self_attn.k_proj.lora_{letter}.weight"
            for letter in "AB"
        ]
        layer = "model.visual.blocks.0.attn.proj"
        pair = (torch.zeros(4, 32), torch.zeros(32, 4))
        weights = LoRAWeights(rank=4, scale=1.0, layers={layer: pair})
        with pytest.raises(ModelError, match=rf"policy reader change the vision part.*{layer}"):
            await engine.update("reader", weights, 1)


async def test_models_whose_images_vllm_does_not_get(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_vision_model(tmp_path / "model", seed=5, family="gemma3", tied=False)
    with caplog.at_level(logging.WARNING):
        engine = VLLMEngine(VLLM(addresses=("http://127.0.0.1:1",)), {"a": folder}, logs=tmp_path)
    assert engine.capabilities.images == ()
    types = "images are taken by models of the types qwen2_5_vl, qwen3_vl, smolvlm"
    assert f"images are refused for {folder}: with vLLM, {types}" in caplog.text
    assert "--enable-scale-out" not in flags_of(engine._specs["a"])


async def test_images_of_a_model_that_does_not_see(folder: Path, tmp_path: Path) -> None:
    image = PromptImage(digest="a" * 64, grid=(4, 6), start=0, length=2, data=b"x")
    server = Wire(folder)
    async with reading(folder, tmp_path, server) as engine:
        assert engine.capabilities.images == ()
        with pytest.raises(UnsupportedError, match="policy reader takes none: its model does not"):
            await generate_seen(engine, ([5, 6], (image,)))


def test_each_tile_of_an_image_is_an_item(tmp_path: Path) -> None:
    """vLLM takes no image whose placeholders have text in between."""
    folder = tiny_vision_model(tmp_path / "model", seed=5, family="smolvlm")
    ids, images = seen(folder, picture(), "what?")
    processor = tokenizer(folder).images
    prepared = processor.prepare(images[0].digest, images[0].data)
    made = image_features(ids, images, processor, "smolvlm", "bfloat16")
    items = [unpacked(item) for item in made["kwargs_data"]["image"]]
    digest = images[0].digest
    assert made["mm_hashes"]["image"] == [f"{digest} (2, 2) {first}" for first in range(0, 20, 4)]
    pixels = torch.cat([item["pixel_values"][0] for item in items])
    assert torch.equal(pixels, torch.as_tensor(prepared.inputs["pixel_values"][0]).bfloat16())
    masks = torch.cat([item["pixel_attention_mask"][0] for item in items])
    assert np.array_equal(masks.numpy(), prepared.inputs["pixel_attention_mask"][0])
    for item in items:
        count, field = item["num_patches"]
        assert (count.shape, count.item(), field) == ((), 1, ["batched", {"keep_on_cpu": True}])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_a_part_of_a_run_is_refused(tmp_path: Path, family: VisionFamily) -> None:
    """vLLM's engine would die of it."""
    folder = tiny_vision_model(tmp_path / "model", seed=5, family=family)
    ids, images = seen(folder, picture(), "what?")
    part = msgspec.structs.replace(images[0], length=images[0].length - 1)
    with pytest.raises(DataError, match=r"numbers 0 to \d of them, which is no run"):
        image_features(ids, [part], tokenizer(folder).images, family, "float32")


def test_weights_have_the_learners_names(qwen: Path) -> None:
    """The names in the files of Qwen2.5-VL are others."""
    spec = ServerSpec.of(qwen, dtype=None, context=None)
    model = load_model(qwen)
    assert spec.shapes == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert spec.embeddings == (
        "model.language_model.embed_tokens.weight",
        "model.embed_tokens.weight",
    )
    assert spec.as_saved(0).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert spec.vision == {name for name in spec.shapes if name.startswith("model.visual.")}
