"""Tests of images from a client of each API to a real vision model, and its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan.schema.images import Image
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import Rig
from lightspan_testing.gateway_suite.image_tests import Api, each_api, post
from lightspan_testing.image_suite import image_reference
from lightspan_testing.tiny_vision import picture, tiny_vision_model
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model


@pytest.mark.slow
@each_api
async def test_a_model_sees_what_the_client_sent(store: Store, tmp_path: Path, api: Api) -> None:
    folder = tiny_vision_model(tmp_path / "model", seed=1)
    engine = TransformersEngine({"policy": str(folder)})
    await engine.start()
    rig = Rig(store, engine, engine.tokenizer("policy"))  # type: ignore[arg-type]
    await rig.start()
    images = [Image.of(picture(colour), "image/png") for colour in ("red", "blue")]
    try:
        for number, image in enumerate(images):
            content = [api.text("What is it?"), api.image(image)]
            body: Any = api.body({"role": "user", "content": content})
            body["max_output_tokens" if api.path == "responses" else "max_tokens"] = 8
            status, answer = await post(rig, api, body, f"call-{number}")
            assert status == 200, answer
        records = await rig.records()
    finally:
        await rig.gateway.close()
        await engine.close()
    assert records[0].prompt == records[1].prompt
    assert records[0].prompt_key != records[1].prompt_key
    model = load_model(str(folder))
    for record, image in zip(records, images, strict=True):
        [placed] = record.images
        assert placed.digest == image.digest
        prompt = record.prompt_ids, (msgspec.structs.replace(placed, data=image.data),)
        reference = image_reference(model, prompt, record.response_ids)
        assert record.logprobs == pytest.approx(reference, abs=1e-5)
