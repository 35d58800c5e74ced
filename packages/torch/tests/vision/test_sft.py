"""Fine-tuning on chats with images."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightspan.errors import DataError
from lightspan_testing.image_suite import image_reference
from lightspan_testing.learner_suite.rows import token_logprobs
from lightspan_testing.tiny import tiny_model
from lightspan_testing.tiny_vision import (
    VisionFamily,
    image_chat,
    picture,
    tiny_vision_model,
)
from lightspan_torch import SFT
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.sft.rendering import render_demonstration


def chat(colour: str, answer: str) -> dict[str, Any]:
    messages = [*image_chat(picture(colour), "Which?"), {"role": "assistant", "content": answer}]
    return {"messages": messages}


def test_answers_to_images_of_equal_size_are_told_apart(tmp_path: Path) -> None:
    """Two prompts have equal ids, and after the fine-tuning each has its own answer."""
    torch.set_num_threads(1)
    folder = tiny_vision_model(tmp_path / "model", seed=1, hidden=32)
    chats = [chat("red", "query"), chat("blue", "singer")]
    sft = SFT(folder, learning_rate=1e-2, batch_size=2, epochs=30, prompt_weight=0.1)
    result = sft.fit(chats, tmp_path / "tuned")
    assert result.demonstrations == 2
    assert result.losses[-1] < 0.3 * result.losses[0]
    tokenizer = load_tokenizer(tmp_path / "tuned")
    demos = []
    for each in chats:
        demo = render_demonstration(each, tokenizer, "chat", "last", Counter())
        assert demo is not None
        demos.append(demo)
    assert demos[0].prompt_ids == demos[1].prompt_ids
    rows = sft._rows(demos)
    model = load_model(tmp_path / "tuned")
    with torch.no_grad():
        for row, demo in zip(rows, demos, strict=True):
            [image] = demo.images
            run = slice(image.start, image.start + image.length)
            assert row.weights[run] == [0.0] * image.length
            assert not any(row.mask[run])
            assert row.weights[1] > 0
            own = float(token_logprobs(model, row)[len(demo.prompt_ids) :].sum())
            assert own > -0.7  # of two answers, it takes its own


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_the_loss_is_that_of_transformers_with_pixels(tmp_path: Path, family: VisionFamily) -> None:
    torch.set_num_threads(1)
    folder = tiny_vision_model(tmp_path / "model", seed=1, family=family)
    chats = [chat("red", "query"), chat("blue", "singer name")]
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    demos, logprobs = [], list[float]()
    for each in chats:
        demo = render_demonstration(each, tokenizer, "chat", "last", Counter())
        assert demo is not None
        demos.append(demo)
        prompt = demo.prompt_ids, demo.images
        logprobs += image_reference(model, prompt, demo.response_ids)
    expected = pytest.approx([-sum(logprobs) / len(logprobs)], abs=1e-5)
    for number, given in enumerate((chats, demos)):
        result = SFT(folder, batch_size=2).fit(given, tmp_path / f"tuned-{number}")
        assert result.losses == expected


def test_an_image_that_the_model_cannot_take_is_named(tmp_path: Path) -> None:
    folder = tiny_vision_model(tmp_path / "model", seed=1)
    answer = {"role": "assistant", "content": "red"}
    demos = [[*image_chat(picture(size=size)), answer] for size in ((84, 56), (2_000, 4))]
    with pytest.raises(
        DataError, match=r"^demonstrations\[1\]: image .* of 2000 by 4 pixels .* 200"
    ):
        SFT(str(folder), learning_rate=1e-3).fit(demos, tmp_path / "run")


def test_token_ids_without_their_images_are_refused(tmp_path: Path) -> None:
    """Check the ids of an exported call, whose placeholders would be imitated as texts."""
    folder = tiny_vision_model(tmp_path / "model", seed=1)
    demo = render_demonstration(chat("red", "query"), load_tokenizer(folder), "", "last", Counter())
    assert demo is not None
    bare = msgspec.structs.replace(demo, images=())
    with pytest.raises(DataError, match="has placeholders of images in its prompt_ids, and 0 of"):
        SFT(folder).fit([bare], tmp_path / "tuned")


def test_a_model_without_sight_leaves_them_out(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(DataError, match="a part of the content is not text"):
        SFT(folder).fit([chat("red", "query")], tmp_path / "tuned")
