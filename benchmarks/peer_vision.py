"""Steps of TRL's GRPO over chats with an image, measured as `vision.py` measures ours.

Runs in the peer's own environment (`_peers.py`); the last line is JSON: for each step the CPU
seconds of the process between its beginning and its end, generation included, and how many tokens
were sampled.

transformers' processor of Qwen2.5-VL needs torchvision, which is not installable everywhere.
`Processor` does what TRL needs of it with the image processor that needs Pillow alone.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    BatchFeature,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

IMAGE = "<|image_pad|>"
_PASSED = ("padding", "padding_side", "add_special_tokens", "return_tensors")


class Processor(ProcessorMixin):
    """Tokenizer and image processor of a Qwen2.5-VL in one."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = tokenizer.chat_template
        self.image_token = IMAGE
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "pixel_values", "image_grid_thw"]

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Save nothing."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        texts = [text] if isinstance(text, str) else list(text)
        pixels: dict[str, Any] = {}
        if images is not None:
            flat = [image for each in images for image in each]
            pixels = dict(self.image_processor(images=flat, return_tensors="pt"))
            counts = [int(grid.prod()) // 4 for grid in pixels["image_grid_thw"]]
            texts = [_expanded(each, counts) for each in texts]
        passed = {name: options[name] for name in _PASSED if name in options}
        encoded = dict(self.tokenizer(texts, **passed))
        if images is not None:
            ids = torch.as_tensor(encoded["input_ids"])
            encoded["mm_token_type_ids"] = (ids == self.image_token_id).long()
        return BatchFeature({**encoded, **pixels})


def _expanded(text: str, counts: list[int]) -> str:
    """Repeat each placeholder; take the numbers from the front of `counts`."""
    first, *rest = text.split(IMAGE)
    return first + "".join(IMAGE * counts.pop(0) + part for part in rest)


class Meter(TrainerCallback):
    """Records the CPU seconds between the start and the end of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.tokens = 0
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.tokens, self._start = 0, time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"cpu_s": time.process_time() - self._start, "tokens": self.tokens})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder of image files")
    parser.add_argument("--question", required=True)
    parser.add_argument("--answer", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng, meter = random.Random(1), Meter()
    files = [path.read_bytes() for path in sorted(options.images.iterdir())]
    rows = [
        {
            "prompt": [{"role": "user", "content": options.question}],
            "image": Image.open(io.BytesIO(file)).convert("RGB"),
        }
        for file in files * options.steps
    ]

    def reward(completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        meter.tokens += sum(map(len, completion_ids))
        return [rng.random() for _ in completions]

    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".visual." not in f".{name}")
    processor = Processor(
        Qwen2VLImageProcessorPil.from_pretrained(options.model),
        AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[meter],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=options.group * len(files),
                num_generations=options.group,
                max_completion_length=options.answer,
                temperature=1.0,
                top_k=0,
                beta=0.0,
                learning_rate=options.learning_rate,
                max_steps=options.steps,
                shuffle_dataset=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    print(json.dumps(meter.steps))


if __name__ == "__main__":
    main()
