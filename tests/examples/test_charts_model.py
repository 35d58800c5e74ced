"""Test the small vision model, its warm start, and the published model in its place.

The architecture of Qwen2.5-VL-3B-Instruct is transformers' own, with fewer and smaller layers. The
chat template and the settings of the image processor are the published ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from charts_example import demonstrations, training, vision_model
from charts_example.app import ASKED
from lightspan.progress import SilentReporter
from lightspan_examples.script import main
from lightspan_examples.warm_start import make_sft
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model

FEW = 800
"""Demonstrations that teach the form of an answer."""
SCRIPT = Path(__file__).parents[2] / "examples" / "charts" / "train.py"
PUBLISHED_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template of Qwen2.5-VL-3B-Instruct."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision_model.build_model(folder, demonstrations.demonstrate(200, 0), seed=3)
    return folder


def test_the_folder_is_that_of_an_ordinary_model(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config: Any = AutoConfig.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert config.model_type == "qwen2_5_vl"
    assert tokenizer.convert_ids_to_tokens(config.image_token_id) == "<|image_pad|>"
    model = load_model(folder)
    assert 750_000 < sum(parameter.numel() for parameter in model.parameters()) < 850_000
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_equal_seeds_give_equal_weights(folder: Path, tmp_path: Path) -> None:
    chats = demonstrations.demonstrate(200, 0)
    vision_model.build_model(tmp_path, chats, seed=3)
    written = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == written


def test_a_chart_has_nine_tokens(folder: Path) -> None:
    tokenizer: Any = load_tokenizer(folder)
    chat = demonstrations.demonstrate(1, 0)[0]["messages"]
    ids, (image,) = tokenizer.render_images(chat[:-1])
    assert (image.grid, image.length) == ((6, 6), 9)
    assert tokenizer.tokenizer.decode(ids) == (
        f"<|im_start|>user\n{ASKED}<|vision_start|>{'<|image_pad|>' * 9}<|vision_end|>"
        "<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    whole, _ = tokenizer.render_images(chat, add_generation_prompt=False)
    assert whole[: len(ids)] == ids
    assert len(whole) - len(ids) <= training.RECIPE.max_tokens


def imitate(base: Path, folder: Path, count: int) -> None:
    """Fine-tune a model as the warm start does."""
    settings = training.VisionImitation(demonstrations=count)
    chats = demonstrations.demonstrate(count, 0)
    make_sft(base, 0, settings).fit(chats, folder, reporter=SilentReporter())


@pytest.mark.slow
def test_the_warm_start_teaches_the_vision_part_too(folder: Path, tmp_path: Path) -> None:
    imitate(folder, tmp_path / "m", 64)
    before, after = load_model(folder), load_model(tmp_path / "m")
    changed = {
        name
        for (name, old), (_, new) in zip(
            before.named_parameters(), after.named_parameters(), strict=True
        )
        if not torch.equal(old, new)
    }
    assert changed == {name for name, _ in before.named_parameters()}
    assert (tmp_path / "m" / "preprocessor_config.json").is_file()


# --- training -------------------------------------------------------------------------------
def train(folder: Path, *options: str) -> None:
    """Run a step of `train.py`, and check that it learned from some groups."""
    command = [sys.executable, str(SCRIPT), "--steps", "1", "--held-out", "4", "--runners", "8"]
    command += ["--validate-every", "0", "--folder", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(n=4" in done.stdout.splitlines()[-1], "what it gained"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (step,) = [line for line in lines if line["kind"] == "train"]
    assert step["calls"] == step["scored"] > 0
    assert step["batch/trained_tokens"] > 0, "rewards differ within groups"


@pytest.mark.slow
@pytest.mark.usefixtures("torch_threads")
def test_the_dry_run_and_the_resumed_training(
    folder: Path,
    tmp_path: Path,
    script_of: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check `--dev` and `--resume` with the untaught model, whose answers are all wrong."""
    few = replace(training.REAL_MODEL, group_size=2, tasks_per_step=2, max_tokens=8)
    monkeypatch.setattr(training, "REAL_MODEL", few)
    script = script_of("charts")

    def train_py(*arguments: str) -> str:
        common = ["--model", str(folder), "--runners", "2", *arguments]
        status = main(script.EXAMPLE, script.__doc__, common)
        seen = capsys.readouterr()
        assert status == 0, seen.out + seen.err
        return seen.out

    report = train_py("--dev")
    calls = re.search(
        r"reader: (\d+) of (\d+) calls have images: \d+ different images, 9 / 9", report
    )
    assert calls is not None, report
    assert calls[1] == calls[2]
    run = tmp_path / "run"
    options = ("--held-out", "2", "--folder", str(run), "--validate-every", "0")
    train_py(*options, "--steps", "1")
    lines = (run / "metrics.jsonl").read_text()
    assert "after step 1\n" in train_py(*options, "--steps", "2", "--resume")
    resumed = (run / "metrics.jsonl").read_text()
    assert resumed.startswith(lines)
    steps = [
        line["step"] for line in map(json.loads, resumed.splitlines()) if line["kind"] == "train"
    ]
    assert steps == [1, 2]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_short_training(tmp_path: Path) -> None:
    """Train from a warm start that teaches the form of an answer, and nothing about charts."""
    cache = tmp_path / "cache"
    train(tmp_path / "run", "--cache", str(cache), "--demonstrations", str(FEW))
    (start,) = cache.glob("warm-start-*-0")
    before, after = load_model(start), load_model(tmp_path / "run" / "model")
    changed = {
        name.split(".")[1]
        for (name, old), (_, new) in zip(
            before.named_parameters(), after.named_parameters(), strict=True
        )
        if not torch.equal(old, new)
    }
    assert changed == {"language_model"}


def published_model(folder: Path) -> Path:
    """Save Qwen2.5-VL-3B-Instruct with fewer and smaller layers, and a small vocabulary."""
    vision_model.build_model(folder, demonstrations.demonstrate(50, 0), context=2048)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = PUBLISHED_TEMPLATE
    tokenizer.save_pretrained(folder)
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    Qwen2VLImageProcessorPil(
        min_pixels=3136, max_pixels=12_845_056, patch_size=14, merge_size=2, temporal_patch_size=2
    ).save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(special)
    config: Any = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,  # 2048
            "intermediate_size": 256,  # 11008
            "num_hidden_layers": 2,  # 36
            "num_attention_heads": 4,  # 16
            "num_key_value_heads": 2,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [4, 6, 6],  # [16, 24, 24] of heads of 128
            },
        },
        vision_config={
            "depth": 4,  # 32
            "hidden_size": 64,  # 1280
            "intermediate_size": 128,  # 3420
            "num_heads": 4,  # 16
            "out_hidden_size": 128,  # 2048
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],  # [7, 15, 23, 31]
        },
        vision_start_token_id=ids[0],
        vision_end_token_id=ids[1],
        image_token_id=ids[2],
        video_token_id=ids[3],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [(), ("--lora",)], ids=["whole", "lora"])
def test_the_published_model_trains_by_the_same_command(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    untaught, model = tmp_path / "untaught", tmp_path / "Qwen2.5-VL-3B-Instruct"
    imitate(published_model(untaught), model, FEW)
    load_model(model, dtype=torch.bfloat16).save_pretrained(model)  # as it is published
    train(tmp_path / "run", "--model", str(model), *options)
